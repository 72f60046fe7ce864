// Fibres: a thread of a threadgroup is a stack and a saved stack pointer. A switch saves the registers that a function
// call preserves, and costs a few nanoseconds.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

extern "C" void ms_switch(void** save, void* load);
extern "C" void ms_fibre_start();
extern "C" void ms_fibre_main();  // runs the current thread; never returns

#if defined(__x86_64__)
__asm__(
    ".text\n"
    ".globl ms_switch\n"
    "ms_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".globl ms_fibre_start\n"
    "ms_fibre_start:\n"
    "  call ms_fibre_main@PLT\n"
    "  ud2\n");
static inline void* fibre_prepare(char* top) {
  // At the first switch: six registers, then `ret` into ms_fibre_start with the stack aligned for its call.
  void** sp = (void**)((uintptr_t)top & ~(uintptr_t)63);
  *--sp = nullptr;
  *--sp = nullptr;
  *--sp = (void*)ms_fibre_start;
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
#if defined(__APPLE__)
#define MS_SYMBOL(name) "_" #name
#else
#define MS_SYMBOL(name) #name
#endif
__asm__(
    ".text\n"
    ".globl " MS_SYMBOL(ms_switch) "\n.p2align 2\n" MS_SYMBOL(ms_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n"
    ".globl " MS_SYMBOL(ms_fibre_start) "\n.p2align 2\n" MS_SYMBOL(ms_fibre_start) ":\n"
    "  bl " MS_SYMBOL(ms_fibre_main) "\n  brk #1\n");
static inline void* fibre_prepare(char* top) {
  char* sp = (char*)((uintptr_t)top & ~(uintptr_t)63) - 160;
  __builtin_memset(sp, 0, 160);
  ((void**)sp)[11] = (void*)ms_fibre_start;  // x30
  return sp;
}
#else
#error "the simulator's fibres are written for x86-64 and arm64"
#endif

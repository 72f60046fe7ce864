// Every memory access of a kernel calls this file first (clang's address sanitizer instrumentation, outlined to
// calls). It knows the buffers, counts the bytes, and records the last accesses to each piece of memory.
//
// Device buffers are far apart in the address space, so that an index that is wrong by gigabytes still identifies its
// buffer. Threadgroup variables are in one arena with gaps, laid out by build.py.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"

constexpr uint64_t kSlot = 1ull << 35, kStart = 1ull << 33;  // a buffer begins 8 GiB into its 32 GiB slot
constexpr uint32_t kMaxBuffers = 40;
constexpr uint64_t kMaxThreadgroupBytes = 64 << 10;

struct Slot {
  uint64_t bytes, mapped;
  uint32_t item;
  Cell* cells;         // outputs: one cell per element
  uint8_t* touched;    // inputs: one byte per element
  uint64_t shadow_bytes;
};
static char* g_arena;
static Slot g_slots[kMaxBuffers];
static Cell* g_cells;  // threadgroup memory
static const char *g_tg_begin, *g_tg_end;

#define CALLER ((uint64_t)__builtin_return_address(0))

static char* address_of(uint32_t buffer) { return g_arena + buffer * kSlot + kStart; }

static void* reserve(uint64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

uint64_t memory_argument(uint32_t buffer) { return (uint64_t)address_of(buffer); }

const char* memory_begin(Launch* l) {
  if (!g_arena) {
    void* p = mmap(nullptr, kMaxBuffers * kSlot, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return "no address space for the buffers (is there a limit on virtual memory?)";
    g_arena = (char*)p;
    g_cells = (Cell*)reserve(kMaxThreadgroupBytes * sizeof(Cell));
    if (!g_cells) return "no memory for the threadgroup shadow";
  }
  if (l->n_buffers > kMaxBuffers) return "too many buffers";
  for (uint32_t i = 0; i < l->n_buffers; ++i) {
    Buffer& b = l->buffers[i];
    Slot& s = g_slots[i];
    s.bytes = b.bytes;
    s.item = b.item;
    s.mapped = (b.bytes + 4096) & ~4095ull;
    if (s.mapped > kSlot - kStart) return "a buffer is too large";
    if (mprotect(address_of(i), s.mapped, PROT_READ | PROT_WRITE)) return "no memory for a buffer";
    uint64_t elements = b.bytes / b.item + 1;
    s.cells = nullptr;
    s.touched = nullptr;
    s.shadow_bytes = elements * (b.kind == kOutput ? sizeof(Cell) : 1);
    void* shadow = reserve(s.shadow_bytes);
    if (!shadow) return "no memory for a buffer's shadow";
    if (b.kind == kOutput) s.cells = (Cell*)shadow;
    else s.touched = (uint8_t*)shadow;
    if (b.copy_in) memcpy(address_of(i), b.host, b.bytes);
    else memset(address_of(i), 0xff, b.bytes);  // NaN in every float type
  }
  if (l->n_variables) {
    g_tg_begin = (const char*)l->variables[0].address - 128;
    const ThreadgroupVariable& last = l->variables[l->n_variables - 1];
    g_tg_end = (const char*)last.address + last.bytes + 128;
    if (g_tg_end - g_tg_begin > (int64_t)kMaxThreadgroupBytes) return "the threadgroup arena is too large";
    memset(g_cells, 0, (g_tg_end - g_tg_begin) * sizeof(Cell));
  } else {
    g_tg_begin = g_tg_end = nullptr;
  }
  return nullptr;
}

void memory_new_threadgroup() {
  for (uint32_t i = 0; i < g.launch->n_variables; ++i) {
    const ThreadgroupVariable& v = g.launch->variables[i];
    memset(v.address, 0xff, v.bytes);
  }
}

void memory_end(Launch* l) {
  for (uint32_t i = 0; i < l->n_buffers; ++i) {
    Buffer& b = l->buffers[i];
    Slot& s = g_slots[i];
    for (uint64_t e = 0; e < b.bytes / b.item; ++e) {
      if (s.touched) {
        b.unique_read += s.touched[e] ? b.item : 0;
      } else {
        b.unique_read += s.cells[e].read_epoch ? b.item : 0;
        b.unique_written += s.cells[e].write_epoch ? b.item : 0;
      }
    }
    if (b.kind == kOutput) memcpy(b.host, address_of(i), b.bytes);
    munmap(s.cells ? (void*)s.cells : (void*)s.touched, s.shadow_bytes);
    // Release the pages and make them inaccessible.
    madvise(address_of(i), s.mapped, MADV_DONTNEED);
    mprotect(address_of(i), s.mapped, PROT_NONE);
  }
}

// --- faults -----------------------------------------------------------------------------------------------

[[noreturn]] static void memory_fault(FaultKind kind, Space space, int buffer, int64_t offset, uint32_t size,
                                      bool write, uint64_t pc, const char* what) {
  Fault& f = fault();
  f.space = space;
  f.buffer = buffer;
  f.offset = offset;
  f.size = size;
  f.write = write;
  stop(kind, pc, "%s", what);
}

[[noreturn]] static void race(Space space, int buffer, int64_t offset, uint32_t size, bool write, uint64_t pc,
                              uint32_t other, uint32_t other_pc, bool other_write, bool across) {
  Fault& f = fault();
  f.other_thread = other;
  f.other_pc = other_pc ? (uint64_t)g.launch->image_begin + other_pc : 0;
  f.other_write = other_write;
  f.across_threadgroups = across;
  memory_fault(kRace, space, buffer, offset, size, write, pc, "");
}

// --- the check of one cell --------------------------------------------------------------------------------

struct Access {
  Space space;
  int buffer;
  int64_t offset;
  uint32_t size;
  uint64_t pc;
  uint16_t thread;       // or kAtomic
  uint32_t epoch;        // barriers of the threadgroup that order this kind of memory
  uint16_t group_epoch;  // the same for the SIMD group
};

// True if a barrier of the shared SIMD group ordered the earlier access of `who` before this one.
static inline bool ordered_in_group(const Access& a, uint16_t who, uint16_t group_epoch) {
  if (a.thread == kAtomic || who >= kAtomic) return false;
  uint32_t group = who & kManyLanes ? who & 0x7fffu : who / kLanes;
  return group == g.current / kLanes && group_epoch < a.group_epoch;
}

static inline uint32_t pc_offset(uint64_t pc) { return (uint32_t)(pc - (uint64_t)g.launch->image_begin); }

static inline void on_read(Cell& c, const Access& a) {
  if (c.write_epoch >= a.epoch && c.writer != a.thread && !ordered_in_group(a, c.writer, c.write_group_epoch))
    race(a.space, a.buffer, a.offset, a.size, false, a.pc, c.writer, c.write_pc, true, false);
  if (a.space == kDevice && c.write_epoch && c.write_epoch < g.born && !(c.writer == kAtomic && a.thread == kAtomic))
    race(a.space, a.buffer, a.offset, a.size, false, a.pc, c.writer, c.write_pc, true, true);
  // Keep reads of earlier threadgroups: a later write must be checked against them too.
  if (a.space == kDevice && c.read_epoch && c.read_epoch < g.born && c.reader != kAtomic) c.older_read_pc = c.read_pc;
  uint32_t group = g.current / kLanes;
  if (c.read_epoch < a.epoch || ordered_in_group(a, c.reader, c.read_group_epoch)) {
    c.reader = a.thread;
  } else if (c.reader != a.thread) {
    bool same = c.reader < kAtomic && a.thread < kAtomic &&
                (c.reader & kManyLanes ? (c.reader & 0x7fffu) : c.reader / kLanes) == group;
    c.reader = same ? (uint16_t)(kManyLanes | group) : kManyGroups;
  }
  c.read_epoch = g.epoch;
  c.read_group_epoch = a.group_epoch;
  c.read_pc = pc_offset(a.pc);
}

static inline void on_write(Cell& c, const Access& a) {
  if (c.write_epoch >= a.epoch && c.writer != a.thread && !ordered_in_group(a, c.writer, c.write_group_epoch))
    race(a.space, a.buffer, a.offset, a.size, true, a.pc, c.writer, c.write_pc, true, false);
  if (c.read_epoch >= a.epoch && c.reader != a.thread && !ordered_in_group(a, c.reader, c.read_group_epoch))
    race(a.space, a.buffer, a.offset, a.size, true, a.pc, c.reader, c.read_pc, false, false);
  if (a.space == kDevice) {
    bool atomic = a.thread == kAtomic;
    if (c.write_epoch && c.write_epoch < g.born && !(atomic && c.writer == kAtomic))
      race(a.space, a.buffer, a.offset, a.size, true, a.pc, c.writer, c.write_pc, true, true);
    if (c.read_epoch && c.read_epoch < g.born && !(atomic && c.reader == kAtomic))
      race(a.space, a.buffer, a.offset, a.size, true, a.pc, c.reader, c.read_pc, false, true);
    if (c.older_read_pc)
      race(a.space, a.buffer, a.offset, a.size, true, a.pc, kNobody, c.older_read_pc, false, true);
  }
  c.write_epoch = g.epoch;
  c.writer = a.thread;
  c.write_group_epoch = a.group_epoch;
  c.write_pc = pc_offset(a.pc);
}

// --- accesses ---------------------------------------------------------------------------------------------

static void device_access(char* p, uint64_t size, bool write, bool atomic, uint64_t pc) {
  uint32_t i = (uint32_t)((p - g_arena) / kSlot);
  int64_t offset = p - g_arena - (int64_t)(i * kSlot + kStart);
  if (i >= g.launch->n_buffers) memory_fault(kOutOfBounds, kDevice, -1, offset, size, write, pc, "");
  Slot& s = g_slots[i];
  if (offset < 0 || (uint64_t)offset + size > s.bytes)
    memory_fault(kOutOfBounds, kDevice, i, offset, size, write, pc, "");
  Buffer& b = g.launch->buffers[i];
  uint64_t first = (uint64_t)offset / s.item, last = ((uint64_t)offset + size - 1) / s.item;
  if (write) {
    b.written_bytes += size;
    b.writes++;
  } else {
    b.read_bytes += size;
    b.reads++;
  }
  if (s.touched) {
    if (write) memory_fault(kWriteToInput, kDevice, i, offset, size, write, pc, "");
    memset(s.touched + first, 1, last - first + 1);
    return;
  }
  Group& group = g.groups[g.current / kLanes];
  Access a = {kDevice, (int)i, offset, (uint32_t)size, pc, atomic ? kAtomic : (uint16_t)g.current,
              g.device_epoch, (uint16_t)group.device_epoch};
  for (uint64_t e = first; e <= last; ++e) {
    Cell& c = s.cells[e];
    if (write) {
      on_write(c, a);
    } else {
      if (!c.write_epoch && !b.initialised)
        memory_fault(kUninitialised, kDevice, i, e * s.item, size, write, pc, "");
      on_read(c, a);
    }
  }
}

static void threadgroup_access(const char* p, uint64_t size, bool write, bool atomic, uint64_t pc) {
  Launch* l = g.launch;
  uint32_t i = 0;
  while (i + 1 < l->n_variables && p >= (const char*)l->variables[i + 1].address - 64) ++i;
  const ThreadgroupVariable& v = l->variables[i];
  int64_t offset = p - (const char*)v.address;
  if (offset < 0 || (uint64_t)offset + size > v.bytes)
    memory_fault(kOutOfBounds, kThreadgroup, i, offset, size, write, pc, "");
  (write ? l->counts.threadgroup_written : l->counts.threadgroup_read) += size;
  Group& group = g.groups[g.current / kLanes];
  Access a = {kThreadgroup, (int)i, offset, (uint32_t)size, pc, atomic ? kAtomic : (uint16_t)g.current,
              g.threadgroup_epoch, (uint16_t)group.threadgroup_epoch};
  uint64_t granule = l->granule;
  // Launch.py retries with a finer granule.
  if ((size | (uint64_t)(p - g_tg_begin)) & (granule - 1)) stop(kGranule, pc, "");
  Cell* cells = g_cells + (p - g_tg_begin) / granule;
  for (uint64_t e = 0; e < size; e += granule) {
    Cell& c = cells[e / granule];
    if (write) {
      on_write(c, a);
    } else {
      if (c.write_epoch < g.born)
        memory_fault(kUninitialised, kThreadgroup, i, offset + e, size, write, pc, "");
      on_read(c, a);
    }
  }
}

static inline void access(uint64_t address, uint64_t size, bool write, uint64_t pc, bool atomic = false) {
  char* p = (char*)address;
  if ((uint64_t)(p - g_stacks) < g_private_bytes) return;
  if (size == 0) return;
  if ((uint64_t)(p - g_arena) < kMaxBuffers * kSlot) {
    device_access(p, size, write, atomic, pc);
  } else if (p >= g_tg_begin && p < g_tg_end) {
    threadgroup_access(p, size, write, atomic, pc);
  } else if (p < g.launch->image_begin || p >= g.launch->image_end || write) {
    Fault& f = fault();
    f.write = write;
    f.size = (uint32_t)size;
    f.buffer = -1;
    stop(kOutOfBounds, pc, "address 0x%llx belongs to no buffer", (unsigned long long)address);
  }
}

// The compiler calls these only for addresses that it assumes to be aligned, and the ...N functions otherwise.
static inline void aligned_access(uint64_t address, uint64_t size, bool write, uint64_t pc) {
  access(address, size, write, pc);
  if (address & (size - 1)) {
    fault().buffer = -1;
    stop(kMisaligned, pc, "%llu bytes at an address that is not a multiple of that", (unsigned long long)size);
  }
}

#define MS_ACCESS(n)                                                                                     \
  extern "C" void __asan_load##n##_noabort(uint64_t a) { aligned_access(a, n, false, CALLER); }         \
  extern "C" void __asan_store##n##_noabort(uint64_t a) { aligned_access(a, n, true, CALLER); }
MS_ACCESS(1)
MS_ACCESS(2)
MS_ACCESS(4)
MS_ACCESS(8)
MS_ACCESS(16)
extern "C" void __asan_loadN_noabort(uint64_t a, uint64_t n) { access(a, n, false, CALLER); }
extern "C" void __asan_storeN_noabort(uint64_t a, uint64_t n) { access(a, n, true, CALLER); }
extern "C" void* __asan_memcpy(void* to, const void* from, uint64_t n) {
  access((uint64_t)from, n, false, CALLER);
  access((uint64_t)to, n, true, CALLER);
  return memcpy(to, from, n);
}
extern "C" void* __asan_memmove(void* to, const void* from, uint64_t n) {
  access((uint64_t)from, n, false, CALLER);
  access((uint64_t)to, n, true, CALLER);
  return memmove(to, from, n);
}
extern "C" void* __asan_memset(void* to, int value, uint64_t n) {
  access((uint64_t)to, n, true, CALLER);
  return memset(to, value, n);
}
extern "C" void __asan_handle_no_return() {}

extern "C" uint64_t __ms_atomic_load(const void* p, uint32_t size) {
  g.launch->counts.atomics++;
  access((uint64_t)p, size, false, CALLER, true);
  uint64_t v = 0;
  memcpy(&v, p, size);
  return v;
}
extern "C" void __ms_atomic_store(void* p, uint32_t size, uint64_t value) {
  access((uint64_t)p, size, true, CALLER, true);
  memcpy(p, &value, size);
}

// --- handlers of clang's undefined-behaviour checks -------------------------------------------------------

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

[[noreturn]] static void stop_at(FaultKind kind, const void* data, const char* format, long long value) {
  const SourceLocation* at = (const SourceLocation*)data;
  Fault& f = fault();
  f.line = at->line;
  f.buffer = -1;
  snprintf(f.file, sizeof f.file, "%s", at->file ? at->file : "");
  stop(kind, 0, format, value);
}
extern "C" void __ubsan_handle_out_of_bounds(void* data, uint64_t index) {
  fault().space = kThread;
  stop_at(kOutOfBounds, data, "index %lld is outside the array", (long long)index);
}
extern "C" void __ms_thread_bounds() {
  fault().space = kThread;
  fault().buffer = -1;
  stop(kOutOfBounds, CALLER, "an access outside an array of the thread");
}
extern "C" void __ubsan_handle_type_mismatch_v1(void* data, uint64_t address) {
  stop_at(kMisaligned, data, "address 0x%llx is not aligned for the type it is read or written as",
          (long long)address);
}
extern "C" void __ubsan_handle_divrem_overflow(void* data, uint64_t a, uint64_t) {
  stop_at(kArithmetic, data, "division of %lld by zero, or overflow", (long long)a);
}
extern "C" void __ubsan_handle_shift_out_of_bounds(void* data, uint64_t, uint64_t by) {
  stop_at(kArithmetic, data, "shift by %lld", (long long)by);
}

// Shared state of the runtime: the running launch, its threads and its memory.
#pragma once
#include "abi.h"

constexpr uint32_t kMaxThreads = 1024, kLanes = 32, kMaxGroups = kMaxThreads / kLanes;
constexpr uint32_t kNobody = 0xffffffffu;
constexpr uint64_t kStackBytes = 256 << 10;

// Last accesses to a piece of memory. Epochs count barriers: two accesses of different threads without a barrier
// between them have the same epoch, and race if one of them writes.
struct Cell {
  uint32_t write_epoch, read_epoch;  // 0: never
  uint32_t write_pc, read_pc;        // offsets into the kernel's image
  uint16_t writer, reader;           // thread, or one of the marks below
  uint16_t write_group_epoch, read_group_epoch;  // counts barriers of the thread's SIMD group
  uint32_t older_read_pc;            // device memory: a read by an earlier threadgroup than the last reader's; 0: none
};
constexpr uint16_t kManyGroups = 0xffff;   // readers from several SIMD groups
constexpr uint16_t kAtomic = 0xfffe;       // atomic access
constexpr uint16_t kManyLanes = 0x8000;    // | SIMD group: several lanes of one group

// Operation that all lanes of a SIMD group, or all SIMD groups of a threadgroup, must reach together.
enum Meeting : uint32_t { kExit, kSimdOperation, kGroupBarrier, kBarrier };

struct Exchange {  // mirrors ms_exchange in the kernel's header
  uint32_t count, done;
  uint8_t result[32];
  uint8_t data[32][32];
};

struct Group {
  uint32_t first, size;            // threads of the group
  uint32_t arrived, resume;        // number of waiting lanes; thread that runs when the group resumes
  Meeting meeting;
  const char* name;
  uint64_t pc;
  uint32_t first_arrival;
  uint32_t parity;
  uint32_t device_epoch, threadgroup_epoch;  // barriers of this SIMD group, per kind of memory
};

// Operations of a SIMD group without an exchange (matrix loads and stores) do not wait. A lane records them, and the
// records are compared at the next meeting of the lanes.
constexpr uint32_t kNotes = 64;
struct Notes {
  uint32_t count;
  uint32_t pad;
  uint64_t pc[kNotes];  // the last ones, at count % kNotes
  const char* name[kNotes];
  uint64_t hash;
};

struct State {
  Launch* launch;
  uint32_t n_threads, n_groups;
  uint32_t current;                // running thread
  uint32_t position[3];            // position of the running threadgroup
  uint32_t extent[3];              // size of the running threadgroup: smaller at the ragged edge of the grid
  void* stack_pointer[kMaxThreads];
  void* scheduler;
  Group groups[kMaxGroups];
  Notes notes[kMaxThreads];
  // state of the meeting of SIMD groups
  uint32_t arrived_groups;
  Meeting meeting;
  uint64_t meeting_pc;
  uint32_t meeting_thread;
  // epochs; `born` is the first epoch of the running threadgroup
  uint32_t epoch, born, device_epoch, threadgroup_epoch;
  bool finished;
};
extern State g;

extern char* g_stacks;         // kMaxThreads stacks, then the exchanges: memory that is not checked
extern uint64_t g_private_bytes;
Exchange* exchange_of(uint32_t group, uint32_t parity);

// memory.cpp
const char* memory_begin(Launch* launch);  // nullptr, or the reason for a failure
void memory_new_threadgroup();
void memory_end(Launch* launch);
uint64_t memory_argument(uint32_t buffer);

// Stops the launch: fills launch->fault and never returns to the fibre.
[[noreturn]] void stop(FaultKind kind, uint64_t pc, const char* format, ...);
Fault& fault();

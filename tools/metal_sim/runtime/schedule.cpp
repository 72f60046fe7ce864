// Runs threadgroups one after another. The threads of a threadgroup are fibres that switch when they must wait.
//
// Lanes of a SIMD group run one after another. A lane that reaches an operation of the whole group waits, and the next
// lane runs. The last lane completes the operation and continues. All lanes must reach the same operation at the same
// place, so the divergence check detects a mismatch immediately. SIMD groups meet at threadgroup barriers in the same
// way.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fibre.h"
#include "state.h"

State g;
char* g_stacks;
uint64_t g_private_bytes;
static uint32_t g_ids[20][3];
static uint64_t* g_arguments;  // in private memory, because the kernel's instrumented entry reads it

#define CALLER ((uint64_t)__builtin_return_address(0))

Exchange* exchange_of(uint32_t group, uint32_t parity) {
  return (Exchange*)(g_stacks + kMaxThreads * kStackBytes) + (group * 2 + parity);
}

Fault& fault() { return g.launch->fault; }

void stop(FaultKind kind, uint64_t pc, const char* format, ...) {
  Fault& f = fault();
  f.kind = kind;
  f.pc = pc;
  uint32_t t = g.current;
  f.thread[0] = t % g.extent[0];
  f.thread[1] = t / g.extent[0] % g.extent[1];
  f.thread[2] = t / g.extent[0] / g.extent[1];
  for (int i = 0; i < 3; ++i) f.threadgroup[i] = g.position[i];
  va_list args;
  va_start(args, format);
  vsnprintf(f.message, sizeof f.message, format, args);
  va_end(args);
  void* lost;
  ms_switch(&lost, g.scheduler);
  __builtin_unreachable();
}

static inline void run_thread(uint32_t next) {
  uint32_t self = g.current;
  g.current = next;
  ms_switch(&g.stack_pointer[self], g.stack_pointer[next]);
}

static const char* describe(Meeting m, const char* name) {
  return m == kExit ? "the end of the kernel" : m == kBarrier ? "threadgroup_barrier"
       : m == kGroupBarrier ? "simdgroup_barrier" : name;
}

[[noreturn]] static void diverged(Meeting a, const char* a_name, uint64_t a_pc, uint32_t a_thread, Meeting b,
                                  const char* b_name, uint64_t b_pc, bool between_groups) {
  Fault& f = fault();
  f.other_thread = a_thread;
  f.other_pc = a_pc;
  bool simd = a == kSimdOperation || b == kSimdOperation;
  // Report the operation as the place, not the end of the kernel.
  bool swap = b == kExit;
  if (swap) {
    f.other_pc = b_pc;
    b_pc = a_pc;
  }
  stop(simd ? kSimdDivergence : kBarrierDivergence, b_pc, "%s%u is at %s while %s%u is at %s",
       between_groups ? "SIMD group " : "thread ", between_groups ? a_thread / kLanes : a_thread,
       describe(a, a_name), between_groups ? "SIMD group " : "thread ",
       between_groups ? g.current / kLanes : g.current, describe(b, b_name));
}

// Meeting of SIMD groups at a threadgroup barrier or at the end.
static void meet_groups(Meeting meeting, uint64_t pc) {
  uint32_t me = g.current / kLanes;
  if (g.arrived_groups == 0) {
    g.meeting = meeting;
    g.meeting_pc = pc;
    g.meeting_thread = g.current;
  } else if (meeting != g.meeting || (meeting == kBarrier && pc != g.meeting_pc)) {
    diverged(g.meeting, "", g.meeting_pc, g.meeting_thread, meeting, "", pc, true);
  }
  if (++g.arrived_groups == g.n_groups) {
    g.arrived_groups = 0;
    if (meeting == kExit) {
      g.finished = true;
      void* lost;
      ms_switch(&lost, g.scheduler);
    }
    return;
  }
  g.groups[me].resume = g.current;
  run_thread(g.groups[(me + 1) % g.n_groups].resume);
}

// The notes of two meeting lanes differ: find the first difference that is still recorded.
[[noreturn]] static void diverged_before(uint32_t other) {
  const Notes &a = g.notes[other], &b = g.notes[g.current];
  uint32_t longest = a.count > b.count ? a.count : b.count;
  for (uint32_t i = longest > kNotes ? longest - kNotes : 0; i < longest; ++i) {
    uint32_t at = i % kNotes;
    if (i < a.count && i < b.count && a.pc[at] == b.pc[at]) continue;
    const Notes& who = i < b.count ? b : a;
    fault().other_thread = other;
    fault().other_pc = i < a.count && i < b.count ? a.pc[at] : 0;
    stop(kSimdDivergence, who.pc[at], "%s is reached by thread %u and not by thread %u", who.name[at],
         &who == &a ? other : g.current, &who == &a ? g.current : other);
  }
  stop(kSimdDivergence, 0, "threads %u and %u took different ways", other, g.current);
}

// Meeting of the lanes of a SIMD group. Returns true for the last lane.
static bool meet_lanes(Meeting meeting, const char* name, uint64_t pc) {
  Group& group = g.groups[g.current / kLanes];
  Notes& mine = g.notes[g.current];
  const Notes& theirs = g.notes[group.first_arrival];
  if (group.arrived && (mine.hash != theirs.hash || mine.count != theirs.count)) diverged_before(group.first_arrival);
  if (group.arrived == 0) {
    group.meeting = meeting;
    group.name = name;
    group.pc = pc;
    group.first_arrival = g.current;
  } else if (meeting != group.meeting || (meeting != kExit && pc != group.pc)) {
    diverged(group.meeting, group.name, group.pc, group.first_arrival, meeting, name, pc, false);
  }
  if (++group.arrived == group.size) {
    group.arrived = 0;
    mine.count = 0;
    mine.hash = 0;
    return true;
  }
  uint32_t next = g.current + 1;
  run_thread(next == group.first + group.size ? group.first : next);
  // Cleared only here, because later lanes compare themselves with the first lane.
  mine.count = 0;
  mine.hash = 0;
  return false;
}

extern "C" void ms_fibre_main() {
  uint32_t t = g.current;
  // Ids of thread t for every attribute of the language, in the order of signature.py.
  uint32_t ids[20][3];
  memcpy(ids, g_ids, sizeof ids);
  const uint32_t* group = g.launch->group;
  uint32_t p[3] = {t % g.extent[0], t / g.extent[0] % g.extent[1], t / g.extent[0] / g.extent[1]};
  for (int i = 0; i < 3; ++i) {
    ids[0][i] = g.position[i] * group[i] + p[i];  // thread_position_in_grid
    ids[1][i] = p[i];                             // thread_position_in_threadgroup
    ids[2][i] = g.position[i];                    // threadgroup_position_in_grid
    ids[3][i] = g.extent[i];                      // threads_per_threadgroup
  }
  ids[4][0] = t;
  ids[5][0] = t % kLanes;
  ids[6][0] = t / kLanes;
  ids[7][0] = g.n_groups;
  ids[8][0] = t % 4;
  ids[9][0] = t / 4;
  ids[10][0] = (g.n_threads + 3) / 4;
  g.launch->entry(g_arguments, &ids[0][0]);
  if (meet_lanes(kExit, "", 0)) meet_groups(kExit, 0);
  __builtin_trap();
}

static void run_threadgroup() {
  Launch* l = g.launch;
  g.n_threads = g.extent[0] * g.extent[1] * g.extent[2];
  g.n_groups = (g.n_threads + kLanes - 1) / kLanes;
  g.arrived_groups = 0;
  g.finished = false;
  for (uint32_t t = 0; t < g.n_threads; ++t) g.notes[t].count = g.notes[t].hash = 0;
  g.born = g.device_epoch = g.threadgroup_epoch = ++g.epoch;
  for (uint32_t i = 0; i < g.n_groups; ++i) {
    Group& group = g.groups[i];
    memset(&group, 0, sizeof group);
    group.first = group.resume = i * kLanes;
    group.size = g.n_threads - group.first < kLanes ? g.n_threads - group.first : kLanes;
  }
  for (uint32_t t = 0; t < g.n_threads; ++t)
    g.stack_pointer[t] = fibre_prepare(g_stacks + (t + 1) * kStackBytes);
  memory_new_threadgroup();
  g.current = 0;
  l->counts.threadgroups++;
  l->counts.threads += g.n_threads;
  ms_switch(&g.scheduler, g.stack_pointer[0]);
}

extern "C" const char* ms_launch(Launch* l) {
  if (!g_stacks) {
    g_private_bytes = kMaxThreads * kStackBytes + kMaxGroups * 2 * sizeof(Exchange) + 64 * sizeof(uint64_t);
    void* p = mmap(nullptr, g_private_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) return "no address space for the stacks of the threads";
    g_stacks = (char*)p;
    g_arguments = (uint64_t*)(g_stacks + g_private_bytes) - 64;
  }
  memset(&g, 0, sizeof g);
  g.launch = l;
  if (const char* why = memory_begin(l)) return why;
  for (uint32_t i = 0; i < l->n_buffers; ++i) g_arguments[i] = memory_argument(i);
  uint32_t groups[3];
  memset(g_ids, 0, sizeof g_ids);
  for (int i = 0; i < 3; ++i) {
    groups[i] = (l->grid[i] + l->group[i] - 1) / l->group[i];
    g_ids[11][i] = groups[i];     // threadgroups_per_grid
    g_ids[12][i] = l->grid[i];    // threads_per_grid
    g_ids[13][i] = l->group[i];   // dispatch_threads_per_threadgroup
  }
  uint32_t full = l->group[0] * l->group[1] * l->group[2];
  g_ids[14][0] = kLanes;                            // threads_per_simdgroup, thread_execution_width
  g_ids[15][0] = (full + kLanes - 1) / kLanes;      // dispatch_simdgroups_per_threadgroup
  g_ids[16][0] = (full + 3) / 4;                    // dispatch_quadgroups_per_threadgroup
  for (uint32_t z = 0; z < groups[2]; ++z)
    for (uint32_t y = 0; y < groups[1]; ++y)
      for (uint32_t x = 0; x < groups[0]; ++x) {
        uint32_t at[3] = {x, y, z};
        for (int i = 0; i < 3; ++i) {
          g.position[i] = at[i];
          uint32_t left = l->grid[i] - at[i] * l->group[i];
          g.extent[i] = left < l->group[i] ? left : l->group[i];
        }
        run_threadgroup();
        if (l->fault.kind) goto done;
      }
done:
  memory_end(l);
  return nullptr;
}

// Functions that kernels call.

extern "C" void __ms_threadgroup_barrier(uint32_t flags) {
  uint64_t pc = CALLER;
  if (meet_lanes(kBarrier, "", pc)) {
    uint32_t arrived = g.arrived_groups + 1;
    if (arrived == g.n_groups) g.launch->counts.barriers++;
    meet_groups(kBarrier, pc);
    if (arrived == g.n_groups) {
      g.epoch++;
      if (flags & 1) g.device_epoch = g.epoch;
      if (flags & 2) g.threadgroup_epoch = g.epoch;
    }
  }
}

extern "C" void __ms_simdgroup_barrier(uint32_t flags) {
  Group& group = g.groups[g.current / kLanes];
  if (meet_lanes(kGroupBarrier, "", CALLER)) {
    g.launch->counts.simdgroup_barriers++;
    if (flags & 1) group.device_epoch++;
    if (flags & 2) group.threadgroup_epoch++;
  }
}

extern "C" Exchange* __ms_simd(const char* name, const void* value, uint32_t size) {
  uint32_t me = g.current / kLanes;
  Group& group = g.groups[me];
  // Two alternating buffers suffice: no lane can reach the operation after the next before all lanes have left this
  // one.
  Exchange* x = exchange_of(me, group.parity & 1);
  memcpy(x->data[g.current % kLanes], value, size);
  if (meet_lanes(kSimdOperation, name, CALLER)) {
    x->count = group.size;
    x->done = 0;
    group.parity++;
    g.launch->counts.simd_operations++;
  }
  return x;
}

extern "C" void __ms_group(const char* name) {
  Notes& n = g.notes[g.current];
  uint32_t at = n.count++ % kNotes;
  n.pc[at] = CALLER;
  n.name[at] = name;
  n.hash = (n.hash ^ n.pc[at]) * 0x9e3779b97f4a7c15ull;
  if (g.current % kLanes == 0) g.launch->counts.simd_operations++;
}

extern "C" uint32_t __ms_lane() { return g.current % kLanes; }

extern "C" void __ms_missing_lane(const char* name, uint32_t lane) {
  stop(kMissingLane, CALLER, "%s takes the value of lane %d, which has no thread", name, (int)lane);
}

extern "C" void __ms_multiply_accumulate(const float* in, float* out) {
  uint32_t me = g.current / kLanes, lane = g.current % kLanes;
  Group& group = g.groups[me];
  Exchange* x = exchange_of(me, group.parity & 1);
  memcpy(x->data[lane], in, 24);
  if (meet_lanes(kSimdOperation, "simdgroup_multiply_accumulate", CALLER)) {
    if (group.size != kLanes)
      stop(kMissingLane, CALLER, "a matrix product in a SIMD group of %u threads", group.size);
    group.parity++;
    g.launch->counts.products++;
    float a[8][8], b[8][8], c[8][8];
    for (uint32_t i = 0; i < kLanes; ++i) {
      const float* v = (const float*)x->data[i];
      uint32_t row = (i / 4 & 4) + i / 2 % 4, column = (i / 4 & 2) * 2 + i % 2 * 2;
      for (int k = 0; k < 2; ++k) {
        a[row][column + k] = v[k];
        b[row][column + k] = v[2 + k];
        c[row][column + k] = v[4 + k];
      }
    }
    for (int r = 0; r < 8; ++r)
      for (int k = 0; k < 8; ++k)
        for (int s = 0; s < 8; ++s) c[r][s] += a[r][k] * b[k][s];
    for (uint32_t i = 0; i < kLanes; ++i) {
      float* v = (float*)x->data[i];
      uint32_t row = (i / 4 & 4) + i / 2 % 4, column = (i / 4 & 2) * 2 + i % 2 * 2;
      v[0] = c[row][column];
      v[1] = c[row][column + 1];
    }
  }
  memcpy(out, x->data[lane], 8);
}

struct TensorParts {  // mirrors ms_tensor_parts in the stand-in for mpp::tensor_ops
  float left[8], right[16], sum[16];
  uint16_t left_at[8], right_at[16], sum_at[16];
};
struct TensorOperands {
  float left[16][16], right[16][32];
};

extern "C" void __ms_tensor_product(const TensorParts* in, float* out) {
  static TensorOperands operands[kMaxGroups][2];  // two alternate, as for other operations
  uint32_t me = g.current / kLanes;
  Group& group = g.groups[me];
  TensorOperands& x = operands[me][group.parity & 1];
  for (int i = 0; i < 8; ++i) x.left[in->left_at[i] / 16][in->left_at[i] % 16] = in->left[i];
  for (int i = 0; i < 16; ++i) x.right[in->right_at[i] / 32][in->right_at[i] % 32] = in->right[i];
  if (meet_lanes(kSimdOperation, "matmul2d", CALLER)) {
    if (group.size != kLanes) stop(kMissingLane, CALLER, "a tensor operation in a SIMD group of %u threads", group.size);
    group.parity++;
    g.launch->counts.products += 16;
  }
  for (int i = 0; i < 16; ++i) {
    float sum = in->sum[i];
    for (int k = 0; k < 16; ++k) sum += x.left[in->sum_at[i] / 32][k] * x.right[k][in->sum_at[i] % 32];
    out[i] = sum;
  }
}

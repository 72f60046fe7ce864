// Structures exchanged with launch.py, whose ctypes classes mirror them field by field.
#pragma once
#include <stdint.h>

enum BufferKind : uint32_t { kInput = 0, kOutput = 1, kConstant = 2 };

struct Buffer {
  void* host;           // bytes in, bytes out
  uint64_t bytes;
  uint32_t item;        // size of an element
  uint32_t kind;        // BufferKind
  uint32_t initialised; // an output that MLX fills with init_value before the launch
  uint32_t copy_in;     // host holds the initial contents
  // counted
  uint64_t read_bytes, written_bytes, unique_read, unique_written, reads, writes;
};

struct ThreadgroupVariable {
  void* address;
  uint64_t bytes;
};

struct Counts {
  uint64_t threadgroups, threads;
  uint64_t threadgroup_read, threadgroup_written;      // bytes of threadgroup memory
  uint64_t products;                                   // 8x8 matrix products
  uint64_t barriers, simdgroup_barriers, simd_operations, atomics;
};

enum FaultKind : uint32_t {
  kNone = 0,
  kOutOfBounds,
  kUninitialised,
  kRace,
  kBarrierDivergence,
  kSimdDivergence,
  kMissingLane,
  kMisaligned,
  kWriteToInput,
  kArithmetic,
  kGranule  // not a fault: an access finer than the shadow cells of threadgroup memory
};
enum Space : uint32_t { kNoSpace = 0, kDevice, kThreadgroup, kThread };

struct Fault {
  uint32_t kind, space;
  int32_t buffer;       // index into the launch's buffers or threadgroup variables; -1 if none is near
  uint32_t size;        // bytes of the access
  int64_t offset;       // byte offset into the buffer
  uint32_t write;
  uint32_t thread[3], threadgroup[3];
  uint32_t other_thread;  // linear index; kNobody if there is none
  uint32_t other_write;
  uint32_t across_threadgroups;
  uint64_t pc, other_pc;  // return addresses inside the kernel
  uint32_t line, other_line;  // used instead of a pc if the compiler provides the line
  char file[96];
  char message[256];
};

struct Launch {
  void (*entry)(const uint64_t* arguments, const uint32_t* ids);
  uint32_t grid[3], group[3];
  Buffer* buffers;
  uint32_t n_buffers, n_variables;
  const ThreadgroupVariable* variables;
  const char *image_begin, *image_end;  // the kernel's library, whose constants may be read
  uint32_t granule;  // bytes of threadgroup memory per shadow cell
  uint32_t pad;
  Counts counts;
  Fault fault;
};

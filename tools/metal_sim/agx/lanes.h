// SIMD groups as OpenCL's subgroups: what the headers of include/metal_sim/ and ../cuda/simd.h need of the machine.
// OpenCL's functions are declared by name here, and llvm-spirv makes instructions of the calls.
#pragma once

#define MS_CONVERGENT __attribute__((convergent))
ulong get_local_id(uint) __attribute__((const));
ulong get_group_id(uint) __attribute__((const));
ulong get_local_size(uint) __attribute__((const));
ulong get_num_groups(uint) __attribute__((const));
ulong get_global_size(uint) __attribute__((const));
ulong get_global_id(uint) __attribute__((const));
ulong get_local_linear_id() __attribute__((const));
uint get_sub_group_id() __attribute__((const));
uint get_sub_group_local_id() __attribute__((const));
uint get_num_sub_groups() __attribute__((const));
uint sub_group_shuffle(uint, uint) MS_CONVERGENT;
uint sub_group_broadcast(uint, uint) MS_CONVERGENT;
void barrier(uint) MS_CONVERGENT;
void sub_group_barrier(uint) MS_CONVERGENT;

extern "C" {
METAL_FUNC uint __ms_lane() { return get_sub_group_local_id(); }
METAL_FUNC void __ms_group(const constant char*) {}
METAL_FUNC void __ms_threadgroup_barrier(uint) { barrier(1); }
METAL_FUNC void __ms_simdgroup_barrier(uint) { sub_group_barrier(1); }
}
METAL_FUNC uint ms_lanes() { return 32; }

// A value of up to 4 bytes as a word, or in words.
template <class T>
union ms_words {
  uint word[(sizeof(T) + 3) / 4];
  T whole;
  METAL_FUNC ms_words() : word{} {}
};

template <class T>
METAL_FUNC T ms_take(T value, uint lane) {
  ms_words<T> out, in;
  in.whole = value;
  for (uint i = 0; i < sizeof(in.word) / 4; ++i) out.word[i] = sub_group_shuffle(in.word[i], lane);
  return out.whole;
}

// A stand-in. The GPU has one instruction for simd_shuffle_xor; Mesa makes four shuffles of it, whose lane numbers take about
// ten registers. A broadcast is one instruction with the same operands. Nothing runs, so the lane does not matter.
template <class T>
METAL_FUNC T ms_take_xor(T value, uint mask) {
  ms_words<T> out, in;
  in.whole = value;
  for (uint i = 0; i < sizeof(in.word) / 4; ++i) out.word[i] = sub_group_broadcast(in.word[i], mask);
  return out.whole;
}

// Metal's SIMD groups as CUDA's warps: the machine-dependent functions for the headers of include/metal_sim/.
//
// All operations use one exchange, ms_take, in which all lanes of a warp take a lane's value. For NVPTX it is a
// shuffle. The simulator's run pass can also compile these headers, with the runtime's exchange, so that tests run the
// same text without a GPU.
#pragma once

// CUDA's position of a thread in its block, position of the block in the grid, and size of a block.
struct ms_place {
  uint thread_[3], block[3], size[3];
};

#ifdef __NVPTX__

METAL_FUNC ms_place ms_this_place() {
  return ms_place{
      {uint(__nvvm_read_ptx_sreg_tid_x()), uint(__nvvm_read_ptx_sreg_tid_y()), uint(__nvvm_read_ptx_sreg_tid_z())},
      {uint(__nvvm_read_ptx_sreg_ctaid_x()), uint(__nvvm_read_ptx_sreg_ctaid_y()),
       uint(__nvvm_read_ptx_sreg_ctaid_z())},
      {uint(__nvvm_read_ptx_sreg_ntid_x()), uint(__nvvm_read_ptx_sreg_ntid_y()), uint(__nvvm_read_ptx_sreg_ntid_z())}};
}
METAL_FUNC uint ms_take_word(uint word, uint lane) {
  return uint(__nvvm_shfl_sync_idx_i32(0xffffffffu, int(word), int(lane), 31));
}
// Lanes of this warp that have a thread in CUDA.
METAL_FUNC uint ms_lanes() {
  const ms_place at = ms_this_place();
  const uint index = at.thread_[0] + (at.thread_[1] + at.thread_[2] * at.size[1]) * at.size[0];
  const uint left = at.size[0] * at.size[1] * at.size[2] - index / 32 * 32;
  return left < 32 ? left : 32;
}

extern "C" {
METAL_FUNC uint __ms_lane() { return uint(__nvvm_read_ptx_sreg_laneid()); }
METAL_FUNC void __ms_group(const constant char*) {}
// Both order all memory for the threads of this threadgroup.
METAL_FUNC void __ms_threadgroup_barrier(uint) { __syncthreads(); }
METAL_FUNC void __ms_simdgroup_barrier(uint) { __nvvm_bar_warp_sync(0xffffffffu); }
}

#else

struct ms_exchange {
  uint count, done;
  uchar result[32];
  uchar data[32][32];
};
extern "C" ms_exchange* __ms_simd(const constant char* name, const void* value, uint size);

METAL_FUNC uint ms_take_word(uint word, uint lane) {
  ms_exchange* x = __ms_simd("warp shuffle", &word, sizeof(word));
  return *reinterpret_cast<uint*>(x->data[lane & 31]);
}
METAL_FUNC uint ms_lanes() {
  uint none = 0;
  return __ms_simd("lanes", &none, sizeof(none))->count;
}

#endif

// Computes the ids of a thread, in the order of signature.py. Returns true if the thread exists in Metal: CUDA starts
// more threads if the grid is not a multiple of the threadgroup.
METAL_FUNC bool ms_ids(uint* ids, ms_place at, uint grid_x, uint grid_y, uint grid_z) {
  const uint grid[3] = {grid_x, grid_y, grid_z};
  uint extent[3];  // size of this threadgroup: fewer threads at the grid's end
  bool exists = true;
  for (int i = 0; i < 54; ++i) ids[i] = 0;
  for (int i = 0; i < 3; ++i) {
    const uint left = grid[i] - at.block[i] * at.size[i];
    extent[i] = left < at.size[i] ? left : at.size[i];
    exists = exists && at.thread_[i] < extent[i];
    ids[3 * 0 + i] = at.block[i] * at.size[i] + at.thread_[i];
    ids[3 * 1 + i] = at.thread_[i];
    ids[3 * 2 + i] = at.block[i];
    ids[3 * 3 + i] = extent[i];
    ids[3 * 11 + i] = (grid[i] + at.size[i] - 1) / at.size[i];
    ids[3 * 12 + i] = grid[i];
    ids[3 * 13 + i] = at.size[i];
  }
  const uint index = at.thread_[0] + (at.thread_[1] + at.thread_[2] * extent[1]) * extent[0];
  const uint threads = extent[0] * extent[1] * extent[2], all = at.size[0] * at.size[1] * at.size[2];
  ids[3 * 4] = index;
  ids[3 * 5] = index % 32;
  ids[3 * 6] = index / 32;
  ids[3 * 7] = (threads + 31) / 32;
  ids[3 * 8] = index % 4;
  ids[3 * 9] = index / 4;
  ids[3 * 10] = (threads + 3) / 4;
  ids[3 * 14] = 32;
  ids[3 * 15] = (all + 31) / 32;
  ids[3 * 16] = (all + 3) / 4;
  return exists;
}

// Returns the value of lane `lane` modulo 32. All lanes of the warp must call it.
template <class T>
METAL_FUNC T ms_take(T value, uint lane) {
  constexpr uint words = (sizeof(T) + 3) / 4;
  union parts {
    uint word[words];
    T whole;
    METAL_FUNC parts() : word{} {}
  } out, in;
  in.whole = value;
  for (uint i = 0; i < words; ++i) out.word[i] = ms_take_word(in.word[i], lane);
  return out.whole;
}

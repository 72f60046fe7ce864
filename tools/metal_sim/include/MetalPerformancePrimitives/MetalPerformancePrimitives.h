// The part of Apple's mpp::tensor_ops that kernels here use: matmul2d of one SIMD group, [16 x 16] times [16 x 32], all
// operands cooperative tensors.
//
// The distribution of elements over lanes differs between GPUs, so a kernel must query it. This header has two layouts,
// selected by METAL_SIM_TENSOR_LAYOUT (0 or 1), and a kernel must give the same results in both.
//
//     0   layout of M5, which MLX's kernels assume (steel/attn/nax.h)
//     1   elements scattered over the whole matrix, differently for each operand and operation
//
// New tensors contain NaN, so that elements which a kernel does not set become visible.
#pragma once

#ifndef METAL_SIM_TENSOR_LAYOUT
#define METAL_SIM_TENSOR_LAYOUT 0
#endif

// A lane's elements of a product, and their positions in the matrices: row * columns + column.
struct ms_tensor_parts {
  float left[8], right[16], sum[16];
  ushort left_at[8], right_at[16], sum_at[16];
};
extern "C" void __ms_tensor_product(const ms_tensor_parts* in, float* out);

namespace metal {

template <size_t Groups>
struct execution_simdgroups {};
using execution_simdgroup = execution_simdgroups<1>;

// Metal's array has more members.
template <class T, size_t N>
struct array {
  T values[N];
  METAL_FUNC T operator[](uint i) const thread { return values[i]; }
};

enum class ms_operand : uint { left, right, sum };

// `Transposed`: True if the operation's right matrix is stored as [columns x inner].
template <class T, ms_operand Operand, bool Transposed>
class cooperative_tensor {
  static constexpr constant bool is_left = Operand == ms_operand::left;
  static constexpr constant bool is_tall = Operand == ms_operand::right && Transposed;  // [32 x 16]
  static constexpr constant ushort capacity = is_left ? 8 : 16;
  T elements[capacity];

 public:
  typedef T element_type;

  METAL_FUNC cooperative_tensor() thread {
    for (ushort i = 0; i < capacity; ++i) elements[i] = T(__builtin_nanf(""));
  }
  METAL_FUNC thread T& operator[](ushort i) thread { return elements[i]; }
  METAL_FUNC T operator[](ushort i) const thread { return elements[i]; }
  METAL_FUNC ushort get_capacity() const thread { return capacity; }
  METAL_FUNC bool is_valid_element(ushort) const thread { return true; }

  // Returns {column, row} of this lane's element i in the matrix as stored in memory.
  METAL_FUNC array<int, 2> get_multidimensional_index(ushort i) const thread {
    const int lane = int(__ms_lane());
#if METAL_SIM_TENSOR_LAYOUT
    const int size = capacity * 32, width = is_left || is_tall ? 16 : 32;
    const int at = ((lane * capacity + i) * 45 + 29 * int(Operand) + 77 * Transposed) % size;
    return array<int, 2>{{at % width, at / width}};
#else
    // Halves of 16 x 16: a lane has four adjacent elements in each of two rows.
    const int column = ((lane / 4 & 2) + lane % 2) * 4 + i % 4;
    const int row = (lane / 4 & 4) + lane / 2 % 4 + i / 4 % 2 * 8;
    return array<int, 2>{{column + (is_tall ? 0 : i / 8 * 16), row + (is_tall ? i / 8 * 16 : 0)}};
#endif
  }
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode : uint { multiply, multiply_accumulate };

  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;

  constexpr METAL_FUNC matmul2d_descriptor(
      int rows, int columns, int inner = -1, bool left = false, bool right = false, bool relaxed = false,
      mode what = mode::multiply)
      : m(rows), n(columns), k(inner), transpose_left(left), transpose_right(right), relaxed_precision(relaxed),
        matmul_mode(what) {}

  // Apple's compiler accepts a descriptor as a template argument. This language accepts only numbers.
  constexpr METAL_FUNC operator ulong() const {
    return m == 16 && n == 32 && k == 16 && !transpose_left
        ? 4ul + (transpose_right ? 2ul : 0ul) + (matmul_mode == mode::multiply_accumulate ? 1ul : 0ul)
        : 0ul;
  }
};

template <ulong Descriptor, class Scope>
class matmul2d {
  static_assert(Descriptor != 0, "the simulator knows products of 16 x 16 with 16 x 32, the left one not transposed");
  static_assert(metal::is_same_v<Scope, metal::execution_simdgroup>, "the simulator knows products of one SIMD group");
  static constexpr constant bool transposed = (Descriptor & 2) != 0, accumulates = (Descriptor & 1) != 0;

  template <class T, class U, class S>
  static constexpr METAL_FUNC bool is_known() {
    return metal::is_same_v<T, U> && (metal::is_same_v<T, half> || metal::is_same_v<T, bfloat>)
        && metal::is_same_v<S, float>;
  }

 public:
  template <class T>
  using left_t = metal::cooperative_tensor<T, metal::ms_operand::left, transposed>;
  template <class T>
  using right_t = metal::cooperative_tensor<T, metal::ms_operand::right, transposed>;
  using sum_t = metal::cooperative_tensor<float, metal::ms_operand::sum, transposed>;

  template <class T, class U, class S>
  METAL_FUNC left_t<T> get_left_input_cooperative_tensor() const thread {
    static_assert(is_known<T, U, S>(), "the simulator knows products of half and of bfloat that give float");
    return left_t<T>();
  }
  template <class T, class U, class S>
  METAL_FUNC right_t<U> get_right_input_cooperative_tensor() const thread {
    static_assert(is_known<T, U, S>(), "the simulator knows products of half and of bfloat that give float");
    return right_t<U>();
  }
  // Takes the types of the operands, not of their elements.
  template <class Left, class Right, class S>
  METAL_FUNC sum_t get_destination_cooperative_tensor() const thread {
    static_assert(metal::is_same_v<Left, left_t<typename Left::element_type>>, "no left operand of this operation");
    static_assert(metal::is_same_v<Right, right_t<typename Right::element_type>>, "no right operand of this operation");
    static_assert(metal::is_same_v<S, float>, "the simulator knows sums in float");
    return sum_t();
  }

  template <class T>
  METAL_FUNC void run(thread left_t<T>& left, thread right_t<T>& right, thread sum_t& sum) const thread {
    ms_tensor_parts in;
    for (ushort i = 0; i < 8; ++i) {
      const auto place = left.get_multidimensional_index(i);
      in.left[i] = float(left[i]);
      in.left_at[i] = ushort(place[1] * 16 + place[0]);
    }
    for (ushort i = 0; i < 16; ++i) {
      const auto place = right.get_multidimensional_index(i), sum_place = sum.get_multidimensional_index(i);
      in.right[i] = float(right[i]);
      in.right_at[i] = ushort(transposed ? place[0] * 32 + place[1] : place[1] * 32 + place[0]);
      in.sum[i] = accumulates ? sum[i] : 0.0f;
      in.sum_at[i] = ushort(sum_place[1] * 32 + sum_place[0]);
    }
    float out[16];
    __ms_tensor_product(&in, out);
    for (ushort i = 0; i < 16; ++i) sum[i] = out[i];
  }
};

}  // namespace tensor_ops
}  // namespace mpp

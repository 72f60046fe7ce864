// Products on a GPU's matrix units, by Metal's tensor operations (M5 and later, macOS 26.2): [16 x 16] times [16 x 32],
// by one SIMD group. A lane holds 8 elements of the left matrix, 16 of the right matrix and 16 of the sum. Which
// elements these are differs between GPUs, so the code queries the place of each element. A place is (column, row).

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

constant constexpr int PRODUCT_ROWS = 16;
constant constexpr int PRODUCT_INNER = 16;
constant constexpr int PRODUCT_COLUMNS = 32;
constant constexpr int LEFT_ELEMENTS = 8;  // elements of the left matrix in a lane
constant constexpr int SUM_ELEMENTS = 16;  // elements of the sum in a lane

// Returns the place of the lane's element i in the left matrix. In memory, the right matrix is [columns x inner] if
// TRANSPOSED, else [inner x columns].
template <typename T, bool TRANSPOSED>
METAL_FUNC int2 place_in_left(int i) {
  constexpr auto shape = mpp::tensor_ops::matmul2d_descriptor(
      PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_INNER, false, TRANSPOSED, false,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<shape, execution_simdgroup> product;
  auto left = product.template get_left_input_cooperative_tensor<T, T, float>();
  const auto place = left.get_multidimensional_index(i);
  return int2(place[0], place[1]);
}

// Returns the place of the lane's element i in the sum.
template <typename T, bool TRANSPOSED>
METAL_FUNC int2 place_in_sum(int i) {
  constexpr auto shape = mpp::tensor_ops::matmul2d_descriptor(
      PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_INNER, false, TRANSPOSED, false,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<shape, execution_simdgroup> product;
  auto left = product.template get_left_input_cooperative_tensor<T, T, float>();
  auto right = product.template get_right_input_cooperative_tensor<T, T, float>();
  auto sum = product.template get_destination_cooperative_tensor<
      remove_addrspace_t<decltype(left)>, remove_addrspace_t<decltype(right)>, float>();
  const auto place = sum.get_multidimensional_index(i);
  return int2(place[0], place[1]);
}

// Adds the product left * right to the lane's elements of the sum. `lefts`: the lane's elements of the left matrix.
// `rights`: the right matrix in threadgroup memory, with `stride` elements from one row to the next.
template <typename T, bool TRANSPOSED>
METAL_FUNC void add_product(
    thread float* sums, thread const T* lefts, threadgroup const T* rights, int stride) {
  constexpr auto shape = mpp::tensor_ops::matmul2d_descriptor(
      PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_INNER, false, TRANSPOSED, false,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<shape, execution_simdgroup> product;
  auto left = product.template get_left_input_cooperative_tensor<T, T, float>();
  auto right = product.template get_right_input_cooperative_tensor<T, T, float>();
  auto sum = product.template get_destination_cooperative_tensor<
      remove_addrspace_t<decltype(left)>, remove_addrspace_t<decltype(right)>, float>();
  #pragma clang loop unroll(full)
  for (int i = 0; i < LEFT_ELEMENTS; ++i) {
    left[i] = lefts[i];
  }
  #pragma clang loop unroll(full)
  for (int i = 0; i < SUM_ELEMENTS; ++i) {
    const auto place = right.get_multidimensional_index(i);
    right[i] = rights[place[1] * stride + place[0]];
    sum[i] = sums[i];
  }
  product.run(left, right, sum);
  #pragma clang loop unroll(full)
  for (int i = 0; i < SUM_ELEMENTS; ++i) {
    sums[i] = sum[i];
  }
}

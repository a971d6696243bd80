// Small operations on rows: rounding to FP8, and products with the few float32 matrices.
#include <cstdint>
#include <cuda_bf16.h>

#include "launch.cuh"
#include "ptx.cuh"
#include "rows.cuh"

namespace abyssal {

template <class T>
__device__ float value_of(T v) {
  return static_cast<float>(v);
}

template <class T>
__global__ void round_kernel(const T* x, T* out, int64_t count) {
  grid_wait();
  grid_release();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  Eight value = {};
  if (i < count) value = load_eight(x + i);
  value = round_eight(value);
  if (i < count) store_eight(out + i, value);
}

constexpr int ROWS_AT_ONCE = 4;

// out[t, n] for four n by one warp: lane l sums columns l, l + 32, .., then the lanes are added pairwise.
template <class T>
__global__ void linear_f32_kernel(const T* x, const float* weight, float* out, int tokens, int rows, int columns) {
  grid_wait();
  grid_release();
  const int lane = threadIdx.x & 31;
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = blockIdx.y * ROWS_AT_ONCE;
  if (token >= tokens) return;
  float sum[ROWS_AT_ONCE] = {};
  for (int k = lane; k < columns; k += 32) {
    const float value = value_of(x[static_cast<size_t>(token) * columns + k]);
    for (int r = 0; r < ROWS_AT_ONCE; r++)
      if (first + r < rows) sum[r] = fmaf(value, weight[static_cast<size_t>(first + r) * columns + k], sum[r]);
  }
  for (int r = 0; r < ROWS_AT_ONCE; r++) {
    for (int other = 16; other; other /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], other);
    if (lane == 0 && first + r < rows) out[static_cast<size_t>(token) * rows + first + r] = sum[r];
  }
}

}  // namespace abyssal

using namespace abyssal;

// `count` is a multiple of 32.
extern "C" int round_rows_fp8(const void* x, void* out, int64_t count, int is_bf16, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((count + 2047) / 2048));
  if (is_bf16)
    return launch(round_kernel<__nv_bfloat16>, grid, 256, 0, stream, static_cast<const __nv_bfloat16*>(x), static_cast<__nv_bfloat16*>(out), count);
  return launch(round_kernel<float>, grid, 256, 0, stream, static_cast<const float*>(x), static_cast<float*>(out), count);
}

extern "C" int linear_f32(const void* x, const float* weight, float* out, int tokens, int rows, int columns, int is_bf16, cudaStream_t stream) {
  const dim3 grid((tokens + 3) / 4, (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE);
  if (is_bf16)
    return launch(linear_f32_kernel<__nv_bfloat16>, grid, 128, 0, stream, static_cast<const __nv_bfloat16*>(x), weight, out, tokens, rows, columns);
  return launch(linear_f32_kernel<float>, grid, 128, 0, stream, static_cast<const float*>(x), weight, out, tokens, rows, columns);
}

// What becomes of the sums of a chunk (their layout: mainloop.cuh).
#pragma once
#include <cuda_bf16.h>

#include "ptx.cuh"
#include "round.cuh"
#include "tiles.cuh"

namespace abyssal {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 r = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&r);
}

__device__ __forceinline__ size_t out_offset(const GemmCall& call, const Tile& tile) {
  return call.tiles ? 0 : static_cast<size_t>(tile.group) * call.out_rows;
}

template <int N>
__device__ __forceinline__ void store_bf16(const GemmCall& call, const Tile& tile, const float (&acc)[N / 2], float undo, int chunk, int thread) {
  const int lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int channel = chunk * CHUNK_ROWS + (thread >> 5) * 16 + 4 * c;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(call.out) + out_offset(call, tile) + channel;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    uint2 value;
    value.x = transpose_8x8(pack_bf16(acc[4 * j] * undo, acc[4 * j + 1] * undo));
    value.y = transpose_8x8(pack_bf16(acc[4 * j + 2] * undo, acc[4 * j + 3] * undo));
    const int token = 8 * j + g;
    if (token < tile.tokens && channel < call.out_rows)
      *reinterpret_cast<uint2*>(out + static_cast<size_t>(tile.first + token) * call.out_stride) = value;
  }
}

template <int N>
__device__ __forceinline__ void store_f32(const GemmCall& call, const Tile& tile, const float (&acc)[N / 2], float undo, int chunk, int thread) {
  const int lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int channel = chunk * CHUNK_ROWS + (thread >> 5) * 16 + channel_of(g);
  float* out = static_cast<float*>(call.out) + static_cast<size_t>(tile.part) * call.x_rows * call.out_stride + out_offset(call, tile) + channel;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 8 * j + 2 * c + (i & 1), offset = i < 2 ? 0 : 2;
      if (token < tile.tokens && channel + offset < call.out_rows)
        out[static_cast<size_t>(tile.first + token) * call.out_stride + offset] = acc[4 * j + i] * undo;
    }
  }
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Factors of a tile's rows, fetched before the sums are made: token `thread`, then that + 128.
template <int N>
struct Factors {
  float value[(N + 127) / 128];

  __device__ __forceinline__ Factors(const GemmCall& call, const Tile& tile, int thread) {
#pragma unroll
    for (int i = 0; i < (N + 127) / 128; i++) {
      const int token = thread + 128 * i;
      value[i] = call.row_weight && !tile.other && token < tile.tokens ? call.row_weight[tile.first + token] : 1.0f;
    }
  }

  __device__ __forceinline__ void store(float* to, int thread) const {
#pragma unroll
    for (int i = 0; i < (N + 127) / 128; i++)
      if (thread + 128 * i < N) to[thread + 128 * i] = value[i];
  }
};

// One exponent for each token from the peaks of the four warps, in place of the first warp's.
template <int N>
__device__ __forceinline__ void find_exponents(float* peaks, int thread) {
#pragma unroll
  for (int i = 0; i < (N + 127) / 128; i++) {
    const int token = thread + 128 * i;
    if (token >= N) break;
    const float peak = fmaxf(fmaxf(peaks[token], peaks[N + token]), fmaxf(peaks[2 * N + token], peaks[3 * N + token]));
    peaks[token] = __int_as_float(fp8_exponent(peak));
  }
}

// Rows g hold gate channels, rows g + 8 the up projections of the same: a chunk makes 32 neighbouring channels, one scale group.
// `scratch`: peaks of four warps, then factors.
template <int N>
__device__ __forceinline__ void store_swiglu(const GemmCall& call, const Tile& tile, float (&acc)[N / 2], float undo, int chunk, int thread,
                                             float* scratch, int barrier) {
  const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, c = lane & 3;
  const float* factors = scratch + 4 * N;
  sync_threads(barrier, 128);  // factors are there; the exponents of the chunk before have been read
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * c);
    acc[4 * j] = swiglu(acc[4 * j] * undo, acc[4 * j + 2] * undo, call.limit) * factor.x;
    acc[4 * j + 1] = swiglu(acc[4 * j + 1] * undo, acc[4 * j + 3] * undo, call.limit) * factor.y;
    if (call.rounded) {
      float2 peak = make_float2(fabsf(acc[4 * j]), fabsf(acc[4 * j + 1]));
#pragma unroll
      for (int other = 4; other < 32; other *= 2) {
        peak.x = fmaxf(peak.x, __shfl_xor_sync(~0u, peak.x, other));
        peak.y = fmaxf(peak.y, __shfl_xor_sync(~0u, peak.y, other));
      }
      if (g == 0) *reinterpret_cast<float2*>(scratch + warp * N + 8 * j + 2 * c) = peak;
    }
  }
  if (call.rounded) {
    sync_threads(barrier, 128);
    find_exponents<N>(scratch, thread);
    sync_threads(barrier, 128);
  }
  const int channel = chunk * 32 + warp * 8 + 2 * c;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(call.out) + channel;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float2 t = make_float2(acc[4 * j], acc[4 * j + 1]);
    if (call.rounded) {
      const int2 exponent = *reinterpret_cast<const int2*>(scratch + 8 * j + 2 * c);
      t = round_fp8_pair(t, exponent);
    }
    const uint32_t value = transpose_8x8(pack_bf16(t.x, t.y));
    const int token = 8 * j + g;
    if (token < tile.tokens && channel < call.out_rows)
      *reinterpret_cast<uint32_t*>(out + static_cast<size_t>(tile.first + token) * call.out_stride) = value;
  }
}

}  // namespace abyssal

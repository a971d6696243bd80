// Rows in units of eight neighbours: 16 bytes of bf16. Four lanes with neighbouring units share one FP8 scale.
#pragma once
#include <cuda_bf16.h>

#include "round.cuh"

namespace abyssal {

struct Eight {
  float value[8];
};

__device__ __forceinline__ uint4 load_raw(const __nv_bfloat16* from) { return *reinterpret_cast<const uint4*>(from); }

__device__ __forceinline__ Eight unpack_eight(uint4 raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  Eight r;
#pragma unroll
  for (int i = 0; i < 8; i++) r.value[i] = __uint_as_float(i & 1 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
  return r;
}

__device__ __forceinline__ Eight load_eight(const __nv_bfloat16* from) { return unpack_eight(load_raw(from)); }

__device__ __forceinline__ Eight load_eight(const float* from) {
  const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ void store_eight(__nv_bfloat16* to, const Eight& x) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x.value[2 * i], x.value[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_eight(float* to, const Eight& x) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x.value[0], x.value[1], x.value[2], x.value[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x.value[4], x.value[5], x.value[6], x.value[7]);
}

// Called by whole warps.
__device__ __forceinline__ Eight round_eight(Eight x) {
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) peak = fmaxf(peak, fabsf(x.value[i]));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
  const int exponent = fp8_exponent(peak);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 pair = round_fp8_pair(make_float2(x.value[i], x.value[i + 1]), make_int2(exponent, exponent));
    x.value[i] = pair.x;
    x.value[i + 1] = pair.y;
  }
  return x;
}

}  // namespace abyssal

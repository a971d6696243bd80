// Rounding to FP8 under a power-of-two scale. Contract: abyssal/ops/quantize.py.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace abyssal {

// Biased exponent of the scale of a group whose greatest magnitude is `peak`: that of the least power of two >= peak / 448.
__device__ __forceinline__ int fp8_exponent(float peak) {
  const float limit = fmaxf(peak, 1e-4f) * (1.0f / 448.0f);
  return ((__float_as_int(limit) - 1) >> 23) + 1;
}

__device__ __forceinline__ float power(int biased) { return __int_as_float(biased << 23); }

// Two values rounded to e4m3, nearest even and saturating, each under its own scale. The results fit bf16 exactly.
__device__ __forceinline__ float2 round_fp8_pair(float2 x, int2 exponent) {
  const float2 scaled = make_float2(x.x * power(254 - exponent.x), x.y * power(254 - exponent.y));
  const __nv_fp8x2_storage_t codes = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
  const float2 rounded = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
  return make_float2(rounded.x * power(exponent.x), rounded.y * power(exponent.y));
}

__device__ __forceinline__ float round_fp8(float x, float peak) {
  const int exponent = fp8_exponent(peak);
  return round_fp8_pair(make_float2(x, 0.0f), make_int2(exponent, exponent)).x;
}

}  // namespace abyssal

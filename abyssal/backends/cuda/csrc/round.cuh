// Rounding to FP8 under a power-of-two scale. Contract: abyssal/ops/quantize.py.
#pragma once
#include <cstdint>
#include <cuda_fp8.h>

namespace abyssal {

// The value of x rounded to e4m3 under the scale of a group whose greatest magnitude is `peak`. The result fits bf16 exactly.
__device__ __forceinline__ float round_fp8(float x, float peak) {
  const float limit = fmaxf(peak, 1e-4f) * (1.0f / 448.0f);
  const int exponent = ((__float_as_int(limit) - 1) >> 23) + 1;  // biased; limit is normal and far from the ends
  const float scaled = x * __int_as_float((254 - exponent) << 23);
  const __nv_fp8_e4m3 code(scaled);  // nearest even, saturating
  return static_cast<float>(code) * __int_as_float(exponent << 23);
}

}  // namespace abyssal

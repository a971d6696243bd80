// Norm and rotation of one row.
#pragma once

#include "vec.h"

namespace abyssal {

inline float inverse_rms(float sum_of_squares, int64_t width, float eps) {
    return 1.0f / std::sqrt(sum_of_squares / float(width) + eps);
}

inline void rms_norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
    vf r = splat(inverse_rms(sum_of_squares(x, width), width, eps));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * r * load(weight + i));
}

// In place: pairs (a, b) of the last 2 * half channels become (a cos - sign b sin, sign a sin + b cos).
void rotate_row(float* x, int64_t width, const float* cos, const float* sin, int64_t half, float sign);

}  // namespace abyssal

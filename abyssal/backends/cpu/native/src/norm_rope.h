// Norm and rotation of one row.
#pragma once

#include "vec.h"

namespace abyssal {

inline float inverse_rms(float sum_of_squares, int64_t width, float eps) {
    return 1.0f / std::sqrt(sum_of_squares / float(width) + eps);
}

inline void rms_norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
    const vf r = splat(inverse_rms(sum_of_squares(x, width), width, eps));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * r * load(weight + i));
}

// In place: pairs (a, b) of the last 2 * half channels become (a cos - sign b sin, sign a sin + b cos). Both products are
// rounded before they are added, as in the trained model's code: what follows may round to a coarse grid, so the last bit matters.
inline void rotate_row(float* x, int64_t width, const float* cos, const float* sin, int64_t half, float sign) {
    float* tail = x + width - 2 * half;
    for (int64_t i = 0; i < half; i++) {
        const float a = tail[2 * i], b = tail[2 * i + 1], c = cos[i], s = sign * sin[i];
        tail[2 * i] = a * c - b * s;
        tail[2 * i + 1] = a * s + b * c;
    }
}

}  // namespace abyssal

#include "norm_rope.h"

#include "pool.h"
#include "quantize.h"

using namespace abyssal;

// Both products are rounded before they are added, as in the trained model's code: what follows may round to a coarse grid, so
// the last bit matters.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
__attribute__((optimize("fp-contract=off")))
#endif
void abyssal::rotate_row(float* x, int64_t width, const float* cos, const float* sin, int64_t half, float sign) {
    float* tail = x + width - 2 * half;
    for (int64_t i = 0; i < half; i++) {
        const float a = tail[2 * i], b = tail[2 * i + 1], c = cos[i], s = sign * sin[i];
        tail[2 * i] = a * c - b * s;
        tail[2 * i + 1] = a * s + b * c;
    }
}

extern "C" {

void abyssal_rms_norm(const float* x, int64_t rows, int64_t width, const float* weight, float eps, float* out) {
    parallel_for(rows, rows * width,
                 [&](int64_t r) { rms_norm_row(x + r * width, weight, width, eps, out + r * width); });
}

// x [rows, heads, width]; cos, sin [positions, half]
void abyssal_rotate(const float* x, int64_t rows, int64_t heads, int64_t width, const int32_t* positions,
                    const float* cos, const float* sin, int64_t half, float* out) {
    parallel_for(rows, rows * heads * width, [&](int64_t r) {
        const int64_t size = heads * width;
        std::memcpy(out + r * size, x + r * size, size * sizeof(float));
        for (int64_t h = 0; h < heads; h++)
            rotate_row(out + r * size + h * width, width, cos + positions[r] * half, sin + positions[r] * half, half, 1.0f);
    });
}

void abyssal_window_rows(const float* x, int64_t rows, int64_t width, const float* weight, float eps,
                         const int32_t* positions, const float* cos, const float* sin, int64_t half, int64_t rounded,
                         float* out) {
    parallel_for(rows, rows * width, [&](int64_t r) {
        float* row = out + r * width;
        rms_norm_row(x + r * width, weight, width, eps, row);
        rotate_row(row, width, cos + positions[r] * half, sin + positions[r] * half, half, 1.0f);
        if (rounded) round_fp8_row(row, width, row);
    });
}

// storage[dst[i]] = values[rows[i]], or values[i] if rows is null
void abyssal_write_rows(float* storage, int64_t width, const int32_t* dst, const float* values, const int32_t* rows,
                        int64_t count) {
    for (int64_t i = 0; i < count; i++)
        std::memcpy(storage + dst[i] * width, values + (rows ? rows[i] : i) * width, width * sizeof(float));
}
}

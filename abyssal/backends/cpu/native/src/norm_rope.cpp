#include "norm_rope.h"

#include "pool.h"
#include "quantize.h"

using namespace abyssal;

namespace {

struct RmsNorm {
    const float* x;  // [rows, width]
    int64_t rows, width;
    const float* weight;
    double eps;
    float* out;
};

// Cosines and sines [positions, half].
struct Rotary {
    const float *cos, *sin;
    int64_t half;
};

struct Rotate {
    const float* x;  // [rows, heads, width]
    int64_t rows, heads, width;
    const int32_t* positions;
    Rotary rotary;
    float* out;
};

struct WindowRows {
    const float* x;  // [rows, width]
    int64_t rows, width;
    const float* weight;
    double eps;
    const int32_t* positions;
    Rotary rotary;
    int64_t rounded;
    float* out;
};

struct WriteRows {
    float* storage;  // [.., width]
    int64_t width;
    const int32_t* dst;
    const float* values;
    const int32_t* rows;  // or null: values are in order
    int64_t count;
};

void rotate_at(const Rotary& r, int64_t position, float* x, int64_t width) {
    rotate_row(x, width, r.cos + position * r.half, r.sin + position * r.half, r.half, 1.0f);
}

}  // namespace

extern "C" {

void abyssal_rms_norm(const RmsNorm* a) {
    parallel_for(a->rows, a->rows * a->width, [=](int64_t r) {
        rms_norm_row(a->x + r * a->width, a->weight, a->width, float(a->eps), a->out + r * a->width);
    });
}

void abyssal_rotate(const Rotate* a) {
    const int64_t size = a->heads * a->width;
    parallel_for(a->rows, a->rows * size, [=](int64_t r) {
        float* row = a->out + r * size;
        std::memcpy(row, a->x + r * size, size * sizeof(float));
        for (int64_t h = 0; h < a->heads; h++) rotate_at(a->rotary, a->positions[r], row + h * a->width, a->width);
    });
}

void abyssal_window_rows(const WindowRows* a) {
    parallel_for(a->rows, a->rows * a->width * 2, [=](int64_t r) {
        float* row = a->out + r * a->width;
        rms_norm_row(a->x + r * a->width, a->weight, a->width, float(a->eps), row);
        rotate_at(a->rotary, a->positions[r], row, a->width);
        if (a->rounded) round_fp8_row(row, a->width, row);
    });
}

void abyssal_write_rows(const WriteRows* a) {
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t from = a->rows == nullptr ? i : a->rows[i];
        std::memcpy(a->storage + a->dst[i] * a->width, a->values + from * a->width, a->width * sizeof(float));
    }
}
}

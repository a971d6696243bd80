#include "quantize.h"

#include "pool.h"

using namespace abyssal;

namespace {

struct RoundFp8 {
    const float* x;  // [rows, width]
    int64_t rows, width;
    float* out;
};

struct RoundFp4 {
    const float* x;  // [rows, width]
    int64_t rows, width, e4m3_scale;
    float* out;
};

// amax / 6 as the trained kernels form it: a product with the constant
float sixth(float amax) { return amax * (1.0f / 6.0f); }

void round_fp4_e4m3_row(const float* x, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += LANES) {
        vf a = load(x + i);
        float wanted = std::fmin(sixth(std::fmax(hmax(vabs(a)), 6.0f * 0x1p-9f)), 448.0f);
        float step = round_e4m3(splat(wanted))[0];
        store(out + i, round_e2m1(a * (1.0f / step)) * step);
    }
}

void round_fp4_ue8m0_row(const float* x, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += 2 * LANES) {
        vf a = load(x + i), b = load(x + i + LANES);
        int e = exponent_at_least(sixth(std::fmax(hmax(vmax(vabs(a), vabs(b))), 6.0f * 0x1p-126f)));
        // x / 2^e in two steps, since 2^-e may be out of range
        float down = exp2i(-(e / 2)), rest = exp2i(-(e - e / 2)), up = exp2i(e);
        store(out + i, round_e2m1(a * down * rest) * up);
        store(out + i + LANES, round_e2m1(b * down * rest) * up);
    }
}

}  // namespace

extern "C" {

void abyssal_round_fp8(const RoundFp8* a) {
    parallel_for(a->rows, a->rows * a->width,
                 [=](int64_t r) { round_fp8_row(a->x + r * a->width, a->width, a->out + r * a->width); });
}

void abyssal_round_fp4(const RoundFp4* a) {
    const auto row = a->e4m3_scale ? round_fp4_e4m3_row : round_fp4_ue8m0_row;
    parallel_for(a->rows, a->rows * a->width,
                 [=](int64_t r) { row(a->x + r * a->width, a->width, a->out + r * a->width); });
}
}

// Rounding of float32 values to the grids of FP8 and FP4; see abyssal/ops/quantize.py for the rules.
#pragma once

#include "vec.h"

namespace abyssal {

constexpr int FP8_GROUP = 32;

inline float bits_to_float(uint32_t u) {
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
}

inline uint32_t float_to_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, sizeof u);
    return u;
}

// Smallest e with 2^e >= x, for positive normal x.
inline int exponent_at_least(float x) { return int((float_to_bits(x) - 1) >> 23) + 1 - 127; }

// 2^e, also below the normal range.
inline float exp2i(int e) { return e < -126 ? bits_to_float(1u << (e + 149)) : bits_to_float(uint32_t(e + 127) << 23); }

ABYSSAL_INLINE vf with_sign(vf magnitude, vf sign) {
    return from_bits(bits(magnitude) | (bits(sign) & int32_t(0x80000000)));
}

// Nearest E4M3 value of |v| <= 448, half to even; NaN stays.
ABYSSAL_INLINE vf round_e4m3(vf v) {
    vf a = vmin(splat(448.0f), vabs(v));
    vi u = bits(a);
    vf normal = from_bits((u + 0x7ffff + (shift_right<20>(u) & 1)) & ~0xfffff);
    const vf magic = splat(0x1.8p14f);  // its last place is 2^-9, the spacing of subnormals
    vf subnormal = (a + magic) - magic;
    return with_sign(where_less(a, splat(0x1p-6f), subnormal, normal), v);
}

// Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; NaN stays.
ABYSSAL_INLINE vf round_e2m1(vf v) {
    vf a = vmin(splat(6.0f), vabs(v));
    vf coarse = where_less(a, splat(4.0f), splat(0x1.8p23f), splat(0x1.8p24f));
    vf magic = where_less(a, splat(2.0f), splat(0x1.8p22f), coarse);
    return with_sign((a + magic) - magic, v);
}

inline void round_fp8_row(const float* x, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += FP8_GROUP) {
        vf a = load(x + i), b = load(x + i + LANES);
        float amax = std::fmax(hmax(vmax(vabs(a), vabs(b))), 1e-4f);
        int e = exponent_at_least(amax * (1.0f / 448.0f));
        float down = exp2i(-e), up = exp2i(e);
        store(out + i, round_e4m3(a * down) * up);
        store(out + i + LANES, round_e4m3(b * down) * up);
    }
}

}  // namespace abyssal

// Sixteen float lanes on any instruction set, and the few functions that every kernel needs.
//
// Bits must not depend on the instruction set or on how many rows are computed together. So a reduction always runs over
// sixteen lanes and folds them in one fixed tree, and products are contracted to fused multiply-adds everywhere (the build
// requires hardware that has them).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace abyssal {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64), aligned(64)));
typedef int32_t vi __attribute__((vector_size(64), aligned(64)));

inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline vi splati(int32_t x) { return vi{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

inline vi bits(vf v) { return (vi)v; }
inline vf from_bits(vi v) { return (vf)v; }

inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vabs(vf v) { return from_bits(bits(v) & splati(0x7fffffff)); }

template <int A, int B, int C, int D, int E, int F, int G, int H, int I, int J, int K, int L, int M, int N, int O, int P>
inline vf shuffle(vf v) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P);
#else
    return __builtin_shuffle(v, vi{A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P});
#endif
}

// Lane i receives lane i ^ 8, i ^ 4, i ^ 2, i ^ 1.
inline vf swap8(vf v) { return shuffle<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v); }
inline vf swap4(vf v) { return shuffle<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(v); }
inline vf swap2(vf v) { return shuffle<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(v); }
inline vf swap1(vf v) { return shuffle<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(v); }

inline float hsum(vf v) {
    v += swap8(v);
    v += swap4(v);
    v += swap2(v);
    v += swap1(v);
    return v[0];
}

inline float hmax(vf v) {
    v = vmax(v, swap8(v));
    v = vmax(v, swap4(v));
    v = vmax(v, swap2(v));
    v = vmax(v, swap1(v));
    return v[0];
}

inline float dot(const float* a, const float* b, int64_t n) {
    vf s = {};
    for (int64_t i = 0; i < n; i += LANES) s += load(a + i) * load(b + i);
    return hsum(s);
}

inline float sum_of_squares(const float* a, int64_t n) { return dot(a, a, n); }

// exp with at most 2 ulp of error; 0 below about -87.3, infinity above 88.7. Cody-Waite reduction and the Taylor polynomial of
// degree 7 on [-ln2/2, ln2/2].
inline vf vexp(vf x) {
    x = vmin(vmax(x, splat(-104.0f)), splat(89.0f));
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = (x * 1.44269504088896341f + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440054690583e-4f;
    vf p = splat(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // 2^n in two factors, so that n = 128 and results below the normal range come out right
    vi e = __builtin_convertvector(n, vi);
    vi half = e >> 1;
    vf s0 = from_bits((half + 127) << 23), s1 = from_bits((e - half + 127) << 23);
    return p * s0 * s1;
}

inline vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

}  // namespace abyssal

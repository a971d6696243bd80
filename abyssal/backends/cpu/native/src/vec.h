// Sixteen float lanes on any instruction set, and the few functions that every kernel needs.
//
// Bits must not depend on the instruction set or on how many rows are computed together. So a reduction always runs over
// sixteen lanes and folds them in one fixed tree, and whether a product is fused with a sum is written out (`fma`): the build
// forbids compilers to contract on their own.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ABYSSAL_INLINE inline __attribute__((always_inline))

namespace abyssal {

constexpr int LANES = 16;

// Lanes of one register. A vector is 1, 2 or 4 of them, each an array element of its own: compilers split wider types badly.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float float_part __attribute__((vector_size(WIDTH * 4)));
typedef int32_t int_part __attribute__((vector_size(WIDTH * 4)));

struct vf {
    float_part part[PARTS];
    float operator[](int i) const { return part[i / WIDTH][i % WIDTH]; }
};

struct vi {
    int_part part[PARTS];
};

// register by register: a copy of the whole struct would go through memory
ABYSSAL_INLINE vf load(const float* p) {
    vf v;
    for (int i = 0; i < PARTS; i++) std::memcpy(&v.part[i], p + i * WIDTH, sizeof v.part[i]);
    return v;
}

ABYSSAL_INLINE void store(float* p, vf v) {
    for (int i = 0; i < PARTS; i++) std::memcpy(p + i * WIDTH, &v.part[i], sizeof v.part[i]);
}

template <class Part, class Scalar, size_t... I>
ABYSSAL_INLINE Part splat_part(Scalar x, std::index_sequence<I...>) {
    return Part{((void)I, x)...};
}

ABYSSAL_INLINE vf splat(float x) {
    vf v;
    for (int i = 0; i < PARTS; i++) v.part[i] = splat_part<float_part>(x, std::make_index_sequence<WIDTH>());
    return v;
}

ABYSSAL_INLINE vi splat(int32_t x) {
    vi v;
    for (int i = 0; i < PARTS; i++) v.part[i] = splat_part<int_part>(x, std::make_index_sequence<WIDTH>());
    return v;
}

ABYSSAL_INLINE vf zero() { return splat(0.0f); }

#define ABYSSAL_BINARY(type, scalar, op)                       \
    ABYSSAL_INLINE type operator op(type a, type b) {          \
        for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] op b.part[i]; \
        return a;                                              \
    }                                                          \
    ABYSSAL_INLINE type operator op(type a, scalar b) { return a op splat(b); } \
    ABYSSAL_INLINE type operator op(scalar a, type b) { return splat(a) op b; }
ABYSSAL_BINARY(vf, float, +)
ABYSSAL_BINARY(vf, float, -)
ABYSSAL_BINARY(vf, float, *)
ABYSSAL_BINARY(vf, float, /)
ABYSSAL_BINARY(vi, int32_t, +)
ABYSSAL_BINARY(vi, int32_t, -)
ABYSSAL_BINARY(vi, int32_t, &)
ABYSSAL_BINARY(vi, int32_t, |)
#undef ABYSSAL_BINARY

ABYSSAL_INLINE vi operator~(vi a) { return splat(int32_t(-1)) - a; }

template <int N>
ABYSSAL_INLINE vi shift_left(vi a) {
    for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] << N;
    return a;
}

template <int N>
ABYSSAL_INLINE vi shift_right(vi a) {  // arithmetic
    for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] >> N;
    return a;
}

ABYSSAL_INLINE vi bits(vf v) {
    vi r;
    for (int i = 0; i < PARTS; i++) r.part[i] = (int_part)v.part[i];
    return r;
}

ABYSSAL_INLINE vf from_bits(vi v) {
    vf r;
    for (int i = 0; i < PARTS; i++) r.part[i] = (float_part)v.part[i];
    return r;
}

ABYSSAL_INLINE vi to_int(vf v) {  // of whole numbers
    vi r;
    for (int i = 0; i < PARTS; i++) r.part[i] = __builtin_convertvector(v.part[i], int_part);
    return r;
}

// a < b ? x : y, lane by lane; false where one is NaN.
ABYSSAL_INLINE vf where_less(vf a, vf b, vf x, vf y) {
    for (int i = 0; i < PARTS; i++) x.part[i] = a.part[i] < b.part[i] ? x.part[i] : y.part[i];
    return x;
}

ABYSSAL_INLINE vf where_equal(vi a, vi b, vf x, vf y) {
    for (int i = 0; i < PARTS; i++) x.part[i] = a.part[i] == b.part[i] ? x.part[i] : y.part[i];
    return x;
}

// Both give b where one is NaN.
ABYSSAL_INLINE vf vmax(vf a, vf b) { return where_less(b, a, a, b); }
ABYSSAL_INLINE vf vmin(vf a, vf b) { return where_less(a, b, a, b); }
ABYSSAL_INLINE vf vabs(vf v) { return from_bits(bits(v) & 0x7fffffff); }

// a * b + c, rounded once.
ABYSSAL_INLINE vf fma(vf a, vf b, vf c) {
    for (int i = 0; i < PARTS; i++) {
#if defined(__AVX512F__)
        c.part[i] = (float_part)_mm512_fmadd_ps((__m512)a.part[i], (__m512)b.part[i], (__m512)c.part[i]);
#elif defined(__AVX2__)
        c.part[i] = (float_part)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#elif defined(__aarch64__)
        c.part[i] = (float_part)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]);
#else
        for (int j = 0; j < WIDTH; j++) c.part[i][j] = std::fma(a.part[i][j], b.part[i][j], c.part[i][j]);
#endif
    }
    return c;
}
ABYSSAL_INLINE vf fma(vf a, float b, vf c) { return fma(a, splat(b), c); }
ABYSSAL_INLINE vf fma(vf a, vf b, float c) { return fma(a, b, splat(c)); }

ABYSSAL_INLINE vf vsqrt(vf v) {
    for (int i = 0; i < PARTS; i++) {
#if defined(__AVX512F__)
        v.part[i] = (float_part)_mm512_sqrt_ps((__m512)v.part[i]);
#elif defined(__AVX2__)
        v.part[i] = (float_part)_mm256_sqrt_ps((__m256)v.part[i]);
#else
        for (int j = 0; j < WIDTH; j++) v.part[i][j] = std::sqrt(v.part[i][j]);
#endif
    }
    return v;
}

template <int X, size_t... I>
ABYSSAL_INLINE float_part swap_in_part(float_part v, std::index_sequence<I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, int(I ^ X)...);
#else
    return __builtin_shuffle(v, int_part{int(I ^ X)...});
#endif
}

// Lane i receives lane i ^ X, for a power of two X.
template <int X>
ABYSSAL_INLINE vf swap(vf v) {
    vf r;
    for (int i = 0; i < PARTS; i++) {
        if constexpr (X >= WIDTH)
            r.part[i] = v.part[i ^ (X / WIDTH)];
        else
            r.part[i] = swap_in_part<X>(v.part[i], std::make_index_sequence<WIDTH>());
    }
    return r;
}

// The same tree on every instruction set: lanes 8, 4, 2, 1 apart.
ABYSSAL_INLINE float hsum(vf v) {
    v = v + swap<8>(v);
    v = v + swap<4>(v);
    v = v + swap<2>(v);
    v = v + swap<1>(v);
    return v[0];
}

template <int X, size_t... I>
ABYSSAL_INLINE int_part bit_of_lane(std::index_sequence<I...>) {
    return int_part{((I & X) ? -1 : 0)...};
}

// Pair sums: lanes without bit X take a[i] + a[i ^ X], those with it b[i] + b[i ^ X].
template <int X>
ABYSSAL_INLINE vf merge(vf a, vf b) {
    vf own, other;
    if constexpr (X >= WIDTH) {
        for (int i = 0; i < PARTS; i++) {
            const bool high = i & (X / WIDTH);
            own.part[i] = high ? b.part[i] : a.part[i];
            other.part[i] = high ? a.part[i] : b.part[i];
        }
    } else {
        const int_part high = bit_of_lane<X>(std::make_index_sequence<WIDTH>());
        for (int i = 0; i < PARTS; i++) {
            own.part[i] = high ? b.part[i] : a.part[i];
            other.part[i] = high ? a.part[i] : b.part[i];
        }
    }
    return own + swap<X>(other);
}

// Lane i receives hsum(v[i]), by the same tree.
ABYSSAL_INLINE vf hsum16(const vf (&v)[LANES]) {
    vf a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = merge<8>(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) b[i] = merge<4>(a[i], a[i + 4]);
    return merge<1>(merge<2>(b[0], b[2]), merge<2>(b[1], b[3]));
}

ABYSSAL_INLINE float hmax(vf v) {
    v = vmax(v, swap<8>(v));
    v = vmax(v, swap<4>(v));
    v = vmax(v, swap<2>(v));
    v = vmax(v, swap<1>(v));
    return v[0];
}

// Of multiples of 16.
inline float dot(const float* a, const float* b, int64_t n) {
    vf s = zero();
    for (int64_t i = 0; i < n; i += LANES) s = fma(load(a + i), load(b + i), s);
    return hsum(s);
}

inline float sum_of_squares(const float* a, int64_t n) { return dot(a, a, n); }

// exp with at most 2 ulp of error; 0 below -104, infinity above 88.73. Cody-Waite reduction and the Taylor polynomial of
// degree 7 on [-ln2/2, ln2/2].
ABYSSAL_INLINE vf vexp(vf x) {
    x = vmin(splat(89.0f), vmax(splat(-104.0f), x));  // in this order NaN stays
    const vf magic = splat(0x1.8p23f);                // adding it rounds to a whole number
    vf n = fma(x, 1.44269504088896341f, magic) - magic;
    vf r = fma(n, -0.693359375f, x);
    r = fma(n, 2.12194440054690583e-4f, r);
    vf p = splat(1.0f / 5040.0f);
    p = fma(p, r, 1.0f / 720.0f);
    p = fma(p, r, 1.0f / 120.0f);
    p = fma(p, r, 1.0f / 24.0f);
    p = fma(p, r, 1.0f / 6.0f);
    p = fma(p, r, 0.5f);
    p = fma(p, r, 1.0f);
    p = fma(p, r, 1.0f);
    // 2^n in two factors, so that n = 128 and results below the normal range come out right
    vi e = to_int(n);
    vi half = shift_right<1>(e);
    vf s0 = from_bits(shift_left<23>(half + 127)), s1 = from_bits(shift_left<23>(e - half + 127));
    return p * s0 * s1;
}

ABYSSAL_INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(0.0f - x)); }

ABYSSAL_INLINE vf vsilu(vf x) { return x / (1.0f + vexp(0.0f - x)); }

}  // namespace abyssal

// Rows of logits: their order, a first look at a row, and elementary functions whose bits depend on nothing but their argument.
//
// Include this file before any other. What follows is compiled without fused multiply-adds, so that additions and
// multiplications have the bits that numpy's have, on any instruction set. For that reason nothing of vec.h is used here.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace abyssal {

constexpr int64_t BLOCK = 64;  // tokens that share a maximum and a hash
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline int64_t num_blocks(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK; }

typedef float Lanes __attribute__((vector_size(32), aligned(32)));
typedef int32_t IntLanes __attribute__((vector_size(32), aligned(32)));

struct Scan {
    float peak = MINUS_INFINITY;  // the highest logit, unless one is no number
    bool has_masked = false;      // -inf
    bool has_bad = false;         // NaN or +inf
};

// Looks at all logits of a row; block_peak[num_blocks] gets the highest one of each block.
inline Scan scan_row(const float* logits, int64_t vocab, float* block_peak) {
    IntLanes masked = {}, bad = {};
    Scan scan;
    for (int64_t b = 0; b * BLOCK < vocab; b++) {
        int64_t width = std::min(BLOCK, vocab - b * BLOCK);
        alignas(64) float padded[BLOCK];
        const float* x = logits + b * BLOCK;
        if (width < BLOCK) {
            std::fill(std::copy(x, x + width, padded), padded + BLOCK, x[0]);
            x = padded;
        }
        Lanes best;
        for (int64_t i = 0; i < BLOCK; i += 8) {
            Lanes v;
            std::memcpy(&v, x + i, sizeof v);
            IntLanes bits = (IntLanes)v;
            IntLanes is_masked = bits == int32_t(0xff800000);
            masked |= is_masked;
            bad |= ((bits & 0x7fffffff) >= 0x7f800000) & ~is_masked;
            best = i == 0 ? v : (best > v ? best : v);
        }
        for (int half = 4; half > 0; half /= 2) {
            for (int i = 0; i < half; i++) best[i] = best[i] > best[i + half] ? best[i] : best[i + half];
        }
        block_peak[b] = best[0];
        scan.peak = std::max(scan.peak, best[0]);
    }
    for (int i = 0; i < 8; i++) {
        scan.has_masked |= masked[i] != 0;
        scan.has_bad |= bad[i] != 0;
    }
    return scan;
}

// Greater keys come first: a higher logit, or the lower id among equals (both zeros are equal).
typedef uint64_t Key;

inline Key key_of(float logit, int64_t id) {
    float value = logit + 0.0f;
    uint32_t u;
    std::memcpy(&u, &value, sizeof u);
    u ^= u >> 31 ? 0xffffffffu : 0x80000000u;
    return Key(u) << 32 | (0xffffffffu - uint32_t(id));
}

inline float logit_of(Key key) {
    uint32_t u = uint32_t(key >> 32);
    u ^= u >> 31 ? 0x80000000u : 0xffffffffu;
    float value;
    std::memcpy(&value, &u, sizeof value);
    return value;
}

inline int32_t id_of(Key key) { return int32_t(0xffffffffu - uint32_t(key)); }

// e^x of n numbers in [-700, 0]; see `exp` in backends/cpu/sampling.py.
inline void exp_of(const double* x, int64_t n, double* out) {
    constexpr double LOG2_E = 1.0 / 0.69314718055994530942, LN2_HIGH = 0x1.62e43p-1;
    constexpr double LN2_LOW = 0.69314718055994530942 - LN2_HIGH;
    constexpr double INVERSE_FACTORIALS[] = {1.0,         1.0,          1.0 / 2,       1.0 / 6,        1.0 / 24,       1.0 / 120,
                                             1.0 / 720,   1.0 / 5040,   1.0 / 40320,   1.0 / 362880,   1.0 / 3628800,  1.0 / 39916800};
    for (int64_t i = 0; i < n; i++) {
        double k = std::floor(x[i] * LOG2_E + 0.5);
        double r = (x[i] - k * LN2_HIGH) - k * LN2_LOW;
        double series = INVERSE_FACTORIALS[11];
        for (int term = 10; term >= 0; term--) series = series * r + INVERSE_FACTORIALS[term];
        double shifted = k + (0x1p52 + 1023.0);  // whose low bits are the exponent of 2^k
        uint64_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        bits <<= 52;
        double power;
        std::memcpy(&power, &bits, sizeof power);
        out[i] = series * power;
    }
}

}  // namespace abyssal

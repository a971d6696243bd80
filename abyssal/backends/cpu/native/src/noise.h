// The noise of drawing tokens; see core/noise.py, whose bits these are.
#pragma once

#include "tokens.h"

namespace abyssal {

constexpr int ROUNDS = 10;

// Words of the ids first_id .. first_id + 63, of which the first is a multiple of 64.
inline void hash_block(uint64_t seed, uint32_t position, int64_t first_id, uint32_t* words) {
    constexpr int N = BLOCK / 4;
    uint32_t c0[N], c1[N], c2[N], c3[N];
    for (int i = 0; i < N; i++) {
        c0[i] = uint32_t(first_id / 4 + i);
        c1[i] = position;
        c2[i] = 0;
        c3[i] = 0;
    }
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < N; i++) {
            uint64_t p0 = uint64_t(c0[i]) * 0xD2511F53u, p1 = uint64_t(c2[i]) * 0xCD9E8D57u;
            c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
            c1[i] = uint32_t(p1);
            c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
            c3[i] = uint32_t(p0);
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < N; i++) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

inline double log_of(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    double exponent = double(int64_t(bits >> 52) - 1023);
    bits = (bits & ((uint64_t(1) << 52) - 1)) | uint64_t(0x3ff) << 52;
    double m;
    std::memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1.0;
    }
    double s = (m - 1.0) / (m + 1.0), square = s * s, series = 1.0 / 21;
    for (int term = 9; term >= 0; term--) series = series * square + 1.0 / (2 * term + 1);
    return exponent * 0.69314718055994530942 + (2.0 * s) * series;
}

inline double gumbel_of(uint32_t word) { return -log_of(-log_of((double(word) + 0.5) / 0x1p32)); }

constexpr double GUMBEL_MAX = 22.8739;  // above the noise of any word

// A quick bound of gumbel_of(word): -log(-log(u)) <= -log(1 - u), and the bits of 1 - u tell its logarithm to within log 2.
inline double gumbel_bound(uint32_t word) {
    uint32_t rest = ~word;
    int bits = rest == 0 ? 0 : 32 - __builtin_clz(rest);
    return (33 - bits) * 0.6931471806;
}

}  // namespace abyssal

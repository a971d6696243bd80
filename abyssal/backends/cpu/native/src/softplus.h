// log(1 + exp(x)), rounded once: computed in double, because two experts' scores may lie one float apart.
#pragma once

#include <cstring>

#include "vec.h"

namespace abyssal {

// exp for x in [-700, 0], relative error below 1e-14.
inline double exp_double(double x) {
    const double magic = 0x1.8p52;  // adding it rounds to a whole number, and leaves that in the lowest bits
    const double shifted = x * 1.44269504088896340736 + magic, n = shifted - magic;
    const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
    double p = 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;  // 2^n: what the magic number leaves above is shifted out
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

// log(1 + y) for y in [0, 1], relative error below 1e-14: 2 atanh(s) with s = y / (2 + y), by its series.
inline double log1p_double(double y) {
    const double s = y / (2.0 + y), t = s * s;
    double p = 2.0 / 29.0;
    p = p * t + 2.0 / 27.0;
    p = p * t + 2.0 / 25.0;
    p = p * t + 2.0 / 23.0;
    p = p * t + 2.0 / 21.0;
    p = p * t + 2.0 / 19.0;
    p = p * t + 2.0 / 17.0;
    p = p * t + 2.0 / 15.0;
    p = p * t + 2.0 / 13.0;
    p = p * t + 2.0 / 11.0;
    p = p * t + 2.0 / 9.0;
    p = p * t + 2.0 / 7.0;
    p = p * t + 2.0 / 5.0;
    p = p * t + 2.0 / 3.0;
    return s * t * p + 2.0 * s;
}

// In place, 16 values.
inline void softplus16(float* x) {
    for (int i = 0; i < LANES; i++) {
        const double v = x[i], down = v < 0.0 ? v : -v;
        const double y = exp_double(down < -700.0 ? -700.0 : down);
        x[i] = float((v > 0.0 ? v : 0.0) + log1p_double(y));
    }
}

}  // namespace abyssal

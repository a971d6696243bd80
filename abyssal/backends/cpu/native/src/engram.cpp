#include "norm_rope.h"
#include "pool.h"

using namespace abyssal;

extern "C" {

// ngram_ids [rows, orders + 1]; primes, offsets [orders * heads]; out int64 [rows, orders * heads]
void abyssal_engram_rows(const int32_t* ngram_ids, int64_t rows, int64_t orders, int64_t heads, const int64_t* token_map,
                         int64_t pad, const int64_t* multipliers, const int64_t* primes, const int64_t* offsets,
                         int64_t* out) {
    parallel_for(rows, rows * orders * heads * 16, [&](int64_t r) {
        const int32_t* ids = ngram_ids + r * (orders + 1);
        auto term = [&](int64_t i) { return (ids[i] < 0 ? pad : token_map[ids[i]]) * multipliers[i]; };
        int64_t mixed = term(0);
        for (int64_t n = 1; n <= orders; n++) {
            mixed ^= term(n);
            for (int64_t c = (n - 1) * heads; c < n * heads; c++)
                out[r * orders * heads + c] = mixed % primes[c] + offsets[c];
        }
    });
}

// h [rows, streams, width]; key_value [rows, streams + 1, width]; weight [streams, width]
void abyssal_engram_gate(const float* h, const float* key_value, const float* weight, int64_t rows, int64_t streams,
                         int64_t width, float eps, float* out) {
    const float root = 1.0f / std::sqrt(float(width));
    parallel_for(rows, rows * streams * width * 4, [&](int64_t r) {
        const float* value = key_value + (r * (streams + 1) + streams) * width;
        for (int64_t j = 0; j < streams; j++) {
            const float *x = h + (r * streams + j) * width, *key = key_value + (r * (streams + 1) + j) * width;
            vf products = {};
            for (int64_t i = 0; i < width; i += LANES) products += load(x + i) * load(weight + j * width + i) * load(key + i);
            const float norms = inverse_rms(sum_of_squares(x, width), width, eps) *
                                inverse_rms(sum_of_squares(key, width), width, eps);
            const float d = hsum(products) * norms * root;
            const float gate = vsigmoid(splat(std::copysign(std::sqrt(std::fmax(std::fabs(d), 1e-6f)), d)))[0];
            float* o = out + (r * streams + j) * width;
            for (int64_t i = 0; i < width; i += LANES) store(o + i, load(x + i) + gate * load(value + i));
        }
    });
}
}

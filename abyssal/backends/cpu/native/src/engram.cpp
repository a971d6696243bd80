#include "norm_rope.h"
#include "pool.h"

using namespace abyssal;

namespace {

struct EngramRows {
    const int32_t* ngram_ids;  // [rows, orders + 1]
    int64_t rows, orders, heads;
    const int64_t* token_map;
    int64_t pad;
    const int64_t *multipliers, *primes, *offsets;  // [orders + 1], [orders * heads], [orders * heads]
    int64_t* out;                                   // [rows, orders * heads]
};

struct EngramGate {
    const float *h, *key_value, *weight;  // [rows, streams, width], [rows, streams + 1, width], [streams, width]
    int64_t rows, streams, width;
    double eps;
    float* out;
};

void hash_row(const EngramRows& a, const int32_t* ids, int64_t* out) {
    // unsigned: a product may wrap, as it does in the reference
    auto term = [&](int64_t i) { return uint64_t(ids[i] < 0 ? a.pad : a.token_map[ids[i]]) * uint64_t(a.multipliers[i]); };
    uint64_t mixed = term(0);
    for (int64_t n = 1; n <= a.orders; n++) {
        mixed ^= term(n);
        for (int64_t c = (n - 1) * a.heads; c < n * a.heads; c++) {
            const int64_t rest = int64_t(mixed) % a.primes[c];
            out[c] = (rest < 0 ? rest + a.primes[c] : rest) + a.offsets[c];
        }
    }
}

void gate_stream(const float* x, const float* key, const float* value, const float* weight, int64_t width, float eps, float* out) {
    vf products = zero();
    for (int64_t i = 0; i < width; i += LANES) products = fma(load(x + i) * load(weight + i), load(key + i), products);
    const float norms = inverse_rms(sum_of_squares(x, width), width, eps) * inverse_rms(sum_of_squares(key, width), width, eps);
    const float d = hsum(products) * norms * float(1.0 / std::sqrt(double(width)));
    const vf gate = vsigmoid(splat(std::copysign(std::sqrt(std::fmax(std::fabs(d), 1e-6f)), d)));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, fma(gate, load(value + i), load(x + i)));
}

}  // namespace

extern "C" {

void abyssal_engram_rows(const EngramRows* a) {
    const int64_t columns = a->orders * a->heads;
    parallel_for(a->rows, a->rows * columns * 16,
                 [=](int64_t r) { hash_row(*a, a->ngram_ids + r * (a->orders + 1), a->out + r * columns); });
}

void abyssal_engram_gate(const EngramGate* a) {
    parallel_for(a->rows, a->rows * a->streams * a->width * 4, [=](int64_t r) {
        const float* keys = a->key_value + r * (a->streams + 1) * a->width;
        for (int64_t j = 0; j < a->streams; j++) {
            const int64_t at = (r * a->streams + j) * a->width;
            gate_stream(a->h + at, keys + j * a->width, keys + a->streams * a->width, a->weight + j * a->width, a->width,
                        float(a->eps), a->out + at);
        }
    });
}
}

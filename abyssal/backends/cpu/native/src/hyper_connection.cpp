#include <algorithm>

#include "matrix.h"
#include "norm_rope.h"
#include "pool.h"

using namespace abyssal;

namespace {

constexpr int64_t STREAMS = 4, MIXES = (2 + STREAMS) * STREAMS, BLOCK = 4;

struct HcMap {
    const float* h;  // [rows, STREAMS, width]
    int64_t rows, width;
    const Matrix* fn;
    const float *base, *scale;
    int64_t iterations;
    double eps, norm_eps;
    float *pre, *post, *comb;
};

struct HcCollapse {
    const float *h, *pre;  // [rows, streams, width], [rows, streams]
    int64_t rows, streams, width;
    const float* weight;
    double eps;
    float* out;  // [rows, width]
};

struct HcExpand {
    const float *y, *h, *post, *comb;  // [rows, width], [rows, streams, width], [rows, streams], [rows, streams, streams]
    int64_t rows, streams, width;
    float* out;  // [rows, streams, width]
};

// A 4 x 4 matrix lies in one vector, element [j, k] in lane 4 j + k.
ABYSSAL_INLINE vf sum_rows(vf c) {  // over k, to every k
    c = c + swap<1>(c);
    return c + swap<2>(c);
}

ABYSSAL_INLINE vf sum_columns(vf c) {  // over j, to every j
    c = c + swap<4>(c);
    return c + swap<8>(c);
}

// B matrices in lockstep, so that their divisions overlap.
template <int B>
void sinkhorn(vf (&c)[B], int64_t iterations, float eps) {
    for (int b = 0; b < B; b++) {
        vf peak = vmax(c[b], swap<1>(c[b]));
        peak = vmax(peak, swap<2>(peak));
        vf e = vexp(c[b] - peak);
        c[b] = e / sum_rows(e) + eps;
    }
    for (int b = 0; b < B; b++) c[b] = c[b] / (sum_columns(c[b]) + eps);
    for (int64_t i = 1; i < iterations; i++) {
        for (int b = 0; b < B; b++) c[b] = c[b] / (sum_rows(c[b]) + eps);
        for (int b = 0; b < B; b++) c[b] = c[b] / (sum_columns(c[b]) + eps);
    }
}

// Rows r .. r + B - 1 from their products with fn, [B, MIXES].
template <int B>
void finish(const HcMap& a, const float* products, int64_t r) {
    const float eps = float(a.eps);
    const int64_t flat = STREAMS * a.width;
    vf matrices[B];
    for (int b = 0; b < B; b++) {
        const float norm = inverse_rms(sum_of_squares(a.h + (r + b) * flat, flat), flat, float(a.norm_eps));
        float m[MIXES + LANES], gates[LANES];
        for (int i = 0; i < MIXES; i++) m[i] = products[b * MIXES + i] * norm;
        for (int i = 0; i < LANES; i++) gates[i] = i < 8 ? std::fma(m[i], a.scale[i / 4], a.base[i]) : 0.0f;
        store(gates, vsigmoid(load(gates)));
        for (int i = 0; i < 4; i++) {
            a.pre[(r + b) * STREAMS + i] = gates[i] + eps;
            a.post[(r + b) * STREAMS + i] = 2.0f * gates[4 + i];
        }
        matrices[b] = fma(load(m + 8), a.scale[2], load(a.base + 8));
    }
    sinkhorn(matrices, a.iterations, eps);
    for (int b = 0; b < B; b++) store(a.comb + (r + b) * LANES, matrices[b]);
}

void collapse_row(const HcCollapse& a, int64_t r) {
    const float *h = a.h + r * a.streams * a.width, *pre = a.pre + r * a.streams;
    float* y = a.out + r * a.width;
    for (int64_t i = 0; i < a.width; i += LANES) {
        vf s = load(h + i) * pre[0];
        for (int64_t j = 1; j < a.streams; j++) s = fma(load(h + j * a.width + i), pre[j], s);
        store(y + i, s);
    }
    rms_norm_row(y, a.weight, a.width, float(a.eps), y);
}

void expand_row(const HcExpand& a, int64_t r) {
    const float *h = a.h + r * a.streams * a.width, *comb = a.comb + r * a.streams * a.streams;
    float* out = a.out + r * a.streams * a.width;
    for (int64_t i = 0; i < a.width; i += LANES) {
        const vf y = load(a.y + r * a.width + i);
        for (int64_t k = 0; k < a.streams; k++) {
            vf s = y * a.post[r * a.streams + k];
            for (int64_t j = 0; j < a.streams; j++) s = fma(load(h + j * a.width + i), comb[j * a.streams + k], s);
            store(out + k * a.width + i, s);
        }
    }
}

}  // namespace

extern "C" {

void abyssal_hc_map(const HcMap* a) {
    float* products = scratch(3, a->rows * MIXES);
    product(a->h, a->rows, 1, *a->fn, products);
    const int64_t blocks = (a->rows + BLOCK - 1) / BLOCK;
    parallel_for(blocks, a->rows * (STREAMS * a->width + 2000), [=](int64_t task) {
        const int64_t first = task * BLOCK, last = std::min(a->rows, first + BLOCK);
        if (last - first == BLOCK) return finish<BLOCK>(*a, products + first * MIXES, first);
        for (int64_t r = first; r < last; r++) finish<1>(*a, products + r * MIXES, r);
    });
}

void abyssal_hc_collapse(const HcCollapse* a) {
    parallel_for(a->rows, a->rows * a->streams * a->width, [=](int64_t r) { collapse_row(*a, r); });
}

void abyssal_hc_expand(const HcExpand* a) {
    parallel_for(a->rows, a->rows * a->streams * a->streams * a->width, [=](int64_t r) { expand_row(*a, r); });
}
}

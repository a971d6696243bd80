#include <algorithm>

#include "matrix.h"
#include "norm_rope.h"
#include "pool.h"

using namespace abyssal;

namespace {

// A 4 x 4 matrix lies in one vector, element [j, k] in lane 4 j + k.
inline vf sum_rows(vf c) {  // over k, to every k
    c += swap1(c);
    return c + swap2(c);
}

inline vf sum_columns(vf c) {  // over j, to every j
    c += swap4(c);
    return c + swap8(c);
}

// B matrices in lockstep, so that their divisions overlap.
template <int B>
void sinkhorn(vf* c, int64_t iterations, float eps) {
    for (int b = 0; b < B; b++) {
        vf peak = vmax(c[b], swap1(c[b]));
        peak = vmax(peak, swap2(peak));
        vf e = vexp(c[b] - peak);
        c[b] = e / sum_rows(e) + eps;
    }
    for (int b = 0; b < B; b++) c[b] = c[b] / (sum_columns(c[b]) + eps);
    for (int64_t i = 1; i < iterations; i++) {
        for (int b = 0; b < B; b++) c[b] = c[b] / (sum_rows(c[b]) + eps);
        for (int b = 0; b < B; b++) c[b] = c[b] / (sum_columns(c[b]) + eps);
    }
}

struct Constants {
    const float* base;
    const float* scale;
    int64_t iterations;
    float eps;
};

inline vf pre_and_post(const float* m, const Constants& c) {
    // lanes 0..3 pre, 4..7 post; the rest is not used
    float z[LANES] = {};
    for (int i = 0; i < 8; i++) z[i] = m[i] * c.scale[i / 4] + c.base[i];
    return vsigmoid(load(z));
}

template <int B>
void finish(const float* m, const Constants& c, float* pre, float* post, float* comb) {
    vf matrices[B];
    for (int b = 0; b < B; b++) {
        vf gates = pre_and_post(m + b * 24, c);
        for (int i = 0; i < 4; i++) {
            pre[b * 4 + i] = gates[i] + c.eps;
            post[b * 4 + i] = 2.0f * gates[4 + i];
        }
        matrices[b] = load(m + b * 24 + 8) * c.scale[2] + load(c.base + 8);
    }
    sinkhorn<B>(matrices, c.iterations, c.eps);
    for (int b = 0; b < B; b++) store(comb + b * 16, matrices[b]);
}

}  // namespace

extern "C" {

void abyssal_linear(const float* x, int64_t rows, int64_t groups, const Matrix* m, float* y);

// h [rows, 4, width]
void abyssal_hc_map(const float* h, int64_t rows, int64_t width, const Matrix* fn, const float* base, const float* scale,
                    int64_t iterations, float eps, float norm_eps, float* pre, float* post, float* comb) {
    float* mixes = scratch(3, rows * 24);
    abyssal_linear(h, rows, 1, fn, mixes);
    const Constants constants = {base, scale, iterations, eps};
    const int64_t flat = 4 * width, block = 4, blocks = (rows + block - 1) / block;
    parallel_for(blocks, rows * (flat + 2000), [&](int64_t task) {
        const int64_t r0 = task * block, r1 = std::min(rows, r0 + block);
        for (int64_t r = r0; r < r1; r++) {
            const float norm = inverse_rms(sum_of_squares(h + r * flat, flat), flat, norm_eps);
            for (int i = 0; i < 24; i++) mixes[r * 24 + i] *= norm;
        }
        auto at = [&](int64_t r) { return mixes + r * 24; };
        if (r1 - r0 == 4) return finish<4>(at(r0), constants, pre + r0 * 4, post + r0 * 4, comb + r0 * 16);
        for (int64_t r = r0; r < r1; r++) finish<1>(at(r), constants, pre + r * 4, post + r * 4, comb + r * 16);
    });
}

void abyssal_hc_collapse(const float* h, const float* pre, int64_t rows, int64_t streams, int64_t width,
                         const float* weight, float eps, float* out) {
    parallel_for(rows, rows * streams * width, [&](int64_t r) {
        const float* row = h + r * streams * width;
        float* y = out + r * width;
        vf squares = {};
        for (int64_t i = 0; i < width; i += LANES) {
            vf s = {};
            for (int64_t j = 0; j < streams; j++) s += pre[r * streams + j] * load(row + j * width + i);
            store(y + i, s);
            squares += s * s;
        }
        vf norm = splat(inverse_rms(hsum(squares), width, eps));
        for (int64_t i = 0; i < width; i += LANES) store(y + i, load(y + i) * norm * load(weight + i));
    });
}

void abyssal_hc_expand(const float* y, const float* h, const float* post, const float* comb, int64_t rows,
                       int64_t streams, int64_t width, float* out) {
    parallel_for(rows, rows * streams * streams * width, [&](int64_t r) {
        const float *row = h + r * streams * width, *c = comb + r * streams * streams, *p = post + r * streams;
        float* o = out + r * streams * width;
        for (int64_t i = 0; i < width; i += LANES) {
            vf value = load(y + r * width + i);
            for (int64_t k = 0; k < streams; k++) {
                vf s = p[k] * value;
                for (int64_t j = 0; j < streams; j++) s += c[j * streams + k] * load(row + j * width + i);
                store(o + k * width + i, s);
            }
        }
    });
}
}

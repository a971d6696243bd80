#include <algorithm>
#include <vector>

#include "matrix.h"
#include "pool.h"
#include "quantize.h"

using namespace abyssal;

namespace {

// Rows of one expert, and which of its panels a task computes.
struct Piece {
    int64_t expert, first, last, begin, end;  // panels, and places in the sorted order
};

// Cuts the products of all experts with rows into tasks of `span` panels and at most `chunk` rows.
std::vector<Piece> cut(const Matrix* matrices, const std::vector<int64_t>& start, int64_t span, int64_t chunk) {
    std::vector<Piece> pieces;
    for (size_t e = 0; e + 1 < start.size(); e++) {
        const int64_t panels = num_panels(matrices[e]);
        for (int64_t begin = start[e]; begin < start[e + 1]; begin += chunk)
            for (int64_t first = 0; first < panels; first += span)
                pieces.push_back({int64_t(e), first, std::min(first + span, panels), begin,
                                  std::min(begin + chunk, start[e + 1])});
    }
    return pieces;
}

void run(const Matrix* matrices, const std::vector<int64_t>& start, const std::vector<const float*>& x,
         const std::vector<float*>& y, int64_t work) {
    const int64_t pairs = start.back(), span = pairs < int64_t(4 * start.size()) ? 8 : 4;
    const std::vector<Piece> pieces = cut(matrices, start, span, 64);
    parallel_for(pieces.size(), work, [&](int64_t i) {
        const Piece& p = pieces[i];
        multiply(matrices[p.expert], x.data() + p.begin, p.end - p.begin, p.first, p.last, y.data() + p.begin);
    });
}

// t = silu(min(a, limit)) * clamp(b, -limit, limit) * weight from a row [a, b], written over a.
void swiglu_row(float* row, int64_t width, float weight, float limit, bool rounded) {
    for (int64_t i = 0; i < width; i += LANES) {
        vf a = vmin(load(row + i), splat(limit));
        vf b = vmax(vmin(load(row + width + i), splat(limit)), splat(-limit));
        store(row + i, a / (1.0f + vexp(-a)) * b * weight);
    }
    if (rounded) round_fp8_row(row, width, row);
}

}  // namespace

extern "C" {

// logits [rows, experts] in, ids and weights [rows, top_k] out
void abyssal_pick_experts(const float* logits, const float* bias, int64_t rows, int64_t experts, int64_t top_k,
                          float scale, int32_t* ids, float* weights) {
    parallel_for(rows, rows * experts * 20, [&](int64_t r) {
        float* scores = scratch(1, 2 * experts);
        float* biased = scores + experts;
        for (int64_t e = 0; e < experts; e++) {
            const float l = logits[r * experts + e];
            scores[e] = std::sqrt(l > 20.0f ? l : std::log1p(std::exp(l)));
            biased[e] = scores[e] + bias[e];
        }
        float sum = 0.0f;
        for (int64_t k = 0; k < top_k; k++) {
            int64_t best = 0;
            for (int64_t e = 1; e < experts; e++)
                if (biased[e] > biased[best]) best = e;
            ids[r * top_k + k] = int32_t(best);
            weights[r * top_k + k] = scores[best];
            sum += scores[best];
            biased[best] = -INFINITY;
        }
        for (int64_t k = 0; k < top_k; k++) weights[r * top_k + k] = scale * weights[r * top_k + k] / (sum + 1e-20f);
    });
}

// x [rows, width], already rounded if need be. up[e] is w1 over w3 [2 inner, width], down[e] is w2 [width, inner]; the last of the
// num_experts + 1 is the shared expert. hidden [(top_k + 1) rows, 2 inner] and parts [(top_k + 1) rows, width] are scratch.
void abyssal_experts(const float* x, int64_t rows, int64_t width, int64_t inner, const int32_t* ids,
                     const float* weights, int64_t top_k, const Matrix* up, const Matrix* down, int64_t num_experts,
                     float limit, int64_t rounded, float* hidden, float* parts, float* out) {
    if (rows == 0) return;
    const int64_t slots = top_k + 1, pairs = rows * slots;
    // counting sort of (row, slot) by expert; slot top_k is the shared expert
    auto expert_of = [&](int64_t pair) {
        return pair % slots == top_k ? num_experts : int64_t(ids[pair / slots * top_k + pair % slots]);
    };
    std::vector<int64_t> start(num_experts + 2, 0), order(pairs);
    for (int64_t i = 0; i < pairs; i++) start[expert_of(i) + 1]++;
    for (int64_t e = 0; e <= num_experts; e++) start[e + 1] += start[e];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (int64_t i = 0; i < pairs; i++) order[next[expert_of(i)]++] = i;

    std::vector<const float*> source(pairs);
    std::vector<float*> target(pairs);
    for (int64_t i = 0; i < pairs; i++) {
        source[i] = x + order[i] / slots * width;
        target[i] = hidden + i * 2 * inner;
    }
    run(up, start, source, target, pairs * 2 * inner * width);
    parallel_for(pairs, pairs * inner * 16, [&](int64_t i) {
        const int64_t row = order[i] / slots, slot = order[i] % slots;
        swiglu_row(hidden + i * 2 * inner, inner, slot == top_k ? 1.0f : weights[row * top_k + slot], limit, rounded);
    });
    for (int64_t i = 0; i < pairs; i++) {
        source[i] = hidden + i * 2 * inner;
        target[i] = parts + order[i] * width;
    }
    run(down, start, source, target, pairs * inner * width);
    parallel_for(rows, pairs * width, [&](int64_t r) {
        for (int64_t i = 0; i < width; i += LANES) {
            vf sum = load(parts + r * slots * width + i);
            for (int64_t s = 1; s < slots; s++) sum += load(parts + (r * slots + s) * width + i);
            store(out + r * width + i, sum);
        }
    });
}
}

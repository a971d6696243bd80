#include <algorithm>
#include <vector>

#include "matrix.h"
#include "pool.h"
#include "quantize.h"
#include "softplus.h"

using namespace abyssal;

namespace {

struct Route {
    const float* x;  // [rows, width of the gate]
    int64_t rows;
    const Matrix* gate;
    const float* bias;
    int64_t top_k;
    double scale;
    int32_t* ids;    // [rows, top_k]
    float* weights;  // [rows, top_k]
};

struct Experts {
    const float* x;  // [rows, width]
    int64_t rows, width, inner;
    const int32_t* ids;    // [rows, top_k]
    const float* weights;  // [rows, top_k]
    int64_t top_k;
    const Matrix *up, *down;  // w1 over w3 [2 inner, width], w2 [width, inner]; the last of num_routed + 1 is the shared expert
    int64_t num_routed;
    double limit;
    int64_t rounded;
    float* out;  // [rows, width]
};

// Every row with each of its experts, the shared one being the last slot, in the order of the experts.
struct Pairs {
    int64_t slots;
    std::vector<int64_t> start;  // of each expert in `order`, and the end
    std::vector<int64_t> order;  // row * slots + slot

    explicit Pairs(const Experts& a) : slots(a.top_k + 1), start(a.num_routed + 2, 0), order(a.rows * slots) {
        auto expert_of = [&](int64_t pair) {
            const int64_t row = pair / slots, slot = pair % slots;
            return slot == a.top_k ? a.num_routed : int64_t(a.ids[row * a.top_k + slot]);
        };
        const int64_t count = int64_t(order.size());
        for (int64_t i = 0; i < count; i++) start[expert_of(i) + 1]++;
        for (int64_t e = 0; e <= a.num_routed; e++) start[e + 1] += start[e];
        std::vector<int64_t> next(start);
        for (int64_t i = 0; i < count; i++) order[next[expert_of(i)]++] = i;
    }

    int64_t count() const { return int64_t(order.size()); }
};

// Panels first .. last - 1 of one expert for pairs begin .. end - 1.
struct Piece {
    int64_t expert, first, last, begin, end;
};

// One product for each pair, x[i] with its expert's matrix into y[i].
void multiply_pairs(const Matrix* matrices, const Pairs& pairs, const std::vector<const float*>& x,
                    const std::vector<float*>& y) {
    const int64_t span = pairs.count() < int64_t(4 * pairs.start.size()) ? 8 : 4;
    std::vector<Piece> pieces;
    int64_t work = 0;
    for (size_t e = 0; e + 1 < pairs.start.size(); e++) {
        const Matrix& m = matrices[e];
        const int64_t panels = num_panels(m), end = pairs.start[e + 1];
        const int64_t chunk = is_packed(m) ? pairs.count() : ROW_BLOCK;  // what was decoded serves all rows
        for (int64_t begin = pairs.start[e]; begin < end; begin += chunk)
            for (int64_t first = 0; first < panels; first += span)
                pieces.push_back({int64_t(e), first, std::min(first + span, panels), begin, std::min(begin + chunk, end)});
        work += (end - pairs.start[e]) * m.out * m.in;
    }
    parallel_for(int64_t(pieces.size()), work, [&](int64_t i) {
        const Piece& p = pieces[i];
        multiply(matrices[p.expert], x.data() + p.begin, p.end - p.begin, p.first, p.last, y.data() + p.begin);
    });
}

// silu(min(a, limit)) * clamp(b, -limit, limit) * weight from a row [a, b], written over a.
void swiglu_row(float* row, int64_t width, float weight, float limit, bool rounded) {
    for (int64_t i = 0; i < width; i += LANES) {
        const vf a = vmin(splat(limit), load(row + i));
        const vf b = vmax(splat(-limit), vmin(splat(limit), load(row + width + i)));
        store(row + i, vsilu(a) * b * weight);
    }
    if (rounded) round_fp8_row(row, width, row);
}

// scores = sqrt(softplus(logits)), over them; the logits are padded to a multiple of 16.
void score_experts(float* logits, int64_t padded) {
    for (int64_t e = 0; e < padded; e += LANES) {
        softplus16(logits + e);
        store(logits + e, vsqrt(load(logits + e)));
    }
}

void pick_experts(const Route& a, int64_t r, float* scores, float* biased) {
    const int64_t experts = a.gate->out;
    for (int64_t e = 0; e < experts; e++) biased[e] = scores[e] + a.bias[e];
    int32_t* ids = a.ids + r * a.top_k;
    float *weights = a.weights + r * a.top_k, sum = 0.0f;
    for (int64_t k = 0; k < a.top_k; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < experts; e++)
            if (biased[e] > biased[best]) best = e;
        ids[k] = int32_t(best);
        weights[k] = scores[best];
        sum += scores[best];
        biased[best] = -INFINITY;
    }
    for (int64_t k = 0; k < a.top_k; k++) weights[k] = float(a.scale) * weights[k] / (sum + 1e-20f);
}

const float* rounded_rows(const Experts& a, float* out) {
    parallel_for(a.rows, a.rows * a.width,
                 [=](int64_t r) { round_fp8_row(a.x + r * a.width, a.width, out + r * a.width); });
    return out;
}

}  // namespace

extern "C" {

void abyssal_route(const Route* a) {
    const int64_t experts = a->gate->out, padded = (experts + LANES - 1) / LANES * LANES;
    Workspace logits(3, a->rows * experts);
    product(a->x, a->rows, 1, *a->gate, logits.data());
    parallel_for(a->rows, a->rows * experts * 16, [&](int64_t r) {
        float *scores = scratch(1, 2 * padded), *biased = scores + padded;
        std::fill(scores + experts, scores + padded, 0.0f);
        std::memcpy(scores, logits.data() + r * experts, experts * sizeof(float));
        score_experts(scores, padded);
        pick_experts(*a, r, scores, biased);
    });
}

void abyssal_experts(const Experts* a) {
    if (a->rows == 0) return;
    const Pairs pairs(*a);
    const int64_t count = pairs.count(), slots = pairs.slots, hidden_size = count * 2 * a->inner;
    Workspace memory(3, hidden_size + count * a->width + (a->rounded ? a->rows * a->width : 0));
    float *hidden = memory.data(), *parts = hidden + hidden_size;
    const float* x = a->rounded ? rounded_rows(*a, parts + count * a->width) : a->x;

    std::vector<const float*> source(count);
    std::vector<float*> target(count);
    for (int64_t i = 0; i < count; i++) {
        source[i] = x + pairs.order[i] / slots * a->width;
        target[i] = hidden + i * 2 * a->inner;
    }
    multiply_pairs(a->up, pairs, source, target);
    parallel_for(count, count * a->inner * 16, [&](int64_t i) {
        const int64_t row = pairs.order[i] / slots, slot = pairs.order[i] % slots;
        const float weight = slot == a->top_k ? 1.0f : a->weights[row * a->top_k + slot];
        swiglu_row(hidden + i * 2 * a->inner, a->inner, weight, float(a->limit), a->rounded);
    });
    for (int64_t i = 0; i < count; i++) {
        source[i] = hidden + i * 2 * a->inner;
        target[i] = parts + pairs.order[i] * a->width;
    }
    multiply_pairs(a->down, pairs, source, target);
    parallel_for(a->rows, count * a->width, [=](int64_t r) {
        const float* part = parts + r * slots * a->width;
        for (int64_t i = 0; i < a->width; i += LANES) {
            vf sum = load(part + i);
            for (int64_t s = 1; s < slots; s++) sum = sum + load(part + s * a->width + i);
            store(a->out + r * a->width + i, sum);
        }
    });
}
}

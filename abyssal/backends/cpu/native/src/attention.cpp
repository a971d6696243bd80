#include <algorithm>

#include "norm_rope.h"
#include "pool.h"

using namespace abyssal;

namespace {

constexpr int64_t HEAD_BLOCK = 4;

// Scores of up to HEAD_BLOCK heads q[h] [width] with all keys; scores [heads][stride].
template <int H>
void score(const float* q, const float* const* keys, int64_t num_keys, int64_t width, float scale, float* scores,
           int64_t stride) {
    for (int64_t n = 0; n < num_keys; n++) {
        vf s[H] = {};
        for (int64_t i = 0; i < width; i += LANES) {
            vf k = load(keys[n] + i);
            for (int h = 0; h < H; h++) s[h] += load(q + h * width + i) * k;
        }
        for (int h = 0; h < H; h++) scores[h * stride + n] = hsum(s[h]) * scale;
    }
}

// In place: exp(score - peak) / (exp(sink - peak) + sum); absent keys at the end of the padded row weigh nothing.
void softmax_with_sink(float* scores, int64_t num_keys, float sink) {
    const int64_t padded = (num_keys + LANES - 1) / LANES * LANES;
    for (int64_t n = num_keys; n < padded; n++) scores[n] = -INFINITY;
    vf peak = splat(sink);
    for (int64_t n = 0; n < padded; n += LANES) peak = vmax(peak, load(scores + n));
    vf top = splat(hmax(peak)), sum = {};
    for (int64_t n = 0; n < padded; n += LANES) {
        vf e = vexp(load(scores + n) - top);
        store(scores + n, e);
        sum += e;
    }
    // exp(-104) is what absent keys got instead of 0
    for (int64_t n = num_keys; n < padded; n++) scores[n] = 0.0f;
    const float total = hsum(sum) + vexp(splat(sink) - top)[0];
    for (int64_t n = 0; n < padded; n += LANES) store(scores + n, load(scores + n) / total);
}

template <int H>
void weigh(const float* scores, int64_t stride, const float* const* keys, int64_t num_keys, int64_t width, float* out) {
    constexpr int64_t SPAN = 4;  // vectors of width done together: H * SPAN sums stay in registers
    for (int64_t i = 0; i < width; i += SPAN * LANES) {
        const int64_t span = std::min(SPAN, (width - i) / LANES);
        vf s[H][SPAN] = {};
        if (span == SPAN) {
            for (int64_t n = 0; n < num_keys; n++)
                for (int64_t c = 0; c < SPAN; c++) {
                    vf k = load(keys[n] + i + c * LANES);
                    for (int h = 0; h < H; h++) s[h][c] += scores[h * stride + n] * k;
                }
        } else {
            for (int64_t n = 0; n < num_keys; n++)
                for (int64_t c = 0; c < span; c++) {
                    vf k = load(keys[n] + i + c * LANES);
                    for (int h = 0; h < H; h++) s[h][c] += scores[h * stride + n] * k;
                }
        }
        for (int h = 0; h < H; h++)
            for (int64_t c = 0; c < span; c++) store(out + h * width + i + c * LANES, s[h][c]);
    }
}

template <int H>
void attend(const float* q, const float* const* keys, int64_t num_keys, int64_t width, const float* sink, float* scores,
            int64_t stride, float* out) {
    score<H>(q, keys, num_keys, width, 1.0f / std::sqrt(float(width)), scores, stride);
    for (int h = 0; h < H; h++) softmax_with_sink(scores + h * stride, num_keys, sink[h]);
    weigh<H>(scores, stride, keys, num_keys, width, out);
}

struct Heads {
    const float* sink;
    int64_t count;
    int64_t width;
};

// All heads first .. last - 1 of one row, rotated back by cos, sin.
void attend_row(const float* q, const float* const* keys, int64_t num_keys, const Heads& heads, int64_t first,
                int64_t last, const float* cos, const float* sin, int64_t half, float* out) {
    const int64_t stride = (num_keys + LANES - 1) / LANES * LANES, width = heads.width;
    float* scores = scratch(1, HEAD_BLOCK * stride);
    int64_t h = first;
    for (; h + HEAD_BLOCK <= last; h += HEAD_BLOCK)
        attend<HEAD_BLOCK>(q + h * width, keys, num_keys, width, heads.sink + h, scores, stride, out + h * width);
    for (; h < last; h++) attend<1>(q + h * width, keys, num_keys, width, heads.sink + h, scores, stride, out + h * width);
    for (h = first; h < last; h++) rotate_row(out + h * width, width, cos, sin, half, -1.0f);
}

}  // namespace

extern "C" {

// q, out [rows, heads, width]; kv [rows, width]; ring [slots, ring_rows, width]; selected [rows, num_selected] or null
void abyssal_sparse_attention(const float* q, const float* kv, const float* ring, int64_t ring_rows, const float* entries,
                              const int32_t* selected, int64_t num_selected, const float* sink, int64_t rows,
                              int64_t heads, int64_t width, int64_t window, const int32_t* positions,
                              const int32_t* row_to_request, const int32_t* query_start, const int32_t* state_slot,
                              const int32_t* window_start,
                              const float* cos, const float* sin, int64_t half, float* out) {
    const Heads all = {sink, heads, width};
    const int64_t most = window + num_selected;
    // one row alone is spread by heads
    const int64_t head_span = rows < 4 ? std::max<int64_t>(HEAD_BLOCK, (heads / 4 + 3) / 4 * 4) : heads;
    const int64_t head_spans = (heads + head_span - 1) / head_span;
    parallel_for(rows * head_spans, rows * heads * width * most * 2, [&](int64_t task) {
        const int64_t r = task / head_spans, first_head = task % head_spans * head_span;
        const float** keys = reinterpret_cast<const float**>(scratch(2, most * 2));
        const int64_t request = row_to_request[r], p = positions[r], slot = state_slot[request];
        const int64_t begin = query_start[request], first = std::max<int64_t>(window_start[request], p - window + 1);
        int64_t n = 0;
        for (int64_t t = first; t <= p; t++) {
            const int64_t row = r - (p - t);
            keys[n++] = row >= begin ? kv + row * width : ring + (slot * ring_rows + t % ring_rows) * width;
        }
        for (int64_t i = 0; i < num_selected && selected[r * num_selected + i] >= 0; i++)
            keys[n++] = entries + int64_t(selected[r * num_selected + i]) * width;
        attend_row(q + r * heads * width, keys, n, all, first_head, std::min(heads, first_head + head_span),
                   cos + p * half, sin + p * half, half, out + r * heads * width);
    });
}
}

#include <algorithm>

#include "norm_rope.h"
#include "pool.h"

using namespace abyssal;

namespace {

constexpr int HEADS = 4, KEYS = 4;  // a block of scores: 16 sums

// Parts of a block whose sums fit the registers, and vectors of width that are weighed together.
#if defined(__AVX512F__)
constexpr int PART_HEADS = 4, PART_KEYS = 4, SPAN = 4;
#else
constexpr int PART_HEADS = 2, PART_KEYS = 2, SPAN = 1;
#endif

struct Keys {
    const float* const* row;
    int64_t count, width;
};

// Products of HEADS queries with KEYS keys, head-major in the lanes.
ABYSSAL_INLINE vf score_block(const float* const (&q)[HEADS], const float* const (&k)[KEYS], int64_t width) {
    vf sums[LANES];
    for (int h0 = 0; h0 < HEADS; h0 += PART_HEADS)
        for (int k0 = 0; k0 < KEYS; k0 += PART_KEYS) {
            vf s[PART_HEADS][PART_KEYS];
            for (int h = 0; h < PART_HEADS; h++)
                for (int j = 0; j < PART_KEYS; j++) s[h][j] = zero();
            for (int64_t i = 0; i < width; i += LANES)
                for (int h = 0; h < PART_HEADS; h++) {
                    const vf a = load(q[h0 + h] + i);
                    for (int j = 0; j < PART_KEYS; j++) s[h][j] = fma(a, load(k[k0 + j] + i), s[h][j]);
                }
            for (int h = 0; h < PART_HEADS; h++)
                for (int j = 0; j < PART_KEYS; j++) sums[(h0 + h) * KEYS + k0 + j] = s[h][j];
        }
    return hsum16(sums);
}

// Scores of HEADS queries, [HEADS][stride], with `stride` the number of keys rounded up to 16.
void score(const float* const (&q)[HEADS], const Keys& keys, float* scores, int64_t stride) {
    const float scale = float(1.0 / std::sqrt(double(keys.width)));
    for (int64_t n = 0; n < keys.count; n += KEYS) {
        const float* k[KEYS];
        for (int j = 0; j < KEYS; j++) k[j] = keys.row[std::min(n + j, keys.count - 1)];
        const vf block = score_block(q, k, keys.width) * scale;
        float lanes[LANES];
        store(lanes, block);
        for (int h = 0; h < HEADS; h++) std::memcpy(scores + h * stride + n, lanes + h * KEYS, KEYS * sizeof(float));
    }
}

// In place: exp(score - peak) / (exp(sink - peak) + sum). What pads the row weighs nothing.
void softmax_with_sink(float* scores, int64_t count, int64_t stride, float sink) {
    for (int64_t n = count; n < stride; n++) scores[n] = -INFINITY;
    vf peak = splat(sink);
    for (int64_t n = 0; n < stride; n += LANES) peak = vmax(peak, load(scores + n));
    const vf top = splat(hmax(peak));
    vf sum = zero();
    for (int64_t n = 0; n < stride; n += LANES) {
        const vf e = vexp(load(scores + n) - top);
        store(scores + n, e);
        sum = sum + e;
    }
    const vf total = splat(hsum(sum) + vexp(splat(sink) - top)[0]);
    for (int64_t n = 0; n < stride; n += LANES) store(scores + n, load(scores + n) / total);
}

// Sums of keys for the first `count` of HEADS heads, S vectors of the width from i on.
template <int S>
ABYSSAL_INLINE void weigh_span(const float* weights, int64_t stride, const Keys& keys, int64_t i, int64_t count, float* out) {
    vf s[HEADS][S];
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < S; c++) s[h][c] = zero();
    for (int64_t n = 0; n < keys.count; n++) {
        vf k[S];
        for (int c = 0; c < S; c++) k[c] = load(keys.row[n] + i + c * LANES);
        for (int h = 0; h < HEADS; h++) {
            const vf w = splat(weights[h * stride + n]);
            for (int c = 0; c < S; c++) s[h][c] = fma(w, k[c], s[h][c]);
        }
    }
    for (int64_t h = 0; h < HEADS && h < count; h++)
        for (int c = 0; c < S; c++) store(out + h * keys.width + i + c * LANES, s[h][c]);
}

void weigh(const float* weights, int64_t stride, const Keys& keys, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + SPAN * LANES <= keys.width; i += SPAN * LANES) weigh_span<SPAN>(weights, stride, keys, i, count, out);
    for (; i < keys.width; i += LANES) weigh_span<1>(weights, stride, keys, i, count, out);
}

struct Rotary {
    const float *cos, *sin;  // [positions, half]
    int64_t half;
};

// What rows of queries [heads, width] have in common.
struct Heads {
    const float* sink;
    int64_t count, width;
    Rotary rotary;
};

// Heads first .. last - 1 of one row, rotated back by its position.
void attend(const float* q, const Keys& keys, const Heads& heads, int64_t first, int64_t last, int64_t position, float* out) {
    const int64_t stride = (keys.count + LANES - 1) / LANES * LANES;
    float* scores = scratch(1, HEADS * stride);
    for (int64_t h = first; h < last; h += HEADS) {
        const int64_t count = std::min<int64_t>(HEADS, last - h);
        const float* block[HEADS];
        for (int i = 0; i < HEADS; i++) block[i] = q + std::min(h + i, last - 1) * heads.width;
        score(block, keys, scores, stride);
        for (int i = 0; i < HEADS; i++)
            softmax_with_sink(scores + i * stride, keys.count, stride, heads.sink[std::min(h + i, last - 1)]);
        weigh(scores, stride, keys, count, out + h * heads.width);
    }
    const Rotary& r = heads.rotary;
    for (int64_t h = first; h < last; h++)
        rotate_row(out + h * heads.width, heads.width, r.cos + position * r.half, r.sin + position * r.half, r.half, -1.0f);
}

// Runs gather(row, keys) -> count and attends, for all rows; a few rows alone are spread by heads.
template <class Gather>
void attend_rows(const float* q, int64_t rows, const Heads& heads, int64_t most_keys, const int32_t* positions,
                 const Gather& gather, float* out) {
    const int64_t span = rows < 4 ? std::max<int64_t>(HEADS, (heads.count / 4 + HEADS - 1) / HEADS * HEADS) : heads.count;
    const int64_t spans = (heads.count + span - 1) / span;
    parallel_for(rows * spans, rows * heads.count * heads.width * most_keys * 2, [&](int64_t task) {
        const int64_t r = task / spans, first = task % spans * span, offset = r * heads.count * heads.width;
        const float** keys = reinterpret_cast<const float**>(scratch(2, most_keys * 2));
        const int64_t count = gather(r, keys);
        attend(q + offset, {keys, count, heads.width}, heads, first, std::min(heads.count, first + span), positions[r],
               out + offset);
    });
}

struct SparseAttention {
    const float* q;  // [rows, heads, width]
    int64_t rows, heads, width;
    const float* kv;    // [rows, width]
    const float* ring;  // [slots, ring_rows, width]
    int64_t ring_rows;
    const float* entries;
    const int32_t* selected;  // [rows, num_selected]
    int64_t num_selected;
    const float* sink;
    int64_t window;
    const int32_t *positions, *row_to_request, *query_start, *state_slot, *window_start;
    Rotary rotary;
    float* out;
};

struct BlockAttention {
    const float* q;  // [rows, heads, width], `block_rows` to a block
    int64_t rows, heads, width, block_rows;
    const float* kv;    // [rows, width]
    const float* ring;  // [slots, ring_rows, width]
    int64_t ring_rows;
    const float* sink;
    int64_t window;
    const int32_t *positions, *block_start, *state_slot;
    Rotary rotary;
    float* out;
};

}  // namespace

extern "C" {

void abyssal_sparse_attention(const SparseAttention* a) {
    const Heads heads = {a->sink, a->heads, a->width, a->rotary};
    auto gather = [=](int64_t r, const float** keys) {
        const int64_t request = a->row_to_request[r], p = a->positions[r];
        const float* ring = a->ring + a->state_slot[request] * a->ring_rows * a->width;
        int64_t n = 0;
        for (int64_t t = std::max<int64_t>(a->window_start[request], p - a->window + 1); t <= p; t++) {
            const int64_t row = r - (p - t);
            keys[n++] = row >= a->query_start[request] ? a->kv + row * a->width : ring + t % a->ring_rows * a->width;
        }
        const int32_t* selected = a->selected + r * a->num_selected;
        for (int64_t i = 0; i < a->num_selected && selected[i] >= 0; i++)
            keys[n++] = a->entries + int64_t(selected[i]) * a->width;
        return n;
    };
    attend_rows(a->q, a->rows, heads, a->window + a->num_selected, a->positions, gather, a->out);
}

void abyssal_block_attention(const BlockAttention* a) {
    const Heads heads = {a->sink, a->heads, a->width, a->rotary};
    auto gather = [=](int64_t r, const float** keys) {
        const int64_t block = r / a->block_rows, start = a->block_start[block];
        const float* ring = a->ring + a->state_slot[block] * a->ring_rows * a->width;
        int64_t n = 0;
        for (int64_t t = std::max<int64_t>(0, start - a->window); t < start; t++)
            keys[n++] = ring + t % a->ring_rows * a->width;
        for (int64_t i = 0; i < a->block_rows; i++) keys[n++] = a->kv + (block * a->block_rows + i) * a->width;
        return n;
    };
    attend_rows(a->q, a->rows, heads, a->window + a->block_rows, a->positions, gather, a->out);
}
}

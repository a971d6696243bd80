#include <algorithm>
#include <vector>

#include "pool.h"
#include "quantize.h"

using namespace abyssal;

namespace {

constexpr int64_t SCORES_HELD = 1 << 22;  // bounds the scratch of a long prompt
constexpr int64_t CHUNK = 1024;           // entries scored by one task

struct SelectEntries {
    const float* q;        // [rows, heads, width]
    const float* weights;  // [rows, heads]
    const float* keys;     // [entries of all blocks, width]
    int64_t rows, heads, width;
    const int32_t *positions, *row_to_request;
    const int32_t* block_table;
    int64_t table_width;
    int64_t ratio, per_block, topk, block_size, topk_blocks;
    const int32_t* candidates;  // [rows, candidate_width] or null
    int64_t candidate_width;
    int64_t most_visible;  // entries that any row sees
    int32_t* entries;      // [rows, entry_width]
    int64_t entry_width;
    int32_t* blocks;  // [rows, block_width] or null
    int64_t block_width;
};

// The entries a row may choose from, in ascending order.
struct Eligible {
    const int32_t* table;
    const int32_t* candidates;  // ascending blocks, then -1; null for all
    int64_t visible, count, block_size, per_block;

    Eligible(const SelectEntries& a, int64_t row)
        : table(a.block_table + a.row_to_request[row] * a.table_width),
          candidates(a.candidates == nullptr ? nullptr : a.candidates + row * a.candidate_width),
          visible((a.positions[row] + 1) / a.ratio),
          count(visible),
          block_size(a.block_size),
          per_block(a.per_block) {
        if (candidates == nullptr) return;
        count = 0;
        for (int64_t i = 0; i < a.candidate_width && candidates[i] >= 0; i++) {
            const int64_t first = candidates[i] * block_size;
            if (first >= visible) break;
            count += std::min(block_size, visible - first);
        }
    }

    // all candidate blocks but the last are whole
    int64_t entry(int64_t i) const { return candidates ? candidates[i / block_size] * block_size + i % block_size : i; }
    int64_t flat(int64_t i) const {
        const int64_t e = entry(i);
        return int64_t(table[e / per_block]) * per_block + e % per_block;
    }
    int64_t num_blocks() const { return (visible + block_size - 1) / block_size; }
};

// score[i] = sum_h w[h] relu(q[h] . key): heads lie in lanes, `E` entries go side by side.
template <int V, int E>
void score_entries(const float* q, const float* w, const float* const* keys, int64_t width, float* scores) {
    vf s[E][V];
    for (int e = 0; e < E; e++)
        for (int v = 0; v < V; v++) s[e][v] = zero();
    for (int64_t d = 0; d < width; d++) {
        vf column[V];
        for (int v = 0; v < V; v++) column[v] = load(q + (d * V + v) * LANES);
        for (int e = 0; e < E; e++) {
            const vf k = splat(keys[e][d]);
            for (int v = 0; v < V; v++) s[e][v] = fma(k, column[v], s[e][v]);
        }
    }
    for (int e = 0; e < E; e++) {
        vf total = zero();
        for (int v = 0; v < V; v++) total = fma(vmax(s[e][v], zero()), load(w + v * LANES), total);
        scores[e] = hsum(total) + 0.0f;  // no negative zero, which would order below zero
    }
}

// Entries first .. last - 1 of those that a row may choose from; V vectors hold all heads.
template <int V>
void score_chunk(const SelectEntries& a, const Eligible& eligible, int64_t row, int64_t first, int64_t last, float* scores) {
    constexpr int E = WIDTH == LANES ? (V == 4 ? 4 : 8) : (V == 4 ? 1 : 4 / V);
    float* q = scratch(1, (a.width + 1) * V * LANES);
    float* w = q + a.width * V * LANES;
    std::fill(q, q + (a.width + 1) * V * LANES, 0.0f);
    for (int64_t h = 0; h < a.heads; h++) {
        for (int64_t d = 0; d < a.width; d++) q[d * V * LANES + h] = a.q[(row * a.heads + h) * a.width + d];
        w[h] = a.weights[row * a.heads + h];
    }
    const float* keys[E];
    int64_t i = first;
    for (; i + E <= last; i += E) {
        for (int e = 0; e < E; e++) keys[e] = a.keys + eligible.flat(i + e) * a.width;
        score_entries<V, E>(q, w, keys, a.width, scores + i);
    }
    for (; i < last; i++) {
        keys[0] = a.keys + eligible.flat(i) * a.width;
        score_entries<V, 1>(q, w, keys, a.width, scores + i);
    }
}

inline uint32_t ordered(float f) {
    const uint32_t u = float_to_bits(f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The `k` greatest of n > k values, in ascending order of index; of equals the first. Three histograms find the k-th greatest.
void best_indices(const float* values, int64_t n, int64_t k, int32_t* out) {
    uint32_t prefix = 0, mask = 0;
    int64_t wanted = k;  // how many of those that agree with the prefix so far are taken
    for (int shift : {21, 10, 0}) {
        const int64_t size = shift == 0 ? 1024 : 2048;
        int32_t histogram[2048] = {};
        for (int64_t i = 0; i < n; i++) {
            const uint32_t u = ordered(values[i]);
            if ((u & mask) == prefix) histogram[(u >> shift) & (size - 1)]++;
        }
        int64_t bucket = size - 1;
        for (; histogram[bucket] < wanted; bucket--) wanted -= histogram[bucket];
        prefix |= uint32_t(bucket) << shift;
        mask |= uint32_t(size - 1) << shift;
    }
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = ordered(values[i]);
        if (u > prefix || (u == prefix && wanted-- > 0)) *out++ = int32_t(i);
    }
}

void publish_blocks(const SelectEntries& a, const Eligible& eligible, const float* scores, int32_t* blocks) {
    const int64_t count = eligible.num_blocks(), kept = std::min(count, a.topk_blocks);
    std::fill(blocks + kept, blocks + a.block_width, -1);
    if (kept == count) {
        for (int64_t b = 0; b < count; b++) blocks[b] = int32_t(b);
        return;
    }
    std::vector<float> best(count);
    for (int64_t b = 0; b < count; b++) {
        const int64_t end = std::min(eligible.visible, (b + 1) * a.block_size);
        best[b] = *std::max_element(scores + b * a.block_size, scores + end);
    }
    best[count - 1] = INFINITY;  // the block with the newest entry is always kept
    best_indices(best.data(), count, kept, blocks);
}

bool needs_scores(const SelectEntries& a, const Eligible& e) {
    return e.count > a.topk || (a.blocks != nullptr && e.num_blocks() > a.topk_blocks);
}

void select_row(const SelectEntries& a, int64_t r, const float* scores) {
    const Eligible eligible(a, r);
    int32_t* out = a.entries + r * a.entry_width;
    if (a.blocks != nullptr) publish_blocks(a, eligible, scores, a.blocks + r * a.block_width);
    const int64_t kept = std::min(a.topk, eligible.count);
    if (kept == eligible.count)
        for (int64_t i = 0; i < kept; i++) out[i] = int32_t(i);
    else
        best_indices(scores, eligible.count, kept, out);
    for (int64_t i = 0; i < kept; i++) out[i] = int32_t(eligible.flat(out[i]));
    std::fill(out + kept, out + a.entry_width, -1);
}

}  // namespace

extern "C" void abyssal_select_entries(const SelectEntries* a) {
    const auto score = a->heads <= 16 ? score_chunk<1> : a->heads <= 32 ? score_chunk<2> : score_chunk<4>;
    const int64_t most = a->most_visible, chunks = (most + CHUNK - 1) / CHUNK;
    const int64_t group = std::max<int64_t>(1, SCORES_HELD / std::max<int64_t>(1, most));
    for (int64_t begin = 0; begin < a->rows; begin += group) {
        const int64_t count = std::min(group, a->rows - begin);
        float* scores = scratch(3, count * most);
        parallel_for(count * chunks, count * most * a->heads * a->width, [=](int64_t task) {
            const int64_t r = begin + task / chunks, first = task % chunks * CHUNK;
            const Eligible eligible(*a, r);
            if (first < eligible.count && needs_scores(*a, eligible))
                score(*a, eligible, r, first, std::min(first + CHUNK, eligible.count), scores + (r - begin) * most);
        });
        parallel_for(count, count * most * 8, [=](int64_t task) { select_row(*a, begin + task, scores + task * most); });
    }
}

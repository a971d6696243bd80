#include <algorithm>
#include <vector>

#include "pool.h"
#include "quantize.h"

using namespace abyssal;

namespace {

constexpr int64_t SCORES_HELD = 1 << 22;  // bounds the scratch of a long prompt
constexpr int64_t CHUNK = 1024;           // entries scored by one task

struct Inputs {
    const float* q;        // [rows, heads, width]
    const float* weights;  // [rows, heads]
    const float* keys;     // [entries of all blocks, width]
    int64_t heads, width;
    const int32_t* positions;
    const int32_t* row_to_request;
    const int32_t* block_table;
    int64_t table_width;
};

struct Rule {
    int64_t ratio, per_block, topk, block_size, topk_blocks;
};

// The entries a row may choose from, in ascending order.
struct Eligible {
    const int32_t* table;
    const int32_t* candidates;  // ascending blocks, then -1; null for all
    int64_t num_candidates, visible, count, block_size, per_block;

    Eligible(const Inputs& in, const Rule& rule, int64_t row, const int32_t* candidate_rows, int64_t width)
        : table(in.block_table + in.row_to_request[row] * in.table_width),
          candidates(candidate_rows ? candidate_rows + row * width : nullptr),
          num_candidates(0),
          visible((in.positions[row] + 1) / rule.ratio),
          count(visible),
          block_size(rule.block_size),
          per_block(rule.per_block) {
        if (!candidates) return;
        count = 0;
        for (; num_candidates < width && candidates[num_candidates] >= 0; num_candidates++) {
            const int64_t first = candidates[num_candidates] * block_size;
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
    vf s[E][V] = {};
    for (int64_t d = 0; d < width; d++) {
        vf column[V];
        for (int v = 0; v < V; v++) column[v] = load(q + (d * V + v) * LANES);
        for (int e = 0; e < E; e++)
            for (int v = 0; v < V; v++) s[e][v] += keys[e][d] * column[v];
    }
    for (int e = 0; e < E; e++) {
        vf total = {};
        for (int v = 0; v < V; v++) total += vmax(s[e][v], vf{}) * load(w + v * LANES);
        scores[e] = hsum(total) + 0.0f;  // no negative zero, which would order below zero
    }
}

template <int V>
void score_chunk(const Inputs& in, const Eligible& eligible, int64_t row, int64_t first, int64_t last, float* scores) {
    constexpr int E = V == 1 ? 8 : 4;
    float* q = scratch(1, (in.width + 1) * V * LANES);
    float* w = q + in.width * V * LANES;
    std::fill(q, q + (in.width + 1) * V * LANES, 0.0f);
    for (int64_t h = 0; h < in.heads; h++) {
        for (int64_t d = 0; d < in.width; d++) q[d * V * LANES + h] = in.q[(row * in.heads + h) * in.width + d];
        w[h] = in.weights[row * in.heads + h];
    }
    const float* keys[E];
    int64_t i = first;
    for (; i + E <= last; i += E) {
        for (int e = 0; e < E; e++) keys[e] = in.keys + eligible.flat(i + e) * in.width;
        score_entries<V, E>(q, w, keys, in.width, scores + i);
    }
    for (; i < last; i++) {
        keys[0] = in.keys + eligible.flat(i) * in.width;
        score_entries<V, 1>(q, w, keys, in.width, scores + i);
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

void publish_blocks(const Eligible& eligible, const Rule& rule, const float* scores, int32_t* blocks) {
    const int64_t count = eligible.num_blocks();
    if (count <= rule.topk_blocks) {
        for (int64_t b = 0; b < count; b++) blocks[b] = int32_t(b);
        return;
    }
    std::vector<float> best(count);
    for (int64_t b = 0; b < count; b++) {
        const int64_t end = std::min(eligible.visible, (b + 1) * rule.block_size);
        best[b] = *std::max_element(scores + b * rule.block_size, scores + end);
    }
    best[count - 1] = INFINITY;  // the block with the newest entry is always kept
    best_indices(best.data(), count, rule.topk_blocks, blocks);
}

bool needs_scores(const Eligible& e, const Rule& rule, bool publishes) {
    return e.count > rule.topk || (publishes && e.num_blocks() > rule.topk_blocks);
}

}  // namespace

extern "C" {

// entries [rows, entry_width] and blocks [rows, block_width] (or null) come filled with -1.
void abyssal_select_entries(const float* q, const float* weights, const float* keys, int64_t rows, int64_t heads,
                            int64_t width, const int32_t* positions, const int32_t* row_to_request,
                            const int32_t* block_table, int64_t table_width, int64_t ratio, int64_t per_block,
                            int64_t topk, int64_t block_size, int64_t topk_blocks, const int32_t* candidates,
                            int64_t candidate_width, int64_t most_visible, int32_t* entries, int64_t entry_width,
                            int32_t* blocks, int64_t block_width) {
    const Inputs in = {q, weights, keys, heads, width, positions, row_to_request, block_table, table_width};
    const Rule rule = {ratio, per_block, topk, block_size, topk_blocks};
    const auto score = heads <= 16 ? score_chunk<1> : heads <= 32 ? score_chunk<2> : score_chunk<4>;
    const int64_t chunks = (most_visible + CHUNK - 1) / CHUNK;
    const int64_t group = std::max<int64_t>(1, SCORES_HELD / std::max<int64_t>(1, most_visible));
    for (int64_t begin = 0; begin < rows; begin += group) {
        const int64_t count = std::min(group, rows - begin);
        float* scores = scratch(3, count * most_visible);
        parallel_for(count * chunks, count * most_visible * heads * width, [&](int64_t task) {
            const int64_t r = begin + task / chunks, first = task % chunks * CHUNK;
            const Eligible eligible(in, rule, r, candidates, candidate_width);
            if (first < eligible.count && needs_scores(eligible, rule, blocks != nullptr))
                score(in, eligible, r, first, std::min(first + CHUNK, eligible.count), scores + (r - begin) * most_visible);
        });
        parallel_for(count, count * most_visible * 8, [&](int64_t task) {
            const int64_t r = begin + task;
            const Eligible eligible(in, rule, r, candidates, candidate_width);
            const float* own = scores + task * most_visible;
            int32_t* out = entries + r * entry_width;
            if (blocks != nullptr) publish_blocks(eligible, rule, own, blocks + r * block_width);
            const int64_t kept = std::min(topk, eligible.count);
            if (kept == eligible.count)
                for (int64_t i = 0; i < kept; i++) out[i] = int32_t(i);
            else
                best_indices(own, eligible.count, kept, out);
            for (int64_t i = 0; i < kept; i++) out[i] = int32_t(eligible.flat(out[i]));
        });
    }
}
}

// Adjusting logits and drawing tokens. Contracts: abyssal/ops/sampling.py.
#include "tokens.h"

#include "noise.h"
#include "pool.h"

namespace abyssal {
namespace {

// What may be drawn of a row: logits above `value`, and those equal to it up to an id.
struct Cut {
    float value;
    int64_t id;
    bool keeps(float logit, int64_t i) const { return logit > value || (logit == value && i <= id); }
};

struct Best {
    double key = -std::numeric_limits<double>::infinity();
    int64_t id = -1;
    void take(double other, int64_t i) {
        if (other > key || (other == key && i < id)) {
            key = other;
            id = i;
        }
    }
};

int64_t first_peak(const float* logits, const float* block_peak, float peak) {
    int64_t b = 0;
    while (block_peak[b] != peak) b++;
    return std::find(logits + b * BLOCK, logits + (b + 1) * BLOCK, peak) - logits;
}

// One block's tokens, none of which is hashed if even the largest noise could not lift it above the best.
void take_block(const float* logits, int64_t vocab, int64_t b, float peak, double temperature, const Cut& cut, uint64_t seed,
                uint32_t position, Best& best) {
    double highest = double(peak) / temperature;
    if (peak < cut.value || highest + GUMBEL_MAX < best.key) return;
    alignas(64) uint32_t words[BLOCK];
    hash_block(seed, position, b * BLOCK, words);
    uint32_t largest = 0;
    for (int64_t i = 0; i < BLOCK; i++) largest = words[i] > largest ? words[i] : largest;
    if (highest + gumbel_bound(largest) + 1e-9 < best.key) return;
    int64_t end = std::min(vocab, (b + 1) * BLOCK);
    for (int64_t i = b * BLOCK; i < end; i++) {
        if (cut.keeps(logits[i], i)) best.take(double(logits[i]) / temperature + gumbel_of(words[i - b * BLOCK]), i);
    }
}

int64_t draw_row(const float* logits, int64_t vocab, double temperature, const Cut& cut, uint64_t seed, uint32_t position,
                 bool masked) {
    thread_local std::vector<float> block_peak;
    block_peak.resize(num_blocks(vocab));
    Scan scan = scan_row(logits, vocab, block_peak.data());
    if (scan.has_bad || (scan.has_masked && !masked) || scan.peak == MINUS_INFINITY) return -1;
    int64_t first = first_peak(logits, block_peak.data(), scan.peak);
    if (temperature == 0.0) return first;
    Best best;
    int64_t likely = first / BLOCK;  // its tokens first: most others then need not be looked at
    take_block(logits, vocab, likely, block_peak[likely], temperature, cut, seed, position, best);
    for (int64_t b = 0; b * BLOCK < vocab; b++) {
        if (b != likely) take_block(logits, vocab, b, block_peak[b], temperature, cut, seed, position, best);
    }
    return best.id;
}

void mask_tokens(float* out, int64_t n, uint32_t word) {
    for (int64_t i = 0; i < n; i++) {
        bool allowed = word >> i & 1;
        out[i] = allowed || out[i] != out[i] ? out[i] : MINUS_INFINITY;
    }
}

void mask_row(float* out, int64_t vocab, const int32_t* words, int64_t num_words) {
    int64_t covered = std::min(vocab, 32 * num_words), whole = covered / 32;
    for (int64_t w = 0; w < whole; w++) {
        if (words[w] != -1) mask_tokens(out + 32 * w, 32, uint32_t(words[w]));
    }
    if (32 * whole < covered) mask_tokens(out + 32 * whole, covered - 32 * whole, uint32_t(words[whole]));
    for (int64_t i = covered; i < vocab; i++) out[i] = out[i] != out[i] ? out[i] : MINUS_INFINITY;
}

void adjust_entry(float& logit, float divisor, float minus, float plus) {
    float value = logit > 0.0f ? logit / divisor : logit * divisor;
    value = (value - minus) + plus;
    constexpr float LARGEST = std::numeric_limits<float>::max();
    logit = value > LARGEST ? LARGEST : value < -LARGEST ? -LARGEST : value;
}

}  // namespace
}  // namespace abyssal

using namespace abyssal;

extern "C" void abyssal_adjust_logits(const float* logits, int64_t vocab, const int32_t* rows, int64_t num_rows,
                                      const int32_t* entry_rows, const int32_t* ids, const float* divisor, const float* minus,
                                      const float* plus, int64_t num_entries, const int32_t* masked, int64_t num_masked,
                                      const int32_t* masks, int64_t num_words, float* out) {
    parallel_for(num_rows, num_rows * vocab, [=](int64_t r) {
        const float* x = logits + int64_t(rows[r]) * vocab;
        float* y = out + r * vocab;
        for (int64_t i = 0; i < vocab; i++) y[i] = x[i] - x[i] == 0.0f ? x[i] : std::numeric_limits<float>::quiet_NaN();
        const int32_t* end = entry_rows + num_entries;
        for (const int32_t* e = std::lower_bound(entry_rows, end, int32_t(r)); e < end && *e == r; e++) {
            int64_t i = e - entry_rows;
            adjust_entry(y[ids[i]], divisor[i], minus[i], plus[i]);
        }
        const int32_t* own = std::find(masked, masked + num_masked, int32_t(r));
        if (own < masked + num_masked) mask_row(y, vocab, masks + (own - masked) * num_words, num_words);
    });
}

extern "C" void abyssal_draw_tokens(const float* logits, int64_t vocab, const int32_t* rows, int64_t num_rows,
                                    const double* temperature, const float* values, const int32_t* ids, const int64_t* seeds,
                                    const int32_t* positions, int64_t masked, int64_t* out) {
    parallel_for(num_rows, num_rows * vocab, [=](int64_t r) {
        out[r] = draw_row(logits + int64_t(rows[r]) * vocab, vocab, temperature[r], Cut{values[r], ids[r]}, uint64_t(seeds[r]),
                          uint32_t(positions[r]), masked != 0);
    });
}

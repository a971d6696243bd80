// Where filters cut off the tokens of a row, and the log-probabilities of tokens. Contracts: abyssal/ops/sampling.py.
//
// No row is sorted. Top-k looks only at blocks whose peak reaches the k-th highest peak; top-p adds up masses in buckets of
// the distance from the peak and looks closer at one of them.
#include "tokens.h"

#include "pool.h"

namespace abyssal {
namespace {

constexpr double MASS_ONE = 0x1p44;
constexpr double NO_MASS_BELOW = -31.0;
constexpr double BUCKETS_PER_UNIT = 32.0;
constexpr int NUM_BUCKETS = 31 * 32 + 1;
constexpr int64_t NO_LIMIT = std::numeric_limits<int64_t>::max();

struct Candidate {
    Key key;
    int64_t mass;
};

// The last of n >= 1 candidates, in descending order of their keys, that is among the first `count` and whose predecessors
// weigh less than `limit`. Both limits are at least 1. Reorders the candidates.
Key last_kept(Candidate* first, Candidate* last, int64_t count, int64_t limit) {
    for (;;) {
        Candidate *middle = first + (last - first) / 2, *end = last - 1;
        Key a = first->key, b = middle->key, c = end->key;
        Key pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        Candidate* split = std::partition(first, last, [=](const Candidate& x) { return x.key > pivot; });
        int64_t mass = 0;
        for (Candidate* x = first; x < split; x++) mass += x->mass;
        if (split - first >= count || mass >= limit) {
            last = split;
            continue;
        }
        std::swap(*split, *std::find_if(split, last, [=](const Candidate& x) { return x.key == pivot; }));
        count -= split - first + 1;
        limit = limit == NO_LIMIT ? limit : limit - mass - split->mass;
        first = split + 1;
        if (count <= 0 || limit <= 0 || first == last) return pivot;
    }
}

// Masses of n <= BLOCK logits.
void masses_of(const float* logits, int64_t n, double temperature, double highest, int64_t* mass, double* z) {
    double e[BLOCK];
    for (int64_t i = 0; i < n; i++) z[i] = double(logits[i]) / temperature - highest;
    double bounded[BLOCK];
    for (int64_t i = 0; i < n; i++) bounded[i] = z[i] > NO_MASS_BELOW ? z[i] : NO_MASS_BELOW;
    exp_of(bounded, n, e);
    for (int64_t i = 0; i < n; i++) {
        double whole = z[i] > NO_MASS_BELOW ? std::floor(e[i] * MASS_ONE) : 0.0;
        double shifted = whole + 0x1p52;  // whose low bits are the whole number
        int64_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        mass[i] = bits & ((int64_t(1) << 52) - 1);
    }
}

struct Row {
    const float* logits;
    int64_t vocab;
    double temperature;
    const float* block_peak;
    double highest;  // of logit / temperature
    float lowest;    // the lowest logit that min-p keeps

    int64_t width(int64_t b) const { return std::min(BLOCK, vocab - b * BLOCK); }
    bool has_mass(int64_t b) const {
        return block_peak[b] >= lowest && double(block_peak[b]) / temperature - highest > NO_MASS_BELOW;
    }
};

// The smallest float whose quotient by the temperature is at least `bound`.
float lowest_logit(double bound, double temperature) {
    constexpr float END = std::numeric_limits<float>::infinity();
    if (bound == -std::numeric_limits<double>::infinity()) return MINUS_INFINITY;
    float f = float(bound * temperature);
    while (f > MINUS_INFINITY && double(std::nextafter(f, -END)) / temperature >= bound) f = std::nextafter(f, -END);
    while (f < END && !(double(f) / temperature >= bound)) f = std::nextafter(f, END);
    return f;
}

int64_t whole_limit(double top_p, int64_t total) { return int64_t(std::ceil(top_p * double(total))); }

// A lower bound of the count-th highest logit, close to it: as many blocks have a peak that high, or, where more than there
// are blocks is asked for, as many logits in buckets by their leading bits.
float floor_of_best(const Row& row, int64_t count) {
    int64_t blocks = num_blocks(row.vocab);
    if (count <= blocks) {
        thread_local std::vector<float> peaks;
        peaks.assign(row.block_peak, row.block_peak + blocks);
        std::nth_element(peaks.begin(), peaks.begin() + (count - 1), peaks.end(), std::greater<float>());
        return peaks[count - 1];
    }
    thread_local std::vector<int32_t> buckets;
    buckets.assign(1 << 16, 0);
    for (int64_t i = 0; i < row.vocab; i++) buckets[key_of(row.logits[i], 0) >> 48]++;
    int64_t bucket = (1 << 16) - 1;
    for (; bucket > 0 && (count -= buckets[bucket]) > 0;) bucket--;
    return logit_of(Key(bucket) << 48);
}

// The best `count` tokens that min-p keeps, or all if there are fewer; in any order.
void best_tokens(const Row& row, int64_t count, std::vector<Candidate>& out) {
    float floor = std::max(row.lowest, floor_of_best(row, count));
    out.clear();
    for (int64_t b = 0; b * BLOCK < row.vocab; b++) {
        if (row.block_peak[b] < floor) continue;
        for (int64_t i = b * BLOCK, end = i + row.width(b); i < end; i++) {
            float x = row.logits[i];
            if (x >= floor && x > MINUS_INFINITY) out.push_back({key_of(x, i), 0});
        }
    }
    if (int64_t(out.size()) <= count) return;
    Key last = last_kept(out.data(), out.data() + out.size(), count, NO_LIMIT);
    out.erase(std::partition(out.begin(), out.end(), [=](const Candidate& x) { return x.key >= last; }), out.end());
}

int64_t weigh(const Row& row, std::vector<Candidate>& candidates) {
    int64_t total = 0;
    for (size_t begin = 0; begin < candidates.size(); begin += BLOCK) {
        int64_t n = std::min<int64_t>(BLOCK, candidates.size() - begin), mass[BLOCK];
        float logits[BLOCK];
        double z[BLOCK];
        for (int64_t i = 0; i < n; i++) logits[i] = logit_of(candidates[begin + i].key);
        masses_of(logits, n, row.temperature, row.highest, mass, z);
        for (int64_t i = 0; i < n; i++) total += candidates[begin + i].mass = mass[i];
    }
    return total;
}

int bucket_of(double z) { return int(z * -BUCKETS_PER_UNIT); }

// Mass of all tokens that min-p keeps, by bucket.
int64_t weigh_all(const Row& row, std::vector<int64_t>& buckets) {
    buckets.assign(NUM_BUCKETS, 0);
    int64_t total = 0;
    for (int64_t b = 0; b * BLOCK < row.vocab; b++) {
        if (!row.has_mass(b)) continue;
        int64_t n = row.width(b), mass[BLOCK];
        double z[BLOCK];
        int place[BLOCK];
        const float* x = row.logits + b * BLOCK;
        masses_of(x, n, row.temperature, row.highest, mass, z);
        for (int64_t i = 0; i < n; i++) mass[i] = x[i] >= row.lowest ? mass[i] : 0;
        for (int64_t i = 0; i < n; i++) place[i] = bucket_of(z[i] > NO_MASS_BELOW ? z[i] : NO_MASS_BELOW);
        for (int64_t i = 0; i < n; i++) total += mass[i];
        for (int64_t i = 0; i < n; i++) buckets[place[i]] += mass[i];
    }
    return total;
}

// Top-p of all tokens that min-p keeps.
Key cut_by_mass(const Row& row, double top_p, std::vector<int64_t>& buckets, std::vector<Candidate>& candidates) {
    int64_t limit = whole_limit(top_p, weigh_all(row, buckets));
    int bucket = 0;
    for (; buckets[bucket] < limit; bucket++) limit -= buckets[bucket];
    candidates.clear();
    for (int64_t b = 0; b * BLOCK < row.vocab; b++) {
        if (!row.has_mass(b) || bucket_of(double(row.block_peak[b]) / row.temperature - row.highest) > bucket) continue;
        const float* x = row.logits + b * BLOCK;
        int64_t n = row.width(b);
        double from = -bucket / BUCKETS_PER_UNIT, upto = -(bucket + 1) / BUCKETS_PER_UNIT;
        uint8_t inside[BLOCK];
        for (int64_t i = 0; i < n; i++) {
            double z = double(x[i]) / row.temperature - row.highest;
            inside[i] = (z <= from) & (z > upto) & (z > NO_MASS_BELOW) & (x[i] >= row.lowest);
        }
        int64_t found[BLOCK], count = 0;
        for (int64_t i = 0; i < n; i++) {  // without a branch that nobody could predict
            found[count] = i;
            count += inside[i];
        }
        for (int64_t i = 0; i < count; i++) candidates.push_back({key_of(x[found[i]], b * BLOCK + found[i]), 0});
    }
    weigh(row, candidates);
    return last_kept(candidates.data(), candidates.data() + candidates.size(), NO_LIMIT, limit);
}

struct Filter {
    double temperature;
    int64_t top_k;
    double top_p, min_log_ratio;
    bool joint;
};

Key cut_row(const Row& row, const Filter& filter) {
    thread_local std::vector<Candidate> candidates;
    thread_local std::vector<int64_t> buckets;
    if (filter.top_k >= row.vocab) {
        if (filter.top_p >= 1.0) return key_of(row.lowest, row.lowest == MINUS_INFINITY ? -1 : 0x7fffffff);
        return cut_by_mass(row, filter.top_p, buckets, candidates);
    }
    best_tokens(row, filter.top_k, candidates);
    int64_t limit = NO_LIMIT;
    if (filter.top_p < 1.0) {
        int64_t total = weigh(row, candidates);
        limit = whole_limit(filter.top_p, filter.joint ? weigh_all(row, buckets) : total);
    }
    return last_kept(candidates.data(), candidates.data() + candidates.size(), NO_LIMIT, limit);
}

void rank_row(const float* logits, int64_t vocab, double temperature, int64_t id, int64_t num_top, float& chosen, int32_t& rank,
              int32_t* top_ids, float* top) {
    thread_local std::vector<float> block_peak;
    thread_local std::vector<Candidate> best;
    block_peak.resize(num_blocks(vocab));
    Scan scan = scan_row(logits, vocab, block_peak.data());
    if (scan.has_bad || scan.peak == MINUS_INFINITY) {
        chosen = std::numeric_limits<float>::quiet_NaN();
        rank = 0;
        std::fill(top_ids, top_ids + num_top, -1);
        std::fill(top, top + num_top, std::numeric_limits<float>::quiet_NaN());
        return;
    }
    Row row{logits, vocab, temperature, block_peak.data(), double(scan.peak) / temperature, MINUS_INFINITY};
    double sums[BLOCK] = {}, total = 0.0;
    int32_t above = 0;
    for (int64_t b = 0; b * BLOCK < vocab; b++) {
        const float* x = logits + b * BLOCK;
        int64_t n = row.width(b);
        double z[BLOCK], e[BLOCK];
        for (int64_t i = 0; i < n; i++) z[i] = double(x[i]) / temperature - row.highest;
        for (int64_t i = 0; i < n; i++) z[i] = z[i] > -700.0 ? z[i] : -700.0;
        exp_of(z, n, e);
        for (int64_t i = 0; i < n; i++) sums[i] += x[i] > MINUS_INFINITY ? e[i] : 0.0;
        for (int64_t i = 0; i < n; i++) above += x[i] > logits[id];
    }
    for (double sum : sums) total += sum;
    for (int64_t i = 0; i < id; i++) above += logits[i] == logits[id];
    double log_total = row.highest + std::log(total);
    chosen = float(double(logits[id]) / temperature - log_total);
    rank = above + 1;
    if (num_top == 0) return;
    best_tokens(row, num_top, best);
    std::sort(best.begin(), best.end(), [](const Candidate& a, const Candidate& b) { return a.key > b.key; });
    for (int64_t i = 0; i < num_top; i++) {
        bool exists = i < int64_t(best.size());
        top_ids[i] = exists ? id_of(best[i].key) : -1;
        top[i] = exists ? float(double(logit_of(best[i].key)) / temperature - log_total) : MINUS_INFINITY;
    }
}

}  // namespace
}  // namespace abyssal

using namespace abyssal;

extern "C" void abyssal_cut_tokens(const float* logits, int64_t vocab, const int32_t* rows, int64_t num_rows,
                                   const double* temperature, const int32_t* top_k, const double* top_p,
                                   const double* min_log_ratio, const uint8_t* joint, float* values, int32_t* ids) {
    parallel_for(num_rows, num_rows * vocab, [=](int64_t r) {
        thread_local std::vector<float> block_peak;
        block_peak.resize(num_blocks(vocab));
        const float* x = logits + int64_t(rows[r]) * vocab;
        values[r] = MINUS_INFINITY;
        ids[r] = -1;
        Filter filter{temperature[r], top_k[r], top_p[r], min_log_ratio[r], joint[r] != 0};
        bool filters = filter.top_k < vocab || filter.top_p < 1.0 || filter.min_log_ratio > -INFINITY;
        if (temperature[r] == 0.0 || !filters) return;
        Scan scan = scan_row(x, vocab, block_peak.data());
        if (scan.has_bad || scan.peak == MINUS_INFINITY) return;
        double highest = double(scan.peak) / filter.temperature;
        float lowest = lowest_logit(highest + filter.min_log_ratio, filter.temperature);
        Key cut = cut_row(Row{x, vocab, filter.temperature, block_peak.data(), highest, lowest}, filter);
        values[r] = logit_of(cut);
        ids[r] = id_of(cut);
    });
}

extern "C" void abyssal_rank_tokens(const float* logits, int64_t vocab, const int32_t* rows, int64_t num_rows,
                                    const double* temperature, const int64_t* chosen_ids, int64_t num_top, float* chosen,
                                    int32_t* ranks, int32_t* top_ids, float* top) {
    parallel_for(num_rows, num_rows * vocab, [=](int64_t r) {
        rank_row(logits + int64_t(rows[r]) * vocab, vocab, temperature[r], chosen_ids[r], num_top, chosen[r], ranks[r],
                 top_ids + r * num_top, top + r * num_top);
    });
}

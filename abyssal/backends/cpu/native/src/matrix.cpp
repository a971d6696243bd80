#include "matrix.h"

#include <algorithm>

#include "pool.h"

namespace abyssal {

namespace {

// Tiles of rows x panels by the number of registers: 32 of 16 lanes, 16 of 8, 32 of 4.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8, TILE_PANELS = 2, ONE_ROW_PANELS = 8;
#else
constexpr int TILE_ROWS = 6, TILE_PANELS = 1, ONE_ROW_PANELS = 4;
#endif

// Inputs of a panel that are decoded at a time: a multiple of K_BLOCK and of 32 whose panels stay in the nearest cache.
constexpr int64_t DECODED = 4 * K_BLOCK;

// Where a tile's sums go: y[r][16 * panel], whose last panel has fewer than 16 outputs if `out` is no multiple.
struct Target {
    float* const* y;
    int64_t panel, out;
    bool first;  // nothing to add to yet
};

ABYSSAL_INLINE void join(const Target& t, int r, int p, vf sum) {
    const int64_t column = (t.panel + p) * LANES;
    float* y = t.y[r] + column;
    if (column + LANES <= t.out) {
        store(y, t.first ? sum : load(y) + sum);
        return;
    }
    for (int64_t i = 0; i < t.out - column; i++) y[i] = t.first ? sum[i] : y[i] + sum[i];
}

// One block of inputs: x[r] from its first input on, w[p] [count, 16].
template <int R, int P>
ABYSSAL_INLINE void tile(const float* const* x, int64_t k0, int64_t count, const float* const* w, const Target& t) {
    vf acc[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) acc[r][p] = zero();
    for (int64_t k = 0; k < count; k++) {
        vf b[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) b[p] = load(w[p] + k * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const vf a = splat(x[r][k0 + k]);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) acc[r][p] = fma(a, b[p], acc[r][p]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) join(t, r, p, acc[r][p]);
}

// All rows in tiles of R, then of fewer. More panels than TILE_PANELS leave registers for one row.
template <int P, int R = (P > TILE_PANELS ? 1 : TILE_ROWS)>
void rows_of_block(const float* const* x, int64_t num_rows, int64_t k0, int64_t count, const float* const* w, Target t) {
    for (; num_rows >= R; num_rows -= R, x += R, t.y += R) tile<R, P>(x, k0, count, w, t);
    if constexpr (R > 1)
        if (num_rows > 0) rows_of_block<P, R == 6 ? 3 : R / 2>(x, num_rows, k0, count, w, t);
}

// P panels from `panel` on. Packed ones are decoded a stretch at a time and serve all rows.
template <int P>
void panel_group(const Matrix& m, const float* const* x, int64_t num_rows, int64_t panel, float* const* y) {
    const float* w[P];
    const bool packed = is_packed(m);
    const int64_t stretch = packed ? DECODED : m.in;
    for (int64_t s0 = 0; s0 < m.in; s0 += stretch) {
        const int64_t s1 = std::min(s0 + stretch, m.in);
        for (int p = 0; p < P; p++) {
            if (packed) {
                float* buffer = scratch(0, P * DECODED * LANES) + p * DECODED * LANES;
                prefetch_panel(m, (panel + p) * LANES, s1, s1 + stretch);
                decode_panel(m, (panel + p) * LANES, s0, s1, buffer);
                w[p] = buffer;
            } else {
                w[p] = m.panels + (panel + p) * m.in * LANES;
            }
        }
        for (int64_t r0 = 0; r0 < num_rows; r0 += ROW_BLOCK)
            for (int64_t k0 = s0; k0 < s1; k0 += K_BLOCK) {
                const float* block[P];
                for (int p = 0; p < P; p++) block[p] = w[p] + (k0 - s0) * LANES;
                rows_of_block<P>(x + r0, std::min(ROW_BLOCK, num_rows - r0), k0, std::min(K_BLOCK, s1 - k0), block,
                                 {y + r0, panel, m.out, k0 == 0});
            }
    }
}

template <int P>
void panel_groups(const Matrix& m, const float* const* x, int64_t num_rows, int64_t& panel, int64_t last, float* const* y) {
    for (; panel + P <= last; panel += P) panel_group<P>(m, x, num_rows, panel, y);
}

struct Linear {
    const float* x;  // [rows, groups, in]
    int64_t rows, groups;
    const Matrix* matrix;
    float* y;  // [rows, out]
};

}  // namespace

void multiply(const Matrix& m, const float* const* x, int64_t num_rows, int64_t first, int64_t last, float* const* y) {
    if (num_rows == 1 && !is_packed(m)) {  // several panels at once hide the latency of a single chain of sums
        panel_groups<ONE_ROW_PANELS>(m, x, num_rows, first, last, y);
        panel_groups<ONE_ROW_PANELS / 2>(m, x, num_rows, first, last, y);
    }
    panel_groups<TILE_PANELS>(m, x, num_rows, first, last, y);
    panel_groups<1>(m, x, num_rows, first, last, y);
}

void product(const float* x, int64_t rows, int64_t groups, const Matrix& m, float* y) {
    if (rows == 0) return;
    const int64_t panels = num_panels(m), panels_of_group = panels / groups;
    // pieces: some panels of one group times some rows, small enough to spread, large enough to reuse what was decoded
    const int64_t span = rows == 1 && !is_packed(m) ? ONE_ROW_PANELS : 2;
    const int64_t spans = (panels_of_group + span - 1) / span;
    const int64_t chunk = is_packed(m) ? rows : groups * spans < 2 * num_threads() ? 16 : ROW_BLOCK;
    const int64_t chunks = (rows + chunk - 1) / chunk;
    parallel_for(groups * spans * chunks, rows * m.out * m.in, [&](int64_t task) {
        const int64_t piece = task / chunks, g = piece / spans;
        const int64_t first = g * panels_of_group + (piece % spans) * span;
        const int64_t last = std::min(first + span, (g + 1) * panels_of_group);
        const int64_t r0 = task % chunks * chunk, count = std::min(rows - r0, chunk);
        const float** xs = reinterpret_cast<const float**>(scratch(1, 4 * count));
        float** ys = const_cast<float**>(xs + count);
        for (int64_t i = 0; i < count; i++) {
            xs[i] = x + ((r0 + i) * groups + g) * m.in;
            ys[i] = y + (r0 + i) * m.out;
        }
        multiply(m, xs, count, first, last, ys);
    });
}

}  // namespace abyssal

using namespace abyssal;

extern "C" {

void abyssal_linear(const Linear* a) { product(a->x, a->rows, a->groups, *a->matrix, a->y); }

void abyssal_set_num_threads(int64_t count) { set_num_threads(int(count)); }

// The digest of the sources that this library was built from.
const char* abyssal_sources() {
#if defined(ABYSSAL_SOURCES)
    return ABYSSAL_SOURCES;
#else
    return "unknown";
#endif
}
}

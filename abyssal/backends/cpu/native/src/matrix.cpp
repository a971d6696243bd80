#include "matrix.h"

#include <algorithm>

#include "pool.h"

namespace abyssal {

namespace {

inline float power_of_two(uint8_t byte) {
    uint32_t u = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : uint32_t(byte) << 23;
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
}

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint16_t words16 __attribute__((vector_size(32)));

inline vi widen(bytes16 b) { return __builtin_convertvector(b, vi); }

inline vf e4m3(vi b) {
    // exponent and fraction moved into place; the factor 2^120 mends the bias, also of subnormals
    vf value = from_bits(((b & 0x7f) << 20) | ((b & 0x80) << 24)) * 0x1p120f;
    vi nan = (b & 0x7f) == splati(0x7f);
    return from_bits((bits(value) & ~nan) | (splati(0x7fc00000) & nan));
}

// 16 values of one row from column k on.
inline vf decode16(const Segment& s, int64_t width, int64_t row, int64_t k) {
    switch (s.format) {
        case FP8_TILES: {
            bytes16 b;
            std::memcpy(&b, s.data + row * width + k, 16);
            return e4m3(widen(b)) * power_of_two(s.scale[(row / 32) * (width / 32) + k / 32]);
        }
        case FP4_ROWS: {
            uint8_t packed[8];
            std::memcpy(packed, s.data + (row * width + k) / 2, 8);
            bytes16 b;
            for (int i = 0; i < 8; i++) {
                b[2 * i] = packed[i] & 15;
                b[2 * i + 1] = packed[i] >> 4;
            }
            vi code = widen(b), magnitude = code & 7;
            // e2m1: two exponent bits and one of fraction, shifted into a float of the same value times 2^-126
            vf value = from_bits((magnitude << 22) | ((code & 8) << 28)) * 0x1p126f;
            return value * power_of_two(s.scale[row * (width / 32) + k / 32]);
        }
        case BF16: {
            words16 w;
            std::memcpy(&w, s.data + (row * width + k) * 2, 32);
            return from_bits(__builtin_convertvector(w, vi) << 16);
        }
        default:
            return load(reinterpret_cast<const float*>(s.data + (row * width + k) * 4));
    }
}

// 16 x 16 transpose: four rounds of exchanging between registers 8, 4, 2, 1 apart.
inline void transpose(vf* t) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    auto exchange = [&](int d, auto swap) {
        vi high = (lane & d) != 0;
        for (int i = 0; i < LANES; i++) {
            if (i & d) continue;
            vf a = t[i], b = t[i + d];
            t[i] = high ? swap(b) : a;
            t[i + d] = high ? b : swap(a);
        }
    };
    exchange(8, swap8);
    exchange(4, swap4);
    exchange(2, swap2);
    exchange(1, swap1);
}

template <int R, int P>
inline void micro(const float* const* x, const float* const* w, int64_t k0, int64_t k1, vf (&acc)[R][P]) {
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) acc[r][p] = vf{};
    for (int64_t k = k0; k < k1; k++) {
        vf b[P];
        for (int p = 0; p < P; p++) b[p] = load(w[p] + (k - k0) * LANES);
        for (int r = 0; r < R; r++) {
            vf a = splat(x[r][k]);
            for (int p = 0; p < P; p++) acc[r][p] += a * b[p];
        }
    }
}

inline void add_to(float* y, vf value, int64_t valid, bool first) {
    if (valid >= LANES) {
        store(y, first ? value : load(y) + value);
        return;
    }
    for (int64_t i = 0; i < valid; i++) y[i] = first ? value[i] : y[i] + value[i];
}

template <int R, int P>
inline void tile(const Matrix& m, const float* const* x, const float* const* w, int64_t k0, int64_t k1, int64_t panel,
                 float* const* y, int64_t base) {
    vf acc[R][P];
    micro<R, P>(x, w, k0, k1, acc);
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) {
            int64_t column = (panel + p) * LANES;
            add_to(y[r] + column - base * LANES, acc[r][p], m.out - column, k0 == 0);
        }
}

// Tiles by the number of vector registers: 32 of 16 lanes, or 16 of 8.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8, TILE_PANELS = 2, ONE_ROW_PANELS = 8;
#else
constexpr int TILE_ROWS = 4, TILE_PANELS = 1, ONE_ROW_PANELS = 4;
#endif

template <int P>
void rows_of_panels(const Matrix& m, const float* const* x, int64_t num_rows, const float* const* w, int64_t k0,
                    int64_t k1, int64_t panel, float* const* y, int64_t base) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= num_rows; r += TILE_ROWS) tile<TILE_ROWS, P>(m, x + r, w, k0, k1, panel, y + r, base);
    if (num_rows - r >= 4 && TILE_ROWS > 4) {
        tile<4, P>(m, x + r, w, k0, k1, panel, y + r, base);
        r += 4;
    }
    if (num_rows - r >= 2) {
        tile<2, P>(m, x + r, w, k0, k1, panel, y + r, base);
        r += 2;
    }
    if (num_rows - r >= 1) tile<1, P>(m, x + r, w, k0, k1, panel, y + r, base);
}

struct PanelBlock {
    const float* w[8];
};

// Pointers to the inputs k0 .. k1 - 1 of `count` panels, decoded into scratch if need be.
inline PanelBlock panel_block(const Matrix& m, int64_t panel, int count, int64_t k0, int64_t k1) {
    PanelBlock block;
    if (m.panels != nullptr) {
        for (int p = 0; p < count; p++) block.w[p] = m.panels + ((panel + p) * m.in + k0) * LANES;
        return block;
    }
    float* buffer = scratch(0, count * K_BLOCK * LANES);
    for (int p = 0; p < count; p++) {
        decode_panel(m, (panel + p) * LANES, k0, k1, buffer + p * K_BLOCK * LANES);
        block.w[p] = buffer + p * K_BLOCK * LANES;
    }
    return block;
}

template <int P>
void panel_group(const Matrix& m, const float* const* x, int64_t num_rows, int64_t panel, float* const* y, int64_t base) {
    for (int64_t k0 = 0; k0 < m.in; k0 += K_BLOCK) {
        int64_t k1 = std::min(k0 + K_BLOCK, m.in);
        PanelBlock block = panel_block(m, panel, P, k0, k1);
        rows_of_panels<P>(m, x, num_rows, block.w, k0, k1, panel, y, base);
    }
}

template <int P>
void one_row(const Matrix& m, const float* const* x, int64_t panel, float* const* y, int64_t base) {
    for (int64_t k0 = 0; k0 < m.in; k0 += K_BLOCK) {
        int64_t k1 = std::min(k0 + K_BLOCK, m.in);
        PanelBlock block = panel_block(m, panel, P, k0, k1);
        tile<1, P>(m, x, block.w, k0, k1, panel, y, base);
    }
}

}  // namespace

void decode_panel(const Matrix& m, int64_t row, int64_t k0, int64_t k1, float* out) {
    const Segment* s = m.segments;
    while (row >= s->rows) row -= (s++)->rows;
    int64_t rows = std::min<int64_t>(LANES, s->rows - row);
    for (int64_t k = k0; k < k1; k += LANES) {
        vf t[LANES];
        for (int64_t i = 0; i < LANES; i++) t[i] = i < rows ? decode16(*s, m.in, row + i, k) : vf{};
        transpose(t);
        for (int i = 0; i < LANES; i++) store(out + (k - k0 + i) * LANES, t[i]);
    }
}

void multiply(const Matrix& m, const float* const* x, int64_t num_rows, int64_t first, int64_t last, float* const* y,
              int64_t base) {
    int64_t panel = first;
    if (num_rows == 1) {
        for (; panel + ONE_ROW_PANELS <= last; panel += ONE_ROW_PANELS) one_row<ONE_ROW_PANELS>(m, x, panel, y, base);
        if (ONE_ROW_PANELS > 4 && panel + 4 <= last) {
            one_row<4>(m, x, panel, y, base);
            panel += 4;
        }
        for (; panel + 2 <= last; panel += 2) one_row<2>(m, x, panel, y, base);
        if (panel < last) one_row<1>(m, x, panel, y, base);
        return;
    }
    for (; panel + TILE_PANELS <= last; panel += TILE_PANELS) panel_group<TILE_PANELS>(m, x, num_rows, panel, y, base);
    for (; panel < last; panel++) panel_group<1>(m, x, num_rows, panel, y, base);
}

}  // namespace abyssal

using namespace abyssal;

extern "C" {

void abyssal_decode_panels(const Matrix* m, float* out) {
    parallel_for(num_panels(*m), m->out * m->in, [&](int64_t p) {
        decode_panel(*m, p * LANES, 0, m->in, out + p * m->in * LANES);
    });
}

// x [rows, groups, in] with row-block g of m for group g -> y [rows, m.out]; one group is a plain product.
void abyssal_linear(const float* x, int64_t rows, int64_t groups, const Matrix* m, float* y) {
    if (rows == 0) return;
    const int64_t panels = num_panels(*m), panels_of_group = panels / groups;
    // pieces: some panels of one group times some rows, small enough to spread, large enough to reuse a decoded panel
    const int64_t span = rows == 1 ? 8 : 2;
    const int64_t spans = (panels_of_group + span - 1) / span;
    const int64_t row_chunk = m->panels == nullptr ? rows : groups * spans < 2 * num_threads() ? 16 : 64;
    const int64_t row_chunks = (rows + row_chunk - 1) / row_chunk;
    parallel_for(groups * spans * row_chunks, rows * m->out * m->in, [&](int64_t task) {
        const int64_t chunk = task % row_chunks, piece = task / row_chunks, g = piece / spans;
        const int64_t first = g * panels_of_group + (piece % spans) * span;
        const int64_t last = std::min(first + span, (g + 1) * panels_of_group);
        const int64_t r0 = chunk * row_chunk, r1 = std::min(rows, r0 + row_chunk);
        const float* xs[64];
        float* ys[64];
        for (int64_t r = r0; r < r1; r += 64) {
            const int64_t n = std::min<int64_t>(64, r1 - r);
            for (int64_t i = 0; i < n; i++) {
                xs[i] = x + ((r + i) * groups + g) * m->in;
                ys[i] = y + (r + i) * m->out;
            }
            multiply(*m, xs, n, first, last, ys);
        }
    });
}

void abyssal_set_num_threads(int64_t n) { set_num_threads(int(n)); }

// The digest of the sources that this library was built from.
const char* abyssal_sources() {
#if defined(ABYSSAL_SOURCES)
    return ABYSSAL_SOURCES;
#else
    return "unknown";
#endif
}
}

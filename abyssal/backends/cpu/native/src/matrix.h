// Matrices as they are held, and products of rows with them.
#pragma once

#include <cstdint>

#include "vec.h"

namespace abyssal {

enum Format : int32_t { FP8_TILES = 0, FP4_ROWS = 1, BF16 = 2, F32 = 3 };

// Stored rows of a matrix, possibly a map of a file and not aligned. All but the last segment have a multiple of 16 rows.
struct Segment {
    int64_t rows;
    int64_t format;
    const uint8_t* data;
    const uint8_t* scale;
};

// [out, in]. Either `panels` holds float32 [out / 16, in, 16] (the last panel padded with what is never looked at), or the segments are decoded
// at each use.
struct Matrix {
    int64_t out;
    int64_t in;
    const float* panels;
    const Segment* segments;
    int64_t num_segments;
};

// Inputs whose products are summed before they join the total. Short sums keep the error of long rows small (it grows with the
// length of a chain), and joining is a few percent of the work.
constexpr int64_t K_BLOCK = 48;

// Rows that share a tile's weights while those are in the nearest cache.
constexpr int64_t ROW_BLOCK = 64;

inline int64_t num_panels(const Matrix& m) { return (m.out + LANES - 1) / LANES; }
inline bool is_packed(const Matrix& m) { return m.panels == nullptr; }

// float32 [k1 - k0, 16]: 16 output rows from `row` on, inputs k0 .. k1 - 1 (k0 a multiple of 32, k1 of 16).
void decode_panel(const Matrix& m, int64_t row, int64_t k0, int64_t k1, float* out);

// Asks for the bytes that `decode_panel` will read: sixteen rows apart are too many streams for processors to foresee.
void prefetch_panel(const Matrix& m, int64_t row, int64_t k0, int64_t k1);

// Products of `num_rows` rows x[r] [in] with output panels first .. last - 1, into y[r][16 * panel]. Runs on the calling
// thread. Rows of y are written up to the matrix's `out`.
void multiply(const Matrix& m, const float* const* x, int64_t num_rows, int64_t first, int64_t last, float* const* y);

// x [rows, groups, in] with row-block g of m for group g, into y [rows, out]; one group is a plain product. Runs on all threads.
void product(const float* x, int64_t rows, int64_t groups, const Matrix& m, float* y);

}  // namespace abyssal

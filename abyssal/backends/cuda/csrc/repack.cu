// Stored matrices to the chunks of formats.cuh. Runs once for each matrix, when it is loaded.
#include <cstdint>
#include <cuda_bf16.h>

#include "formats.cuh"
#include "launch.cuh"

namespace abyssal {

// A stored matrix [rows, columns], or two of the same shape whose rows are paired: gate channels to rows g, up projections of
// the same channels to rows g + 8.
struct Source {
  const uint8_t* data[2];
  const uint8_t* scale[2];
  int rows, columns;
  bool paired;
};

struct Row {
  int matrix, index;
};

// Which row lies at `i` of 16 in a warp of a chunk.
__device__ Row source_row(const Source& source, int chunk, int warp, int i) {
  const int g = i & 7, lower = i >> 3;
  if (source.paired) return {lower, chunk * 32 + warp * 8 + g};
  return {0, chunk * CHUNK_ROWS + warp * 16 + channel_of(g) + 2 * lower};
}

// Byte (row, column / per_byte), zero outside.
__device__ uint32_t stored_byte(const Source& source, Row row, int column, int per_byte) {
  if (row.index >= source.rows || column >= source.columns) return 0;
  return source.data[row.matrix][(static_cast<size_t>(row.index) * source.columns + column) / per_byte];
}

__device__ uint32_t fp4_code(uint32_t nibble, int pair) {
  const int code[4] = {6, 3, 0, 9}, sign[4] = {15, 12, 14, 13};
  return (nibble & 7) << code[pair] | (nibble >> 3) << sign[pair];
}

__device__ uint32_t fp4_word(const Source& source, Row upper, Row lower, int column) {
  uint32_t word = 0;
  for (int pair = 0; pair < 4; pair++) {
    const uint32_t byte = stored_byte(source, pair & 1 ? lower : upper, column + (pair >> 1) * 8, 2);
    word |= fp4_code(byte & 15, pair) | fp4_code(byte >> 4, pair) << 16;
  }
  return word;
}

// `high` is columns 2c + 8, the second word of a step.
__device__ uint32_t fp8_word(const Source& source, Row upper, Row lower, int column) {
  uint32_t word = 0;
  for (int odd = 0; odd < 2; odd++) {
    const uint32_t a = stored_byte(source, upper, column + odd, 1), b = stored_byte(source, lower, column + odd, 1);
    const uint32_t first = (a & 0x80) << 8 | (a & 0x7F) << 4;
    const uint32_t second = (b & 0x80) << 4 | (b & 0x70) << 8 | (b & 0x0F);
    word |= (first | second) << 16 * odd;
  }
  return word;
}

__device__ uint8_t scale_byte(const Source& source, Row row, int group, int rows_per_scale, int shift, int* too_large) {
  const int groups = source.columns / 32;
  if (row.index >= source.rows || group >= groups) return 0;
  const int byte = source.scale[row.matrix][static_cast<size_t>(row.index / rows_per_scale) * groups + group] + shift;
  if (byte > 254) *too_large = 1;
  return static_cast<uint8_t>(byte);
}

__global__ void repack_fp4(Source source, uint8_t* out, int* too_large) {
  const int step = blockIdx.x, chunk = blockIdx.y, thread = threadIdx.x;
  const int warp = thread >> 5, g = (thread & 31) >> 2, c = thread & 3;
  const Row upper = source_row(source, chunk, warp, g), lower = source_row(source, chunk, warp, g + 8);
  uint8_t* to = out + (static_cast<size_t>(chunk) * gridDim.x + step) * Fp4::CHUNK;
  for (int half = 0; half < 2; half++) {
    uint32_t words[4];
    for (int i = 0; i < 4; i++) words[i] = fp4_word(source, upper, lower, step * CHUNK_COLUMNS + half * 64 + i * 16 + 2 * c);
    *reinterpret_cast<uint4*>(to + half * (Fp4::DATA / 2) + thread * 16) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  // lane c takes scale c of each half: rows g, g, g + 8, g + 8 and columns by 32: 0, 1, 0, 1
  for (int half = 0; half < 2; half++)
    to[Fp4::DATA + (thread >> 2) * 8 + half * 4 + c] =
        scale_byte(source, c < 2 ? upper : lower, step * 4 + half * 2 + (c & 1), 1, Fp4::EXPONENT_SHIFT, too_large);
}

__global__ void repack_fp8(Source source, uint8_t* out, int* too_large) {
  const int step = blockIdx.x, chunk = blockIdx.y, thread = threadIdx.x;
  const int warp = thread >> 5, g = (thread & 31) >> 2, c = thread & 3;
  const Row upper = source_row(source, chunk, warp, g), lower = source_row(source, chunk, warp, g + 8);
  uint8_t* to = out + (static_cast<size_t>(chunk) * gridDim.x + step) * Fp8::CHUNK;
  for (int part = 0; part < 4; part++) {
    uint32_t words[4];
    for (int i = 0; i < 4; i++)
      words[i] = fp8_word(source, upper, lower, step * CHUNK_COLUMNS + part * 32 + (i >> 1) * 16 + (i & 1) * 8 + 2 * c);
    *reinterpret_cast<uint4*>(to + part * (Fp8::DATA / 4) + thread * 16) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (thread & 32 || g) return;
  for (int half = 0; half < 2; half++)
    to[Fp8::DATA + (thread >> 6) * 8 + half * 4 + c] =
        scale_byte(source, c < 2 ? upper : lower, step * 4 + half * 2 + (c & 1), 32, Fp8::EXPONENT_SHIFT, too_large);
}

__device__ uint32_t bf16_pair(const Source& source, Row row, int column) {
  if (row.index >= source.rows || column >= source.columns) return 0;
  const uint16_t* data = reinterpret_cast<const uint16_t*>(source.data[0]) + static_cast<size_t>(row.index) * source.columns + column;
  return data[0] | static_cast<uint32_t>(data[1]) << 16;
}

__global__ void repack_bf16(Source source, uint8_t* out, int*) {
  const int step = blockIdx.x, chunk = blockIdx.y, thread = threadIdx.x;
  const int warp = thread >> 5, g = (thread & 31) >> 2, c = thread & 3;
  const Row upper = source_row(source, chunk, warp, g), lower = source_row(source, chunk, warp, g + 8);
  uint8_t* to = out + (static_cast<size_t>(chunk) * gridDim.x + step) * Bf16::CHUNK;
  for (int i = 0; i < 8; i++) {
    const int column = step * CHUNK_COLUMNS + i * 16 + 2 * c;
    *reinterpret_cast<uint4*>(to + i * (Bf16::DATA / 8) + thread * 16) =
        make_uint4(bf16_pair(source, upper, column), bf16_pair(source, lower, column), bf16_pair(source, upper, column + 8),
                   bf16_pair(source, lower, column + 8));
  }
}

}  // namespace abyssal

// Packs [rows, columns] (with `data1`: two of them, paired) into chunk_rows * steps chunks. Sets *too_large if a scale is above
// 2^65. Formats: 0 FP4 rows, 1 FP8 tiles, 2 bf16.
extern "C" int repack(const void* data0, const void* scale0, const void* data1, const void* scale1, int rows, int columns, int format,
                      void* out, int chunk_rows, int steps, int* too_large, cudaStream_t stream) {
  using namespace abyssal;
  const Source source = {{static_cast<const uint8_t*>(data0), static_cast<const uint8_t*>(data1)},
                         {static_cast<const uint8_t*>(scale0), static_cast<const uint8_t*>(scale1)},
                         rows,
                         columns,
                         data1 != nullptr};
  const dim3 grid(steps, chunk_rows);
  uint8_t* to = static_cast<uint8_t*>(out);
  if (format == 0)
    repack_fp4<<<grid, 128, 0, stream>>>(source, to, too_large);
  else if (format == 1)
    repack_fp8<<<grid, 128, 0, stream>>>(source, to, too_large);
  else
    repack_bf16<<<grid, 128, 0, stream>>>(source, to, too_large);
  return cudaGetLastError();
}

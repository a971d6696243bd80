// How a product is cut into tiles, and the ring of stages through which a tile's operands pass.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <cuda_bf16.h>

#include "formats.cuh"

namespace abyssal {

enum Epilogue : int { STORE_BF16 = 0, STORE_F32 = 1, SWIGLU = 2 };

// Mirrored by `GemmCall` in abyssal/backends/cuda/gemm.py.
struct GemmCall {
  const uint8_t* weight;    // [groups][chunk_rows][steps] chunks
  const __nv_bfloat16* x;   // [x_rows][x_groups][columns]
  void* out;                // row r of x writes out[r * out_stride + group * out_rows + ..], with `tiles` without the group's part
  const int4* tiles;        // (group, first row, rows, 0), or null: every group takes all rows
  const int* num_tiles;     // with `tiles`
  const float* row_weight;  // SWIGLU: a factor for each row of x, or null
  const uint8_t* other_weight;  // with `tiles`: one more matrix of the same size in another format, or null
  int other_first, other_rows;  // the rows of x that take it
  int other_tokens;             // most rows of its tiles
  int max_tiles;                // upper bound of *num_tiles
  int x_rows, x_groups, columns;
  int groups, chunk_rows, steps;
  int out_rows, out_stride;
  int tile_tokens;  // most rows of a tile
  int token_block;  // row tiles go around this many token tiles
  int parts;        // STORE_F32: the columns in this many parts, each stored at out + part * x_rows * out_stride
  int epilogue, rounded, shape;
  float limit;
};

// Chunks `chunk`.. of a group, or of the other matrix, by rows first .. first + tokens - 1 of x, over steps begin .. end - 1.
struct Tile {
  int group, first, tokens, chunk, part, begin, end;
  bool other;
};

__host__ __device__ constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// The least of the widths, given in ascending order, that holds `tokens`.
template <int FIRST, int... REST>
__host__ __device__ constexpr int tile_width(int tokens) {
  if constexpr (sizeof...(REST) == 0)
    return FIRST;
  else
    return tokens <= FIRST ? FIRST : tile_width<REST...>(tokens);
}

// A block of WARPGROUPS consumers, each with PER_GROUP chunks, for tiles of the given widths (in tokens, ascending). A stage has
// room for REGION bytes of weights, if that is more than they need.
template <class W_, int WARPGROUPS_, int PER_GROUP_, int REGION, int... WIDTHS>
struct Shape {
  using W = W_;
  static constexpr int WARPGROUPS = WARPGROUPS_, PER_GROUP = PER_GROUP_, CHUNKS = WARPGROUPS * PER_GROUP;
  static constexpr int WEIGHT_BYTES = round_up(std::max(CHUNKS * W::CHUNK, REGION), 1024);
  static constexpr bool ALONE = WARPGROUPS == 1;
  static constexpr int THREADS = WARPGROUPS * 128 + (ALONE ? 32 : 128);
  static constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 24;  // unless alone
  static constexpr int CONSUMER_REGISTERS = WARPGROUPS == 4 ? 112 : WARPGROUPS == 3 ? 160 : 232;
  static constexpr int MOST = std::max({WIDTHS...});
  static constexpr bool SINGLE = sizeof...(WIDTHS) == 1;
  static constexpr int PER_SM = !ALONE ? 1 : MOST <= 32 ? 4 : 3;  // at most
  static constexpr int SCRATCH = 5 * MOST;  // floats of a warpgroup
  static constexpr int FIXED_BYTES = 1024 + 1024 + round_up(WARPGROUPS * SCRATCH * 4, 1024);  // alignment, barriers, scratch
  static constexpr int MOST_STAGES = 32;
  // Of decoded operands. Four warpgroups keep the multiplier busy among themselves; two must overlap their own work.
  static constexpr int BUFFERS = WARPGROUPS == 4 ? 1 : 2;

  static __host__ __device__ constexpr int width(int tokens) { return tile_width<WIDTHS...>(tokens); }
  static __host__ __device__ constexpr int token_bytes(int width) { return width * CHUNK_COLUMNS * 2; }

  // Calls f with the width of tiles of this many tokens as a constant.
  template <class F>
  static __device__ __forceinline__ void with_width(int tokens, F&& f) {
    const int n = width(tokens);
    ((n == WIDTHS ? f(std::integral_constant<int, WIDTHS>()) : void()), ...);
  }
};

// Position in the ring. Barriers lie at the start of shared memory: those of full stages, then those of empty ones. A stage is
// the chunks of one step, then the tokens' columns as two boxes of 64.
struct Ring {
  uint32_t base, stages, bytes, num;
  uint32_t stage, phase;

  __device__ __forceinline__ void next() {
    if (++stage == num) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ uint32_t full_barrier() const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t empty_barrier() const { return base + 512 + 8 * stage; }
  __device__ __forceinline__ uint32_t address() const { return stages + stage * bytes; }
};

__device__ __forceinline__ int count_token_tiles(const GemmCall& call) {
  if (call.tiles) return *call.num_tiles;
  return call.groups * ((call.x_rows + call.tile_tokens - 1) / call.tile_tokens);
}

template <class S>
__host__ __device__ inline int count_row_tiles(const GemmCall& call) {
  return (call.chunk_rows + S::CHUNKS - 1) / S::CHUNKS;
}

__host__ __device__ inline int count_other_token_tiles(const GemmCall& call) {
  return call.other_weight ? (call.other_rows + call.other_tokens - 1) / call.other_tokens : 0;
}

// S: the shape of tiles; O: that of the other matrix's tiles, which come first.
template <class S, class O>
__device__ __forceinline__ int count_tiles(const GemmCall& call) {
  return count_token_tiles(call) * count_row_tiles<S>(call) * call.parts + count_other_token_tiles(call) * count_row_tiles<O>(call);
}

template <class O>
__device__ __forceinline__ Tile find_other_tile(const GemmCall& call, int index, int token_tiles) {
  const int size = round_up((call.other_rows + token_tiles - 1) / token_tiles, 8), first = index % token_tiles * size;
  return {0, call.other_first + first, min(size, call.other_rows - first), index / token_tiles * O::CHUNKS, 0, 0, call.steps, true};
}

template <class S, class O>
__device__ __forceinline__ Tile find_tile(const GemmCall& call, int index) {
  const int other = count_other_token_tiles(call), others = other * count_row_tiles<O>(call);
  if (index < others) return find_other_tile<O>(call, index, other);
  index -= others;
  const int token_tiles = count_token_tiles(call), row_tiles = count_row_tiles<S>(call);
  Tile tile;
  tile.other = false;
  tile.part = index % call.parts;
  index /= call.parts;
  tile.begin = tile.part * call.steps / call.parts;
  tile.end = (tile.part + 1) * call.steps / call.parts;
  const int first = index / (call.token_block * row_tiles) * call.token_block;
  const int size = min(call.token_block, token_tiles - first);
  const int inside = index - first * row_tiles;
  const int t = first + inside % size;
  tile.chunk = inside / size * S::CHUNKS;
  if (call.tiles) {
    const int4 entry = call.tiles[t];
    tile.group = entry.x;
    tile.first = entry.y;
    tile.tokens = entry.z;
  } else {
    const int per_group = token_tiles / call.groups;
    tile.group = t / per_group;
    tile.first = t % per_group * call.tile_tokens;
    tile.tokens = min(call.tile_tokens, call.x_rows - tile.first);
  }
  return tile;
}

}  // namespace abyssal

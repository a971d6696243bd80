// The warp that fills the ring. Each lane copies one chunk of weights and one box of tokens, so that a stage takes few
// instructions: it shares its issue slots with warps that are busy decoding.
#pragma once
#include "ptx.cuh"
#include "tiles.cuh"

namespace abyssal {

constexpr int BOX_ROWS = 16;

template <class S, class O>
struct Producer {
  const GemmCall& call;
  const CUtensorMap& narrow;  // boxes of 8 tokens
  const CUtensorMap& wide;    // boxes of BOX_ROWS tokens
  int lane;

  // What this lane copies in every step of a tile.
  struct Share {
    const uint8_t* weight;
    const CUtensorMap* map;
    uint32_t chunk_bytes, weight_to, token_to, bytes;
    int column, group, row;
    bool has_weight, has_tokens;
  };

  __device__ __forceinline__ Share share_of(const Tile& tile) const {
    const int chunks = min(tile.other ? O::CHUNKS : S::CHUNKS, call.chunk_rows - tile.chunk), width = S::width(tile.tokens);
    const int half = lane & 1, row = (lane >> 1) * BOX_ROWS;
    const uint8_t* matrix = tile.other ? call.other_weight : call.weight;
    Share share;
    share.chunk_bytes = tile.other ? O::W::CHUNK : S::W::CHUNK;
    share.has_weight = lane < chunks;
    share.weight = matrix + (static_cast<size_t>(tile.group) * call.chunk_rows + tile.chunk + lane) * call.steps * share.chunk_bytes;
    share.weight_to = lane * share.chunk_bytes;
    share.has_tokens = row < width;
    share.map = row + BOX_ROWS <= width ? &wide : &narrow;
    share.token_to = S::WEIGHT_BYTES + half * width * 128 + row * 128;
    share.column = half * 64;
    share.group = call.x_groups > 1 ? tile.group : 0;
    share.row = tile.first + row;
    share.bytes = chunks * share.chunk_bytes + S::token_bytes(width);
    return share;
  }

  __device__ __forceinline__ void load_weights(const Ring& ring, const Share& share, int step) const {
    if (lane == 0) barrier_expect(ring.full_barrier(), share.bytes);
    __syncwarp();
    if (share.has_weight)
      copy_bulk(ring.address() + share.weight_to, share.weight + static_cast<size_t>(step) * share.chunk_bytes, share.chunk_bytes,
                ring.full_barrier());
  }

  __device__ __forceinline__ void load_tokens(const Ring& ring, const Share& share, int step) const {
    if (share.has_tokens)
      copy_box(ring.address() + share.token_to, share.map, share.column + step * CHUNK_COLUMNS, share.group, share.row,
               ring.full_barrier());
  }

  // Weights do not depend on the previous grid; tokens do. (Nor do `tiles`: see grid_release.)
  __device__ __forceinline__ int load_first(Ring& ring, const Share& share, const Tile& tile) const {
    const int end = min(tile.end, tile.begin + static_cast<int>(ring.num));
    Ring ahead = ring;
    for (int step = tile.begin; step < end; step++, ahead.next()) load_weights(ahead, share, step);
    grid_wait();
    grid_release();
    for (int step = tile.begin; step < end; step++, ring.next()) load_tokens(ring, share, step);
    return end;
  }

  __device__ void run(Ring ring) const {
    const int total = count_tiles<S, O>(call);
    bool started = false;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      const Tile tile = find_tile<S, O>(call, index);
      const Share share = share_of(tile);
      int step = tile.begin;
      if (!started) step = load_first(ring, share, tile);
      started = true;
      for (; step < tile.end; step++, ring.next()) {
        barrier_wait(ring.empty_barrier(), ring.phase ^ 1);
        load_weights(ring, share, step);
        load_tokens(ring, share, step);
      }
    }
    if (!started) {
      grid_wait();
      grid_release();
    }
  }
};

}  // namespace abyssal

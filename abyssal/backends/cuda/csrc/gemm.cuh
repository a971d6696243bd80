// Products of packed weights with rows of bf16 activations, grouped and persistent.
//
// A tile is WARPGROUPS * PER_GROUP chunks of 64 weight rows by up to 160 activation rows. One thread streams chunks of packed
// weights and boxes of activations through a ring in shared memory; each warpgroup decodes its chunks into registers and
// multiplies. The ring runs on across tiles, so memory stays busy during epilogues.
//
// Every output is one chain of wgmma steps of 16 columns in ascending order, whatever the tile, the number of rows or the shape
// of the launch: a row's result has the same bits in any batch.
#pragma once
#include <algorithm>
#include <type_traits>
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "formats.cuh"
#include "launch.cuh"
#include "ptx.cuh"
#include "round.cuh"
#include "wgmma.cuh"

namespace abyssal {

constexpr int BOX_ROWS = 16;

enum Epilogue : int { STORE_BF16 = 0, STORE_F32 = 1, SWIGLU = 2 };

// Mirrored by `GemmCall` in abyssal/backends/cuda/gemm.py.
struct GemmCall {
  const uint8_t* weight;      // [groups][chunk_rows][steps] chunks
  const __nv_bfloat16* x;     // [x_rows][x_groups][columns]
  void* out;                  // row r of x writes out[r * out_stride + group * out_rows + ..]
  const int4* tiles;          // (group, first row, rows, 0), or null: every group takes all rows
  const int* num_tiles;       // with `tiles`
  const float* row_weight;    // SWIGLU: a factor for each row of x, or null
  int max_tiles;              // upper bound of *num_tiles
  int x_rows, x_groups, columns;
  int groups, chunk_rows, steps;
  int out_rows, out_stride;
  int tile_tokens;            // most rows of a tile
  int token_block;            // row tiles go around this many token tiles
  int parts;                  // STORE_F32: the columns in this many parts, each stored at out + part * x_rows * out_stride
  int epilogue, rounded, read_once, shape;
  float limit;
};

struct Tile {
  int group, first, tokens, chunk, part, begin, end;
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

template <class W_, int WARPGROUPS_, int PER_GROUP_, int... WIDTHS>
struct Shape {
  using W = W_;
  static constexpr int WARPGROUPS = WARPGROUPS_, PER_GROUP = PER_GROUP_;
  static constexpr int CHUNKS = WARPGROUPS * PER_GROUP;
  static constexpr int WEIGHT_BYTES = round_up(CHUNKS * W::CHUNK, 1024);
  static constexpr bool ALONE = WARPGROUPS == 1;
  static constexpr int THREADS = WARPGROUPS * 128 + (ALONE ? 32 : 128);
  static constexpr int PER_SM = ALONE ? 3 : 1;
  static constexpr int MOST = std::max({WIDTHS...});
  static constexpr int FIXED_BYTES = 1024 + 1024 + round_up(WARPGROUPS * 4 * MOST * 4, 1024);  // alignment, barriers, peaks
  static constexpr int SHARED_LIMIT = (ALONE ? 75 : 227) * 1024;
  static constexpr int MOST_STAGES = 32;

  static __host__ __device__ constexpr int width(int tokens) { return tile_width<WIDTHS...>(tokens); }

  // Whichever code is for tiles of this many tokens.
  template <class F>
  static __device__ __forceinline__ void with_width(int tokens, F&& f) {
    const int n = width(tokens);
    ((n == WIDTHS ? f(std::integral_constant<int, WIDTHS>()) : void()), ...);
  }
};

// Position in the ring of stages. Barriers lie at the start of shared memory: those of full stages, then those of empty ones.
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
__device__ __forceinline__ int count_row_tiles(const GemmCall& call) {
  return (call.chunk_rows + S::CHUNKS - 1) / S::CHUNKS;
}

template <class S>
__device__ __forceinline__ int count_tiles(const GemmCall& call) {
  return count_token_tiles(call) * count_row_tiles<S>(call) * call.parts;
}

template <class S>
__device__ __forceinline__ Tile find_tile(const GemmCall& call, int index) {
  const int token_tiles = count_token_tiles(call), row_tiles = count_row_tiles<S>(call);
  Tile tile;
  const int part = index % call.parts;
  index /= call.parts;
  tile.part = part;
  tile.begin = part * call.steps / call.parts;
  tile.end = (part + 1) * call.steps / call.parts;
  const int block = index / (call.token_block * row_tiles);
  const int first = block * call.token_block;
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

// ---- producer: one thread -------------------------------------------------------------------------------------------------

template <class S>
struct Producer {
  using W = typename S::W;
  const GemmCall& call;
  const CUtensorMap& narrow;
  const CUtensorMap& wide;
  uint64_t policy;

  __device__ __forceinline__ void load_weights(const Ring& ring, const Tile& tile, int step) const {
    const int chunks = min(S::CHUNKS, call.chunk_rows - tile.chunk);
    const uint32_t bytes = chunks * W::CHUNK + S::width(tile.tokens) * CHUNK_COLUMNS * 2;
    barrier_expect(ring.full_barrier(), bytes);
    const uint8_t* src = call.weight + (static_cast<size_t>(tile.group) * call.chunk_rows + tile.chunk) * call.steps * W::CHUNK +
                         static_cast<size_t>(step) * W::CHUNK;
    const uint32_t dst = ring.address();
    for (int i = 0; i < chunks; i++) {
      const uint8_t* from = src + static_cast<size_t>(i) * call.steps * W::CHUNK;
      if (call.read_once)
        copy_bulk_once(dst + i * W::CHUNK, from, W::CHUNK, ring.full_barrier(), policy);
      else
        copy_bulk(dst + i * W::CHUNK, from, W::CHUNK, ring.full_barrier());
    }
  }

  __device__ __forceinline__ void load_tokens(const Ring& ring, const Tile& tile, int step) const {
    const int width = S::width(tile.tokens);
    const int group = call.x_groups > 1 ? tile.group : 0;
    uint32_t dst = ring.address() + S::WEIGHT_BYTES;
    for (int half = 0; half < 2; half++) {
      const int column = step * CHUNK_COLUMNS + half * 64;
      if (width == 8) {
        copy_box(dst, &narrow, column, group, tile.first, ring.full_barrier());
        dst += 1024;
        continue;
      }
      for (int row = 0; row < width; row += BOX_ROWS, dst += BOX_ROWS * 128)
        copy_box(dst, &wide, column, group, tile.first + row, ring.full_barrier());
    }
  }

  __device__ void run(Ring ring) const {
    const int total = count_tiles<S>(call);
    bool waited = false;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      const Tile tile = find_tile<S>(call, index);
      const int begin = tile.begin, end = tile.end;
      int step = begin;
      if (!waited) {
        // weights do not depend on the previous grid; activations do
        Ring ahead = ring;
        for (; step < min(end, begin + static_cast<int>(ring.num)); step++, ahead.next()) load_weights(ahead, tile, step);
        grid_wait();
        grid_release();
        waited = true;
        for (int s = begin; s < step; s++, ring.next()) load_tokens(ring, tile, s);
      }
      for (; step < end; step++, ring.next()) {
        barrier_wait(ring.empty_barrier(), ring.phase ^ 1);
        load_weights(ring, tile, step);
        load_tokens(ring, tile, step);
      }
    }
    if (!waited) {
      grid_wait();
      grid_release();
    }
  }
};

// ---- consumers: warpgroups ------------------------------------------------------------------------------------------------

template <class S, int N>
__device__ __forceinline__ void accumulate(float (&acc)[S::PER_GROUP][N / 2], Ring& ring, int steps, int warpgroup, int thread) {
  using W = typename S::W;
  constexpr int PER_GROUP = S::PER_GROUP;
#pragma unroll
  for (int m = 0; m < PER_GROUP; m++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[m][i] = 0.0f;
  const bool leader = (thread & 31) == 0;
  uint32_t a[2][4][4];
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    barrier_wait(ring.full_barrier(), ring.phase);
    const uint32_t weights = ring.address() + warpgroup * PER_GROUP * W::CHUNK;
    const uint64_t tokens = wgmma_operand(ring.address() + S::WEIGHT_BYTES);
    typename W::Raw raw = W::load(weights, 0, thread);
#pragma unroll
    for (int q = 0; q < 2 * PER_GROUP; q++) {
      const int half = q / PER_GROUP, m = q % PER_GROUP, next = q + 1;
      W::decode(raw, a[q & 1]);
      if (next < 2 * PER_GROUP) raw = W::load(weights + next % PER_GROUP * W::CHUNK, next / PER_GROUP, thread);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++) Wgmma<N>::multiply(acc[m], a[q & 1][i], tokens + half * (N * 128 / 16) + 2 * i);
      wgmma_commit();
      if (q + 1 < 2 * PER_GROUP)
        wgmma_wait<1>();
      else
        wgmma_wait<0>();
    }
    if (leader) barrier_arrive(ring.empty_barrier());
    ring.next();
  }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 r = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&r);
}

template <int N>
__device__ __forceinline__ void store_bf16(const GemmCall& call, const Tile& tile, const float (&acc)[N / 2], float undo, int chunk, int thread) {
  const int lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int channel = chunk * CHUNK_ROWS + (thread >> 5) * 16 + 4 * c;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(call.out) + static_cast<size_t>(tile.group) * (call.tiles ? 0 : call.out_rows) + channel;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    uint2 value;
    value.x = transpose_8x8(pack_bf16(acc[4 * j] * undo, acc[4 * j + 1] * undo));
    value.y = transpose_8x8(pack_bf16(acc[4 * j + 2] * undo, acc[4 * j + 3] * undo));
    const int token = 8 * j + g;
    if (token < tile.tokens && channel < call.out_rows)
      *reinterpret_cast<uint2*>(out + static_cast<size_t>(tile.first + token) * call.out_stride) = value;
  }
}

template <int N>
__device__ __forceinline__ void store_f32(const GemmCall& call, const Tile& tile, const float (&acc)[N / 2], float undo, int chunk, int thread) {
  const int lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int channel = chunk * CHUNK_ROWS + (thread >> 5) * 16 + channel_of(g);
  float* out = static_cast<float*>(call.out) + static_cast<size_t>(tile.part) * call.x_rows * call.out_stride +
               static_cast<size_t>(tile.group) * (call.tiles ? 0 : call.out_rows) + channel;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 8 * j + 2 * c + (i & 1), offset = i < 2 ? 0 : 2;
      if (token < tile.tokens && channel + offset < call.out_rows)
        out[static_cast<size_t>(tile.first + token) * call.out_stride + offset] = acc[4 * j + i] * undo;
    }
  }
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.0f + __expf(-gate)) * up;
}

// Rows g hold gate channels, rows g + 8 the up projections of the same: a chunk makes 32 neighbouring channels, one scale group.
template <int N>
__device__ __forceinline__ void store_swiglu(const GemmCall& call, const Tile& tile, float (&acc)[N / 2], float undo, int chunk, int thread,
                                             float* peaks, int barrier) {
  const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, c = lane & 3;
  float* own = peaks + warp * N;
  if (call.rounded) sync_threads(barrier, 128);  // the peaks of the chunk before have been read
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = 8 * j + 2 * c + i;
      const float factor = call.row_weight && token < tile.tokens ? call.row_weight[tile.first + token] : 1.0f;
      const float t = swiglu(acc[4 * j + i] * undo, acc[4 * j + 2 + i] * undo, call.limit) * factor;
      acc[4 * j + i] = t;
      if (call.rounded) {
        float peak = fabsf(t);
        for (int other = 4; other < 32; other *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, other));
        if (g == 0) own[token] = peak;
      }
    }
  }
  if (call.rounded) sync_threads(barrier, 128);
  const int channel = chunk * 32 + warp * 8 + 2 * c;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(call.out) + channel;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float t[2] = {acc[4 * j], acc[4 * j + 1]};
    if (call.rounded) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float* peak = peaks + 8 * j + 2 * c + i;
        t[i] = round_fp8(t[i], fmaxf(fmaxf(peak[0], peak[N]), fmaxf(peak[2 * N], peak[3 * N])));
      }
    }
    const uint32_t value = transpose_8x8(pack_bf16(t[0], t[1]));
    const int token = 8 * j + g;
    if (token < tile.tokens && channel < call.out_rows)
      *reinterpret_cast<uint32_t*>(out + static_cast<size_t>(tile.first + token) * call.out_stride) = value;
  }
}

template <class S, int N>
__device__ __forceinline__ void consume_tile(const GemmCall& call, int index, int steps, Ring& ring, int warpgroup, int thread, float* peaks) {
  constexpr int PER_GROUP = S::PER_GROUP;
  constexpr float UNDO = S::W::UNDO;
  float acc[PER_GROUP][N / 2];
  accumulate<S, N>(acc, ring, steps, warpgroup, thread);
  const Tile tile = find_tile<S>(call, index);  // found again rather than kept in registers
#pragma unroll
  for (int m = 0; m < PER_GROUP; m++) {
    const int chunk = tile.chunk + warpgroup * PER_GROUP + m;
    if (chunk >= call.chunk_rows) break;
    if (call.epilogue == STORE_BF16)
      store_bf16<N>(call, tile, acc[m], UNDO, chunk, thread);
    else if (call.epilogue == STORE_F32)
      store_f32<N>(call, tile, acc[m], UNDO, chunk, thread);
    else
      store_swiglu<N>(call, tile, acc[m], UNDO, chunk, thread, peaks, 1 + warpgroup);
  }
}

template <class S>
__device__ __forceinline__ void consume(const GemmCall& call, Ring ring, int warpgroup, int thread, float* peaks) {
  const int total = count_tiles<S>(call);
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Tile tile = find_tile<S>(call, index);
    S::with_width(tile.tokens, [&](auto n) {
      consume_tile<S, decltype(n)::value>(call, index, tile.end - tile.begin, ring, warpgroup, thread, peaks);
    });
  }
}

template <class S>
__global__ void __launch_bounds__(S::THREADS, S::PER_SM)
    gemm_kernel(const __grid_constant__ GemmCall call, const __grid_constant__ CUtensorMap narrow, const __grid_constant__ CUtensorMap wide,
                const int num_stages, const uint32_t stage_bytes) {
  constexpr int WARPGROUPS = S::WARPGROUPS;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  float* peaks = reinterpret_cast<float*>(shared + (base - shared_address(shared)) + 1024);
  Ring ring{base, base + S::FIXED_BYTES - 1024, stage_bytes, static_cast<uint32_t>(num_stages), 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < num_stages; i++) {
      barrier_init(base + 8 * i, 1);
      barrier_init(base + 512 + 8 * i, WARPGROUPS * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == WARPGROUPS) {
    if constexpr (!S::ALONE) registers_drop<WARPGROUPS == 4 ? 24 : 40>();
    if (threadIdx.x == WARPGROUPS * 128) Producer<S>{call, narrow, wide, evict_first_policy()}.run(ring);
  } else {
    if constexpr (!S::ALONE) registers_raise<WARPGROUPS == 4 ? 112 : 232>();
    consume<S>(call, ring, warpgroup, threadIdx.x % 128, peaks + warpgroup * 4 * S::MOST);
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------------

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled encode_tiled() {
  static EncodeTiled found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return found;
}

// Boxes of 64 columns x `rows` rows of one group of x, swizzled by 128 bytes; what lies outside reads as zero.
inline bool map_tokens(CUtensorMap* map, const GemmCall& call, int rows) {
  const cuuint64_t columns = call.columns, groups = call.x_groups, total = call.x_rows;
  const cuuint64_t dims[3] = {columns, groups, total};
  const cuuint64_t strides[2] = {columns * 2, columns * groups * 2};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(rows)};
  const cuuint32_t unit[3] = {1, 1, 1};
  return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<__nv_bfloat16*>(call.x), dims, strides, box, unit,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class S>
int launch_gemm(const GemmCall& call, cudaStream_t stream) {
  auto kernel = gemm_kernel<S>;
  if (call.tile_tokens > S::MOST || !encode_tiled()) return cudaErrorInvalidValue;
  CUtensorMap narrow, wide;
  if (!map_tokens(&narrow, call, 8) || !map_tokens(&wide, call, BOX_ROWS)) return cudaErrorInvalidValue;
  const int stage_bytes = S::WEIGHT_BYTES + S::width(call.tile_tokens) * CHUNK_COLUMNS * 2;
  const int stages = std::min<int>(S::MOST_STAGES, (S::SHARED_LIMIT - S::FIXED_BYTES) / stage_bytes);
  const int bytes = S::FIXED_BYTES + stages * stage_bytes;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED_LIMIT);
  if (allowed != cudaSuccess) return allowed;
  const int token_tiles = call.tiles ? call.max_tiles : call.groups * ((call.x_rows + call.tile_tokens - 1) / call.tile_tokens);
  const int64_t total = static_cast<int64_t>(token_tiles) * ((call.chunk_rows + S::CHUNKS - 1) / S::CHUNKS) * call.parts;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(total, num_processors() * S::PER_SM)));
  return launch(kernel, grid, S::THREADS, bytes, stream, call, narrow, wide, stages, static_cast<uint32_t>(stage_bytes));
}

}  // namespace abyssal

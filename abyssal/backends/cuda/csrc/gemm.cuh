// Products of packed weights with rows of bf16 activations, grouped and persistent.
//
// A block takes tiles of WARPGROUPS * PER_GROUP chunks of 64 weight rows by up to 144 activation rows. One warp streams chunks
// of packed weights and boxes of activations through a ring in shared memory; the others decode chunks into registers and
// multiply. The ring runs on across tiles, so memory stays busy during epilogues.
//
// Every output is one chain of products of 16 columns in ascending order, whatever the tile, the number of rows or the shape
// of the launch: a row's result has the same bits in any batch.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "epilogue.cuh"
#include "launch.cuh"
#include "mainloop.cuh"
#include "producer.cuh"
#include "ptx.cuh"
#include "tiles.cuh"

namespace abyssal {

// T: the shape of this tile, S or O.
template <class S, class O, class T, int N>
__device__ __forceinline__ void consume_tile(const GemmCall& call, int index, int steps, Ring& ring, int warpgroup, int thread, float* scratch) {
  constexpr int PER_GROUP = T::PER_GROUP;
  constexpr float UNDO = T::W::UNDO;
  const Factors<N> factors(call, find_tile<S, O>(call, index), thread);
  float acc[PER_GROUP][N / 2];
  accumulate<T, N>(acc, ring, steps, warpgroup, thread);
  const Tile tile = find_tile<S, O>(call, index);  // found again rather than kept in registers
  if (call.epilogue == SWIGLU) factors.store(scratch + 4 * N, thread);
#pragma unroll
  for (int m = 0; m < PER_GROUP; m++) {
    const int chunk = tile.chunk + warpgroup * PER_GROUP + m;
    if (chunk >= call.chunk_rows) break;
    if (call.epilogue == STORE_BF16)
      store_bf16<N>(call, tile, acc[m], UNDO, chunk, thread);
    else if (call.epilogue == STORE_F32)
      store_f32<N>(call, tile, acc[m], UNDO, chunk, thread);
    else
      store_swiglu<N>(call, tile, acc[m], UNDO, chunk, thread, scratch, 1 + warpgroup);
  }
  // the next tile's factors must not overtake the slowest reader of these
  if (call.epilogue == SWIGLU) sync_threads(1 + warpgroup, 128);
}

template <class S, class O>
__device__ __forceinline__ void consume(const GemmCall& call, Ring ring, int warpgroup, int thread, float* scratch) {
  const int total = count_tiles<S, O>(call);
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Tile tile = find_tile<S, O>(call, index);
    const int steps = tile.end - tile.begin;
    S::with_width(tile.tokens, [&](auto n) {
      constexpr int N = decltype(n)::value;
      if constexpr (!std::is_same_v<S, O>) {
        if (tile.other) return consume_tile<S, O, O, N>(call, index, steps, ring, warpgroup, thread, scratch);
      }
      consume_tile<S, O, S, N>(call, index, steps, ring, warpgroup, thread, scratch);
    });
  }
}

template <class S, class O>
__global__ void __launch_bounds__(S::THREADS, S::PER_SM)
    gemm_kernel(const __grid_constant__ GemmCall call, const __grid_constant__ CUtensorMap narrow, const __grid_constant__ CUtensorMap wide,
                const int num_stages, const uint32_t stage_bytes) {
  constexpr int WARPGROUPS = S::WARPGROUPS;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  float* scratch = reinterpret_cast<float*>(shared + (base - shared_address(shared)) + 1024);
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
    if constexpr (!S::ALONE) registers_drop<S::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARPGROUPS * 128 + 32) Producer<S, O>{call, narrow, wide, static_cast<int>(threadIdx.x % 32)}.run(ring);
  } else {
    if constexpr (!S::ALONE) registers_raise<S::CONSUMER_REGISTERS>();
    consume<S, O>(call, ring, warpgroup, threadIdx.x % 128, scratch + warpgroup * S::SCRATCH);
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

constexpr int SHARED_BYTES = 227 * 1024;  // the most that a block may have

// O: the shape for call.other_weight, of the same threads and stages.
template <class S, class O = S>
int launch_gemm(const GemmCall& call, cudaStream_t stream) {
  static_assert(S::WEIGHT_BYTES == O::WEIGHT_BYTES && S::WARPGROUPS == O::WARPGROUPS && S::MOST == O::MOST);
  auto kernel = gemm_kernel<S, O>;
  if (call.tile_tokens > S::MOST || (call.other_weight && call.other_tokens > S::MOST) || !encode_tiled()) return cudaErrorInvalidValue;
  CUtensorMap narrow, wide;
  if (!map_tokens(&narrow, call, 8) || !map_tokens(&wide, call, BOX_ROWS)) return cudaErrorInvalidValue;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
  if (allowed != cudaSuccess) return allowed;
  const int token_tiles = call.tiles ? call.max_tiles : call.groups * ((call.x_rows + call.tile_tokens - 1) / call.tile_tokens);
  const int64_t total = static_cast<int64_t>(token_tiles) * count_row_tiles<S>(call) * call.parts +
                        static_cast<int64_t>(count_other_token_tiles(call)) * count_row_tiles<O>(call);
  // no more blocks on a processor than there are tiles for, and room for the next grid's to begin
  const int per_sm = static_cast<int>(std::min<int64_t>(S::PER_SM, (total + num_processors() - 1) / num_processors()));
  const int widest = S::width(std::max(call.tile_tokens, call.other_weight ? call.other_tokens : 0));
  const int stage_bytes = S::WEIGHT_BYTES + S::token_bytes(widest);
  const int available = (SHARED_BYTES + 1024) / (S::ALONE ? std::max(per_sm, 2) : 1) - 1024 - S::FIXED_BYTES;
  const int stages = std::min<int>(S::MOST_STAGES, available / stage_bytes);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(total, num_processors() * per_sm)));
  return launch(kernel, grid, S::THREADS, S::FIXED_BYTES + stages * stage_bytes, stream, call, narrow, wide, stages,
                static_cast<uint32_t>(stage_bytes));
}

}  // namespace abyssal

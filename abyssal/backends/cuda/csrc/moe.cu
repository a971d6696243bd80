// Around the products of the experts: picking them, sorting rows by expert, and summing up.
#include <climits>
#include <cstdint>
#include <cuda_bf16.h>

#include "launch.cuh"
#include "ptx.cuh"
#include "rows.cuh"

namespace abyssal {

constexpr int SORT_BLOCK = 1024;  // pairs of a block, one to a thread
constexpr int LANE_EXPERTS = 16;  // up to 512 experts

// ---- route: one block for each token --------------------------------------------------------------------------------------

constexpr int ROUTE_THREADS = 128;
constexpr int MOST_PARTS = 8;

// Integers in the order of the floats, all above zero.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// sqrt(softplus(sum of an expert's parts)); the loads are independent.
__device__ __forceinline__ float route_score(const float* logits, size_t stride, int parts) {
  float part[MOST_PARTS];
#pragma unroll
  for (int p = 0; p < MOST_PARTS; p++) part[p] = p < parts ? logits[p * stride] : 0.0f;
  float logit = 0.0f;
#pragma unroll
  for (int p = 0; p < MOST_PARTS; p++) logit += part[p];
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

__global__ void __launch_bounds__(ROUTE_THREADS)
    route_kernel(const float* logits, int parts, const float* bias, int tokens, int experts, int top_k, float scale, int* ids, float* weights) {
  __shared__ float scores[32 * LANE_EXPERTS];
  __shared__ unsigned keys[32 * LANE_EXPERTS];
  grid_wait();
  grid_release();
  const int token = blockIdx.x, lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 32 * LANE_EXPERTS / ROUTE_THREADS; i++) {
    const int e = i * ROUTE_THREADS + threadIdx.x;
    keys[e] = 0;
    if (e >= experts) continue;
    scores[e] = route_score(logits + static_cast<size_t>(token) * experts + e, static_cast<size_t>(tokens) * experts, parts);
    keys[e] = ordered(scores[e] + bias[e]);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  unsigned key[LANE_EXPERTS];
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++) key[i] = keys[i * 32 + lane];
  float total = 0.0f, mine = 0.0f;
  int chosen = 0;
  for (int slot = 0; slot < top_k; slot++) {
    unsigned best = 0;
    int id = INT_MAX;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
      if (key[i] > best) {
        best = key[i];
        id = i * 32 + lane;
      }
    }
    const unsigned highest = __reduce_max_sync(~0u, best);
    id = __reduce_min_sync(~0u, best == highest ? id : INT_MAX);  // of equal keys the lowest id
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++)
      if (i * 32 + lane == id) key[i] = 0;
    const float picked = scores[id];
    total += picked;
    if (lane == slot) {
      chosen = id;
      mine = picked;
    }
  }
  if (lane < top_k) {
    ids[token * top_k + lane] = chosen;
    weights[token * top_k + lane] = scale * mine / (total + 1e-20f);
  }
}

// ---- sort: counting, stable ------------------------------------------------------------------------------------------------

// Inclusive sum over a block of 1024; `scratch` holds 32 values.
__device__ int block_sum(int value, int* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int sum = scratch[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    scratch[lane] = sum;
  }
  __syncthreads();
  const int before = warp ? scratch[warp - 1] : 0;
  __syncthreads();
  return value + before;
}

// Rank of this thread's pair among those of its block with the same expert; thread e returns in `total` how many pairs of the
// block go to expert e. `counts` is [warps][experts].
__device__ int rank_in_block(int id, int warps, int experts, int* counts, int* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < warps * experts; i += SORT_BLOCK) counts[i] = 0;
  __syncthreads();
  const unsigned same = __match_any_sync(~0u, id);
  const int before = __popc(same & ((1u << lane) - 1));
  if (id >= 0 && before == 0) counts[warp * experts + id] = __popc(same);
  __syncthreads();
  int sum = 0;
  if (threadIdx.x < experts) {
#pragma unroll 8
    for (int w = 0; w < warps; w++) {
      int* count = counts + w * experts + threadIdx.x;
      const int here = *count;
      *count = sum;
      sum += here;
    }
  }
  *total = sum;
  __syncthreads();
  return id >= 0 ? counts[warp * experts + id] + before : 0;
}

// Tiles of about equal size, in multiples of 8 rows, for every expert that was picked. Thread e holds expert e's rows.
__device__ void write_tiles(int first, int count, int tile_tokens, int4* tiles, int* num_tiles, int* scratch) {
  const int here = (count + tile_tokens - 1) / tile_tokens;
  const int end = block_sum(here, scratch);
  const int size = here ? ((count + here - 1) / here + 7) / 8 * 8 : 0;
  for (int i = 0; i < here; i++) tiles[end - here + i] = make_int4(threadIdx.x, first + i * size, min(size, count - i * size), 0);
  if (threadIdx.x == SORT_BLOCK - 1) *num_tiles = end;
}

struct SortCall {
  const int* ids;
  const float* weights;
  int pairs, experts, tile_tokens;
  int* position;
  float* row_weight;
  int4* tiles;
  int* num_tiles;
  int* totals;  // [blocks][experts], with several blocks
};

// For one block: everything. For several: ranks inside each block, and its totals.
__global__ void __launch_bounds__(SORT_BLOCK, 1) count_kernel(SortCall call) {
  extern __shared__ int counts[];
  __shared__ int scratch[32], base[32 * LANE_EXPERTS];
  grid_wait();
  grid_release();
  const int pair = blockIdx.x * SORT_BLOCK + threadIdx.x, here = min(SORT_BLOCK, call.pairs - blockIdx.x * SORT_BLOCK);
  const int id = pair < call.pairs ? call.ids[pair] : -1;
  int total;
  const int rank = rank_in_block(id, (here + 31) / 32, call.experts, counts, &total);
  if (gridDim.x > 1) {
    if (threadIdx.x < call.experts) call.totals[blockIdx.x * call.experts + threadIdx.x] = total;
    if (id >= 0) call.position[pair] = rank;
    return;
  }
  const int first = block_sum(total, scratch) - total;
  if (threadIdx.x < call.experts) base[threadIdx.x] = first;
  write_tiles(first, total, call.tile_tokens, call.tiles, call.num_tiles, scratch);
  if (id < 0) return;
  const int to = base[id] + rank;
  call.position[pair] = to;
  call.row_weight[to] = call.weights[pair];
}

__global__ void __launch_bounds__(SORT_BLOCK, 1) place_kernel(SortCall call) {
  __shared__ int scratch[32], base[32 * LANE_EXPERTS];
  grid_wait();
  grid_release();
  const int pair = blockIdx.x * SORT_BLOCK + threadIdx.x, blocks = gridDim.x;
  int before = 0, total = 0;
  if (threadIdx.x < call.experts) {
#pragma unroll 8
    for (int b = 0; b < blocks; b++) {
      const int here = call.totals[b * call.experts + threadIdx.x];
      before += b < blockIdx.x ? here : 0;
      total += here;
    }
  }
  const int first = block_sum(total, scratch) - total;
  if (threadIdx.x < call.experts) base[threadIdx.x] = first + before;
  if (blockIdx.x == 0) write_tiles(first, total, call.tile_tokens, call.tiles, call.num_tiles, scratch);
  __syncthreads();
  if (pair >= call.pairs) return;
  const int to = base[call.ids[pair]] + call.position[pair];
  call.position[pair] = to;
  call.row_weight[to] = call.weights[pair];
}

// ---- gather: one block for each token -------------------------------------------------------------------------------------

// Copies each row of x to the places of its pairs, rounded to FP8 if asked; `kept` receives the rounded rows in order, or null.
__global__ void gather_kernel(const __nv_bfloat16* x, const int* position, int columns, int top_k, bool rounded, __nv_bfloat16* sorted,
                              __nv_bfloat16* kept) {
  grid_wait();
  grid_release();
  const size_t token = blockIdx.x;
  // whole warps, so that lanes beyond the row take part in the exchange
  for (int i = threadIdx.x * 8; i < (columns + 255) / 256 * 256; i += blockDim.x * 8) {
    Eight value = {};
    if (i < columns) value = load_eight(x + token * columns + i);
    if (rounded) value = round_eight(value);
    if (i >= columns) continue;
    for (int slot = 0; slot < top_k; slot++)
      store_eight(sorted + static_cast<size_t>(position[token * top_k + slot]) * columns + i, value);
    if (kept) store_eight(kept + token * columns + i, value);
  }
}

// ---- combine --------------------------------------------------------------------------------------------------------------

constexpr int SLOTS_AT_ONCE = 8;

// out[t] = sum over slots of rows[position[t, slot]] in order, then shared[t]; float32 sums, bf16 results.
__global__ void combine_kernel(const __nv_bfloat16* rows, const int* position, const __nv_bfloat16* shared, int columns, int top_k,
                               __nv_bfloat16* out) {
  grid_wait();
  grid_release();
  const size_t token = blockIdx.x;
  for (int i = threadIdx.x * 8; i < columns; i += blockDim.x * 8) {
    Eight sum = {};
    for (int begin = 0; begin <= top_k; begin += SLOTS_AT_ONCE) {
      uint4 part[SLOTS_AT_ONCE];
#pragma unroll
      for (int s = 0; s < SLOTS_AT_ONCE; s++) {
        const int slot = begin + s;
        if (slot < top_k) part[s] = load_raw(rows + static_cast<size_t>(position[token * top_k + slot]) * columns + i);
        if (slot == top_k) part[s] = load_raw(shared + token * columns + i);
      }
#pragma unroll
      for (int s = 0; s < SLOTS_AT_ONCE; s++) {
        if (begin + s > top_k) continue;
        const Eight x = unpack_eight(part[s]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.value[j] += x.value[j];
      }
    }
    store_eight(out + token * columns + i, sum);
  }
}

// Threads for a row, so that none is idle in the last round.
int row_threads(int columns) {
  const int eights = columns / 8, rounds = (eights + 319) / 320;
  return ((eights + rounds - 1) / rounds + 31) / 32 * 32;
}

}  // namespace abyssal

using namespace abyssal;

extern "C" int route(const float* logits, int parts, const float* bias, int tokens, int experts, int top_k, float scale, int* ids,
                     float* weights, cudaStream_t stream) {
  if (experts > 32 * LANE_EXPERTS || top_k > 32 || top_k > experts || parts > MOST_PARTS) return cudaErrorInvalidValue;
  return launch(route_kernel, tokens, ROUTE_THREADS, 0, stream, logits, parts, bias, tokens, experts, top_k, scale, ids, weights);
}

// Where each pair (token, slot) goes when pairs are ordered by expert, then by index; their weights in that order; and tiles.
// `totals`: room for experts numbers for every 1024 pairs.
extern "C" int sort_pairs(const int* ids, const float* weights, int pairs, int experts, int tile_tokens, int* position, float* row_weight,
                          void* tiles, int* num_tiles, int* totals, cudaStream_t stream) {
  if (experts > 32 * LANE_EXPERTS) return cudaErrorInvalidValue;
  const SortCall call = {ids, weights, pairs, experts, tile_tokens, position, row_weight, static_cast<int4*>(tiles), num_tiles, totals};
  const int blocks = (pairs + SORT_BLOCK - 1) / SORT_BLOCK;
  static const cudaError_t allowed = cudaFuncSetAttribute(count_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 32 * 32 * LANE_EXPERTS * 4);
  if (allowed != cudaSuccess) return allowed;
  const int code = launch(count_kernel, blocks, SORT_BLOCK, 32 * experts * 4, stream, call);
  return code || blocks == 1 ? code : launch(place_kernel, blocks, SORT_BLOCK, 0, stream, call);
}

extern "C" int gather_rows(const void* x, const int* position, int tokens, int columns, int top_k, int rounded, void* sorted, void* kept,
                           cudaStream_t stream) {
  return launch(gather_kernel, tokens, row_threads(columns), 0, stream, static_cast<const __nv_bfloat16*>(x), position, columns, top_k,
                rounded != 0, static_cast<__nv_bfloat16*>(sorted), static_cast<__nv_bfloat16*>(kept));
}

extern "C" int combine_rows(const void* rows, const int* position, const void* shared, int tokens, int columns, int top_k, void* out,
                            cudaStream_t stream) {
  return launch(combine_kernel, tokens, row_threads(columns), 0, stream, static_cast<const __nv_bfloat16*>(rows), position,
                static_cast<const __nv_bfloat16*>(shared), columns, top_k, static_cast<__nv_bfloat16*>(out));
}

// Around the products of the experts: picking them, sorting rows by expert, and summing up.
#include <climits>
#include <cstdint>
#include <cuda_bf16.h>

#include "launch.cuh"
#include "ptx.cuh"
#include "round.cuh"

namespace abyssal {

constexpr int SORT_WARPS = 32;
constexpr int LANE_EXPERTS = 16;  // up to 512 experts

// ---- route: one warp for each token ---------------------------------------------------------------------------------------

__global__ void route_kernel(const float* logits, int parts, const float* bias, int tokens, int experts, int top_k, float scale, int* ids,
                             float* weights) {
  grid_wait();
  grid_release();
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (token >= tokens) return;
  float score[LANE_EXPERTS], key[LANE_EXPERTS];
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++) {
    const int e = i * 32 + lane;
    score[i] = 0.0f;
    key[i] = -INFINITY;
    if (e >= experts) continue;
    float logit = 0.0f;
    for (int part = 0; part < parts; part++) logit += logits[(static_cast<size_t>(part) * tokens + token) * experts + e];
    score[i] = sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
    key[i] = score[i] + bias[e];
  }
  float total = 0.0f, mine = 0.0f;
  int chosen = 0;
  for (int slot = 0; slot < top_k; slot++) {
    float best = -INFINITY, picked = 0.0f;
    int id = INT_MAX;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
      if (key[i] > best) {
        best = key[i];
        id = i * 32 + lane;
        picked = score[i];
      }
    }
    for (int other = 16; other; other /= 2) {
      const float their_best = __shfl_xor_sync(~0u, best, other), their_score = __shfl_xor_sync(~0u, picked, other);
      const int their_id = __shfl_xor_sync(~0u, id, other);
      if (their_best > best || (their_best == best && their_id < id)) {
        best = their_best;
        id = their_id;
        picked = their_score;
      }
    }
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++)
      if (i * 32 + lane == id) key[i] = -INFINITY;
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

// ---- sort: one block, counting, stable ------------------------------------------------------------------------------------

// Inclusive sum over the block; `scratch` holds 32 values.
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

// Tiles of about equal size, in multiples of 8 rows, for every expert that was picked.
__device__ void write_tiles(int expert, int first, int count, int tile_tokens, int4* tiles, int* num_tiles, int* scratch) {
  const int tiles_here = (count + tile_tokens - 1) / tile_tokens;
  const int end = block_sum(tiles_here, scratch);
  const int size = tiles_here ? ((count + tiles_here - 1) / tiles_here + 7) / 8 * 8 : 0;
  for (int i = 0; i < tiles_here; i++) tiles[end - tiles_here + i] = make_int4(expert, first + i * size, max(min(size, count - i * size), 0), 0);
  if (threadIdx.x == blockDim.x - 1) *num_tiles = end;
}

// Where each pair (token, slot) goes when pairs are ordered by expert, then by index; their weights in that order; and tiles.
__global__ void __launch_bounds__(SORT_WARPS * 32, 1)
    sort_kernel(const int* ids, const float* weights, int pairs, int experts, int tile_tokens, int* position, float* row_weight, int4* tiles,
                int* num_tiles) {
  extern __shared__ int counts[];  // [SORT_WARPS][experts]
  __shared__ int scratch[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < SORT_WARPS * experts; i += blockDim.x) counts[i] = 0;
  grid_wait();
  grid_release();
  __syncthreads();
  const int segment = (pairs + SORT_WARPS * 32 - 1) / (SORT_WARPS * 32) * 32;
  const int begin = warp * segment, end = min(begin + segment, pairs);
  int* own = counts + warp * experts;
#pragma unroll 4
  for (int base = begin; base < end; base += 32) {
    const int id = base + lane < end ? ids[base + lane] : -1;
    const unsigned same = __match_any_sync(~0u, id);
    if (id >= 0 && lane == __ffs(same) - 1) own[id] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  const int expert = threadIdx.x;
  int total = 0;
  if (expert < experts) {
    for (int w = 0; w < SORT_WARPS; w++) {
      const int here = counts[w * experts + expert];
      counts[w * experts + expert] = total;
      total += here;
    }
  }
  const int first = block_sum(total, scratch) - total;
  if (expert < experts)
    for (int w = 0; w < SORT_WARPS; w++) counts[w * experts + expert] += first;
  write_tiles(expert, first, total, tile_tokens, tiles, num_tiles, scratch);
  __syncthreads();
#pragma unroll 4
  for (int base = begin; base < end; base += 32) {
    const int pair = base + lane;
    const int id = pair < end ? ids[pair] : -1;
    const unsigned same = __match_any_sync(~0u, id);
    const int before = __popc(same & ((1u << lane) - 1));
    int to = 0;
    if (id >= 0) to = own[id] + before;
    __syncwarp();
    if (id >= 0) {
      if (before == 0) own[id] += __popc(same);
      position[pair] = to;
      row_weight[to] = weights[pair];
    }
    __syncwarp();
  }
}

// ---- gather: one block for each token -------------------------------------------------------------------------------------

__device__ float bf16_value(uint32_t pair, int odd) { return __uint_as_float(odd ? pair & 0xFFFF0000u : pair << 16); }

// Eight neighbours, rounded together with those of the next three lanes: a group of 32.
__device__ uint4 round_eight(uint4 value) {
  uint32_t words[4] = {value.x, value.y, value.z, value.w};
  float peak = 0.0f;
  for (int i = 0; i < 8; i++) peak = fmaxf(peak, fabsf(bf16_value(words[i / 2], i & 1)));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
  for (int i = 0; i < 4; i++) {
    const __nv_bfloat162 r = __floats2bfloat162_rn(round_fp8(bf16_value(words[i], 0), peak), round_fp8(bf16_value(words[i], 1), peak));
    words[i] = *reinterpret_cast<const uint32_t*>(&r);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Copies each row of x to the places of its pairs, rounded to FP8 if asked; `kept` receives the rounded rows in order, or null.
__global__ void gather_kernel(const uint4* x, const int* position, int eights, int top_k, bool rounded, uint4* sorted, uint4* kept) {
  grid_wait();
  grid_release();
  const size_t token = blockIdx.x;
  // whole warps, so that lanes beyond the row take part in the exchange
  for (int i = threadIdx.x; i < (eights + 31) / 32 * 32; i += blockDim.x) {
    uint4 value = i < eights ? x[token * eights + i] : make_uint4(0, 0, 0, 0);
    if (rounded) value = round_eight(value);
    if (i >= eights) continue;
    for (int slot = 0; slot < top_k; slot++) sorted[static_cast<size_t>(position[token * top_k + slot]) * eights + i] = value;
    if (kept) kept[token * eights + i] = value;
  }
}

// ---- combine --------------------------------------------------------------------------------------------------------------

// out[t] = sum over slots of rows[position[t, slot]] in order, then shared[t]; float32 sums, bf16 results.
__global__ void combine_kernel(const uint4* rows, const int* position, const uint4* shared, int eights, int top_k, uint4* out) {
  grid_wait();
  grid_release();
  const size_t token = blockIdx.x;
  for (int i = threadIdx.x; i < eights; i += blockDim.x) {
    float sum[8] = {};
    for (int slot = 0; slot <= top_k; slot++) {
      const uint4 value = slot < top_k ? rows[static_cast<size_t>(position[token * top_k + slot]) * eights + i] : shared[token * eights + i];
      const uint32_t words[4] = {value.x, value.y, value.z, value.w};
      for (int j = 0; j < 8; j++) sum[j] += bf16_value(words[j / 2], j & 1);
    }
    uint32_t words[4];
    for (int j = 0; j < 4; j++) {
      const __nv_bfloat162 r = __floats2bfloat162_rn(sum[2 * j], sum[2 * j + 1]);
      words[j] = *reinterpret_cast<const uint32_t*>(&r);
    }
    out[token * eights + i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

int row_threads(int eights) { return eights >= 256 ? 256 : (eights + 31) / 32 * 32; }

}  // namespace abyssal

using namespace abyssal;

extern "C" int route(const float* logits, int parts, const float* bias, int tokens, int experts, int top_k, float scale, int* ids,
                     float* weights, cudaStream_t stream) {
  if (experts > 32 * LANE_EXPERTS || top_k > 32 || top_k > experts) return cudaErrorInvalidValue;
  return launch(route_kernel, (tokens + 3) / 4, 128, 0, stream, logits, parts, bias, tokens, experts, top_k, scale, ids, weights);
}

extern "C" int sort_pairs(const int* ids, const float* weights, int pairs, int experts, int tile_tokens, int* position, float* row_weight,
                          void* tiles, int* num_tiles, cudaStream_t stream) {
  if (experts > 32 * LANE_EXPERTS) return cudaErrorInvalidValue;
  const int bytes = SORT_WARPS * experts * 4;
  static const cudaError_t allowed = cudaFuncSetAttribute(sort_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SORT_WARPS * 32 * LANE_EXPERTS * 4);
  if (allowed != cudaSuccess) return allowed;
  return launch(sort_kernel, 1, SORT_WARPS * 32, bytes, stream, ids, weights, pairs, experts, tile_tokens, position, row_weight,
                static_cast<int4*>(tiles), num_tiles);
}

extern "C" int gather_rows(const void* x, const int* position, int tokens, int columns, int top_k, int rounded, void* sorted, void* kept,
                           cudaStream_t stream) {
  return launch(gather_kernel, tokens, row_threads(columns / 8), 0, stream, static_cast<const uint4*>(x), position, columns / 8, top_k,
                rounded != 0, static_cast<uint4*>(sorted), static_cast<uint4*>(kept));
}

extern "C" int combine_rows(const void* rows, const int* position, const void* shared, int tokens, int columns, int top_k, void* out,
                            cudaStream_t stream) {
  return launch(combine_kernel, tokens, row_threads(columns / 8), 0, stream, static_cast<const uint4*>(rows), position,
                static_cast<const uint4*>(shared), columns / 8, top_k, static_cast<uint4*>(out));
}

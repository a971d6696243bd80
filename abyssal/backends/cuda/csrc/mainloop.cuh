// The sums of a tile: acc[m][4 j + ..] of a thread are rows g (first two) and g + 8 of its warp's 16 in chunk m, tokens 8 j + 2 c
// and the next.
#pragma once
#include "formats.cuh"
#include "ptx.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

namespace abyssal {

template <int M, int N>
__device__ __forceinline__ void clear(float (&acc)[M][N]) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int i = 0; i < N; i++) acc[m][i] = 0.0f;
}

// Four steps of 16 columns, committed together.
template <int N>
__device__ __forceinline__ void multiply_group(float (&acc)[N / 2], const uint32_t (&a)[4][4], uint64_t tokens) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; i++) Wgmma<N>::multiply(acc, a[i], tokens + 2 * i);
  wgmma_commit();
}

// Decodes half a step of a chunk into one of BUFFERS register sets and multiplies, while the sets before are still in use.
template <class S, int N>
__device__ __forceinline__ void accumulate_drained(float (&acc)[S::PER_GROUP][N / 2], Ring& ring, int steps, int warpgroup, int thread) {
  using W = typename S::W;
  constexpr int PER_GROUP = S::PER_GROUP, BUFFERS = S::BUFFERS, GROUPS = 2 * PER_GROUP;
  uint32_t a[BUFFERS][4][4];
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    barrier_wait(ring.full_barrier(), ring.phase);
    const uint32_t weights = ring.address() + warpgroup * PER_GROUP * W::CHUNK;
    const uint64_t tokens = wgmma_operand(ring.address() + S::WEIGHT_BYTES);
    typename W::Raw raw = W::load(weights, 0, thread);
#pragma unroll
    for (int q = 0; q < GROUPS; q++) {
      const int half = q / PER_GROUP, m = q % PER_GROUP, next = q + 1;
      W::decode(raw, a[q % BUFFERS]);
      if (next < GROUPS) raw = W::load(weights + next % PER_GROUP * W::CHUNK, next / PER_GROUP, thread);
      multiply_group<N>(acc[m], a[q % BUFFERS], tokens + half * (N * 128 / 16));
      // nothing may be in flight across stages: the compiler would keep the registers of every width apart
      if (next < GROUPS)
        wgmma_wait<BUFFERS - 1>();
      else
        wgmma_wait<0>();
    }
    if ((thread & 31) == 0) barrier_arrive(ring.empty_barrier());
    ring.next();
  }
}

// For code of one width: the last products of a stage run on while the next stage is decoded.
template <class S, int N>
__device__ __forceinline__ void accumulate_running(float (&acc)[S::PER_GROUP][N / 2], Ring& ring, int steps, int warpgroup, int thread) {
  using W = typename S::W;
  constexpr int PER_GROUP = S::PER_GROUP, GROUPS = 2 * PER_GROUP;
  const bool leader = (thread & 31) == 0;
  uint32_t a[2][4][4];
  uint32_t used = 0;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    barrier_wait(ring.full_barrier(), ring.phase);
    const uint32_t weights = ring.address() + warpgroup * PER_GROUP * W::CHUNK;
    const uint64_t tokens = wgmma_operand(ring.address() + S::WEIGHT_BYTES);
    typename W::Raw raw = W::load(weights, 0, thread);
#pragma unroll
    for (int q = 0; q < GROUPS; q++) {
      const int half = q / PER_GROUP, m = q % PER_GROUP, next = q + 1;
      W::decode(raw, a[q & 1]);
      if (next < GROUPS) raw = W::load(weights + next % PER_GROUP * W::CHUNK, next / PER_GROUP, thread);
      multiply_group<N>(acc[m], a[q & 1], tokens + half * (N * 128 / 16));
      wgmma_wait<1>();
      if (q == 0 && step > 0 && leader) barrier_arrive(used);
    }
    used = ring.empty_barrier();
    ring.next();
  }
  wgmma_wait<0>();
  if (leader) barrier_arrive(used);
}

template <class S, int N>
__device__ __forceinline__ void accumulate(float (&acc)[S::PER_GROUP][N / 2], Ring& ring, int steps, int warpgroup, int thread) {
  clear(acc);
  if constexpr (S::SINGLE)
    accumulate_running<S, N>(acc, ring, steps, warpgroup, thread);
  else
    accumulate_drained<S, N>(acc, ring, steps, warpgroup, thread);
}

}  // namespace abyssal

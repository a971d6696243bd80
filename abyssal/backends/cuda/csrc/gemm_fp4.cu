#include "gemm.cuh"

using namespace abyssal;

// FP4 experts, and FP8 for the shared one, in tiles of half the height so that a step of either takes about the same room.
extern "C" int gemm(const GemmCall* call, cudaStream_t stream) {
  constexpr int REGION = 8 * Fp4::CHUNK;
  if (call->shape == 0)
    return launch_gemm<Shape<Fp4, 4, 1, REGION, 8, 16, 32>, Shape<Fp8, 4, 1, REGION, 8, 16, 32>>(*call, stream);
  return launch_gemm<Shape<Fp4, 4, 2, REGION, 8, 16, 24, 32, 48, 64>, Shape<Fp8, 4, 1, REGION, 8, 16, 24, 32, 48, 64>>(*call, stream);
}

#include "gemm.cuh"

extern "C" int gemm(const abyssal::GemmCall* call, cudaStream_t stream) {
  using namespace abyssal;
  switch (call->shape) {
    case 0: return launch_gemm<Shape<Fp4, 1, 1, 8, 16, 32, 64>>(*call, stream);
    case 1: return launch_gemm<Shape<Fp4, 4, 1, 8, 16, 32, 64>>(*call, stream);
    default: return launch_gemm<Shape<Fp4, 2, 2, 16, 32, 64, 96, 112, 128, 144>>(*call, stream);
  }
}

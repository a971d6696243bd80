#include "gemm.cuh"

using namespace abyssal;

static int few(const GemmCall& call, cudaStream_t stream) {
  switch (call.tile_tokens) {
    case 8: return launch_gemm<Shape<Bf16, 1, 1, 0, 8>>(call, stream);
    case 16: return launch_gemm<Shape<Bf16, 1, 1, 0, 16>>(call, stream);
    case 32: return launch_gemm<Shape<Bf16, 1, 1, 0, 32>>(call, stream);
    default: return launch_gemm<Shape<Bf16, 1, 1, 0, 64>>(call, stream);
  }
}

extern "C" int gemm(const GemmCall* call, cudaStream_t stream) {
  switch (call->shape) {
    case 0: return few(*call, stream);
    case 1: return launch_gemm<Shape<Bf16, 2, 1, 0, 64, 128>>(*call, stream);
    default: return launch_gemm<Shape<Bf16, 2, 2, 0, 32, 64, 96, 128>>(*call, stream);
  }
}

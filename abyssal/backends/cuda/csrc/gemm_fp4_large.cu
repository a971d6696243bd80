// Apart from gemm_fp4.cu, as the two take long to compile.
#include "gemm.cuh"

extern "C" int gemm(const abyssal::GemmCall* call, cudaStream_t stream) {
  using namespace abyssal;
  return launch_gemm<Shape<Fp4, 2, 2, 0, 32, 64, 72, 80, 96, 104, 112, 120, 128, 136, 144>>(*call, stream);
}

// Launching a kernel so that its prologue may overlap the end of the one before. Every kernel calls grid_wait before it reads
// what the previous one wrote, and grid_release after that.
#pragma once
#include <cuda_runtime.h>

namespace abyssal {

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

inline int num_processors() {
  static int count = [] {
    int device = 0, n = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    return n;
  }();
  return count;
}

}  // namespace abyssal

extern "C" inline __attribute__((used, visibility("default"))) const char* describe_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// Kernels: their names are registered, their launches are logged, and nothing is computed.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <unordered_map>

#include "record.h"
#include "streams.h"

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

thread_local Configuration pushed;  // by the syntax kernel<<<...>>>

std::unordered_map<const void*, std::string>& names() {  // a function: libraries register before main
  static auto* map = new std::unordered_map<const void*, std::string>;
  return *map;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, cudaStream_t stream) {
  auto entry = names().find(function);
  host_cuda_record("KERNEL name=%s grid=%u,%u,%u block=%u stream=%ld",
                   entry == names().end() ? "?" : entry->second.c_str(), grid.x, grid.y, grid.z,
                   block.x * block.y * block.z, host_cuda_stream_number(stream));
  return cudaSuccess;
}

int do_nothing() { return 0; }

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(function, grid, block, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                        cudaStream_t stream) {
  return launch(function, grid, block, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, config->gridDim, config->blockDim, config->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  constexpr int PROCESSOR_THREADS = 2048;
  *blocks = threads > 0 && threads < PROCESSOR_THREADS ? PROCESSOR_THREADS / threads : 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   size_t bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, bytes);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function) {
    host_cuda_record("MISSING name=%s", name);
    *function = (void*)do_nothing;
  }
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}

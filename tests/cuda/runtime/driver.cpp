// The driver's functions that torch's allocator (expandable segments) and Triton call.
#include <cuda.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "device.h"
#include "memory.h"
#include "record.h"
#include "streams.h"

namespace {

constexpr size_t SEGMENT_GRANULARITY = 2 << 20;
char* const CONTEXT = reinterpret_cast<char*>(8);   // any value that is not null
char* const MODULE = reinterpret_cast<char*>(16);

struct Kernel {
  std::string name;
};

CUresult launch(CUfunction function, dim3 grid, unsigned threads, CUstream stream) {
  host_cuda_record("KERNEL name=%s grid=%u,%u,%u block=%u stream=%ld",
                   reinterpret_cast<Kernel*>(function)->name.c_str(), grid.x, grid.y, grid.z, threads,
                   host_cuda_stream_number(reinterpret_cast<cudaStream_t>(stream)));
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION_NUMBER;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  snprintf(name, size, "%s", DEVICE_NAME);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);  // the numbers are equal
}
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
  *bytes = host_cuda_device_bytes();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)CONTEXT;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return (CUresult)cudaGetDevice(device); }
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext* context) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1024;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error ? "error of the CUDA driver on host memory" : "no error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

// Segments of the allocator: an address range is reserved, and blocks of memory are mapped into it.
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = SEGMENT_GRANULARITY;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* mapped = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  host_cuda_add_range(mapped, bytes, host_cuda_current_device());
  *address = reinterpret_cast<CUdeviceptr>(mapped);
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  host_cuda_remove_range(reinterpret_cast<void*>(address));
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long) {
  if (!host_cuda_reserve(bytes, host_cuda_current_device())) return CUDA_ERROR_OUT_OF_MEMORY;
  host_cuda_record("ALLOCATE place=device address=segment bytes=%zu", bytes);
  *handle = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  host_cuda_release(handle, host_cuda_current_device());
  host_cuda_record("FREE place=device address=segment bytes=%llu", (unsigned long long)handle);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return (CUresult)mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  host_cuda_drain_all();
  madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
  return (CUresult)mprotect(reinterpret_cast<void*>(address), bytes, PROT_NONE);
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

// Modules: kernels that Triton compiled.
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = (CUmodule)MODULE;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(new Kernel{name});
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                                : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuFuncGetParamInfo(CUfunction, size_t, size_t*, size_t*) { return CUDA_ERROR_INVALID_VALUE; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned, CUstream stream, void**, void**) {
  return launch(function, dim3(grid_x, grid_y, grid_z), block_x * block_y * block_z, stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return launch(function, dim3(config->gridDimX, config->gridDimY, config->gridDimZ),
                config->blockDimX * config->blockDimY * config->blockDimZ, config->hStream);
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = address; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(value) = CU_MEMORYTYPE_DEVICE; break;
    default: memset(value, 0, sizeof(int));
  }
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return (CUresult)cudaMemcpy(to, reinterpret_cast<void*>(from), bytes, cudaMemcpyDeviceToHost);
}
CUresult cuStreamSynchronize(CUstream stream) {
  return (CUresult)cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream));
}
CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return cuCtxGetCurrent(context); }
}

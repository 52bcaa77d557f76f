// Devices with the properties of an H100, and the last error of each thread.
#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "record.h"

namespace {

constexpr int PCI_BUS_OF_DEVICE_0 = 10;
constexpr size_t SHARED_BYTES_PER_BLOCK = 49152, SHARED_BYTES_OPT_IN = 232448, SHARED_BYTES_PER_PROCESSOR = 233472;
constexpr int REGISTERS = 65536, PROCESSORS = 132, L2_BYTES = 52428800, MEMORY_BUS_BITS = 5120;
constexpr int CLOCK_KHZ = 1980000, MEMORY_CLOCK_KHZ = 2619000;
constexpr int MAX_BLOCK_THREADS = 1024, MAX_PROCESSOR_THREADS = 2048, MAX_PROCESSOR_BLOCKS = 32;
constexpr int MAX_GRID_X = 2147483647, MAX_GRID_YZ = 65535;

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

int device_count() {
  static const int count = (int)host_cuda_setting("HOST_CUDA_DEVICES", 1);
  return count < MAX_DEVICES ? count : MAX_DEVICES;
}

}  // namespace

size_t host_cuda_setting(const char* name, size_t default_value) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : default_value;
}

int host_cuda_current_device() { return current; }

cudaError_t host_cuda_fail(cudaError_t error) { return last_error = error; }

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return host_cuda_fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_NUMBER;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = MAX_BLOCK_THREADS; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = MAX_GRID_X; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = MAX_GRID_YZ; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_BYTES_PER_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_BYTES_OPT_IN; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_BYTES_PER_PROCESSOR; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = MAX_PROCESSOR_THREADS; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = MAX_PROCESSOR_BLOCKS; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = REGISTERS; break;
    case cudaDevAttrL2CacheSize: *value = L2_BYTES; break;
    case cudaDevAttrClockRate: *value = CLOCK_KHZ; break;
    case cudaDevAttrMemoryClockRate: *value = MEMORY_CLOCK_KHZ; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = MEMORY_BUS_BITS; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrConcurrentKernels: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) return host_cuda_fail(cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", DEVICE_NAME);
  properties->totalGlobalMem = host_cuda_device_bytes();
  properties->sharedMemPerBlock = SHARED_BYTES_PER_BLOCK;
  properties->sharedMemPerBlockOptin = SHARED_BYTES_OPT_IN;
  properties->sharedMemPerMultiprocessor = SHARED_BYTES_PER_PROCESSOR;
  properties->regsPerBlock = properties->regsPerMultiprocessor = REGISTERS;
  properties->warpSize = 32;
  properties->memPitch = MAX_GRID_X;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = MAX_BLOCK_THREADS;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = MAX_GRID_X;
  properties->maxGridSize[1] = properties->maxGridSize[2] = MAX_GRID_YZ;
  properties->totalConstMem = 65536;
  properties->major = 9;
  properties->textureAlignment = 512;
  properties->multiProcessorCount = PROCESSORS;
  properties->maxThreadsPerMultiProcessor = MAX_PROCESSOR_THREADS;
  properties->maxBlocksPerMultiProcessor = MAX_PROCESSOR_BLOCKS;
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->managedMemory = properties->cooperativeLaunch = 1;
  properties->asyncEngineCount = 3;
  properties->memoryBusWidth = MEMORY_BUS_BITS;
  properties->l2CacheSize = L2_BYTES;
  properties->pciBusID = PCI_BUS_OF_DEVICE_0 + device;
  snprintf(properties->uuid.bytes, sizeof properties->uuid.bytes, "host device %02d", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", PCI_BUS_OF_DEVICE_0 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotReady: return "device not ready";
    default: return "error of the CUDA runtime on host memory";
  }
}
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
}

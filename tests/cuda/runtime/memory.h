// Memory of the devices, which is memory of the host.
#pragma once

#include <cstddef>

// Bytes of one device: HOST_CUDA_MEMORY_BYTES, default: the memory of an H100.
size_t host_cuda_device_bytes();

// Counts bytes of a device as used. Returns false, and counts nothing, if the device has too few free bytes.
bool host_cuda_reserve(size_t bytes, int device);
void host_cuda_release(size_t bytes, int device);

// Records that an address range belongs to a device.
void host_cuda_add_range(void* address, size_t bytes, int device);
void host_cuda_remove_range(void* address);

// Allocations, copies and fills. Device memory is mapped on first use, so a device may have more than the host.
#include "memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"
#include "record.h"
#include "streams.h"

namespace {

constexpr size_t H100_BYTES = 85017755648;
constexpr size_t PAGE_BYTES = 4096;
constexpr int PAGEABLE = -2, PINNED = -1;  // instead of a device's number

struct Range {
  size_t bytes;
  int device;  // or PINNED
};

std::map<uintptr_t, Range>& ranges = *new std::map<uintptr_t, Range>;
std::mutex& ranges_mutex = *new std::mutex;
std::atomic<size_t> used[MAX_DEVICES];

int place_of(const void* address) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto after = ranges.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == ranges.begin()) return PAGEABLE;
  auto [start, range] = *--after;
  return reinterpret_cast<uintptr_t>(address) < start + range.bytes ? range.device : PAGEABLE;
}

const char* name_of(int place) { return place == PAGEABLE ? "pageable" : place == PINNED ? "pinned" : "device"; }

cudaError_t allocate(void** address, size_t bytes, int device) {
  size_t whole_pages = (bytes ? bytes + PAGE_BYTES - 1 : PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES;
  *address = nullptr;
  if (device != PINNED && !host_cuda_reserve(whole_pages, device)) return host_cuda_fail(cudaErrorMemoryAllocation);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, whole_pages, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) {
    if (device != PINNED) host_cuda_release(whole_pages, device);
    return host_cuda_fail(cudaErrorMemoryAllocation);
  }
  host_cuda_add_range(mapped, whole_pages, device);
  host_cuda_record("ALLOCATE place=%s address=%p bytes=%zu", name_of(device), mapped, bytes);
  *address = mapped;
  return cudaSuccess;
}

cudaError_t deallocate(void* address) {
  if (!address) return cudaSuccess;
  Range range;
  {
    std::lock_guard<std::mutex> lock(ranges_mutex);
    auto entry = ranges.find(reinterpret_cast<uintptr_t>(address));
    if (entry == ranges.end()) return host_cuda_fail(cudaErrorInvalidValue);
    range = entry->second;
    ranges.erase(entry);
  }
  host_cuda_record("FREE place=%s address=%p bytes=%zu", name_of(range.device), address, range.bytes);
  if (range.device != PINNED) host_cuda_release(range.bytes, range.device);
  munmap(address, range.bytes);
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  int target = place_of(to), source = place_of(from);
  host_cuda_record("COPY from=%s to=%s bytes=%zu read=%p written=%p stream=%ld", name_of(source), name_of(target), bytes,
                   from, to, host_cuda_stream_number(stream));
  if (target != PAGEABLE && source != PAGEABLE) {
    host_cuda_run(stream, [=] { memmove(to, from, bytes); });
    return cudaSuccess;
  }
  // CUDA stages pageable memory: the call returns when the host's buffer may be reused.
  host_cuda_drain(stream);
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t bytes, cudaStream_t stream) {
  host_cuda_record("FILL bytes=%zu written=%p stream=%ld", bytes, to, host_cuda_stream_number(stream));
  host_cuda_run(stream, [=] { memset(to, value, bytes); });
  return cudaSuccess;
}

}  // namespace

size_t host_cuda_device_bytes() {
  static const size_t bytes = host_cuda_setting("HOST_CUDA_MEMORY_BYTES", H100_BYTES);
  return bytes;
}

// Bytes that this process can allocate: another program may use the rest.
static size_t free_bytes() {
  static const size_t bytes = host_cuda_setting("HOST_CUDA_FREE_BYTES", host_cuda_device_bytes());
  return bytes;
}

bool host_cuda_reserve(size_t bytes, int device) {
  size_t before = used[device].fetch_add(bytes);
  if (before + bytes <= free_bytes()) return true;
  used[device] -= bytes;
  host_cuda_record("OUT_OF_MEMORY bytes=%zu used=%zu device=%d", bytes, before, device);
  return false;
}

void host_cuda_release(size_t bytes, int device) { used[device] -= bytes; }

void host_cuda_add_range(void* address, size_t bytes, int device) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges[reinterpret_cast<uintptr_t>(address)] = {bytes, device};
}

void host_cuda_remove_range(void* address) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges.erase(reinterpret_cast<uintptr_t>(address));
}

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) { return allocate(address, bytes, host_cuda_current_device()); }
cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }
cudaError_t cudaFree(void* address) {
  host_cuda_drain_all();  // cudaFree waits for the device
  return deallocate(address);
}
cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  host_cuda_run(stream, [=] { deallocate(address); });
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) { return allocate(address, bytes, PINNED); }
cudaError_t cudaFreeHost(void* address) {
  host_cuda_drain_all();
  return deallocate(address);
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  host_cuda_record("PIN address=%p bytes=%zu", address, bytes);
  host_cuda_add_range(address, bytes, PINNED);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  host_cuda_drain_all();
  host_cuda_remove_range(address);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = host_cuda_device_bytes();
  *free = free_bytes() - used[host_cuda_current_device()];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  int place = place_of(address);
  void* pointer = const_cast<void*>(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = place == PAGEABLE ? cudaMemoryTypeUnregistered
                     : place == PINNED ? cudaMemoryTypeHost
                                       : cudaMemoryTypeDevice;
  attributes->device = place >= 0 ? place : 0;
  attributes->devicePointer = place == PAGEABLE ? nullptr : pointer;
  attributes->hostPointer = place == PINNED ? pointer : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes, nullptr);
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return fill(to, value, bytes, nullptr); }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill(to, value, bytes, stream);
}

// Variables of device code are not stored.
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char zeros[1 << 16];
  *address = zeros;
  return cudaSuccess;
}
}

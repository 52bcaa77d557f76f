// NVML: answers of a machine that reports no processes and no links between its devices.
#include "device.h"

namespace {

constexpr int SUCCESS = 0, NOT_SUPPORTED = 3, UNKNOWN = 999;
int handle;

}  // namespace

extern "C" {

int nvmlInit() { return SUCCESS; }
int nvmlInit_v2() { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned*) { return UNKNOWN; }  // torch counts through the runtime then
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = &handle;
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) {
  *device = &handle;
  return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return SUCCESS; }  // torch requires it for expandable segments
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* processes) {
  return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION_NUMBER;
  return SUCCESS;
}
}

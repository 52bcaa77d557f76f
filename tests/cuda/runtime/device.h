// Devices of the machine, settings and errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

constexpr int MAX_DEVICES = 16;
constexpr int CUDA_VERSION_NUMBER = 13000;
constexpr const char* DEVICE_NAME = "NVIDIA H100 80GB HBM3";

// An environment variable as a number.
size_t host_cuda_setting(const char* name, size_t default_value);

int host_cuda_current_device();

// Stores the error for cudaGetLastError and returns it.
cudaError_t host_cuda_fail(cudaError_t error);

// Arithmetic of reductions over the number types of NCCL.
#pragma once

#include <cstddef>

// nccl.h includes headers of device code that the wheels lack, for types that nothing here needs.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>

// Bytes of a number. 0 for an unknown type.
size_t width_of(ncclDataType_t type);

const char* name_of(ncclDataType_t type);
const char* name_of(ncclRedOp_t operation);

// total = total (operation) values, by element. Returns false if the type cannot be reduced.
bool reduce_into(void* total, const void* values, size_t count, ncclDataType_t type, ncclRedOp_t operation);

// values = values * factor, by element.
bool multiply_by(void* values, size_t count, ncclDataType_t type, double factor);

// A single number as a double.
double number_at(const void* value, ncclDataType_t type);

// Arithmetic of reductions. 16-bit floats are computed in fp32 and rounded to nearest even after each step.
#include "reduction.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    bool is_nan = std::isnan(value);
    bits = is_nan ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
};

struct Float16 {
  static constexpr int MANTISSA_BITS = 10, MIN_EXPONENT = -14, MAX_EXPONENT = 15, BIAS = 15;
  uint16_t bits;
  operator float() const {
    int exponent = bits >> MANTISSA_BITS & 31, mantissa = bits & 1023;
    float value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp(float(mantissa), MIN_EXPONENT - MANTISSA_BITS)
                                  : std::ldexp(float(mantissa + 1024), exponent - BIAS - MANTISSA_BITS);
    return bits & 0x8000 ? -value : value;
  }
  Float16(float value) {
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float magnitude = std::fabs(value);
    if (std::isnan(value)) {
      bits = 0x7e00;
      return;
    }
    int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), MIN_EXPONENT) : MIN_EXPONENT;
    if (std::isinf(magnitude) || exponent > MAX_EXPONENT) {
      bits = sign | 0x7c00;
      return;
    }
    // Rounds to nearest even. A carry raises the exponent, up to infinity, because the fields are adjacent.
    int units = int(std::nearbyint(std::ldexp(magnitude, MANTISSA_BITS - exponent)));
    bits = sign | uint16_t(units + ((exponent - MIN_EXPONENT) << MANTISSA_BITS));
  }
};

template <class Number>
void fold(Number* total, const Number* values, size_t count, ncclRedOp_t operation) {
  for (size_t i = 0; i < count; i++) {
    Number a = total[i], b = values[i];
    switch (operation) {
      case ncclProd: total[i] = Number(a * b); break;
      case ncclMax: total[i] = a < b ? b : a; break;
      case ncclMin: total[i] = b < a ? b : a; break;
      default: total[i] = Number(a + b);  // averages and scaled sums are sums, scaled by the caller
    }
  }
}

template <class Number>
void scale(Number* values, size_t count, double factor) {
  for (size_t i = 0; i < count; i++) values[i] = Number(float(values[i]) * float(factor));
}
template <>
void scale(double* values, size_t count, double factor) {
  for (size_t i = 0; i < count; i++) values[i] *= factor;
}
template <class Number>
void scale_integer(Number* values, size_t count, double factor) {
  for (size_t i = 0; i < count; i++) values[i] = Number(double(values[i]) * factor);
}

// Calls `action` with a null pointer of the C++ type.
template <class Action>
bool with_type(ncclDataType_t type, Action action) {
  switch (type) {
    case ncclInt8: action((int8_t*)nullptr); return true;
    case ncclUint8: action((uint8_t*)nullptr); return true;
    case ncclInt32: action((int32_t*)nullptr); return true;
    case ncclUint32: action((uint32_t*)nullptr); return true;
    case ncclInt64: action((int64_t*)nullptr); return true;
    case ncclUint64: action((uint64_t*)nullptr); return true;
    case ncclFloat16: action((Float16*)nullptr); return true;
    case ncclFloat32: action((float*)nullptr); return true;
    case ncclFloat64: action((double*)nullptr); return true;
    case ncclBfloat16: action((Bfloat16*)nullptr); return true;
    default: return false;
  }
}

}  // namespace

size_t width_of(ncclDataType_t type) {
  size_t width = type == ncclFloat8e4m3 || type == ncclFloat8e5m2 ? 1 : 0;
  with_type(type, [&](auto* number) { width = sizeof *number; });
  return width;
}

const char* name_of(ncclDataType_t type) {
  static const char* names[] = {"int8", "uint8",   "int32",   "uint32",   "int64",       "uint64",
                                "fp16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
  return type >= 0 && type < ncclNumTypes ? names[type] : "unknown";
}

const char* name_of(ncclRedOp_t operation) {
  static const char* names[] = {"sum", "product", "max", "min", "average"};
  return operation >= 0 && operation < ncclNumOps ? names[operation] : "scaled_sum";
}

bool reduce_into(void* total, const void* values, size_t count, ncclDataType_t type, ncclRedOp_t operation) {
  return with_type(type, [&](auto* number) {
    using Pointer = decltype(number);
    fold((Pointer)total, (Pointer)values, count, operation);
  });
}

bool multiply_by(void* values, size_t count, ncclDataType_t type, double factor) {
  return with_type(type, [&](auto* number) {
    using Pointer = decltype(number);
    if constexpr (std::is_integral_v<std::remove_reference_t<decltype(*number)>>)
      scale_integer((Pointer)values, count, factor);
    else
      scale((Pointer)values, count, factor);
  });
}

double number_at(const void* value, ncclDataType_t type) {
  double number = 1.0;
  with_type(type, [&](auto* pointer) { number = double(*(decltype(pointer))value); });
  return number;
}

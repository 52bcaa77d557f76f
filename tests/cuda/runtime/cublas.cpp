// cuBLAS: matrix multiplications are logged, not computed.
// The header needs types of device code, so the declarations here use plain types of the same size.
#include <cuda_runtime_api.h>

#include <cstddef>

#include "record.h"
#include "streams.h"

namespace {

constexpr int FLOAT32 = 0, COMPUTE_32F = 68;  // of cudaDataType and cublasComputeType_t

struct Handle {
  cudaStream_t stream;
  int math_mode, pointer_mode;
};

struct Shape {
  int m, n, k;
};

void log(Handle* handle, int batches, Shape shape, int a_type, int b_type, int c_type, int compute, int a_transposed,
         int b_transposed) {
  host_cuda_record("GEMM batches=%d shape=%d,%d,%d types=%d,%d,%d compute=%d layout=%c%c stream=%ld", batches, shape.m,
                   shape.n, shape.k, a_type, b_type, c_type, compute, a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N',
                   host_cuda_stream_number(handle->stream));
}

}  // namespace

extern "C" {

int cublasCreate_v2(Handle** handle) {
  *handle = new Handle{};
  return 0;
}
int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}
int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}
int cublasGetStream_v2(Handle* handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return 0;
}
int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}
int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return 0;
}
int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}
int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return 0;
}
int cublasGemmEx(Handle* handle, int a_transposed, int b_transposed, int m, int n, int k, const void*, const void*,
                 int a_type, int, const void*, int b_type, int, const void*, void*, int c_type, int, int compute, int) {
  log(handle, 1, {m, n, k}, a_type, b_type, c_type, compute, a_transposed, b_transposed);
  return 0;
}
int cublasSgemm_v2(Handle* handle, int a_transposed, int b_transposed, int m, int n, int k, const float*, const float*,
                   int, const float*, int, const float*, float*, int) {
  log(handle, 1, {m, n, k}, FLOAT32, FLOAT32, FLOAT32, COMPUTE_32F, a_transposed, b_transposed);
  return 0;
}
int cublasGemmStridedBatchedEx(Handle* handle, int a_transposed, int b_transposed, int m, int n, int k, const void*,
                               const void*, int a_type, int, long long, const void*, int b_type, int, long long,
                               const void*, void*, int c_type, int, long long, int batches, int compute, int) {
  log(handle, batches, {m, n, k}, a_type, b_type, c_type, compute, a_transposed, b_transposed);
  return 0;
}
int cublasSgemmStridedBatched(Handle* handle, int a_transposed, int b_transposed, int m, int n, int k, const float*,
                              const float*, int, long long, const float*, int, long long, const float*, float*, int,
                              long long, int batches) {
  log(handle, batches, {m, n, k}, FLOAT32, FLOAT32, FLOAT32, COMPUTE_32F, a_transposed, b_transposed);
  return 0;
}
}

// cuBLASLt: matrix multiplications are logged, not computed.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "record.h"
#include "streams.h"

namespace {

// Numbers of cublasLtMatmulDescAttributes_t.
constexpr int TRANSPOSE_A = 3, TRANSPOSE_B = 4, EPILOGUE = 7;
constexpr size_t VERSION = 130100;

struct Layout {
  int type;
  uint64_t rows, columns;
};

struct Description {
  int compute, a_transposed, b_transposed, epilogue;
};

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return VERSION; }
int cublasLtMatmulDescCreate(Description** description, int compute, int) {
  *description = new Description{compute, 0, 0, 0};
  return 0;
}
int cublasLtMatmulDescDestroy(Description* description) {
  delete description;
  return 0;
}
int cublasLtMatmulDescSetAttribute(Description* description, int attribute, const void* value, size_t) {
  int number = *static_cast<const int*>(value);
  if (attribute == TRANSPOSE_A) description->a_transposed = number;
  if (attribute == TRANSPOSE_B) description->b_transposed = number;
  if (attribute == EPILOGUE) description->epilogue = number;
  return 0;
}
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t) {
  *layout = new Layout{type, rows, columns};
  return 0;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return 0;
}
int cublasLtMatmulPreferenceCreate(int** preference) {
  *preference = new int(0);
  return 0;
}
int cublasLtMatmulPreferenceDestroy(int* preference) {
  delete preference;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, Description*, Layout*, Layout*, Layout*, Layout*, void*, int,
                                   Heuristic* results, int* count) {
  memset(results, 0, sizeof *results);
  *count = 1;
  return 0;
}
int cublasLtMatmul(void*, Description* description, const void*, const void*, Layout* a, const void*, Layout* b,
                   const void*, const void*, Layout*, void*, Layout* d, const void*, void*, size_t,
                   cudaStream_t stream) {
  uint64_t k = description->a_transposed ? a->rows : a->columns;
  host_cuda_record("GEMM batches=1 shape=%lu,%lu,%lu types=%d,%d,%d compute=%d layout=%c%c epilogue=%d stream=%ld",
                   d->rows, d->columns, k, a->type, b->type, d->type, description->compute,
                   description->a_transposed ? 'T' : 'N', description->b_transposed ? 'T' : 'N', description->epilogue,
                   host_cuda_stream_number(stream));
  return 0;
}
}

// Elementwise loops of exact mode on a CPU: Kernels.add_to_grid_ and Kernels.elementwise_adam_, each as one loop,
// bit-identical to torch's operators. Inductor's flags disable fused multiply-adds, as the bits need, and gcc's
// vectorizer, so the code uses vectors explicitly.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

using Vec = at::vec::Vectorized<float>;

constexpr int64_t WIDTH = Vec::size();
constexpr int64_t AT_ONCE = 16384;  // values of a thread's part of Adam

// total += truncated values * scale, of WIDTH or fewer values.
inline void add_vector(int64_t* total, Vec values, Vec scale, int64_t n) {
  const Vec scaled = values * scale;
#if defined(__AVX512DQ__) && defined(CPU_CAPABILITY_AVX512)
  if (n == WIDTH) {
    const __m512 eight = scaled;
    const __m512i low = _mm512_cvttps_epi64(_mm512_castps512_ps256(eight));
    const __m512i high = _mm512_cvttps_epi64(_mm512_extractf32x8_ps(eight, 1));
    _mm512_storeu_si512(total, _mm512_add_epi64(_mm512_loadu_si512(total), low));
    _mm512_storeu_si512(total + 8, _mm512_add_epi64(_mm512_loadu_si512(total + 8), high));
    return;
  }
#endif
  float each[WIDTH];
  scaled.store(each);
  for (int64_t i = 0; i < n; ++i) total[i] += int64_t(each[i]);
}

inline Vec load(const float* values, int64_t n) { return Vec::loadu(values, n); }

inline Vec load(const c10::BFloat16* values, int64_t n) {
  float each[WIDTH] = {};
  for (int64_t i = 0; i < n; ++i) each[i] = float(values[i]);
  return Vec::loadu(each);
}

// Adds each row, and finds the largest absolute value, or NaN.
template <typename T>
static void add_rows(int64_t* total, const T* values, float* largest, float scale, int64_t rows, int64_t columns,
                     int64_t total_stride, int64_t values_stride, int threads) {
  float most = 0;
  bool nan = false;
#pragma omp parallel for num_threads(threads) reduction(max : most) reduction(|| : nan)
  for (int64_t row = 0; row < rows; ++row) {
    Vec sizes(0);
    for (int64_t i = 0; i < columns; i += WIDTH) {
      const int64_t n = std::min(WIDTH, columns - i);
      const Vec part = load(values + row * values_stride + i, n);
      sizes = at::vec::maximum(sizes, part.abs());  // keeps NaN
      add_vector(total + row * total_stride + i, part, Vec(scale), n);
    }
    const float size = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, sizes);
    nan = nan || size != size;
    most = std::max(most, size);
  }
  *largest = nan ? NAN : most;
}

extern "C" void add_fp32(int64_t* total, const float* values, float* largest, float scale, int64_t rows,
                         int64_t columns, int64_t total_stride, int64_t values_stride, int threads) {
  add_rows(total, values, largest, scale, rows, columns, total_stride, values_stride, threads);
}

extern "C" void add_bf16(int64_t* total, const c10::BFloat16* values, float* largest, float scale, int64_t rows,
                         int64_t columns, int64_t total_stride, int64_t values_stride, int threads) {
  add_rows(total, values, largest, scale, rows, columns, total_stride, values_stride, threads);
}

// Adam without fused multiply-adds. ``keep``: 1 - lr * weight decay, if decoupled; ``decay``: weight decay, if not.
extern "C" void elementwise_adam(float* weight, const float* grad, float* exp_avg, float* exp_avg_sq, float keep,
                                 float decay, float beta1, float other1, float beta2, float other2, float root,
                                 float eps, float rate, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t start = 0; start < n; start += AT_ONCE) {
    const int64_t stop = std::min(n, start + AT_ONCE);
    for (int64_t i = start; i < stop; i += WIDTH) {
      const int64_t count = std::min(WIDTH, stop - i);
      Vec w = Vec::loadu(weight + i, count) * Vec(keep);
      Vec g = Vec::loadu(grad + i, count);
      if (decay != 0) g = g + w * Vec(decay);
      const Vec mean = Vec::loadu(exp_avg + i, count) * Vec(beta1) + g * Vec(other1);
      const Vec square = Vec::loadu(exp_avg_sq + i, count) * Vec(beta2) + g * g * Vec(other2);
      const Vec denominator = square.sqrt() / Vec(root) + Vec(eps);
      mean.store(exp_avg + i, count);
      square.store(exp_avg_sq + i, count);
      (w - mean / denominator * Vec(rate)).store(weight + i, count);
    }
  }
}

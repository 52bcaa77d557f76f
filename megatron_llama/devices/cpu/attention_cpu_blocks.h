// Block sizes, thread memory and brgemm's data layouts for attention_cpu.cpp.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::BFloat16;
using Vec = at::vec::Vectorized<float>;
using Words = at::vec::Vectorized<int32_t>;
constexpr int64_t WIDTH = Vec::size();
constexpr int64_t KEYS = 128, QUERIES = 128;
constexpr int64_t OWN_KEYS = 64;  // of the block's own tokens, where half of the scores are hidden
constexpr int64_t STRIDE = QUERIES + WIDTH;  // of scores, so that a column maps to different cache sets
static_assert(KEYS == QUERIES && KEYS % OWN_KEYS == 0);

// A tensor [batch, heads, tokens, d], contiguous in d.
template <typename T>
struct View {
  T* data;
  int64_t batch, head, token;  // strides
  T* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Shape {
  int64_t batch, heads, kv_heads, tokens, d;
  int64_t group() const { return heads / kv_heads; }
  int64_t padded() const { return (tokens + QUERIES - 1) / QUERIES * QUERIES; }
};

// Memory of a thread, reused between calls: page faults of new memory take as long as a matmul.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    thread_local std::vector<char> buffer;
    if (static_cast<int64_t>(buffer.size()) < bytes + 64) buffer = std::vector<char>(bytes + 64);
    next_ = buffer.data() + 64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64;
  }
  template <typename T>
  T* of(int64_t count) {
    return reinterpret_cast<T*>(std::exchange(next_, next_ + bytes<T>(count)));
  }
  template <typename T>
  static int64_t bytes(int64_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* next_;
};

// out [columns, rows] = in [rows, columns], of 4-byte words. A word of a bf16 matrix is a pair of columns.
void transpose_words(const void* from, int64_t stride, int64_t rows, int64_t columns, void* to, int64_t out_stride) {
  const float* in = static_cast<const float*>(from);
  float* out = static_cast<float*>(to);
  const int64_t whole = rows / WIDTH * WIDTH;
  for (int64_t r = 0; r < whole; r += WIDTH)
    for (int64_t c = 0; c < columns; c += WIDTH)
      at::vec::transpose_mxn<float, WIDTH, WIDTH>(in + r * stride + c, stride, out + c * out_stride + r, out_stride);
  for (int64_t r = whole; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) out[c * out_stride + r] = in[r * stride + c];
}

const Words UPPER(static_cast<int32_t>(0xffff0000));

// Words whose upper half is x rounded to bf16 (nearest, ties to even).
Words bf16_bits(Vec x) {
  const Words bits = at::vec::cast<int32_t>(x);
  return bits + Words(0x7fff) + ((bits >> Words(16)) & Words(1));
}

Words upper_to_lower(Words x) { return (x >> Words(16)) & Words(0xffff); }

// Operations by dtype. The second factor of a matmul is packed: bf16 interleaves the values of two rows (VNNI), fp32 is
// unchanged. d is a multiple of 2 * WIDTH.
template <typename T>
struct Of;

template <>
struct Of<BFloat16> {
  static constexpr int64_t PER_WORD = 2;
  static constexpr bool PACKED = true;

  static Vec exp(Vec x) { return x.exp_u20(); }

  static void product(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t lda, const BFloat16* b, int64_t ldb,
                      float* c, int64_t ldc, bool add) {
    at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, true);
  }

  static void release() { at::native::cpublas::brgemm_release(true); }

  // x [rows, d] transposed and packed: [d, out_stride], 0 from column ``rows`` on.
  static void pack_transposed(const BFloat16* x, int64_t stride, int64_t rows, int64_t d, BFloat16* out,
                              int64_t out_stride) {
    transpose_words(x, stride / 2, rows, d / 2, out, out_stride);
    for (int64_t i = 0; i < d / 2; i++)
      std::memset(out + 2 * (i * out_stride + rows), 0, (out_stride - rows) * 2 * sizeof(BFloat16));
  }

  // x [rows, d] packed: [padded, d], 0 from ``rows`` on.
  static void pack(const BFloat16* x, int64_t stride, int64_t rows, int64_t padded, int64_t d, BFloat16* out) {
    const std::vector<BFloat16> none(d);
    for (int64_t r = 0; r < padded; r += 2) {
      const BFloat16* one = r < rows ? x + r * stride : none.data();
      const BFloat16* other = r + 1 < rows ? x + (r + 1) * stride : none.data();
      for (int64_t c = 0; c < d; c += 2 * WIDTH) {
        const Words low = Words::loadu(one + c), high = Words::loadu(other + c);
        const Words even = (low & Words(0xffff)) | (high << Words(16)), odd = upper_to_lower(low) | (high & UPPER);
        const auto [first, second] = at::vec::interleave2<int32_t>(even, odd);
        first.store(out + r * d + 2 * c), second.store(out + r * d + 2 * (c + WIDTH));
      }
    }
  }

  // x [rows, d] transposed, not packed: [d, out_stride], 0 from column ``rows`` on. ``words`` is scratch of this size.
  static void transpose(const BFloat16* x, int64_t stride, int64_t rows, int64_t d, BFloat16* out, int64_t out_stride,
                        float* words) {
    pack_transposed(x, stride, rows, d, reinterpret_cast<BFloat16*>(words), out_stride);
    const auto to_float = [](Words upper) { return at::vec::cast<float>(upper); };
    for (int64_t i = 0; i < d / 2; i++, words += out_stride, out += 2 * out_stride)
      for (int64_t c = 0; c < out_stride; c += 2 * WIDTH) {
        const Words one = Words::loadu(words + c), other = Words::loadu(words + c + WIDTH);
        store(to_float(one << Words(16)), to_float(other << Words(16)), out + c);
        store(to_float(one & UPPER), to_float(other & UPPER), out + out_stride + c);
      }
  }

  // 2 * WIDTH values of a row.
  static std::tuple<Vec, Vec> load(const BFloat16* row) {
    return at::vec::convert_to_float<BFloat16>(at::vec::Vectorized<BFloat16>::loadu(row));
  }
  static void store(Vec one, Vec other, BFloat16* row) {
    at::vec::convert_from_float<BFloat16>(one, other).store(row);
  }

  // WIDTH values of two rows, packed, from column ``at`` on.
  static void store_packed(Vec one, Vec other, BFloat16* rows, int64_t at) {
    (upper_to_lower(bf16_bits(one)) | (bf16_bits(other) & UPPER)).store(rows + 2 * at);
  }
};

template <>
struct Of<float> {
  static constexpr int64_t PER_WORD = 1;
  static constexpr bool PACKED = false;

  static Vec exp(Vec x) { return x.exp(); }

  static void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                      float* c, int64_t ldc, bool add) {
    at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, false);
  }

  static void release() {}

  static void pack_transposed(const float* x, int64_t stride, int64_t rows, int64_t d, float* out, int64_t out_stride) {
    transpose_words(x, stride, rows, d, out, out_stride);
    for (int64_t i = 0; i < d; i++) std::fill(out + i * out_stride + rows, out + (i + 1) * out_stride, 0.f);
  }

  static void pack(const float* x, int64_t stride, int64_t rows, int64_t padded, int64_t d, float* out) {
    for (int64_t r = 0; r < rows; r++) std::memcpy(out + r * d, x + r * stride, d * sizeof(float));
    std::fill(out + rows * d, out + padded * d, 0.f);
  }

  static void transpose(const float* x, int64_t stride, int64_t rows, int64_t d, float* out, int64_t out_stride,
                        float*) {
    pack_transposed(x, stride, rows, d, out, out_stride);
  }

  static std::tuple<Vec, Vec> load(const float* row) { return {Vec::loadu(row), Vec::loadu(row + WIDTH)}; }
  static void store(Vec one, Vec other, float* row) { one.store(row), other.store(row + WIDTH); }
  static void store_packed(Vec one, Vec other, float* rows, int64_t at) {
    one.store(rows + at), other.store(rows + QUERIES + at);
  }
};

// out = factor * in, rounded to T.
template <typename T>
void write_row(const float* in, float factor, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += 2 * WIDTH)
    Of<T>::store(Vec::loadu(in + i) * Vec(factor), Vec::loadu(in + i + WIDTH) * Vec(factor), out + i);
}

}  // namespace

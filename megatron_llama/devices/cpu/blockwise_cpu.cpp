// 8-bit optimizer states on a CPU: Kernels.read_block and write_block, each as one loop, bit-identical to torch's
// operators. Inductor's flags disable gcc's vectorizer, so the code uses vectors explicitly. The caller defines BLOCK,
// the values of a block, above this text.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>

using Vec = at::vec::Vectorized<float>;

constexpr int64_t WIDTH = Vec::size();
static_assert(BLOCK % WIDTH == 0);

// values [blocks, 32] = levels[codes] * scales
extern "C" void read_blocks(const uint8_t* codes, const float* scales, const float* levels, float* values,
                            int64_t blocks, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t block = 0; block < blocks; ++block) {
    const uint8_t* code = codes + block * BLOCK;
    float chosen[BLOCK];
    for (int64_t i = 0; i < BLOCK; ++i) chosen[i] = levels[code[i]];
    const Vec scale(scales[block]);
    for (int64_t i = 0; i < BLOCK; i += WIDTH) (Vec::loadu(chosen + i) * scale).store(values + block * BLOCK + i);
  }
}

// Scales and codes of values [blocks, 32]. ``Levels`` in devices/kernels.py describes boundaries and lowest.
extern "C" void write_blocks(const float* values, const float* boundaries, const uint8_t* lowest, float least,
                             uint8_t* codes, float* scales, int64_t blocks, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t block = 0; block < blocks; ++block) {
    const float* value = values + block * BLOCK;
    Vec largest(least);
    for (int64_t i = 0; i < BLOCK; i += WIDTH) largest = at::vec::maximum(largest, Vec::loadu(value + i).abs());
    const float scale = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, largest);
    scales[block] = scale;
    float shares[BLOCK];
    uint32_t bits[BLOCK];
    for (int64_t i = 0; i < BLOCK; i += WIDTH) (Vec::loadu(value + i) / Vec(scale)).store(shares + i);
    std::memcpy(bits, shares, sizeof(bits));
    uint8_t* code = codes + block * BLOCK;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const uint8_t low = lowest[bits[i] >> 16];
      code[i] = uint8_t(low + (shares[i] >= boundaries[low]));
    }
  }
}

// Optimizer states in 8 bits on a CPU: the many operators of Kernels.read_block and write_block in one pass, bit-identical.
// Inductor's flags switch gcc's vectorizer off, so vectors are written as such. BLOCK, the values of a block, is put above.

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

// The scales and codes of values [blocks, 32]; ``Levels`` in devices/kernels.py describes borders and lowest.
extern "C" void write_blocks(const float* values, const float* borders, const uint8_t* lowest, float least,
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
      const uint8_t found = lowest[bits[i] >> 16];
      code[i] = uint8_t(found + (shares[i] >= borders[found]));
    }
  }
}

// Causal attention on a CPU for T = at::BFloat16 and float. devices/cpu/attention.py compiles and calls it.
//
// FlashAttention-2 (Dao 2023, arXiv:2307.08691) by blocks of KEYS keys and QUERIES queries, with torch's small matmuls
// (brgemm). Blocks are transposed: a row of scores belongs to a key, a column to a query. Sums over keys and the state
// of a query are then operations between rows, and weights have the layout that the backward pass multiplies. A thread
// takes one head of keys and values with its group of query heads, or one query head if there are more threads than kv
// heads. Sums have the same order in both cases, so results are bit-identical.

#include "attention_cpu_blocks.h"

namespace {

// Up to QUERIES queries of a head. A query attends to the keys from its ``low`` to itself. ``low`` is non-decreasing.
struct Block {
  int64_t first, tokens, rows, columns;  // columns: rows, padded to full vectors
  const float* low;

  Block(int64_t first, int64_t tokens, const float* lows)
      : first(first), tokens(tokens), rows(std::min(QUERIES, tokens - first)),
        columns((rows + 2 * WIDTH - 1) / (2 * WIDTH) * 2 * WIDTH), low(lows + first) {}

  int64_t first_key() const { return static_cast<int64_t>(low[0]); }
  int64_t end_key() const { return first + rows; }
  // Number of keys of a step that begins at ``key``, and the first query that attends to one of them.
  int64_t keys(int64_t key) const { return std::min(key < first ? KEYS : OWN_KEYS, tokens - key); }
  int64_t from(int64_t key) const { return std::max<int64_t>(0, key - first); }
  bool all_visible(int64_t key, int64_t keys) const { return key + keys - 1 <= first && key >= low[rows - 1]; }
};

// Writes ``lows`` [padded tokens] of a row of the batch.
void fill_lows(const int32_t* input, int64_t b, const Shape& shape, float* lows) {
  for (int64_t t = 0; t < shape.padded(); t++)
    lows[t] = input ? static_cast<float>(input[b * shape.tokens + std::min(t, shape.tokens - 1)]) : 0.f;
}

// Scaled scores of a key with the queries at ``at``, from a row of scores; -inf if hidden.
template <bool masked>
Vec scaled(const float* row, const Block& block, int64_t at, int64_t key, float scale) {
  const Vec scores = Vec::loadu(row + at) * Vec(scale), one(static_cast<float>(key));
  if (!masked) return scores;
  const Vec query = Vec::arange(static_cast<float>(block.first + at), 1.f);
  return Vec::blendv(Vec(-INFINITY), scores, (query >= one) & (Vec::loadu(block.low + at) <= one));
}

// Running softmax state of a block's queries: largest score, sum of weights, and the factor that rescales earlier sums.
struct State {
  float *largest, *sums, *factors;
};

// Updates the state with these keys, and writes their weights, packed.
template <typename T, bool masked>
void softmax(const float* scores, int64_t key, int64_t keys, const Block& block, float scale, State state, T* packed) {
  for (int64_t at = block.from(key); at < block.columns; at += 2 * WIDTH) {
    const int64_t column[2] = {at, at + WIDTH};
    Vec now[2] = {Vec::loadu(state.largest + column[0]), Vec::loadu(state.largest + column[1])};
    for (int64_t c = 0; c < keys; c++)
      for (int half = 0; half < 2; half++)
        now[half] = at::vec::maximum(
            now[half], scaled<masked>(scores + c * STRIDE, block, column[half], key + c, scale));
    Vec sum[2] = {Vec(0.f), Vec(0.f)};
    for (int64_t c = 0; c < keys; c += 2)
      for (int half = 0; half < 2; half++) {
        Vec weights[2] = {Vec(0.f), Vec(0.f)};
        for (int64_t i = 0; i < 2 && c + i < keys; i++) {
          const Vec score = scaled<masked>(scores + (c + i) * STRIDE, block, column[half], key + c + i, scale);
          weights[i] = Of<T>::exp(score - now[half]);
        }
        sum[half] = sum[half] + weights[0] + weights[1];
        Of<T>::store_packed(weights[0], weights[1], packed + c * QUERIES, column[half]);
      }
    for (int half = 0; half < 2; half++) {
      const Vec factor = Of<T>::exp(Vec::loadu(state.largest + column[half]) - now[half]);
      now[half].store(state.largest + column[half]);
      factor.store(state.factors + column[half]);
      at::vec::fmadd(Vec::loadu(state.sums + column[half]), factor, sum[half]).store(state.sums + column[half]);
    }
  }
}

// Work item of a thread: query heads of one key and value head.
struct Item {
  int64_t b, kv, first, end;
};

int64_t parts(const Shape& shape, int threads) { return shape.batch * shape.kv_heads < threads ? shape.group() : 1; }

Item item_of(int64_t number, const Shape& shape, int64_t parts) {
  const int64_t whole = number / parts, kv = whole % shape.kv_heads, heads = shape.group() / parts;
  const int64_t first = kv * shape.group() + number % parts * heads;
  return {whole / shape.kv_heads, kv, first, first + heads};
}

template <typename T>
struct Forward {
  View<const T> q, k, v;
  View<T> out;
  View<float> lse;
  const int32_t* lows;
  Shape shape;
  float scale;

  void run(int threads) const {
    const int64_t d = shape.d, length = shape.padded(), split = parts(shape, threads);
    const int64_t bytes = Memory::bytes<T>(d * length) + Memory::bytes<float>(d * length) +
        Memory::bytes<float>(length) + Memory::bytes<T>(QUERIES * d) + Memory::bytes<T>(QUERIES * KEYS) +
        Memory::bytes<float>(STRIDE * KEYS) + 2 * Memory::bytes<float>(QUERIES * d) + 3 * Memory::bytes<float>(QUERIES);
#pragma omp parallel num_threads(threads)
    {
      Memory memory(bytes);
      T* values = memory.of<T>(d * length);
      float* words = memory.of<float>(d * length);
      float* low = memory.of<float>(length);
#pragma omp for schedule(dynamic, 1)
      for (int64_t number = 0; number < shape.batch * shape.kv_heads * split; number++) {
        const auto [b, kv, first_head, end_head] = item_of(number, shape, split);
        fill_lows(lows, b, shape, low);
        Of<T>::transpose(v.at(b, kv), v.token, shape.tokens, d, values, length, words);
        for (int64_t h = first_head; h < end_head; h++)
          for (int64_t first = 0; first < shape.tokens; first += QUERIES)
            attend(b, h, k.at(b, kv), Block(first, shape.tokens, low), values, length, memory);
      }
      Of<T>::release();
    }
  }

  void attend(int64_t b, int64_t h, const T* keys_of_head, const Block& block, const T* values, int64_t length,
              Memory memory) const {
    const int64_t d = shape.d, n = block.columns;
    T *queries = memory.of<T>(QUERIES * d), *weights = memory.of<T>(QUERIES * KEYS);
    float *scores = memory.of<float>(STRIDE * KEYS), *sum = memory.of<float>(QUERIES * d);
    float* rows = memory.of<float>(QUERIES * d);
    const State state{memory.of<float>(QUERIES), memory.of<float>(QUERIES), memory.of<float>(QUERIES)};
    std::fill(state.largest, state.largest + QUERIES, -1e30f);  // not -inf, whose difference is NaN
    std::fill(state.sums, state.sums + QUERIES, 0.f);
    Of<T>::pack_transposed(q.at(b, h) + block.first * q.token, q.token, block.rows, d, queries, QUERIES);
    const int64_t start = block.first_key() / KEYS * KEYS;
    for (int64_t key = start, keys; key < block.end_key(); key += keys) {
      keys = block.keys(key);
      const int64_t from = block.from(key), packed = from * Of<T>::PER_WORD;
      Of<T>::product(keys, n - from, d, keys_of_head + key * k.token, k.token, queries + packed, QUERIES,
                     scores + from, STRIDE, false);
      const auto update = block.all_visible(key, keys) ? softmax<T, false> : softmax<T, true>;
      update(scores, key, keys, block, scale, state, weights);
      if (key > start)
        for (int64_t i = 0; i < d; i++)
          for (int64_t r = from; r < n; r += WIDTH)
            (Vec::loadu(sum + i * QUERIES + r) * Vec::loadu(state.factors + r)).store(sum + i * QUERIES + r);
      Of<T>::product(d, n - from, keys + keys % 2, values + key, length, weights + packed, QUERIES, sum + from, QUERIES,
                     key > start);
    }
    for (int64_t r = 0; r < n; r += WIDTH) {
      const Vec total = Vec::loadu(state.sums + r);
      (Vec(1.f) / total).store(state.factors + r);
      (Vec::loadu(state.largest + r) + total.log()).store(state.sums + r);
    }
    transpose_words(sum, QUERIES, d, QUERIES, rows, d);
    for (int64_t r = 0; r < block.rows; r++) {
      write_row(rows + r * d, state.factors[r], d, out.at(b, h) + (block.first + r) * out.token);
      lse.at(b, h)[(block.first + r) * lse.token] = state.sums[r];
    }
  }
};

// Buffers of the backward pass for a head of keys and values and one of its query heads.
template <typename T>
struct Head {
  const T *keys, *values;
  T* keys_t;  // transposed, with stride ``length``
  int64_t length;
  T *queries_t, *queries, *grads_t, *grads;  // packed
  float *dq_t, *dk, *dv, *lse, *means, *low;
};

// Weights of a block's queries for these keys, and the gradients of their scores (also packed, if T is packed).
template <typename T, bool masked>
void weigh(const float* scores, const float* by_weight, int64_t key, int64_t keys, const Block& block, float scale,
           const Head<T>& head, T* weights, T* by_score, T* packed) {
  const float *lse = head.lse + block.first, *means = head.means + block.first;
  for (int64_t c = 0; c < keys; c += 2)
    for (int64_t at = block.from(key); at < block.columns; at += 2 * WIDTH) {
      const Vec none(0.f);
      Vec weight[2][2] = {{none, none}, {none, none}}, gradient[2][2] = {{none, none}, {none, none}};
      for (int64_t i = 0; i < 2 && c + i < keys; i++)
        for (int half = 0; half < 2; half++) {
          const int64_t column = at + half * WIDTH, row = (c + i) * STRIDE;
          const Vec score = scaled<masked>(scores + row, block, column, key + c + i, scale);
          weight[i][half] = Of<T>::exp(score - Vec::loadu(lse + column));
          const Vec difference = Vec::loadu(by_weight + row + column) - Vec::loadu(means + column);
          gradient[i][half] = weight[i][half] * difference * Vec(scale);
        }
      for (int i = 0; i < 2; i++) {
        Of<T>::store(weight[i][0], weight[i][1], weights + (c + i) * QUERIES + at);
        Of<T>::store(gradient[i][0], gradient[i][1], by_score + (c + i) * QUERIES + at);
        if (Of<T>::PACKED)
          Of<T>::store_packed(gradient[0][i], gradient[1][i], packed + c * QUERIES, at + i * WIDTH);
      }
    }
}

template <typename T>
struct Backward {
  View<const T> grad, q, k, v, out;
  View<const float> lse;
  View<T> dq, dk, dv;
  const int32_t* lows;
  Shape shape;
  float scale;

  void run(int threads) const {
    const int64_t d = shape.d, length = shape.padded(), size = length * d, split = parts(shape, threads);
    const int64_t bytes = 5 * Memory::bytes<T>(size) + 5 * Memory::bytes<float>(size) +
        3 * Memory::bytes<float>(length) + 3 * Memory::bytes<T>(QUERIES * KEYS) +
        2 * Memory::bytes<float>(STRIDE * std::max(KEYS, d));
    // dk and dv of each query head, if query heads are separate work items.
    const std::unique_ptr<float[]> of_heads(split > 1 ? new float[2 * shape.batch * shape.heads * size] : nullptr);
#pragma omp parallel num_threads(threads)
    {
      Memory memory(bytes);
      Head<T> head;
      head.length = length;
      for (T** of : {&head.keys_t, &head.queries_t, &head.queries, &head.grads_t, &head.grads})
        *of = memory.of<T>(size);
      float* totals[2] = {memory.of<float>(size), memory.of<float>(size)};
      for (float** sum : {&head.dq_t, &head.dk, &head.dv}) *sum = memory.of<float>(size);
      for (float** row : {&head.lse, &head.means, &head.low}) *row = memory.of<float>(length);
#pragma omp for schedule(dynamic, 1)
      for (int64_t number = 0; number < shape.batch * shape.kv_heads * split; number++) {
        const auto [b, kv, first, end] = item_of(number, shape, split);
        fill_lows(lows, b, shape, head.low);
        head.keys = k.at(b, kv), head.values = v.at(b, kv);
        Of<T>::transpose(head.keys, k.token, shape.tokens, d, head.keys_t, length, head.dk);
        for (int64_t h = first; h < end; h++) {
          for (float* sum : {head.dk, head.dv}) std::fill(sum, sum + size, 0.f);
          prepare(b, h, head);
          for (int64_t key = 0; key < shape.tokens; key += KEYS) add_keys(key, head, memory);
          write_queries(b, h, head, memory);
          float* separate = split > 1 ? of_heads.get() + 2 * (b * shape.heads + h) * size : nullptr;
          add(head.dk, size, separate || h == first, separate ? separate : totals[0]);
          add(head.dv, size, separate || h == first, separate ? separate + size : totals[1]);
        }
        if (split == 1) write_keys(b, kv, totals[0], totals[1]);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t number = 0; number < (split > 1 ? shape.batch * shape.kv_heads : 0); number++) {
        const auto [b, kv, first, end] = item_of(number, shape, 1);
        for (int64_t h = first; h < end; h++)
          for (int i = 0; i < 2; i++)
            add(of_heads.get() + (2 * (b * shape.heads + h) + i) * size, size, h == first, totals[i]);
        write_keys(b, kv, totals[0], totals[1]);
      }
      Of<T>::release();
    }
  }

  static void add(const float* in, int64_t size, bool is_first, float* total) {
    for (int64_t i = 0; i < size; i += WIDTH)
      (is_first ? Vec::loadu(in + i) : Vec::loadu(total + i) + Vec::loadu(in + i)).store(total + i);
  }

  void write_keys(int64_t b, int64_t kv, const float* keys, const float* values) const {
    for (int64_t t = 0; t < shape.tokens; t++) {
      write_row(keys + t * shape.d, 1.f, shape.d, dk.at(b, kv) + t * dk.token);
      write_row(values + t * shape.d, 1.f, shape.d, dv.at(b, kv) + t * dv.token);
    }
  }

  void prepare(int64_t b, int64_t h, const Head<T>& head) const {
    const int64_t d = shape.d;
    const T *head_grad = grad.at(b, h), *head_out = out.at(b, h);
    for (int64_t t = 0; t < shape.padded(); t++) {
      Vec mean(0.f);
      for (int64_t i = 0; i < d && t < shape.tokens; i += 2 * WIDTH) {
        const auto [grad_one, grad_other] = Of<T>::load(head_grad + t * grad.token + i);
        const auto [out_one, out_other] = Of<T>::load(head_out + t * out.token + i);
        mean = at::vec::fmadd(grad_one, out_one, at::vec::fmadd(grad_other, out_other, mean));
      }
      head.means[t] = at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return x + y; }, mean);
      head.lse[t] = t < shape.tokens ? lse.at(b, h)[t * lse.token] : INFINITY;  // padding has weight 0
    }
    for (int64_t first = 0; first < shape.tokens; first += QUERIES) {
      const int64_t rows = std::min(QUERIES, shape.tokens - first);
      const T *queries = q.at(b, h) + first * q.token, *grads = head_grad + first * grad.token;
      Of<T>::pack_transposed(queries, q.token, rows, d, head.queries_t + first * d, QUERIES);
      Of<T>::pack_transposed(grads, grad.token, rows, d, head.grads_t + first * d, QUERIES);
      Of<T>::pack(queries, q.token, rows, QUERIES, d, head.queries + first * d);
      Of<T>::pack(grads, grad.token, rows, QUERIES, d, head.grads + first * d);
    }
    std::fill(head.dq_t, head.dq_t + head.length * d, 0.f);
  }

  // Adds the contribution of KEYS keys to the gradients of a head.
  void add_keys(int64_t start, const Head<T>& head, Memory memory) const {
    const int64_t d = shape.d;
    float *scores = memory.of<float>(STRIDE * KEYS), *by_weight = memory.of<float>(STRIDE * KEYS);
    T *weights = memory.of<T>(QUERIES * KEYS), *by_score = memory.of<T>(QUERIES * KEYS);
    T* packed = Of<T>::PACKED ? memory.of<T>(QUERIES * KEYS) : by_score;
    for (int64_t first = start; first < shape.tokens; first += QUERIES) {
      const Block block(first, shape.tokens, head.low);
      if (block.first_key() >= start + KEYS) break;
      const int64_t end = std::min(start + KEYS, block.end_key());
      for (int64_t key = start, keys; key < end; key += keys) {
        keys = block.keys(key);
        const int64_t from = block.from(key), n = block.columns - from, rows = (first + from) * d;
        const int64_t in_words = from * Of<T>::PER_WORD, transposed = first * d + in_words;
        Of<T>::product(keys, n, d, head.keys + key * k.token, k.token, head.queries_t + transposed, QUERIES,
                       scores + from, STRIDE, false);
        Of<T>::product(keys, n, d, head.values + key * v.token, v.token, head.grads_t + transposed, QUERIES,
                       by_weight + from, STRIDE, false);
        const auto weigh_keys = block.all_visible(key, keys) ? weigh<T, false> : weigh<T, true>;
        weigh_keys(scores, by_weight, key, keys, block, scale, head, weights, by_score, packed);
        Of<T>::product(keys, d, n, weights + from, QUERIES, head.grads + rows, d, head.dv + key * d, d, true);
        Of<T>::product(keys, d, n, by_score + from, QUERIES, head.queries + rows, d, head.dk + key * d, d, true);
        Of<T>::product(d, n, keys + keys % 2, head.keys_t + key, head.length, packed + in_words, QUERIES,
                       head.dq_t + first * d + from, QUERIES, true);
      }
    }
  }

  void write_queries(int64_t b, int64_t h, const Head<T>& head, Memory memory) const {
    float* rows = memory.of<float>(QUERIES * shape.d);
    for (int64_t first = 0; first < shape.tokens; first += QUERIES) {
      transpose_words(head.dq_t + first * shape.d, QUERIES, shape.d, QUERIES, rows, shape.d);
      for (int64_t r = 0; r < std::min(QUERIES, shape.tokens - first); r++)
        write_row(rows + r * shape.d, 1.f, shape.d, dq.at(b, h) + (first + r) * dq.token);
    }
  }
};

// The tensors of a call.
struct Tensors {
  void* const* data;
  const int64_t* strides;
  template <typename T>
  View<T> at(int i) const {
    return {static_cast<T*>(data[i]), strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
  }
};

template <typename T>
void forward(Tensors of, const int32_t* lows, Shape shape, float scale, int threads) {
  Forward<T>{of.at<const T>(0), of.at<const T>(1), of.at<const T>(2), of.at<T>(3), of.at<float>(4), lows, shape, scale}
      .run(threads);
}

template <typename T>
void backward(Tensors of, const int32_t* lows, Shape shape, float scale, int threads) {
  Backward<T>{of.at<const T>(0), of.at<const T>(1), of.at<const T>(2), of.at<const T>(3), of.at<const T>(4),
              of.at<const float>(5), of.at<T>(6), of.at<T>(7), of.at<T>(8), lows, shape, scale}
      .run(threads);
}

template <typename T>
void try_product() {
  const std::vector<T> factor(16 * 16);
  std::vector<float> product(16 * 16);
  Of<T>::product(16, 16, 16, factor.data(), 16, factor.data(), 16, product.data(), 16, false);
  Of<T>::release();
}

}  // namespace

// ``data`` and ``strides`` (batch, head, token) of the tensors in the order of Forward's and Backward's members;
// ``shape`` as Shape; ``lows`` [batch, tokens] or null.
extern "C" {

// Whether brgemm supports the dtype on this processor. An exception inside a parallel region would end the process.
bool multiplies(bool bf16) {
  try {
    bf16 ? try_product<BFloat16>() : try_product<float>();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void attention_forward(bool bf16, void** data, const int64_t* strides, const int32_t* lows, const Shape* shape,
                       float scale, int threads) {
  (bf16 ? forward<BFloat16> : forward<float>)({data, strides}, lows, *shape, scale, threads);
}

void attention_backward(bool bf16, void** data, const int64_t* strides, const int32_t* lows, const Shape* shape,
                        float scale, int threads) {
  (bf16 ? backward<BFloat16> : backward<float>)({data, strides}, lows, *shape, scale, threads);
}
}

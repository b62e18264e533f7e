// The kernels in terms of sixteen lanes; compiled once per instruction set, with that set's simd/*.h included before this file
// and KERNELS naming the table. Everything has internal linkage.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace triblade {
namespace {

using namespace simd;

constexpr int kTile = 16;         // rows of a block, tokens of a cache tile
constexpr int kTokenTile = 8;     // tokens multiplied together
constexpr int kUnpackFrom = 24;   // tokens from which a block is unpacked to bytes once
constexpr int kKeyChunk = 128;    // keys whose scores are held together
constexpr int kMaxRows = kRowsPerItem;
constexpr float kMinusInfinity = -1e30f;

inline float to_bf16_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint16_t to_bf16(float x) {
  x = to_bf16_float(x);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}
inline uint16_t to_half(float x) {  // non-negative and finite, or -(finite); rounds to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  float magnitude = std::fabs(x);
  if (magnitude < 6.103515625e-05f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 16777216.0f)));
  std::memcpy(&bits, &magnitude, 4);
  bits += 0xfff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | std::min<uint32_t>((bits - (112u << 23)) >> 13, 0x7bff));
}
inline float half_value(uint16_t h) {
  alignas(64) uint16_t lanes[kTile] = {h};
  alignas(64) float out[kTile];
  store(out, load_half(lanes));
  return out[0];
}

// e^x, relative error below 2e-7 (minimax polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]).
inline F exp(F x) {
  x = min(max(x, set(-87.0f)), set(88.0f));
  const F n = round(mul(x, set(1.44269504f)));
  F r = fma(n, set(-0.693359375f), x);
  r = fma(n, set(2.12194440e-4f), r);
  F p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set(1.0f));
  return scale_by_power_of_2(p, n);
}
inline F sigmoid(F x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }
inline F tanh(F x) { return sub(mul(set(2.0f), sigmoid(mul(set(2.0f), x))), set(1.0f)); }
inline F silu(F x) { return mul(x, sigmoid(x)); }
inline F gelu(F x) {  // the tanh form: 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
  const F u = mul(set(0.7978845608f), fma(mul(set(0.044715f), mul(x, x)), x, x));
  return mul(x, sigmoid(mul(set(2.0f), u)));
}

// ---- activations ------------------------------------------------------------------------------------------------------------

// Sum of squares of a row; `columns` need not be a multiple of 16.
inline float sum_of_squares(const float* x, int columns) {
  F total = zero();
  int c = 0;
  for (; c + kTile <= columns; c += kTile) {
    const F v = load(x + c);
    total = fma(v, v, total);
  }
  float result = sum(total);
  for (; c < columns; c++) result += x[c] * x[c];
  return result;
}

// One group of int8 codes with their scale: |error| <= max|x| / 254.
inline void quantize_group(const float* x, int count, int8_t* codes, float* scale, int32_t* total) {
  F top = zero();
  for (int c = 0; c < count; c += kTile) top = max(top, abs(load(x + c)));
  const float largest = highest(top);
  *scale = largest / 127.0f;
  const F inverse = set(largest > 0 ? 127.0f / largest : 0.0f);
  F codes_sum = zero();
  for (int c = 0; c < count; c += kTile) {
    const F code = round(mul(load(x + c), inverse));
    store_int8(codes + c, code);
    codes_sum = add(codes_sum, code);
  }
  const float all = sum(codes_sum);
  const bool finite = all == all;  // infinities times zero and NaNs end here; their row stays NaN to the logits
  if (!finite) *scale = all;
  *total = finite ? static_cast<int32_t>(all) : 0;
}

// A row of `columns` floats (readable up to the padded width) in the form that `matrix` multiplies.
inline void quantize_row(float* x, int columns, const Matrix& matrix, int t, const Activations& out) {
  const int inputs = matrix.inputs;
  for (int c = columns; c < inputs; c++) x[c] = 0;
  const int64_t row = static_cast<int64_t>(t) * inputs;
  if (matrix.format == Format::kFp32) {
    std::memcpy(out.floats + row, x, sizeof(float) * inputs);
  } else if (matrix.format == Format::kBf16) {
    for (int c = 0; c < inputs; c++) out.halves[row + c] = to_bf16(x[c]);
  } else {
    const int groups = matrix.groups(), group = matrix.group;
    for (int g = 0; g < groups; g++) {
      const int64_t at = static_cast<int64_t>(t) * groups + g;
      quantize_group(x + g * group, group, out.codes + row + g * group, out.scales + at, out.sums + at);
    }
  }
}

constexpr int kMaxColumns = 1 << 16;
struct RowBuffer {
  alignas(64) float row[kMaxColumns + 256];
};
thread_local RowBuffer row_buffer;

void norm(const float* x, const float* weight, float eps, int columns, const int32_t* gather, const Matrix& matrix, Share tokens,
          const Activations& out) {
  float* row = row_buffer.row;
  for (int t = tokens.begin; t < tokens.end; t++) {
    const float* source = x + static_cast<int64_t>(gather ? gather[t] : t) * columns;
    const float inverse = 1.0f / std::sqrt(sum_of_squares(source, columns) / columns + eps);
    int c = 0;
    for (; c + kTile <= columns; c += kTile) store(row + c, mul(mul(load(source + c), set(inverse)), load(weight + c)));
    for (; c < columns; c++) row[c] = source[c] * inverse * weight[c];
    quantize_row(row, columns, matrix, t, out);
  }
}

void quantize(const float* x, int columns, const Matrix& matrix, Share tokens, const Activations& out) {
  float* row = row_buffer.row;
  for (int t = tokens.begin; t < tokens.end; t++) {
    std::memcpy(row, x + static_cast<int64_t>(t) * columns, sizeof(float) * columns);
    quantize_row(row, columns, matrix, t, out);
  }
}

void norm_add(const float* x, const float* weight, float eps, int columns, Share tokens, float* residual) {
  for (int t = tokens.begin; t < tokens.end; t++) {
    const float* source = x + static_cast<int64_t>(t) * columns;
    float* target = residual + static_cast<int64_t>(t) * columns;
    const float inverse = 1.0f / std::sqrt(sum_of_squares(source, columns) / columns + eps);
    for (int c = 0; c < columns; c++) target[c] += source[c] * inverse * weight[c];
  }
}

// ---- embedding --------------------------------------------------------------------------------------------------------------

// One weight of a packed matrix, as the matrix product sees it.
inline float weight_at(const Matrix& m, int row, int input) {
  const int64_t block = row / kTile, r = row % kTile;
  if (m.format == Format::kFp32) {
    float value;
    std::memcpy(&value, m.weights + (block * m.inputs + input) * 64 + 4 * r, 4);
    return value;
  }
  if (m.format == Format::kBf16) {
    uint16_t half;
    std::memcpy(&half, m.weights + (block * m.inputs / 2 + input / 2) * 64 + 4 * r + 2 * (input % 2), 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  int code;
  if (m.format == Format::kInt4) {
    const uint8_t byte = m.weights[(block * m.inputs / 8 + input / 8) * 64 + 4 * r + input % 4];
    code = input % 8 < 4 ? byte & 15 : byte >> 4;
  } else {
    code = m.weights[(block * m.inputs / 4 + input / 4) * 64 + 4 * r + input % 4];
  }
  const int64_t at = (block * m.groups() + input / m.group) * kTile + r;
  const float scale = half_value(m.scales[at]);
  return m.offsets ? scale * code + half_value(m.offsets[at]) : scale * (code - (m.format == Format::kInt4 ? 8 : 128));
}

void embed(const Matrix& table, const int32_t* ids, float scale, int columns, Share tokens, float* out) {
  for (int t = tokens.begin; t < tokens.end; t++) {
    float* row = out + static_cast<int64_t>(t) * columns;
    for (int c = 0; c < columns; c++) row[c] = scale * weight_at(table, ids[t], c);
  }
}

// ---- linear -----------------------------------------------------------------------------------------------------------------

struct Nibbles {  // int4 as stored
  static constexpr int kZero = 8;
  template <class Use> static inline const uint8_t* next8(const uint8_t* w, Use use) {
    const B both = load_bytes(w);
    use(low_nibbles(both), high_nibbles(both));
    return w + 64;
  }
};
template <int Zero> struct Bytes {  // int8, or int4 unpacked to bytes
  static constexpr int kZero = Zero;
  template <class Use> static inline const uint8_t* next8(const uint8_t* w, Use use) {
    use(load_bytes(w), load_bytes(w + 64));
    return w + 128;
  }
};

// M tokens times one block: out[m] = 16 rows.
template <int M, class Source, bool kAffine>
inline void integer_tile(const Matrix& matrix, int block, const uint8_t* w, const Activations& x, int t, F* out) {
  const int inputs = matrix.inputs, groups = matrix.groups(), group = matrix.group;
  const uint16_t* scales = matrix.scales + static_cast<int64_t>(block) * groups * kTile;
  const uint16_t* offsets = kAffine ? matrix.offsets + static_cast<int64_t>(block) * groups * kTile : nullptr;
  const int8_t* codes = x.codes + static_cast<int64_t>(t) * inputs;
  const float* x_scales = x.scales + static_cast<int64_t>(t) * groups;
  const int32_t* x_sums = x.sums + static_cast<int64_t>(t) * groups;
  for (int m = 0; m < M; m++) out[m] = zero();
  for (int g = 0; g < groups; g++) {
    I total[M];
    for (int m = 0; m < M; m++) total[m] = set_int(kAffine ? 0 : -Source::kZero * x_sums[m * groups + g]);
    const int8_t* input = codes + g * group;
    for (int k = 0; k < group; k += 8, input += 8) {
      w = Source::next8(w, [&](const B& first, const B& second) {
        for (int m = 0; m < M; m++) {
          const int8_t* x8 = input + static_cast<int64_t>(m) * inputs;
          total[m] = dot(dot(total[m], first, x8), second, x8 + 4);
        }
      });
    }
    const F scale = load_half(scales + g * kTile);
    for (int m = 0; m < M; m++) {
      out[m] = fma(mul(scale, set(x_scales[m * groups + g])), to_float(total[m]), out[m]);
      if (kAffine) out[m] = fma(load_half(offsets + g * kTile), set(x_scales[m * groups + g] * x_sums[m * groups + g]), out[m]);
    }
  }
}

template <int M> inline void bf16_tile(const Matrix& matrix, const uint8_t* w, const Activations& x, int t, F* out) {
  const uint16_t* input = x.halves + static_cast<int64_t>(t) * matrix.inputs;
  for (int m = 0; m < M; m++) out[m] = zero();
  for (int k = 0; k < matrix.inputs; k += 2, w += 64) {
    const B pairs = load_bytes(w);
    for (int m = 0; m < M; m++) out[m] = dot_bf16(out[m], pairs, input + static_cast<int64_t>(m) * matrix.inputs + k);
  }
}

template <int M> inline void fp32_tile(const Matrix& matrix, const uint8_t* w, const Activations& x, int t, F* out) {
  const float* input = x.floats + static_cast<int64_t>(t) * matrix.inputs;
  for (int m = 0; m < M; m++) out[m] = zero();
  for (int k = 0; k < matrix.inputs; k++, w += 64) {
    const F rows = load(reinterpret_cast<const float*>(w));
    for (int m = 0; m < M; m++) out[m] = fma(rows, set(input[static_cast<int64_t>(m) * matrix.inputs + k]), out[m]);
  }
}

// One block of any format; `unpacked` is the block as bytes, or null.
template <int M>
inline void block_tile(const Matrix& matrix, int block, const uint8_t* unpacked, const Activations& x, int t, F* out) {
  const int64_t bits = matrix.format == Format::kInt4 ? 4 : matrix.format == Format::kInt8 ? 8 : matrix.format == Format::kBf16 ? 16 : 32;
  const uint8_t* w = matrix.weights + static_cast<int64_t>(block) * matrix.inputs * kTile * bits / 8;
  switch (matrix.format) {
    case Format::kInt4:
      if (unpacked) {
        matrix.offsets ? integer_tile<M, Bytes<8>, true>(matrix, block, unpacked, x, t, out)
                       : integer_tile<M, Bytes<8>, false>(matrix, block, unpacked, x, t, out);
      } else {
        matrix.offsets ? integer_tile<M, Nibbles, true>(matrix, block, w, x, t, out)
                       : integer_tile<M, Nibbles, false>(matrix, block, w, x, t, out);
      }
      break;
    case Format::kInt8:
      matrix.offsets ? integer_tile<M, Bytes<128>, true>(matrix, block, w, x, t, out)
                     : integer_tile<M, Bytes<128>, false>(matrix, block, w, x, t, out);
      break;
    case Format::kBf16: bf16_tile<M>(matrix, w, x, t, out); break;
    case Format::kFp32: fp32_tile<M>(matrix, w, x, t, out); break;
  }
  if (matrix.bias) {
    const F bias = load(matrix.bias + block * kTile);
    for (int m = 0; m < M; m++) out[m] = add(out[m], bias);
  }
}

// Store 16 results, or as many as the row has.
inline void put(float* y, F value, int count, bool accumulate) {
  if (count >= kTile) {
    store(y, accumulate ? add(load(y), value) : value);
    return;
  }
  alignas(64) float lanes[kTile];
  store(lanes, value);
  for (int i = 0; i < count; i++) y[i] = accumulate ? y[i] + lanes[i] : lanes[i];
}

template <int M>
inline void linear_tile(const Matrix& matrix, int block, const uint8_t* unpacked, const Activations& x, int t, Epilogue epilogue,
                        float* y, int64_t stride) {
  F out[M];
  block_tile<M>(matrix, block, unpacked, x, t, out);
  if (epilogue == Epilogue::kStore || epilogue == Epilogue::kAdd) {
    const int left = matrix.rows - block * kTile;
    for (int m = 0; m < M; m++) put(y + (t + m) * stride + block * kTile, out[m], left, epilogue == Epilogue::kAdd);
    return;
  }
  F up[M];
  block_tile<M>(matrix, block + 1, unpacked ? unpacked + static_cast<int64_t>(matrix.inputs) * kTile : nullptr, x, t, up);
  const int width = matrix.rows / 2, column = block / 2 * kTile;
  for (int m = 0; m < M; m++) {
    const F act = epilogue == Epilogue::kSilu ? silu(out[m]) : gelu(out[m]);
    put(y + (t + m) * stride + column, mul(act, up[m]), width - column, false);
  }
}

// The last few tokens.
inline void linear_rest(const Matrix& matrix, int block, const uint8_t* unpacked, const Activations& x, int t, int tokens,
                        Epilogue epilogue, float* y, int64_t stride) {
  switch (tokens - t) {
    case 1: return linear_tile<1>(matrix, block, unpacked, x, t, epilogue, y, stride);
    case 2: return linear_tile<2>(matrix, block, unpacked, x, t, epilogue, y, stride);
    case 3: return linear_tile<3>(matrix, block, unpacked, x, t, epilogue, y, stride);
    case 4: return linear_tile<4>(matrix, block, unpacked, x, t, epilogue, y, stride);
    case 5: return linear_tile<5>(matrix, block, unpacked, x, t, epilogue, y, stride);
    case 6: return linear_tile<6>(matrix, block, unpacked, x, t, epilogue, y, stride);
    case 7: return linear_tile<7>(matrix, block, unpacked, x, t, epilogue, y, stride);
    default: return;
  }
}

inline void unpack_block(const Matrix& matrix, int block, uint8_t* out) {
  const uint8_t* w = matrix.weights + static_cast<int64_t>(block) * matrix.inputs * kTile / 2;
  for (int k = 0; k < matrix.inputs; k += 8, out += 128) {
    w = Nibbles::next8(w, [&](const B& first, const B& second) {
      store_bytes(out, first);
      store_bytes(out + 64, second);
    });
  }
}

void linear(const Matrix& matrix, const Activations& x, int tokens, Epilogue epilogue, Share blocks, float* y, int stride,
            uint8_t* scratch) {
  const bool gated = epilogue == Epilogue::kSilu || epilogue == Epilogue::kGelu;
  const bool unpacks = matrix.format == Format::kInt4 && tokens >= kUnpackFrom;
  for (int block = blocks.begin; block < blocks.end; block += gated ? 2 : 1) {
    if (unpacks) {
      unpack_block(matrix, block, scratch);
      if (gated) unpack_block(matrix, block + 1, scratch + static_cast<int64_t>(matrix.inputs) * kTile);
    }
    const uint8_t* unpacked = unpacks ? scratch : nullptr;
    int t = 0;
    for (; t + kTokenTile <= tokens; t += kTokenTile) linear_tile<kTokenTile>(matrix, block, unpacked, x, t, epilogue, y, stride);
    linear_rest(matrix, block, unpacked, x, t, tokens, epilogue, y, stride);
  }
}

// ---- rope and the cache -----------------------------------------------------------------------------------------------------

inline void norm_head(float* head, const float* weight, int dim, float eps) {
  const float inverse = 1.0f / std::sqrt(sum_of_squares(head, dim) / dim + eps);
  for (int d = 0; d < dim; d++) head[d] *= inverse * weight[d];
}

inline void rotate(float* head, const float* cos, const float* sin, int pairs) {
  for (int i = 0; i < pairs; i++) {
    const float first = head[i], second = head[i + pairs];
    head[i] = first * cos[i] - second * sin[i];
    head[i + pairs] = second * cos[i] + first * sin[i];
  }
}

// The scale of an int8 vector in float16, rounded up so that 127 steps reach the largest number.
inline uint16_t cache_scale(const float* x, int dim) {
  float largest = 0;
  for (int d = 0; d < dim; d++) largest = std::max(largest, std::fabs(x[d]));
  const float exact = largest / 127.0f;
  const uint16_t scale = to_half(exact * (1 + 0x1p-11f) + 0x1p-25f);
  return scale ? scale : 1;
}

inline void write_token(const LayerCache& cache, int slot, int head, const float* key, const float* value) {
  const int dim = cache.head_dim, block = slot / cache.block_size, offset = slot % cache.block_size;
  const int tile = offset / kTile, token = offset % kTile;
  uint8_t* keys = cache.tile(cache.keys, block, tile, head);
  uint8_t* values = cache.tile(cache.values, block, tile, head);
  if (cache.cache == Cache::kBf16) {
    auto* k = reinterpret_cast<uint16_t*>(keys);
    auto* v = reinterpret_cast<uint16_t*>(values);
    for (int d = 0; d < dim; d++) k[(d / 2 * kTile + token) * 2 + d % 2] = to_bf16(key[d]);
    for (int d = 0; d < dim; d++) v[token * dim + d] = to_bf16(value[d]);
    return;
  }
  const uint16_t key_scale = cache_scale(key, dim), value_scale = cache_scale(value, dim);
  cache.scale_tile(cache.key_scales, block, tile, head)[token] = key_scale;
  cache.scale_tile(cache.value_scales, block, tile, head)[token] = value_scale;
  const float key_step = half_value(key_scale), value_step = half_value(value_scale);
  auto* k = reinterpret_cast<int8_t*>(keys);
  auto* v = reinterpret_cast<int8_t*>(values);
  for (int d = 0; d < dim; d++) k[(d / 4 * kTile + token) * 4 + d % 4] = static_cast<int8_t>(std::nearbyint(key[d] / key_step));
  for (int d = 0; d < dim; d++) {
    v[(token / 4 * dim + d) * 4 + token % 4] = static_cast<int8_t>(std::nearbyint(value[d] / value_step));
  }
}

void rope_write(float* qkv, const AttentionShape& shape, const float* norm, float eps, const float* cos, const float* sin,
                int rotary_pairs, const int32_t* positions, const int32_t* slots, const LayerCache& cache, Share tokens) {
  const int dim = shape.head_dim, rotated = shape.heads + shape.kv_heads, width = (rotated + shape.kv_heads) * dim;
  for (int t = tokens.begin; t < tokens.end; t++) {
    float* row = qkv + static_cast<int64_t>(t) * width;
    const int64_t angle = static_cast<int64_t>(positions[t]) * rotary_pairs;
    for (int h = 0; h < rotated; h++) {
      if (norm) norm_head(row + h * dim, norm + h * dim, dim, eps);
      rotate(row + h * dim, cos + angle, sin + angle, rotary_pairs);
    }
    for (int g = 0; g < shape.kv_heads; g++) {
      write_token(cache, slots[t], g, row + (shape.heads + g) * dim, row + (rotated + g) * dim);
    }
  }
}

// ---- attention --------------------------------------------------------------------------------------------------------------

// A tile of up to kMaxRows query vectors (heads of one group of some tokens), in the form that the cache multiplies.
struct Queries {
  int rows = 0;
  int last_key[kMaxRows];   // position of the query: the last key it sees
  int first_key[kMaxRows];  // the first one
  float scale[kMaxRows];    // of the int8 codes, times the attention scale
  int32_t sum[kMaxRows];    // of the codes
  alignas(64) int8_t codes[kMaxRows * 512];
  alignas(64) uint16_t halves[kMaxRows * 512];
};

inline void load_query(Queries& q, const float* head, const AttentionShape& shape, Cache cache, int position) {
  const int dim = shape.head_dim, r = q.rows++;
  q.last_key[r] = position;
  q.first_key[r] = shape.window ? std::max(0, position - shape.window + 1) : 0;
  if (cache == Cache::kBf16) {
    for (int d = 0; d < dim; d++) q.halves[r * dim + d] = to_bf16(head[d]);
    q.scale[r] = shape.scale;
    return;
  }
  float step;
  quantize_group(head, dim, q.codes + r * dim, &step, &q.sum[r]);
  q.scale[r] = step * shape.scale;
}

// Scores of R queries against a tile of 16 keys, unmasked.
template <int R> inline void score_tile(const Queries& q, int r0, const uint8_t* keys, const uint16_t* key_scales, int dim, F* scores) {
  if (key_scales) {
    I total[R];
    for (int r = 0; r < R; r++) total[r] = set_int(-128 * q.sum[r0 + r]);
    for (int d = 0; d < dim; d += 4, keys += 64) {
      const B tile = flip_signs(load_bytes(keys));
      for (int r = 0; r < R; r++) total[r] = dot(total[r], tile, q.codes + (r0 + r) * dim + d);
    }
    const F step = load_half(key_scales);
    for (int r = 0; r < R; r++) scores[r] = mul(to_float(total[r]), mul(step, set(q.scale[r0 + r])));
    return;
  }
  for (int r = 0; r < R; r++) scores[r] = zero();
  for (int d = 0; d < dim; d += 2, keys += 64) {
    const B tile = load_bytes(keys);
    for (int r = 0; r < R; r++) scores[r] = dot_bf16(scores[r], tile, q.halves + (r0 + r) * dim + d);
  }
  for (int r = 0; r < R; r++) scores[r] = mul(scores[r], set(q.scale[r0 + r]));
}

// The cache of one sequence and KV head, tile by tile.
struct Keys {
  const LayerCache& cache;
  const int32_t* table;
  int head;

  int block(int key) const { return table[key / cache.block_size]; }
  int tile(int key) const { return key % cache.block_size / kTile; }
  const uint8_t* keys(int key) const { return cache.tile(cache.keys, block(key), tile(key), head); }
  const uint8_t* values(int key) const { return cache.tile(cache.values, block(key), tile(key), head); }
  const uint16_t* key_scales(int key) const {
    return cache.cache == Cache::kInt8 ? cache.scale_tile(cache.key_scales, block(key), tile(key), head) : nullptr;
  }
  const uint16_t* value_scales(int key) const { return cache.scale_tile(cache.value_scales, block(key), tile(key), head); }
};

// Blocks lie a whole row apart, where the processor does not look ahead by itself: ask for a tile of a plane before its turn.
inline void prefetch_tile(const uint8_t* tile, int bytes) {
  for (int i = 0; i < bytes; i += 64) prefetch(tile + i);
}

struct Accumulator {  // of the online softmax (Milakov and Gimelshein 2018), per query, for one piece of the keys
  float top[kMaxRows], total[kMaxRows];
  float* out;  // [R, D]
};

// Scores of all queries against the tiles of one chunk of keys, masked: scores [R, kKeyChunk].
inline void score_chunk(const Queries& q, const Keys& keys, const AttentionShape& shape, int begin, int end, float* scores) {
  const int dim = shape.head_dim;
  const int tile_bytes = kTile * dim * (keys.cache.cache == Cache::kInt8 ? 1 : 2);
  for (int key = begin; key < end; key += kTile) {
    prefetch_tile(keys.values(key), tile_bytes);
    if (key + 2 * kTile < end) prefetch_tile(keys.keys(key + 2 * kTile), tile_bytes);
    F tile[kMaxRows];
    int r = 0;
    for (; r + 3 <= q.rows; r += 3) score_tile<3>(q, r, keys.keys(key), keys.key_scales(key), dim, tile + r);
    for (; r < q.rows; r++) score_tile<1>(q, r, keys.keys(key), keys.key_scales(key), dim, tile + r);
    for (r = 0; r < q.rows; r++) {
      F s = tile[r];
      if (shape.softcap > 0) s = mul(tanh(div(s, set(shape.softcap))), set(shape.softcap));
      float* row = scores + r * kKeyChunk + key - begin;
      store(row, s);
      if (key + kTile - 1 > q.last_key[r] || key < q.first_key[r]) {
        for (int i = 0; i < kTile; i++) {
          if (key + i > q.last_key[r] || key + i < q.first_key[r]) row[i] = kMinusInfinity;
        }
      }
    }
  }
}

// Turn a query's scores of a chunk into weights and shrink what was summed before. False when it sees nothing here.
inline bool weigh(float* scores, int count, Accumulator& acc, int r, int dim) {
  F top = set(kMinusInfinity);
  for (int i = 0; i < count; i += kTile) top = max(top, load(scores + i));
  const float chunk_top = highest(top);
  if (chunk_top <= kMinusInfinity) return false;
  const float new_top = std::max(acc.top[r], chunk_top);
  F total = zero();
  for (int i = 0; i < count; i += kTile) {
    const F difference = sub(load(scores + i), set(new_top));
    const F weight = zero_below(exp(difference), difference, -86.0f);  // exactly nothing for a key that is not seen
    store(scores + i, weight);
    total = add(total, weight);
  }
  const float shrink = acc.top[r] <= kMinusInfinity ? 0.0f : std::exp(acc.top[r] - new_top);
  acc.total[r] = acc.total[r] * shrink + sum(total);
  acc.top[r] = new_top;
  if (shrink != 1.0f) {
    for (int d = 0; d < dim; d += kTile) store(acc.out + r * dim + d, mul(load(acc.out + r * dim + d), set(shrink)));
  }
  return true;
}

// out[r] += weights x values of a chunk, bf16 values.
template <int R>
inline void add_values_bf16(const float* weights, const Keys& keys, int begin, int end, int dim, float* out) {
  for (int d = 0; d < dim; d += kTile) {
    F total[R];
    for (int r = 0; r < R; r++) total[r] = load(out + r * dim + d);
    for (int key = begin; key < end; key += kTile) {
      const auto* values = reinterpret_cast<const uint16_t*>(keys.values(key)) + d;
      const int count = std::min(kTile, end - key);  // what lies behind is of a former owner, and may be NaN
      for (int i = 0; i < count; i++, values += dim) {
        const F value = load_bf16(values);
        for (int r = 0; r < R; r++) total[r] = fma(value, set(weights[r * kKeyChunk + key - begin + i]), total[r]);
      }
    }
    for (int r = 0; r < R; r++) store(out + r * dim + d, total[r]);
  }
}

// The same with int8 values: a token's scale goes into its weight, and the weights become 8 bits of their chunk's largest.
template <int R>
inline void add_values_int8(float* weights, const Keys& keys, int begin, int end, int dim, float* out) {
  alignas(64) uint8_t codes[R][kKeyChunk];
  float step[R];
  for (int r = 0; r < R; r++) {
    float* row = weights + r * kKeyChunk;
    F top = zero();
    for (int key = begin; key < end; key += kTile) {
      const F scaled = mul(load(row + key - begin), load_half(keys.value_scales(key)));
      store(row + key - begin, scaled);
      top = max(top, scaled);
    }
    const float largest = highest(top);
    step[r] = largest / 255.0f;
    const F inverse = set(largest > 0 ? 255.0f / largest : 0.0f);
    for (int i = 0; i < end - begin; i += kTile) store_uint8(codes[r] + i, round(mul(load(row + i), inverse)));
  }
  for (int d = 0; d < dim; d += kTile) {
    I total[R];
    for (int r = 0; r < R; r++) total[r] = set_int(0);
    for (int key = begin; key < end; key += kTile) {
      const uint8_t* values = keys.values(key) + 4 * d;
      for (int i = 0; i < kTile; i += 4, values += 4 * dim) {
        const B tile = load_bytes(values);
        for (int r = 0; r < R; r++) total[r] = dot_signed(total[r], codes[r] + key - begin + i, tile);
      }
    }
    for (int r = 0; r < R; r++) store(out + r * dim + d, fma(to_float(total[r]), set(step[r]), load(out + r * dim + d)));
  }
}

template <int R>
inline void add_values(float* weights, const Keys& keys, int begin, int end, int dim, float* out) {
  if (keys.cache.cache == Cache::kInt8) {
    add_values_int8<R>(weights, keys, begin, end, dim, out);
  } else {
    add_values_bf16<R>(weights, keys, begin, end, dim, out);
  }
}

inline void attend_piece(const Queries& q, const Keys& keys, const AttentionShape& shape, int begin, int end, Accumulator& acc,
                         float* scores) {
  const int dim = shape.head_dim;
  std::fill_n(acc.out, q.rows * dim, 0.0f);
  std::fill_n(acc.top, q.rows, kMinusInfinity);
  std::fill_n(acc.total, q.rows, 0.0f);
  for (int chunk = begin; chunk < end; chunk += kKeyChunk) {
    const int stop = std::min(end, chunk + kKeyChunk), padded = chunk + (stop - chunk + kTile - 1) / kTile * kTile;
    score_chunk(q, keys, shape, chunk, stop, scores);
    for (int r = 0; r < q.rows; r++) {
      if (!weigh(scores + r * kKeyChunk, padded - chunk, acc, r, dim)) std::fill_n(scores + r * kKeyChunk, kKeyChunk, 0.0f);
    }
    int r = 0;
    for (; r + 3 <= q.rows; r += 3) add_values<3>(scores + r * kKeyChunk, keys, chunk, stop, dim, acc.out + r * dim);
    for (; r < q.rows; r++) add_values<1>(scores + r * kKeyChunk, keys, chunk, stop, dim, acc.out + r * dim);
  }
}

// target = sum of w_i * piece i / sum of w_i * total i with w_i = e^(top i - highest top). States are pairs (top, total).
inline void merge_pieces(const float* outs, int64_t out_stride, const float* states, int64_t states_stride, int pieces, int dim,
                         float* target) {
  float top = kMinusInfinity, total = 0;
  for (int p = 0; p < pieces; p++) top = std::max(top, states[p * states_stride]);
  std::fill_n(target, dim, 0.0f);
  for (int p = 0; p < pieces; p++) {
    if (states[p * states_stride] <= kMinusInfinity) continue;
    const float weight = std::exp(states[p * states_stride] - top);
    total = std::fma(weight, states[p * states_stride + 1], total);
    for (int d = 0; d < dim; d += kTile) {
      store(target + d, fma(set(weight), load(outs + p * out_stride + d), load(target + d)));
    }
  }
  const F divisor = set(total);
  for (int d = 0; d < dim; d += kTile) store(target + d, div(load(target + d), divisor));
}

void attend(const float* qkv, const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache,
            const AttentionItem& item, const AttentionOutput& output, float* scratch) {
  const int dim = shape.head_dim, per_group = shape.heads / shape.kv_heads, width = (shape.heads + 2 * shape.kv_heads) * dim;
  const int first_row = sequences.first_row[item.sequence];
  const int new_tokens = sequences.first_row[item.sequence + 1] - first_row;
  const int first_position = sequences.length[item.sequence] - new_tokens;
  const Keys keys{cache, sequences.block_table + static_cast<int64_t>(item.sequence) * sequences.width, item.kv_head};
  static thread_local Queries q;
  const int total = (item.query_end - item.query_begin) * per_group, pieces = item.piece_end - item.piece_begin;
  float* scores = scratch;
  float* outs = scores + kMaxRows * kKeyChunk;  // [pieces, R, D]
  float* states = outs + static_cast<int64_t>(pieces) * kMaxRows * dim;  // [pieces, R, 2]
  for (int first = 0; first < total; first += kMaxRows) {
    q.rows = 0;
    int first_key = sequences.length[item.sequence], last_key = 0;
    for (int n = first; n < std::min(first + kMaxRows, total); n++) {
      const int token = item.query_begin + n / per_group, head = item.kv_head * per_group + n % per_group;
      load_query(q, qkv + static_cast<int64_t>(first_row + token) * width + head * dim, shape, cache.cache, first_position + token);
      first_key = std::min(first_key, q.first_key[q.rows - 1]);
      last_key = std::max(last_key, q.last_key[q.rows - 1]);
    }
    for (int p = 0; p < pieces; p++) {
      // Chunks begin at multiples of their size whatever is computed beside, so that a row's bits never depend on it.
      const int piece = (item.piece_begin + p) * kPieceKeys;
      Accumulator acc;
      acc.out = outs + static_cast<int64_t>(p) * kMaxRows * dim;
      attend_piece(q, keys, shape, std::max(piece, first_key / kKeyChunk * kKeyChunk), std::min(piece + kPieceKeys, last_key + 1), acc,
                   scores);
      for (int r = 0; r < q.rows; r++) {
        states[(p * kMaxRows + r) * 2] = acc.top[r];
        states[(p * kMaxRows + r) * 2 + 1] = acc.total[r];
      }
    }
    for (int r = 0; r < q.rows; r++) {
      const int token = item.query_begin + (first + r) / per_group, head = item.kv_head * per_group + (first + r) % per_group;
      const int64_t at = static_cast<int64_t>(first_row + token) * shape.heads + head;
      if (!output.states) {
        merge_pieces(outs + r * dim, kMaxRows * dim, states + r * 2, kMaxRows * 2, pieces, dim, output.out + at * dim);
        continue;
      }
      for (int p = 0; p < pieces; p++) {
        const int64_t piece = item.piece_begin + p;
        std::memcpy(output.out + piece * output.piece_stride + at * dim, outs + (static_cast<int64_t>(p) * kMaxRows + r) * dim,
                    sizeof(float) * dim);
        std::memcpy(output.states + piece * output.states_stride + at * 2, states + (p * kMaxRows + r) * 2, sizeof(float) * 2);
      }
    }
  }
}

void merge(const AttentionOutput& pieces, int count, const AttentionShape& shape, Share tokens, float* out) {
  for (int64_t at = static_cast<int64_t>(tokens.begin) * shape.heads; at < static_cast<int64_t>(tokens.end) * shape.heads; at++) {
    merge_pieces(pieces.out + at * shape.head_dim, pieces.piece_stride, pieces.states + at * 2, pieces.states_stride, count,
                 shape.head_dim, out + at * shape.head_dim);
  }
}

void softcap(float* x, int64_t count, float cap) {
  int64_t i = 0;
  for (; i + kTile <= count; i += kTile) store(x + i, mul(tanh(div(load(x + i), set(cap))), set(cap)));
  for (; i < count; i++) x[i] = std::tanh(x[i] / cap) * cap;
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {KERNELS_NAME, embed, norm, quantize, linear, norm_add, rope_write, attend, merge, softcap};

}  // namespace triblade

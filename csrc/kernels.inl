// The kernels in terms of sixteen lanes; compiled once per instruction set, with that set's simd/*.h included before this file
// and KERNELS naming the table. Everything has internal linkage.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "kernels.h"

namespace triblade {
namespace {

using namespace simd;

constexpr int kTile = 16;         // rows of a block, tokens of a cache tile
constexpr int kTokenTile = 8;     // tokens multiplied together
constexpr int kUnpackFrom = 24;   // tokens from which a block is unpacked to bytes once
constexpr int kUnit = 64;         // keys after which the heads of an attention item take turns
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

// Weights of one block as 8 bits each. `kLines` of 64 bytes hold 8 inputs; a product with at least `kAheadTokens` tokens asks for the
// next block's lines, see `integer_tile`.
struct Nibbles {  // int4 as stored
  static constexpr int kZero = 8, kLines = 1, kAheadTokens = 1;
  template <class Use> static inline const uint8_t* next8(const uint8_t* w, Use use) {
    const B both = load_bytes(w);
    use(low_nibbles(both), high_nibbles(both));
    return w + 64;
  }
};
template <int Zero, int AheadTokens> struct Bytes {
  static constexpr int kZero = Zero, kLines = 2, kAheadTokens = AheadTokens;
  template <class Use> static inline const uint8_t* next8(const uint8_t* w, Use use) {
    use(load_bytes(w), load_bytes(w + 64));
    return w + 128;
  }
};
using StoredBytes = Bytes<128, 2>;  // int8; with a single token the processor looks ahead well enough, and asking costs 7 %
using UnpackedNibbles = Bytes<8, std::numeric_limits<int>::max()>;  // in scratch, so always near

// M tokens times one block: out[m] = 16 rows. The first tokens ask for the next block while they multiply this one: with a few tokens
// the processor is too busy to see enough lines coming, and its own prefetching starts anew at every page, so that reading and
// multiplying would take turns. Behind a member's last block lies another's, which is asked for in vain.
template <int M, class Source, bool kAffine>
inline void integer_tile(const Matrix& matrix, int block, const uint8_t* w, const Activations& x, int t, F* out) {
  const int inputs = matrix.inputs, groups = matrix.groups(), group = matrix.group;
  const uint16_t* scales = matrix.scales + static_cast<int64_t>(block) * groups * kTile;
  const uint16_t* offsets = kAffine ? matrix.offsets + static_cast<int64_t>(block) * groups * kTile : nullptr;
  const int8_t* codes = x.codes + static_cast<int64_t>(t) * inputs;
  const float* x_scales = x.scales + static_cast<int64_t>(t) * groups;
  const int32_t* x_sums = x.sums + static_cast<int64_t>(t) * groups;
  const bool asks = M >= Source::kAheadTokens;
  const int64_t ahead = t == 0 ? static_cast<int64_t>(inputs) / 8 * Source::kLines * 64 : 0;  // later tokens read the same lines again
  for (int m = 0; m < M; m++) out[m] = zero();
  for (int g = 0; g < groups; g++) {
    I total[M];
    for (int m = 0; m < M; m++) total[m] = set_int(kAffine ? 0 : -Source::kZero * x_sums[m * groups + g]);
    const int8_t* input = codes + g * group;
    if (asks) prefetch(scales + (groups + g) * kTile);
    for (int k = 0; k < group; k += 8, input += 8) {
      for (int line = 0; asks && line < Source::kLines; line++) prefetch(w + ahead + line * 64);
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
        matrix.offsets ? integer_tile<M, UnpackedNibbles, true>(matrix, block, unpacked, x, t, out)
                       : integer_tile<M, UnpackedNibbles, false>(matrix, block, unpacked, x, t, out);
      } else {
        matrix.offsets ? integer_tile<M, Nibbles, true>(matrix, block, w, x, t, out)
                       : integer_tile<M, Nibbles, false>(matrix, block, w, x, t, out);
      }
      break;
    case Format::kInt8:
      matrix.offsets ? integer_tile<M, StoredBytes, true>(matrix, block, w, x, t, out)
                     : integer_tile<M, StoredBytes, false>(matrix, block, w, x, t, out);
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
  if (epilogue == Epilogue::kAdd) {  // what it is added to often lies in another core's cache
    for (int m = 0; m < M; m++) prefetch_to_write(y + (t + m) * stride + block * kTile);
  }
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

#include "cache_write.inl"

#include "attention_items.inl"

#include "attention.inl"

void softcap(float* x, int64_t count, float cap) {
  int64_t i = 0;
  for (; i + kTile <= count; i += kTile) store(x + i, mul(tanh(div(load(x + i), set(cap))), set(cap)));
  for (; i < count; i++) x[i] = std::tanh(x[i] / cap) * cap;
}

void find_best(const float* x, int count, int first, Best& best) {
  F top = set(best.value), faults = zero();
  int i = 0;
  for (; i + kTile <= count; i += kTile) {
    const F value = load(x + i);
    top = max(top, value);
    faults = fma(value, zero(), faults);  // no longer zero after an infinity or what is not a number
  }
  float largest = highest(top), fault = sum(faults);
  for (; i < count; i++) largest = std::max(largest, x[i]), fault += x[i] * 0;
  best.is_finite = best.is_finite && fault == 0;
  if (largest <= best.value) return;
  const float* at = std::find(x, x + count, largest);
  if (at < x + count) best = {largest, first + static_cast<int32_t>(at - x), best.is_finite};
}

float sum_exp(const float* x, int count, float top) {
  F total = zero();
  int i = 0;
  for (; i + kTile <= count; i += kTile) total = add(total, exp(sub(load(x + i), set(top))));
  float rest = 0;
  for (; i < count; i++) rest += std::exp(x[i] - top);
  return sum(total) + rest;
}

void bar(float* x, int count, const uint16_t* allowed) {
  constexpr float kBarred = std::numeric_limits<float>::lowest();
  for (int i = 0; i < count; i += 16) {
    const uint16_t bits = allowed[i / 16];
    if (bits == 0xffff) continue;
    const int end = std::min(16, count - i);
    for (int j = 0; j < end; j++) x[i + j] = bits >> j & 1 ? x[i + j] : kBarred;
  }
}

double weigh(const float* x, int count, float top, float temperature, float least, float* out) {
  constexpr float kOne = 17592186044416.0f, kWhole = 8388608.0f;  // 2^44; floats from 2^23 on have no fraction
  alignas(64) float lanes[kTile];
  double sums[kTile] = {};
  for (int i = 0; i < count; i += kTile) {
    const int end = std::min<int>(kTile, count - i);
    for (int j = 0; j < kTile; j++) lanes[j] = j < end ? x[i + j] : std::numeric_limits<float>::lowest();
    const F scaled = max(div(sub(load(lanes), set(top)), set(temperature)), set(-64.0f));
    store(lanes, mul(exp(scaled), set(kOne)));
    for (int j = 0; j < kTile; j++) {
      const float weight = lanes[j] < kWhole ? static_cast<float>(static_cast<int32_t>(lanes[j])) : lanes[j];
      lanes[j] = weight < least ? 0.0f : weight;
    }
    for (int j = 0; j < kTile; j++) sums[j] += lanes[j];
    std::copy_n(lanes, end, out + i);
  }
  return std::accumulate(sums, sums + kTile, 0.0);
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {KERNELS_NAME, embed,  norm,  quantize, linear,    norm_add, rope_write,
                         fetch,        attend, merge, softcap,  find_best, sum_exp, bar, weigh};

}  // namespace triblade

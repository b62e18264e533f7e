// The kernels, as one table of functions per instruction set. Every function does one member's share of the work; there is no
// synchronisation inside. T tokens; "block" of a matrix is 16 output rows.
//
// Packed matrices (see ops/packing.py, which writes them). K inputs, G groups of `group` inputs, rows padded to whole blocks:
//   int4   per block and 8 inputs, 64 bytes: byte 4 r + j holds inputs j (low nibble) and 4 + j (high) of row r, unsigned
//   int8   per block and 4 inputs, 64 bytes: byte 4 r + j holds input j of row r, + 128 (unsigned)
//   bf16   per block and 2 inputs, 64 bytes: row r's pair
//   fp32   per block and 1 input, 64 bytes
//   scales, offsets   per block and group, 16 float16:  w = scale * q + offset;  without offsets, offset = -scale * 8 (int4), 128 (int8)
#pragma once
#include <cstdint>
#include <limits>

namespace triblade {

enum class Format : int { kInt4 = 0, kInt8 = 1, kBf16 = 2, kFp32 = 3 };
enum class Epilogue : int { kStore = 0, kAdd = 1, kSilu = 2, kGelu = 3 };
enum class Cache : int { kBf16 = 0, kInt8 = 1 };

struct Matrix {
  Format format = Format::kFp32;
  int rows = 0;     // outputs, without padding
  int inputs = 0;   // padded to a whole group, or to a pair for bf16
  int group = 0;    // inputs per scale; 0 without scales
  const uint8_t* weights = nullptr;
  const uint16_t* scales = nullptr;
  const uint16_t* offsets = nullptr;  // null: symmetric
  const float* bias = nullptr;        // [rows padded], or null

  int blocks() const { return (rows + 15) / 16; }
  int groups() const { return group ? inputs / group : 0; }
};

// Inputs of a matrix product: T rows in the form that the matrix multiplies, made by `Kernels::quantize`.
struct Activations {
  int8_t* codes = nullptr;   // [T, K] for int4 and int8
  float* scales = nullptr;   // [T, G]
  int32_t* sums = nullptr;   // [T, G], of the codes
  uint16_t* halves = nullptr;  // [T, K] bf16
  float* floats = nullptr;   // [T, K]
};

struct Share {
  int begin, end;
};
// A member's contiguous part of `count` items, in units of `unit`.
inline Share share(int count, int unit, int member, int members) {
  const int units = (count + unit - 1) / unit;
  const int begin = static_cast<int>(static_cast<int64_t>(units) * member / members) * unit;
  const int end = static_cast<int>(static_cast<int64_t>(units) * (member + 1) / members) * unit;
  return {begin < count ? begin : count, end < count ? end : count};
}

// A KV row as bytes: where a layer's planes lie, and the pool they lie in. Tiles are 16 tokens of one head:
//   bf16 keys  [D/2][16 tokens][2]            values [16 tokens][D]
//   int8 keys  [D/4][16 tokens][4]            values [4][D][4 tokens]     and a float16 scale per token of each
struct LayerCache {
  uint8_t* pool = nullptr;
  int64_t row_bytes = 0;
  int64_t keys = 0, values = 0, key_scales = 0, value_scales = 0;  // offsets within a row
  Cache cache = Cache::kBf16;
  int block_size = 16;
  int kv_heads = 0, head_dim = 0;

  // The first byte of a tile of keys or values.
  uint8_t* tile(int64_t plane, int block, int tile_index, int head) const {
    const int64_t item = cache == Cache::kInt8 ? 1 : 2, tile_bytes = 16 * head_dim * item;
    return pool + block * row_bytes + plane + (static_cast<int64_t>(tile_index) * kv_heads + head) * tile_bytes;
  }
  uint16_t* scale_tile(int64_t plane, int block, int tile_index, int head) const {
    return reinterpret_cast<uint16_t*>(pool + block * row_bytes + plane) + (static_cast<int64_t>(tile_index) * kv_heads + head) * 16;
  }
};

// The sequences of one step. Token rows of a sequence are contiguous.
struct Sequences {
  int count = 0;
  const int32_t* first_row = nullptr;      // [S + 1]
  const int32_t* length = nullptr;         // [S] keys after this step
  const int32_t* const* tables = nullptr;  // [S] the blocks of each
};

struct AttentionShape {
  int heads, kv_heads, head_dim;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: none
};

constexpr int kMaxHeadDim = 512;
constexpr int kPieceKeys = 256;   // keys are summed up in pieces of this many, then the pieces are merged, whoever computed them
constexpr int kKeyChunk = 128;    // keys of a piece whose scores are held together
constexpr int kRowsPerItem = 16;  // queries times heads of a group that share a read of the keys
constexpr int kHeadSpaceBytes = 1024;

// Bytes that `attend` needs for each head of an item: scores and codes of a chunk; queries, sums and two accumulators.
constexpr int64_t head_space_bytes(int head_dim) {
  return kHeadSpaceBytes + 64 * 16 + kRowsPerItem * (kKeyChunk * 5 + static_cast<int64_t>(head_dim) * (1 + 2 + 3 * 4) + 4 * 4);
}

// Some queries of one sequence against some pieces of its keys, for some KV heads.
struct AttentionItem {
  int sequence;
  int head_begin, head_end;    // KV heads
  int query_begin, query_end;  // within the sequence's new tokens
  int piece_begin, piece_end;  // of kPieceKeys keys
};

// Where attention goes: merged to out [T, H, D], or, with states, piece by piece for `Kernels::merge`.
struct AttentionOutput {
  float* out = nullptr;     // [T, H, D], or [pieces, T, H, D]
  float* states = nullptr;  // [pieces, T, H, 2]: highest score and sum of weights
  int64_t piece_stride = 0, states_stride = 0;
};

// The largest of a row of logits; the first one among equals.
struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int32_t token = 0;
  bool is_finite = true;  // of all that were looked at
  float total = 0;        // sum of e^(x - value) over them, where somebody asked for it
};

// Tokens weighed at a time: the sum of as many weights is an integer that a double holds.
constexpr int kDrawTokens = 256;

// How the token of a row is chosen: the largest logit, or with a temperature a draw, among the tokens whose bit is set.
struct Choice {
  double uniform = 0;  // in [0, 1)
  float temperature = 0;
  float least = 0;  // weights below it are none
  const uint16_t* allowed = nullptr;  // one bit per token of the vocabulary; null: all
};

struct Kernels {
  const char* name;

  // x[t] = scale * row ids[t] of the matrix, for tokens of the share. out [T, K] fp32.
  void (*embed)(const Matrix& table, const int32_t* ids, float scale, int columns, Share tokens, float* out);

  // out[t] = x[t] / rms(x[t]) * weight, then quantised for `matrix`; `gather` names the rows of x, or is null for all.
  void (*norm)(const float* x, const float* weight, float eps, int columns, const int32_t* gather, const Matrix& matrix,
               Share tokens, const Activations& out);

  // x[t] [T, columns] fp32 -> the form that `matrix` multiplies.
  void (*quantize)(const float* x, int columns, const Matrix& matrix, Share tokens, const Activations& out);

  // y = x W^T (+ bias), rows of the share's blocks, all T tokens, y [T, stride]. kAdd adds to y; kSilu and kGelu read the matrix
  // as blocks gate, up, gate, up ... and write act(gate) * up, half as wide.
  void (*linear)(const Matrix& matrix, const Activations& x, int tokens, Epilogue epilogue, Share blocks, float* y, int stride,
                 uint8_t* scratch);

  // x[t] = x[t] / rms(x[t]) * weight (+ add to residual[t] if it is not null).
  void (*norm_add)(const float* x, const float* weight, float eps, int columns, Share tokens, float* residual);

  // Norm (weights [H + G, D] or null) and rotate queries and keys in qkv [T, (H + 2 G) D], and write keys and values to the cache.
  void (*rope_write)(float* qkv, const AttentionShape& shape, const float* norm, float eps, const float* cos, const float* sin,
                     int rotary_pairs, const int32_t* positions, const int32_t* slots, const LayerCache& cache, Share tokens);

  // Bring the first keys and values of an item nearer.
  void (*fetch)(const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache, const AttentionItem& item);

  // Attention of one item's queries, which lie in qkv; the keys of `next`, if there is one, are fetched meanwhile.
  void (*attend)(const float* qkv, const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache,
                 const AttentionItem& item, const AttentionItem* next, const AttentionOutput& output, uint8_t* scratch);

  // Join `count` pieces: out [T, H, D].
  void (*merge)(const AttentionOutput& pieces, int count, const AttentionShape& shape, Share tokens, float* out);

  // softcap * tanh(x / softcap), in place.
  void (*softcap)(float* x, int64_t count, float cap);

  // Look at x [count], whose first one is token `first`, for the largest so far.
  void (*find_best)(const float* x, int count, int first, Best& best);

  // The sum of e^(x - top) over x [count].
  float (*sum_exp)(const float* x, int count, float top);

  // x[i] = -(the largest number) where bit i of `allowed` is 0. x [count]; bits [ceil(count / 16)].
  void (*bar)(float* x, int count, const uint16_t* allowed);

  // out[i] = floor(2^44 e^((x[i] - top) / temperature)), 0 where that is below `least`, and the exact sum of out [count],
  // at most kDrawTokens of them.
  double (*weigh)(const float* x, int count, float top, float temperature, float least, float* out);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx2Vnni;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

// The best table this processor runs, or the one named; null when there is no such, or the processor cannot run it.
const Kernels* kernels_for(const char* name);

// The tables this processor runs, best first; null behind the last.
const Kernels* kernels_at(int rank);

// Bytes of scratch that one member needs for `linear` and `attend`.
int64_t scratch_bytes(int max_inputs, int head_dim, int kv_heads);

}  // namespace triblade

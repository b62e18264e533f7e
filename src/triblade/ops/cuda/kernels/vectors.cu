// The small kernels between the matrix products: embedding, norms, rotation and cache writes, the greedy choice, and packed weights
// spelled out for products over many tokens. One block or warp per row; float32 inside.

constexpr bool F16 = FLOAT16;

DEVICE float sum_of_block(float value) {
  SHARED float sums[32];
  for (int mask = 16; mask; mask >>= 1) value += shuffle_xor(value, mask);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = value;
  block_barrier();
  float total = 0.0f;
  for (int i = 0; i < blockDim.x / 32; i++) total += sums[i];
  block_barrier();
  return total;
}

DEVICE void unpack8(const u32x4& words, float (&x)[8]) {
  x[0] = low<F16>(words.x), x[1] = high<F16>(words.x), x[2] = low<F16>(words.y), x[3] = high<F16>(words.y);
  x[4] = low<F16>(words.z), x[5] = high<F16>(words.z), x[6] = low<F16>(words.w), x[7] = high<F16>(words.w);
}

DEVICE u32x4 pack8(const float (&x)[8]) {
  return u32x4{pack<F16>(x[0], x[1]), pack<F16>(x[2], x[3]), pack<F16>(x[4], x[5]), pack<F16>(x[6], x[7])};
}

#define NORM_THREADS 256
#define NORM_LOADS 4  // of 8 numbers per thread kept in registers: rows up to 8192

// x [tokens, width]: out = norm(x) * weight, in the layout `layout` (layout.cuh). With `added`: x += norm(added) * added_weight first, which is stored.
// Grid: tokens.
KERNEL __launch_bounds__(NORM_THREADS) rms_norm(u32x4* x, const u32x4* added, const f32x4* added_weight, const f32x4* weight, u32x4* out,
                                                int width, float eps, int layout) {
  let_next_start();
  wait_for_previous();
  const int loads = width / 8;
  x += (u64)blockIdx.x * loads;
  float kept[NORM_LOADS][8], scale = 0.0f;
  if (added) {
    added += (u64)blockIdx.x * loads;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < loads; i += NORM_THREADS) {
      float v[8];
      unpack8(added[i], v);
      for (int j = 0; j < 8; j++) squares += v[j] * v[j];
    }
    scale = rsqrtf(sum_of_block(squares) / width + eps);
  }
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < NORM_LOADS; n++) {
    const int i = threadIdx.x + n * NORM_THREADS;
    if (i >= loads) continue;
    unpack8(x[i], kept[n]);
    if (added) {
      float v[8], sum[8];
      unpack8(added[i], v);
      const f32x4 w0 = added_weight[2 * i], w1 = added_weight[2 * i + 1];
      const float w[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] = kept[n][j] + v[j] * scale * w[j];
      const u32x4 stored = pack8(sum);
      x[i] = stored;
      unpack8(stored, kept[n]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) squares += kept[n][j] * kept[n][j];
  }
  const float factor = rsqrtf(sum_of_block(squares) / width + eps);
#pragma unroll
  for (int n = 0; n < NORM_LOADS; n++) {
    const int i = threadIdx.x + n * NORM_THREADS;
    if (i >= loads) continue;
    const f32x4 w0 = weight[2 * i], w1 = weight[2 * i + 1];
    const float w[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = kept[n][j] * factor * w[j];
    store_unit(out, blockIdx.x, i, loads, layout, pack8(v));
  }
}

// Rows of x [tokens, width] in the layout `layout`. Grid: tokens.
KERNEL arrange(const u32x4* x, u32x4* out, int width, int layout) {
  let_next_start();
  wait_for_previous();
  for (int i = threadIdx.x; i < width / 8; i += blockDim.x)
    store_unit(out, blockIdx.x, i, width / 8, layout, x[(u64)blockIdx.x * (width / 8) + i]);
}

// out [tokens, width] = table [ids] * scale. Grid: tokens; an id outside the table (a place that no request takes) gives row 0.
KERNEL embed(const u32x4* table, const int* ids, u32x4* out, int rows, int width, float scale) {
  let_next_start();
  wait_for_previous();
  const int id = ids[blockIdx.x];
  const u64 row = id >= 0 && id < rows ? id : 0;
  for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
    float v[8];
    unpack8(table[row * (width / 8) + i], v);
    for (int j = 0; j < 8; j++) v[j] *= scale;
    out[(u64)blockIdx.x * (width / 8) + i] = pack8(v);
  }
}

#define MOST_OF_LANE 8  // numbers of a head per lane: heads up to 256

struct Pool {
  u8* pool;
  u64 row_bytes;
  int keys, values, key_scales, value_scales;  // byte offsets of this layer's planes in a row
  int block_size, heads;
  int is_int8;
};

struct Rotation {
  const float *cosines, *sines;  // [positions, half]
  const float* norm;             // [query and key heads, dim], or null
  int half;
  float eps;
};

// Smallest scale that holds the vector in 127 steps after it was rounded to float16: as `kv.codecs.Int8Codec`.
DEVICE void write_int8(const Pool& pool, u8* row, u64 item, int dim, bool is_value, const float (&x)[MOST_OF_LANE]) {
  const int lane = threadIdx.x & 31;
  float most = 0.0f;
  for (int j = 0; j < MOST_OF_LANE; j++)
    if (lane + 32 * j < dim) most = fmaxf(most, fabsf(x[j]));
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  const float smallest = 5.9604644775390625e-8f;  // of float16
  u16 bits = half_bits(most / 127.0f * (1.0f + 4.8828125e-4f) + 2.98023223876953125e-8f);
  if (half_value(bits) < smallest) bits = half_bits(smallest);
  const float scale = half_value(bits);
  u8* vector = row + (is_value ? pool.values : pool.keys) + item * dim;
  for (int j = 0; j < MOST_OF_LANE; j++)
    if (lane + 32 * j < dim) vector[lane + 32 * j] = static_cast<u8>(static_cast<int>(rintf(x[j] / scale)));
  if (lane == 0) reinterpret_cast<u16*>(row + (is_value ? pool.value_scales : pool.key_scales))[item] = bits;
}

// qkv [tokens, (query_heads + 2 heads) * dim]: norm and rotate queries (in place) and keys, write keys and values of tokens with a
// slot (negative: none) to the cache. Grid: (query_heads + 2 heads) / warps of a block rounded up, tokens.
KERNEL rotate_and_write(u16* qkv, const int* positions, const int* slots, Pool pool, Rotation rotation, int query_heads, int dim) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x & 31, head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, token = blockIdx.y;
  const int all = query_heads + 2 * pool.heads, slot = slots[token];
  if (head >= all || slot < 0) return;
  u16* vector = qkv + ((u64)token * all + head) * dim;
  float x[MOST_OF_LANE], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < MOST_OF_LANE; j++) {
    const int d = lane + 32 * j;
    x[j] = d < dim ? low<F16>(vector[d]) : 0.0f;
    squares += x[j] * x[j];
  }
  const bool is_value = head >= query_heads + pool.heads;
  if (!is_value) {
    float factor = 1.0f;
    const float* norm = rotation.norm ? rotation.norm + head * dim : nullptr;
    if (norm) {
      for (int mask = 16; mask; mask >>= 1) squares += shuffle_xor(squares, mask);
      factor = rsqrtf(squares / dim + rotation.eps);
    }
    const int half = rotation.half;
    const u64 at = (u64)positions[token] * half;
#pragma unroll
    for (int j = 0; j < MOST_OF_LANE; j++) {
      const int d = lane + 32 * j;
      if (d >= dim) continue;
      x[j] *= factor * (norm ? norm[d] : 1.0f);
      if (d >= 2 * half) continue;
      const int partner = d < half ? d + half : d - half, angle = d < half ? d : d - half;
      const float other = low<F16>(vector[partner]) * factor * (norm ? norm[partner] : 1.0f);
      x[j] = x[j] * rotation.cosines[at + angle] + (d < half ? -other : other) * rotation.sines[at + angle];
    }
  }
  warp_barrier();  // all partners are read before one is overwritten
  if (head < query_heads) {
    for (int j = 0; j < MOST_OF_LANE; j++)
      if (lane + 32 * j < dim) vector[lane + 32 * j] = static_cast<u16>(pack<F16>(x[j], 0.0f));
    return;
  }
  u8* row = pool.pool + (slot / pool.block_size) * pool.row_bytes;
  const u64 item = (u64)(slot % pool.block_size) * pool.heads + head - query_heads - (is_value ? pool.heads : 0);
  // The reference rounds keys to the type of activations before the codec sees them.
  for (int j = 0; j < MOST_OF_LANE; j++) x[j] = low<F16>(pack<F16>(x[j], 0.0f));
  if (pool.is_int8) {
    write_int8(pool, row, item, dim, is_value, x);
    return;
  }
  u16* to = reinterpret_cast<u16*>(row + (is_value ? pool.values : pool.keys)) + item * dim;
  for (int j = 0; j < MOST_OF_LANE; j++)
    if (lane + 32 * j < dim) to[lane + 32 * j] = static_cast<u16>(pack<F16>(x[j], 0.0f));
}

#define BEST_THREADS 256

struct Best {
  float value;
  int token;  // -1: something was not finite
};

DEVICE Best better(Best a, Best b) {
  if (a.token < 0 || b.token < 0) return Best{0.0f, -1};
  return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

DEVICE Best best_of_block(Best best) {
  SHARED Best found[BEST_THREADS / 32];
  for (int mask = 16; mask; mask >>= 1)
    best = better(best, Best{shuffle_xor(best.value, mask), shuffle_xor(best.token, mask)});
  if ((threadIdx.x & 31) == 0) found[threadIdx.x / 32] = best;
  block_barrier();
  for (int i = 0; i < BEST_THREADS / 32; i++) best = better(best, found[i]);
  block_barrier();
  return best;
}

// The token with the largest of the first `vocabulary` logits [rows, columns], the smallest among equals; -1 for a row with NaN or an
// infinity. With `softcap` logits are capped first, in place. Grid: splits, rows. `workspace` [rows, splits], a zero counter per row.
KERNEL __launch_bounds__(BEST_THREADS) best_token(float* logits, int columns, int vocabulary, float softcap, Best* workspace,
                                                  u32* counters, int* best_tokens) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.y, splits = gridDim.x;
  float* mine = logits + (u64)row * columns;
  const int begin = (u64)vocabulary * blockIdx.x / splits, end = (u64)vocabulary * (blockIdx.x + 1) / splits;
  Best best = {-INFINITY, 0x7fffffff};
  for (int i = begin + threadIdx.x; i < end; i += BEST_THREADS) {
    float value = mine[i];
    if (softcap > 0.0f) mine[i] = value = softcap * tanhf(value / softcap);
    best = better(best, Best{value, fabsf(value) < INFINITY ? i : -1});
  }
  best = best_of_block(best);
  if (threadIdx.x == 0) workspace[row * splits + blockIdx.x] = best;
  if (!is_last_block(counters + row, splits)) return;
  best = Best{-INFINITY, 0x7fffffff};
  for (int i = threadIdx.x; i < splits; i += BEST_THREADS) best = better(best, workspace[row * splits + i]);
  best = best_of_block(best);
  if (threadIdx.x == 0) best_tokens[row] = best.token;
}

// The inputs of the next step when every sequence goes on with its token: `ids`, `positions` and `slots` [rows] of one token each; with
// `drawn`, of one more output token.
// A row whose next place is outside its blocks, or that has no token, is left without a slot. Grid: 1 block, a thread per row.
KERNEL advance(const int* best_tokens, int* ids, int* positions, int* slots, int* drawn, const int* tables, const int* num_blocks,
               int table_stride, int block_size, int rows) {
  let_next_start();
  wait_for_previous();
  const int row = threadIdx.x + blockIdx.x * blockDim.x;
  if (row >= rows || positions[row] < 0) return;
  const int position = positions[row] + 1, block = position / block_size;
  const bool goes_on = best_tokens[row] >= 0 && block < num_blocks[row];
  ids[row] = goes_on ? best_tokens[row] : 0;
  slots[row] = goes_on ? tables[row * table_stride + block] * block_size + position % block_size : -1;
  positions[row] = goes_on ? position : -1;
  if (drawn) drawn[row]++;
}

// gate_up [tokens, 2 width], gate then up: out [tokens, width] = activation(gate) * up. Grid: parts of a row, tokens.
KERNEL gated_activation(const u32x4* gate_up, u32x4* out, int width, int is_gelu) {
  let_next_start();
  wait_for_previous();
  const int loads = width / 8;
  const u32x4 *gates = gate_up + (u64)blockIdx.y * 2 * loads, *ups = gates + loads;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < loads; i += gridDim.x * blockDim.x) {
    float gate[8], up[8];
    unpack8(gates[i], gate), unpack8(ups[i], up);
    for (int j = 0; j < 8; j++) {
      const float x = gate[j];
      const float active = is_gelu ? 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))) : x / (1.0f + exponential(-x));
      gate[j] = active * up[j];
    }
    out[(u64)blockIdx.y * loads + i] = pack8(gate);
  }
}

// The row of a gate-up matrix that row g of a tile (the gate's half) or row g + 8 (the other half) is.
DEVICE int half_row(int rows, int tile, int g, int is_up) { return is_up * (rows / 2) + tile * 8 + g; }

// Packed codes [tiles, chunks, bits / 4, 32] as rows [rows, inputs] of the type of activations, in the order of the matrix itself.
// Grid: chunks / warps of a block rounded up, tiles.
KERNEL dequantize(const u32x4* codes, const u32* scales, const u32* offsets, u16* out, int rows, int inputs, int group, int bits,
                  int is_gated) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = blockIdx.y, chunks = inputs / 64;
  const int chunk = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (chunk >= chunks) return;
  const u32x4* from = codes + ((u64)tile * chunks + chunk) * (bits / 4) * 32 + lane;
#pragma unroll  // indexes of registers must be constants
  for (int half = 0; half < 2; half++) {
    const u64 pair = ((u64)tile * (inputs / group) + (chunk * 64 + 32 * half) / group) * 8 + g;
    const int row = is_gated ? half_row(rows, tile, g, 0) : tile * 16 + g, row8 = is_gated ? half_row(rows, tile, g, 1) : row + 8;
    float x[2][8];  // rows g, g + 8; the lane's 8 inputs of this half
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          u32 code;
          if (bits == 4) {
            const u32x4 v = from[0];
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            code = words[2 * half + s] >> (4 * i + 16 * e) & 15u;
          } else {
            const u32x4 v = from[half * 32];
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            code = words[2 * s + (i >> 1)] >> (8 * (2 * (i & 1) + e)) & 255u;
          }
          const u32 scale = scales[pair];
          const float factor = i & 1 ? high<true>(scale) : low<true>(scale);
          float value = (static_cast<int>(code) - (offsets ? 0 : bits == 4 ? 8 : 128)) * factor;
          if (offsets) value += i & 1 ? high<true>(offsets[pair]) : low<true>(offsets[pair]);
          x[i & 1][4 * s + 2 * (i >> 1) + e] = value;
        }
    u32x4* to = reinterpret_cast<u32x4*>(out) + (chunk * 64 + 32 * half) / 8 + t;
    if (row < rows) to[(u64)row * inputs / 8] = pack8(x[0]);
    if (row8 < rows) to[(u64)row8 * inputs / 8] = pack8(x[1]);
  }
}

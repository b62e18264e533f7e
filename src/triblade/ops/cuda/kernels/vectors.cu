// The small kernels between the matrix products: embedding, rotation and cache writes, the greedy choice, and packed weights spelled
// out for products over many tokens. One block or warp per row; float32 inside.

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

#define MOST_ITEMS 4  // of a head per lane: heads up to 256

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
  int half;                      // even
  float eps;
};

// A lane's items of a head: two numbers in a row and, of those that are rotated, their two partners `half` numbers on.
struct Items {
  float x[MOST_ITEMS][4];
};
struct Item {
  int first;  // number in the head
  bool exists, has_partner;
};

DEVICE Item item_of(int j, int dim, int half) {
  const int item = (threadIdx.x & 31) + 32 * j;
  return Item{2 * item < half ? 2 * item : 2 * item + half, 2 * item < dim - half, 2 * item < half};
}

DEVICE void load_items(Items& items, const u32* vector, int dim, int half) {
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++) {
    const Item item = item_of(j, dim, half);
    const u32 word = item.exists ? vector[item.first / 2] : 0, partner = item.has_partner ? vector[(item.first + half) / 2] : 0;
    items.x[j][0] = low<F16>(word), items.x[j][1] = high<F16>(word);
    items.x[j][2] = low<F16>(partner), items.x[j][3] = high<F16>(partner);
  }
}

DEVICE void norm_items(Items& items, const float* norm, int dim, int half, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) squares += items.x[j][i] * items.x[j][i];
  for (int mask = 16; mask; mask >>= 1) squares += shuffle_xor(squares, mask);
  const float factor = rsqrtf(squares / dim + eps);
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++) {
    const Item item = item_of(j, dim, half);
    if (!item.exists) continue;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      items.x[j][e] *= factor * norm[item.first + e];
      if (item.has_partner) items.x[j][2 + e] *= factor * norm[item.first + half + e];
    }
  }
}

DEVICE void rotate_items(Items& items, const Rotation& rotation, int position, int dim) {
  const u64 at = (u64)position * rotation.half;
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++) {
    const Item item = item_of(j, dim, rotation.half);
    if (!item.has_partner) continue;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float cosine = rotation.cosines[at + item.first + e], sine = rotation.sines[at + item.first + e];
      const float x = items.x[j][e], y = items.x[j][2 + e];
      items.x[j][e] = x * cosine - y * sine, items.x[j][2 + e] = y * cosine + x * sine;
    }
  }
}

DEVICE void store_items(const Items& items, u32* vector, int dim, int half) {
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++) {
    const Item item = item_of(j, dim, half);
    if (item.exists) vector[item.first / 2] = pack<F16>(items.x[j][0], items.x[j][1]);
    if (item.has_partner) vector[(item.first + half) / 2] = pack<F16>(items.x[j][2], items.x[j][3]);
  }
}

DEVICE u16 code_pair(float first, float second, float scale) {
  return (static_cast<int>(rintf(first / scale)) & 255) | (static_cast<int>(rintf(second / scale)) & 255) << 8;
}

// Codes of 8 bits with the smallest scale that holds the vector in 127 steps after it was rounded to float16: as `kv.codecs.Int8Codec`.
DEVICE void store_codes(const Items& items, u16* codes, u16* scale_at, int dim, int half) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) most = fmaxf(most, fabsf(items.x[j][i]));
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  const float smallest = 5.9604644775390625e-8f;  // of float16
  u16 bits = half_bits(most / 127.0f * (1.0f + 4.8828125e-4f) + 2.98023223876953125e-8f);
  if (half_value(bits) < smallest) bits = half_bits(smallest);
  const float scale = half_value(bits);
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++) {
    const Item item = item_of(j, dim, half);
    if (item.exists) codes[item.first / 2] = code_pair(items.x[j][0], items.x[j][1], scale);
    if (item.has_partner) codes[(item.first + half) / 2] = code_pair(items.x[j][2], items.x[j][3], scale);
  }
  if ((threadIdx.x & 31) == 0) *scale_at = bits;
}

struct Heads {
  int queries, keys, dim;  // `keys`: as many of keys, and of values
};

DEVICE void write_to_cache(Items& items, const Pool& pool, const Heads& heads, int slot, int head, int half) {
  const bool is_value = head >= heads.queries + heads.keys;
  u8* row = pool.pool + (slot / pool.block_size) * pool.row_bytes;
  const u64 item = (u64)(slot % pool.block_size) * heads.keys + head - heads.queries - (is_value ? heads.keys : 0);
  u8* plane = row + (is_value ? pool.values : pool.keys);
  if (!pool.is_int8) {
    store_items(items, reinterpret_cast<u32*>(plane) + item * (heads.dim / 2), heads.dim, half);
    return;
  }
  // The reference rounds keys to the type of activations before the codec sees them.
#pragma unroll
  for (int j = 0; j < MOST_ITEMS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) items.x[j][i] = low<F16>(pack<F16>(items.x[j][i], 0.0f));
  u16* scales = reinterpret_cast<u16*>(row + (is_value ? pool.value_scales : pool.key_scales));
  store_codes(items, reinterpret_cast<u16*>(plane) + item * (heads.dim / 2), scales + item, heads.dim, half);
}

// qkv [tokens, (query_heads + 2 heads) * dim]: norm and rotate queries (in place) and keys, write keys and values of tokens with a
// slot (negative: none) to the cache. Grid: blocks whose warps take a token's heads in turn, tokens.
KERNEL rotate_and_write(u32* qkv, const int* positions, const int* slots, Pool pool, Rotation rotation, int query_heads, int dim) {
  let_next_start();
  wait_for_previous();
  const int token = blockIdx.y, slot = slots[token], position = positions[token], half = rotation.half, warps = blockDim.x / 32;
  const Heads heads = {query_heads, pool.heads, dim};
  const int all = query_heads + 2 * pool.heads, step = gridDim.x * warps;
  if (slot < 0) return;
  u32* vectors = qkv + (u64)token * all * (dim / 2);
  int head = blockIdx.x * warps + threadIdx.x / 32;
  Items next;
  if (head < all) load_items(next, vectors + head * (dim / 2), dim, half);
  for (; head < all; head += step) {
    Items items = next;
    if (head + step < all) load_items(next, vectors + (head + step) * (dim / 2), dim, half);
    if (head < query_heads + pool.heads) {
      if (rotation.norm) norm_items(items, rotation.norm + head * dim, dim, half, rotation.eps);
      rotate_items(items, rotation, position, dim);
    }
    if (head < query_heads) store_items(items, vectors + head * (dim / 2), dim, half);
    else write_to_cache(items, pool, heads, slot, head, half);
  }
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

DEVICE void take_better(Best& best, float value, int token) {
  best = better(best, Best{value, fabsf(value) < INFINITY ? token : -1});
}

// The best of tokens [begin, end) of a row as the threads of a block see them, four in a load and several loads on their way. Needs a
// row that begins at a multiple of 16 bytes.
DEVICE Best best_of_fours(const float* logits, int begin, int end) {
  const f32x4* fours = reinterpret_cast<const f32x4*>(logits);
  Best best = {-INFINITY, 0x7fffffff};
  const int first = (begin + 3) / 4, stop = end / 4;
#pragma unroll 4
  for (int i = first + threadIdx.x; i < stop; i += BEST_THREADS) {
    const f32x4 v = fours[i];
    take_better(best, v.x, 4 * i), take_better(best, v.y, 4 * i + 1), take_better(best, v.z, 4 * i + 2), take_better(best, v.w, 4 * i + 3);
  }
  const int before = begin + threadIdx.x, behind = 4 * stop + threadIdx.x;
  if (before < min(4 * first, end)) take_better(best, logits[before], before);
  if (stop >= first && behind < end) take_better(best, logits[behind], behind);
  return best;
}

// The same, one by one, where logits are capped first.
DEVICE Best best_of_capped(float* logits, int begin, int end, float softcap) {
  Best best = {-INFINITY, 0x7fffffff};
  for (int i = begin + threadIdx.x; i < end; i += BEST_THREADS) {
    logits[i] = softcap * tanhf(logits[i] / softcap);
    take_better(best, logits[i], i);
  }
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
  if (softcap > 0.0f) best = best_of_capped(mine, begin, end, softcap);
  else if (columns % 4 == 0) best = best_of_fours(mine, begin, end);
  else
    for (int i = begin + threadIdx.x; i < end; i += BEST_THREADS) take_better(best, mine[i], i);
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

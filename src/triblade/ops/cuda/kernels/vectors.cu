// The small kernels between the matrix products: embedding, the greedy choice, and packed weights spelled out for products over many
// tokens. One block or warp per row; float32 inside.

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

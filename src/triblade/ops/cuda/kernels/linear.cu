// y = x W^T for few tokens (1 to 8 NT), bound by reading W once. Weights are the first operand of the matrix instruction (16 rows
// each) and tokens the narrow second one (8 each), so one token wastes arithmetic only, which there is plenty of.
//
// Compile-time: BITS of a weight (4, 8, or 16: the type of activations), GROUP inputs per scale, OFFSETS, ROWS tiles of 16 rows per
// warp, NT tiles of 8 tokens, WM x WK warps of a block along rows and inputs, DEPTH chunks in flight, GATED.
//
// A warp walks over chunks of 64 inputs. The matrix instruction does not care in which order inputs are summed, as long as both
// operands agree: input 32 h + 8 t + j of a chunk belongs to lane t of each four, so a lane's inputs of a token are 16 bytes in a
// row. Packed codes are in the order of the instruction's registers (see ops/cuda/packing.py): 16 bytes per lane and load.
// Sums over warps and over blocks are taken in a fixed order, so the result does not depend on timing.

#define CHUNK 64
#define UNIT (BITS == 16 || GROUP <= CHUNK ? 1 : GROUP / CHUNK)  // chunks that end with a scale
#define SCALES (BITS == 16 ? 0 : (GROUP < CHUNK ? CHUNK / GROUP : 1))  // scales of a chunk
#define LOADS (BITS == 16 ? 4 : BITS / 4)  // of 16 bytes, per lane, chunk and tile
#define STEPS (CHUNK / 16)
#define THREADS (32 * WM * WK)

constexpr bool F16 = FLOAT16;

struct Matrix {
  const u32x4* codes;  // BITS 4, 8: [tiles, chunks, LOADS, 32]; 16: [rows, inputs]
  const u32* scales;   // [tiles, groups, 8]: float16 of rows g and g + 8
  const u32* offsets;  // the same
  const float* bias;   // [rows] in the order of the tiles, or null
  int rows, inputs;
};

struct Fragments {
  u32x4 codes[ROWS][LOADS];
  u32 scales[ROWS][SCALES ? SCALES : 1];
#if OFFSETS
  u32 offsets[ROWS][SCALES ? SCALES : 1];
#endif
};

// The matrix row of row g (or g + 8) of a tile, when rows are stored as they are. A gated tile is 8 gate rows and their up rows.
DEVICE int stored_row(const Matrix& m, int tile, int row) {
  int found = GATED ? (row >> 3) * (m.rows / 2) + tile * 8 + (row & 7) : tile * 16 + row;
  return found < m.rows ? found : m.rows - 1;
}

DEVICE void load_chunk(Fragments& f, const Matrix& m, int first_tile, int tiles, int chunk, bool begins_unit) {
  const int lane = threadIdx.x & 31, chunks = m.inputs / CHUNK;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int tile = first_tile + r < tiles ? first_tile + r : tiles - 1;
#if BITS == 16
#pragma unroll
    for (int j = 0; j < LOADS; j++) {  // j & 1: rows g, g + 8; j >> 1: half of the chunk
      const u64 row = stored_row(m, tile, (lane >> 2) + 8 * (j & 1));
      f.codes[r][j] = load_once(m.codes + (row * m.inputs + chunk * CHUNK + 32 * (j >> 1)) / 8 + (lane & 3));
    }
#else
    const u32x4* codes = m.codes + ((u64)tile * chunks + chunk) * LOADS * 32 + lane;
#pragma unroll
    for (int j = 0; j < LOADS; j++) f.codes[r][j] = load_once(codes + j * 32);
    if (begins_unit) {
      const u64 group = (u64)tile * (m.inputs / GROUP) + chunk * CHUNK / GROUP;
#pragma unroll
      for (int n = 0; n < SCALES; n++) {
        f.scales[r][n] = load_once(m.scales + (group + n) * 8 + (lane >> 2));
#if OFFSETS
        f.offsets[r][n] = load_once(m.offsets + (group + n) * 8 + (lane >> 2));
#endif
      }
    }
#endif
  }
}

DEVICE u32 word_of(const u32x4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The instruction's first operand for step s of a chunk: codes minus their zero point (with offsets: codes), without the scale.
DEVICE void weights_of_step(u32 (&a)[4], const u32x4 (&codes)[LOADS], int s) {
#if BITS == 16
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = word_of(codes[2 * (s >> 1) + (i & 1)], 2 * (s & 1) + (i >> 1));
#elif BITS == 4
  // Nibbles i and i + 4 become a[i]: or-ed into the last bits of 128 (float16: 1024), from which that is subtracted again.
  const u32 word = word_of(codes[0], s);
  const u32 magic = F16 ? 0x64006400u : 0x43004300u, one = F16 ? 0x3c003c00u : 0x3f803f80u;
  const u32 zero = F16 ? (OFFSETS ? 0xe400e400u : 0xe408e408u) : (OFFSETS ? 0xc300c300u : 0xc308c308u);
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = fma2<F16>(((word >> (4 * i)) & 0x000f000fu) | magic, one, zero);
#else
  // Bytes 2 i and 2 i + 1 of the eight of a step become a[i], by way of 2^23 + code.
  const float zero = 8388608.0f + (OFFSETS ? 0.0f : 128.0f);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 word = word_of(codes[s >> 1], 2 * (s & 1) + (i >> 1));
    const float low = __uint_as_float(permute(word, 0x4b000000u, 0x7540 + 2 * (i & 1)));
    const float high = __uint_as_float(permute(word, 0x4b000000u, 0x7541 + 2 * (i & 1)));
    a[i] = pack<F16>(low - zero, high - zero);
  }
#endif
}

DEVICE float activate(float gate) {
#if GELU
  const float inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanhf(inner));
#else
  return gate / (1.0f + exponential(-gate));
#endif
}

struct Output {
  void* values;         // [tokens, columns] in the type of activations, or float32
  const u16* residual;  // the same shape, added; may be `values` itself
  int columns;
  int is_float32;
};

DEVICE void store(const Output& out, int token, int column, float value) {
  const u64 at = (u64)token * out.columns + column;
  if (out.is_float32) {
    static_cast<float*>(out.values)[at] = value;
    return;
  }
  if (out.residual) value += low<F16>(out.residual[at]);
  static_cast<u16*>(out.values)[at] = static_cast<u16>(pack<F16>(value, 0.0f));
}

// Lane 4 g + t has rows g and g + 8 of a tile and tokens 2 t and 2 t + 1.
DEVICE void finish(const Output& out, const Matrix& m, int tile, int nt, int tokens, const float (&c)[4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, row = tile * 16 + g;
  const float bias0 = m.bias && row < m.rows ? m.bias[row] : 0.0f;
  const float bias1 = m.bias && row + 8 < m.rows ? m.bias[row + 8] : 0.0f;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int token = nt * 8 + 2 * (lane & 3) + e;
    if (token >= tokens) continue;
    const float first = c[e] + bias0, second = c[2 + e] + bias1;
#if GATED
    if (row + 8 < m.rows) store(out, token, tile * 8 + g, activate(first) * second);
#else
    if (row < m.rows) store(out, token, row, first);
    if (row + 8 < m.rows) store(out, token, row + 8, second);
#endif
  }
}

// Grid: blocks of WM * ROWS tiles of rows, splits of the inputs. `partial` holds [splits, tiles, NT, 32] float4, `counters` a zero
// per block of rows; both are needed for more than one split.
KERNEL __launch_bounds__(THREADS, BLOCKS) linear(Matrix m, const u16* x, Output out, f32x4* partial, u32* counters, int tokens) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, wm = warp % WM, wk = warp / WM, g = lane >> 2, t = lane & 3;
  const int chunks = m.inputs / CHUNK, units = chunks / UNIT, tiles = (m.rows + 15) / 16;
  const int first_tile = (blockIdx.x * WM + wm) * ROWS;
  const int part = blockIdx.y * WK + wk, parts = gridDim.y * WK;
  const int begin = units * part / parts * UNIT, end = units * (part + 1) / parts * UNIT;

  Fragments ahead[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (begin + d < end) load_chunk(ahead[d], m, first_tile, tiles, begin + d, d % UNIT == 0);
  let_next_start();
  wait_for_previous();

  float sums[ROWS][NT][4] = {};
#if BITS != 16
  float group[ROWS][NT][4] = {};
  u32 scales[ROWS] = {};
#endif
#if OFFSETS
  float inputs[NT][4] = {};  // sums of the inputs of a group, in every row the same
  u32 offsets[ROWS] = {};
  const u32 ones = F16 ? 0x3c003c00u : 0x3f803f80u;
  const u32 all_ones[4] = {ones, ones, ones, ones};
#endif
  for (int base = begin; base < end; base += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int chunk = base + d;
      if (chunk >= end) break;
      u32x4 b[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int token = n * 8 + g;
        const u32x4* row = reinterpret_cast<const u32x4*>(x + (u64)token * m.inputs + chunk * CHUNK) + t;
        b[n][0] = token < tokens ? row[0] : u32x4{0, 0, 0, 0};
        b[n][1] = token < tokens ? row[4] : u32x4{0, 0, 0, 0};
      }
#if BITS != 16
      if (d % UNIT == 0)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          scales[r] = ahead[d].scales[r][0];
#if OFFSETS
          offsets[r] = ahead[d].offsets[r][0];
#endif
        }
#endif
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          u32 a[4];
          weights_of_step(a, ahead[d].codes[r], s);
#pragma unroll
          for (int n = 0; n < NT; n++)
#if BITS == 16
            multiply<F16>(sums[r][n], a, word_of(b[n][s >> 1], 2 * (s & 1)), word_of(b[n][s >> 1], 2 * (s & 1) + 1));
#else
            multiply<F16>(group[r][n], a, word_of(b[n][s >> 1], 2 * (s & 1)), word_of(b[n][s >> 1], 2 * (s & 1) + 1));
#endif
        }
#if OFFSETS
#pragma unroll
        for (int n = 0; n < NT; n++)
          multiply<F16>(inputs[n], all_ones, word_of(b[n][s >> 1], 2 * (s & 1)), word_of(b[n][s >> 1], 2 * (s & 1) + 1));
#endif
#if BITS != 16
        const bool ends = GROUP < CHUNK ? (s + 1) * 16 % GROUP == 0 : s == STEPS - 1 && d % UNIT == UNIT - 1;
        if (!ends) continue;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          if (GROUP < CHUNK) scales[r] = ahead[d].scales[r][s * 16 / GROUP % (SCALES ? SCALES : 1)];
          const float scale0 = low<true>(scales[r]), scale1 = high<true>(scales[r]);
#if OFFSETS
          if (GROUP < CHUNK) offsets[r] = ahead[d].offsets[r][s * 16 / GROUP % (SCALES ? SCALES : 1)];
          const float offset0 = low<true>(offsets[r]), offset1 = high<true>(offsets[r]);
#endif
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              sums[r][n][i] += group[r][n][i] * (i < 2 ? scale0 : scale1);
#if OFFSETS
              sums[r][n][i] += inputs[n][i] * (i < 2 ? offset0 : offset1);
#endif
              group[r][n][i] = 0.0f;
            }
        }
#if OFFSETS
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) inputs[n][i] = 0.0f;
#endif
#endif
      }
      if (chunk + DEPTH < end) load_chunk(ahead[d], m, first_tile, tiles, chunk + DEPTH, d % UNIT == 0);
    }
  }

  // Over the warps of the block.
  SHARED f32x4 shared[WK > 1 ? (WK - 1) * WM * ROWS * NT * 32 : 1];
  if (WK > 1) {
    if (wk > 0)
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
          shared[((((wk - 1) * WM + wm) * ROWS + r) * NT + n) * 32 + lane] =
              f32x4{sums[r][n][0], sums[r][n][1], sums[r][n][2], sums[r][n][3]};
    block_barrier();
    if (wk == 0)
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int k = 0; k < WK - 1; k++) {
            const f32x4 other = shared[(((k * WM + wm) * ROWS + r) * NT + n) * 32 + lane];
            sums[r][n][0] += other.x, sums[r][n][1] += other.y, sums[r][n][2] += other.z, sums[r][n][3] += other.w;
          }
  }

  // Over the blocks that share the rows.
  const int splits = gridDim.y;
  if (splits > 1) {
    if (wk == 0)
      for (int r = 0; r < ROWS && first_tile + r < tiles; r++)
        for (int n = 0; n < NT; n++)
          partial[(((u64)blockIdx.y * tiles + first_tile + r) * NT + n) * 32 + lane] =
              f32x4{sums[r][n][0], sums[r][n][1], sums[r][n][2], sums[r][n][3]};
    if (!is_last_block(counters + blockIdx.x, splits)) return;
    if (wk == 0)
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float total[4] = {};
          for (int k = 0; k < splits && first_tile + r < tiles; k++) {
            const f32x4 other = partial[(((u64)k * tiles + first_tile + r) * NT + n) * 32 + lane];
            total[0] += other.x, total[1] += other.y, total[2] += other.z, total[3] += other.w;
          }
#pragma unroll
          for (int i = 0; i < 4; i++) sums[r][n][i] = total[i];
        }
  }
  if (wk == 0)
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (first_tile + r < tiles && n * 8 < tokens) finish(out, m, first_tile + r, n, tokens, sums[r][n]);
}

// Packed weights as the first operand of matrix instructions, and what becomes of the sums: shared by `linear.cu` and `wide.cu`.
//
// Compile-time: BITS of a weight (4, 8, or 16: the type of activations), GROUP inputs per scale, OFFSETS, ROWS tiles of 16 rows per
// warp, NT tiles of 8 tokens, GATED, GELU. Codes lie in memory in the order of the instruction's registers (ops/cuda/packing.py):
// 16 bytes per lane and load, 512 in a row per warp. Input 32 h + 8 t + j of a chunk belongs to lane t of each four; the instruction
// does not care in which order inputs are summed, as long as both operands agree.

#define CHUNK 64
#define UNIT (BITS == 16 || GROUP <= CHUNK ? 1 : GROUP / CHUNK)  // chunks that end with a scale
#define SCALES (BITS == 16 ? 0 : (GROUP < CHUNK ? CHUNK / GROUP : 1))  // scales of a chunk
#define LOADS (BITS == 16 ? 4 : BITS / 4)  // of 16 bytes, per lane, chunk and tile
#define STEPS (CHUNK / 16)
#define SCALED_WEIGHTS (BITS != 16 && NT >= 4)  // many tokens: scale the weights, not the sums

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

// Where a lane's next codes and scales of its tiles are.
struct Source {
#if BITS == 16
  const u32x4* codes[ROWS][2];  // rows g and g + 8
#else
  const u32x4* codes[ROWS];
  const u32* scales[ROWS];
#if OFFSETS
  const u32* offsets[ROWS];
#endif
#endif
};

DEVICE Source source_of(const Matrix& m, int first_tile, int tiles, int chunk) {
  const int lane = threadIdx.x & 31, chunks = m.inputs / CHUNK;
  Source source;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int tile = first_tile + r < tiles ? first_tile + r : tiles - 1;
#if BITS == 16
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u64 row = stored_row(m, tile, (lane >> 2) + 8 * half);
      source.codes[r][half] = m.codes + (row * m.inputs + chunk * CHUNK) / 8 + (lane & 3);
    }
#else
    source.codes[r] = m.codes + ((u64)tile * chunks + chunk) * LOADS * 32 + lane;
    const u64 group = ((u64)tile * (m.inputs / GROUP) + chunk * CHUNK / GROUP) * 8 + (lane >> 2);
    source.scales[r] = m.scales + group;
#if OFFSETS
    source.offsets[r] = m.offsets + group;
#endif
#endif
  }
  return source;
}

// Chunk `number` from a source on; `number` is known to the compiler, so that it becomes part of the instruction.
DEVICE void load_chunk(Fragments& f, const Source& source, int number) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#if BITS == 16
#pragma unroll
    for (int j = 0; j < LOADS; j++)  // j & 1: rows g, g + 8; j >> 1: half of the chunk
      f.codes[r][j] = load_once(source.codes[r][j & 1] + number * (CHUNK / 8) + 4 * (j >> 1));
#else
#pragma unroll
    for (int j = 0; j < LOADS; j++) f.codes[r][j] = load_once(source.codes[r] + (number * LOADS + j) * 32);
    if (number % UNIT == 0) {
#pragma unroll
      for (int n = 0; n < SCALES; n++) {
        f.scales[r][n] = load_once(source.scales[r] + (number / UNIT * SCALES + n) * 8);
#if OFFSETS
        f.offsets[r][n] = load_once(source.offsets[r] + (number / UNIT * SCALES + n) * 8);
#endif
      }
    }
#endif
  }
}

DEVICE void advance(Source& source, int chunks) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#if BITS == 16
    source.codes[r][0] += chunks * (CHUNK / 8), source.codes[r][1] += chunks * (CHUNK / 8);
#else
    source.codes[r] += chunks * LOADS * 32;
    source.scales[r] += chunks / UNIT * SCALES * 8;
#if OFFSETS
    source.offsets[r] += chunks / UNIT * SCALES * 8;
#endif
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
  for (int i = 0; i < 4; i++) a[i] = fma2<F16>(and_or<0x000f000fu>(word >> (4 * i), magic), one, zero);
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
  int layout;  // of `values`, see `layout.cuh`
};

// A column of the output: what it adds to the place of a number. Tokens of a launch are those of one slab.
struct Column {
  u64 place;
  bool exists;
};

DEVICE Column column_of(const Output& out, int column) {
  return Column{(u64)pair_place(column >> 1, out.layout) * 2 + (column & 1), column < out.columns};
}

DEVICE void store(const Output& out, u64 token_place, const Column& column, float value) {
  if (!column.exists) return;
  if (out.is_float32) static_cast<float*>(out.values)[token_place + column.place] = value;
  else static_cast<u16*>(out.values)[token_place + column.place] = static_cast<u16>(pack<F16>(value, 0.0f));
}

// Lane 4 g + t has rows g and g + 8 of a tile and tokens 2 t and 2 t + 1 of each tile of tokens.
DEVICE void finish(const Output& out, const Matrix& m, int tile, int tokens, const float (&c)[NT][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, row = tile * 16 + g;
  const float bias0 = m.bias && row < m.rows ? m.bias[row] : 0.0f;
  const float bias1 = m.bias && row + 8 < m.rows ? m.bias[row + 8] : 0.0f;
  const Column first_column = column_of(out, GATED ? tile * 8 + g : row), second_column = column_of(out, row + 8);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = n * 8 + 2 * (lane & 3) + e;
      if (token >= tokens) continue;
      const u64 token_place = token_in_slab(token, out.columns / 2, out.layout) * 2;
      const float first = c[n][e] + bias0, second = c[n][2 + e] + bias1;
#if GATED
      store(out, token_place, first_column, activate(first) * second);
#else
      store(out, token_place, first_column, first);
      store(out, token_place, second_column, second);
#endif
    }
}

DEVICE void add_residual(const Output& out, const Matrix& m, int tile, int nt, int tokens, float (&c)[4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = nt * 8 + 2 * (lane & 3) + (i & 1), row = tile * 16 + (lane >> 2) + 8 * (i >> 1);
    if (token < tokens && row < m.rows) c[i] += low<F16>(out.residual[(u64)token * out.columns + row]);
  }
}

// Scales (and offsets) of the rows g and g + 8 as pairs of equal numbers, and the weights of a step with them.
DEVICE void scale_weights(u32 (&a)[4], u32 scales, u32 offsets) {
  const u32 factor[2] = {pack<F16>(low<true>(scales), low<true>(scales)), pack<F16>(high<true>(scales), high<true>(scales))};
  const u32 summand[2] = {pack<F16>(low<true>(offsets), low<true>(offsets)), pack<F16>(high<true>(offsets), high<true>(offsets))};
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = fma2<F16>(a[i], factor[i & 1], OFFSETS ? summand[i & 1] : 0x80008000u);
}

struct Sums {
  float total[ROWS][NT][4];
#if BITS != 16 && !SCALED_WEIGHTS
  float group[ROWS][NT][4];
#if OFFSETS
  float inputs[NT][4];  // sums of the inputs of a group, in every row the same
#endif
#endif
};

// Sums over the blocks that share rows (`partial` [splits, tiles, NT, 32]); false in all but the last block to arrive.
DEVICE bool sum_over_blocks(Sums& sums, f32x4* partial, u32* counter, int first_tile, int tiles, bool has_sums) {
  const int lane = threadIdx.x & 31, splits = gridDim.y;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int n = 0; n < NT; n++)
      if (has_sums && first_tile + r < tiles) {
        const float(&c)[4] = sums.total[r][n];
        partial[(((u64)blockIdx.y * tiles + first_tile + r) * NT + n) * 32 + lane] = f32x4{c[0], c[1], c[2], c[3]};
      }
  if (!is_last_block(counter, splits)) return false;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (!has_sums || first_tile + r >= tiles) continue;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums.total[r][n][i] = 0.0f;
#pragma unroll 1  // registers of more loads would be taken from the loop over the inputs
    for (int k = 0; k < splits; k++) {  // outside, so that the loads of all n are on their way together
      const f32x4* others = partial + (((u64)k * tiles + first_tile + r) * NT) * 32 + lane;
      f32x4 other[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) other[n] = others[n * 32];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float(&total)[4] = sums.total[r][n];
        total[0] += other[n].x, total[1] += other[n].y, total[2] += other[n].z, total[3] += other[n].w;
      }
    }
  }
  return true;
}

// A warp's results. The residual is added to all of them before the first is stored: it may be the same memory, and loads that
// follow a store would wait for it.
DEVICE void write_results(Sums& sums, const Output& out, const Matrix& m, int first_tile, int tiles, int tokens) {
  if (out.residual) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (first_tile + r < tiles) add_residual(out, m, first_tile + r, n, tokens, sums.total[r][n]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (first_tile + r < tiles) finish(out, m, first_tile + r, tokens, sums.total[r]);
}

// Attention of 16 rows of queries over 16 keys at a time, in the order of the matrix instruction. All query heads of a key-value head, for
// all queries of a sequence, are rows of one matrix: row r is query r / group, head r % group; 16 rows make a tile. Partial results are
// merged in a fixed order (online softmax, Milakov and Gimelshein 2018; split over keys as in FlashDecoding).
//
// Compile-time: DIM of a head (a multiple of 64, at most 256), KV8 (int8 with float16 scales, otherwise the type of activations),
// BLOCK tokens of a cache block, SOFTCAP, IN_BOXES: keys and values come in boxes.

#define KEYS 16            // of a turn
#define PIECES (DIM / 64)  // of 64 dimensions
#define STEPS (DIM / 16)

// int8 codes are exact in float16, so that is what the cache's instruction multiplies then.
constexpr bool F16 = FLOAT16;
constexpr bool MATH16 = FLOAT16 || KV8;

struct Cache {
  const u8* pool;  // rows of row_bytes
  u64 row_bytes;
  int keys, values, key_scales, value_scales;  // byte offsets of this layer's planes in a row
  int heads;                                   // of keys and values
};

DEVICE u32 word_of(const u32x4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Four signed bytes as two pairs of float16: biased into the last bits of 1024, from which 1024 + 128 is subtracted.
DEVICE void half_pairs(u32 bytes, u32& first, u32& second) {
  const u32 biased = bytes ^ 0x80808080u;
  first = fma2<true>(permute(biased, 0x64646464u, 0x4140), 0x3c003c00u, 0xe480e480u);
  second = fma2<true>(permute(biased, 0x64646464u, 0x4342), 0x3c003c00u, 0xe480e480u);
}

#if KV8
#define KEY_LOADS (DIM / 64)  // 16 dimensions of a lane's quarter of 64
#define VALUE_WORDS 2         // 8 dimensions
#else
#define KEY_LOADS (DIM / 32)
#define VALUE_WORDS 4
#endif

struct Keys {
  u32x4 words[2][KEY_LOADS];  // keys g and g + 8
};

struct Values {
  u32 words[4][PIECES][VALUE_WORDS];  // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9; dimensions 8 g to 8 g + 7 of each piece
};

DEVICE int pair_key(int lane, int i) { return 2 * (lane & 3) + (i & 1) + 8 * (i >> 1); }

// From where on a lane has the four dimensions of a step: of queries as of keys.
DEVICE int dimension_of(int step, int t) {
#if IN_BOXES && KV8
  return 128 * (step >> 3) + 32 * t + 16 * (step >> 2 & 1) + 4 * (step & 3);
#elif IN_BOXES || KV8
  return 64 * (step >> 2) + 16 * t + 4 * (step & 3);
#else
  return 32 * (step >> 1) + 8 * t + 4 * (step & 1);
#endif
}

struct Queries {
  const u16* q;          // [tokens, q_stride]: heads * group vectors first
  const int* positions;  // [sequences * queries], ascending within a sequence; negative: no such sequence
  const int* tables;     // [sequences, table_stride] blocks
  int q_stride, table_stride, queries, group;
};

struct Scores {
  float scale, softcap;
  int window;  // 0: everything
};

struct Partial {
  f32x4 o[16 * DIM / 4];
  float top[16], total[16];
};

// Queries as first operand, [16 rows, DIM]: in each lane the dimensions whose keys it loads.
DEVICE void load_queries(u32 (&q)[STEPS][4], const Queries& in, int sequence, int head, int first_row) {
  const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first_row + (lane >> 2) + 8 * half, query = row / in.group;
    const bool exists = query < in.queries;
    const int at = exists ? row % in.group + head * in.group : 0;
    const u16* vector = in.q + (u64)(sequence * in.queries + (exists ? query : 0)) * in.q_stride + at * DIM;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32x2 words = *reinterpret_cast<const u32x2*>(vector + dimension_of(step, t));
      if (KV8 && !F16) {
        words.x = pack<true>(low<false>(words.x), high<false>(words.x));
        words.y = pack<true>(low<false>(words.y), high<false>(words.y));
      }
      q[step][half] = exists ? words.x : 0, q[step][2 + half] = exists ? words.y : 0;
    }
  }
}

DEVICE void scores_of(float (&s)[2][4], const u32 (&q)[STEPS][4], const Keys& k) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[half][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#if KV8
      u32 b0, b1;
      half_pairs(word_of(k.words[half][step >> 2], step & 3), b0, b1);
#else
      const u32 b0 = word_of(k.words[half][step >> 1], 2 * (step & 1)), b1 = word_of(k.words[half][step >> 1], 2 * (step & 1) + 1);
#endif
      multiply<MATH16>(s[half], q[step], b0, b1);
    }
  }
}

// o [16, DIM] += p [16, 16] V. Column n of the result's tile 8 piece + e is dimension 64 piece + 8 n + e.
DEVICE void add_values(float (&o)[DIM / 8][4], const u32 (&p)[4], const Values& v) {
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
    for (int w = 0; w < VALUE_WORDS; w++) {
#if KV8
      const u32 even = permute(v.words[0][piece][w], v.words[1][piece][w], 0x5140), odd = permute(v.words[0][piece][w], v.words[1][piece][w], 0x7362);
      const u32 even8 = permute(v.words[2][piece][w], v.words[3][piece][w], 0x5140), odd8 = permute(v.words[2][piece][w], v.words[3][piece][w], 0x7362);
      u32 a[4], b[4];
      half_pairs(even, a[0], a[1]), half_pairs(odd, a[2], a[3]);
      half_pairs(even8, b[0], b[1]), half_pairs(odd8, b[2], b[3]);
#pragma unroll
      for (int e = 0; e < 4; e++) multiply<MATH16>(o[piece * 8 + w * 4 + e], p, a[e], b[e]);
#else
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const u32 order = e ? 0x7632 : 0x5410;
        multiply<MATH16>(o[piece * 8 + w * 2 + e], p, permute(v.words[0][piece][w], v.words[1][piece][w], order),
                         permute(v.words[2][piece][w], v.words[3][piece][w], order));
      }
#endif
    }
}

// Running maximum, sum and result of a lane's two rows.
struct State {
  float o[DIM / 8][4];
  float top[2], total[2];
};

DEVICE void reset(State& state) {
#pragma unroll
  for (int row = 0; row < 2; row++) state.top[row] = -INFINITY, state.total[row] = 0.0f;
#pragma unroll
  for (int n = 0; n < DIM / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) state.o[n][i] = 0.0f;
}

// Over the four lanes that share a row.
DEVICE void sum_totals(State& state) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    state.total[row] += shuffle_xor(state.total[row], 1);
    state.total[row] += shuffle_xor(state.total[row], 2);
  }
}

DEVICE float shrink(float old_top, float new_top) { return old_top == -INFINITY ? 0.0f : exponential2(old_top - new_top); }

DEVICE void rescale(State& state, const float (&new_top)[2]) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    const float factor = shrink(state.top[row], new_top[row]);
    state.top[row] = new_top[row];
    state.total[row] *= factor;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) state.o[n][2 * row] *= factor, state.o[n][2 * row + 1] *= factor;
  }
}

DEVICE void attend(State& state, const u32 (&q)[STEPS][4], const Keys& k, const Values& v, float scale, const Scores& how, int first_key,
                   const int (&position)[2]) {
  const int lane = threadIdx.x & 31;
  const float log2e = 1.4426950408889634f;
  float s[2][4];
  scores_of(s, q, k);
  float new_top[2] = {state.top[0], state.top[1]};
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = first_key + 8 * half + 2 * (lane & 3) + (i & 1), row = i >> 1;
      float score = s[half][i] * how.scale;
#if KV8
      score *= shuffle(scale, pair_key(lane, 2 * half + (i & 1)));
#endif
#if SOFTCAP
      score = how.softcap * tanhf(score / how.softcap);
#endif
      const bool seen = key <= position[row] && (how.window == 0 || key > position[row] - how.window);
      s[half][i] = seen ? score * log2e : -INFINITY;
      new_top[row] = fmaxf(new_top[row], s[half][i]);
    }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    new_top[row] = fmaxf(new_top[row], shuffle_xor(new_top[row], 1));
    new_top[row] = fmaxf(new_top[row], shuffle_xor(new_top[row], 2));
  }
  if (any_lane(new_top[0] > state.top[0] || new_top[1] > state.top[1])) rescale(state, new_top);
  u32 p[4];
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int row = 0; row < 2; row++) {
      float weight[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        weight[e] = shrink(s[half][2 * row + e], new_top[row]);
        state.total[row] += weight[e];
#if KV8
        weight[e] *= shuffle(scale, 16 + pair_key(lane, 2 * half + e));
#endif
      }
      p[2 * half + row] = pack<MATH16>(weight[0], weight[1]);
    }
  add_values(state.o, p, v);
}

// A lane's part of `partial`: rows g and g + 8; in each piece of 64 dimensions 16 t to 16 t + 15, of which o holds the first 8 in its
// even and the last 8 in its odd columns.
DEVICE u64 place_in_partial(int row, int piece, int t, int odd, int quarter) {
  return ((u64)row * DIM + piece * 64 + 16 * t + 8 * odd) / 4 + quarter;
}

DEVICE void write_partial(Partial& partial, const State& state, int rows) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int row = 0; row < 2; row++) {
    if (g + 8 * row >= rows) continue;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++)
#pragma unroll
        for (int w = 0; w < 2; w++) {
          const float(*o)[4] = state.o + piece * 8 + w * 4;
          const int i = 2 * row + odd;
          partial.o[place_in_partial(g + 8 * row, piece, t, odd, w)] = f32x4{o[0][i], o[1][i], o[2][i], o[3][i]};
        }
    if (t == 0) partial.top[g + 8 * row] = state.top[row], partial.total[g + 8 * row] = state.total[row];
  }
}


// Attention of a few queries per sequence over the paged cache, split over the context, bound by reading keys and values once.
//
// Compile-time: DIM of a head (a multiple of 64, at most 256), KV8 (int8 with float16 scales, otherwise the type of activations),
// BLOCK tokens of a cache block, SOFTCAP, STAGED. All query heads of a key-value head, for all queries of a sequence, are rows of one matrix:
// row r is query r / group, head r % group. 16 rows make a tile. A block has WARPS warps and a stretch of the keys; each warp takes 16
// keys at a time, a turn, in the order of the matrix instruction. A lane loads what it needs itself, one turn ahead into registers, or
// (STAGED) STAGES - 1 turns ahead into places of its own in shared memory; no thread waits for another. Partial results of warps and of
// blocks are merged in a fixed order (online softmax, Milakov and Gimelshein 2018; split over keys as in FlashDecoding).

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
      // bfloat16: input 32 (step / 2) + 8 t + 4 (step % 2) on; int8: 64 (step / 4) + 16 t + 4 (step % 4) on.
      const int d = KV8 ? 64 * (step >> 2) + 16 * t + 4 * (step & 3) : 32 * (step >> 1) + 8 * t + 4 * (step & 1);
      u32x2 words = *reinterpret_cast<const u32x2*>(vector + d);
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

DEVICE float shrink(float old_top, float new_top) { return old_top == -INFINITY ? 0.0f : exponential2(old_top - new_top); }

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
    const float factor = shrink(state.top[row], new_top[row]);
    state.top[row] = new_top[row];
    state.total[row] *= factor;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) state.o[n][2 * row] *= factor, state.o[n][2 * row + 1] *= factor;
  }
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

DEVICE void write_partial(Partial& partial, const State& state) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int row = 0; row < 2; row++) {
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

// The result of one row and four dimensions from `count` partial ones, in their order.
DEVICE f32x4 merged(const Partial* partial, int count, int row, int quarter, float& top, float& total) {
  top = -INFINITY, total = 0.0f;
  for (int i = 0; i < count; i++) top = fmaxf(top, partial[i].top[row]);
  f32x4 o = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int i = 0; i < count; i++) {
    const float factor = shrink(partial[i].top[row], top);
    const f32x4 part = partial[i].o[row * (DIM / 4) + quarter];
    total += factor * partial[i].total[row];
    o.x += factor * part.x, o.y += factor * part.y, o.z += factor * part.z, o.w += factor * part.w;
  }
  return o;
}

// Grid: splits, key-value heads * tiles of rows, sequences. `out` is [tokens, heads * group * DIM] in the layout `layout`, of which these are tokens from `first_token` on; `workspace` holds a Partial per
// block (of the whole grid), `counters` a zero per (head and tile, sequence).
KERNEL __launch_bounds__(32 * WARPS) attention(Queries in, Cache cache, Scores how, u16* out, int layout, int first_token,
                                                  Partial* workspace, u32* counters) {
#if STAGED
  DYNAMIC_SHARED(memory);
  Partial* shared = reinterpret_cast<Partial*>(memory);  // once all keys are done
#else
  SHARED Partial shared[DIM > 128 ? 2 : WARPS];
#endif
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int head = blockIdx.y % cache.heads, first_row = blockIdx.y / cache.heads * 16, sequence = blockIdx.z;
  const int rows = min(16, in.queries * in.group - first_row);

  // This block's keys. Sequences too short for all splits use fewer, in pieces of whole turns. Positions and tables are constant
  // within a step.
  const int* positions = in.positions + sequence * in.queries;
  let_next_start();
  if (positions[0] < 0) return;
  const int last = positions[min((first_row + 15) / in.group, in.queries - 1)], stop = last + 1;
  const int start = how.window ? max(0, positions[first_row / in.group] - how.window + 1) / KEYS * KEYS : 0;
  const int turns = (stop - start + KEYS - 1) / KEYS;
  const int splits = min((int)gridDim.x, (turns + WARPS - 1) / WARPS), split = blockIdx.x;
  if (split >= splits) return;
  const int begin = turns * split / splits, end = turns * (split + 1) / splits;

  // The first turns' keys and values are those of earlier steps, unless this step's tokens are among them, and need not wait.
  const Stretch stretch = {cache, in.tables + sequence * in.table_stride, head, stop};
  const int first_turn = begin + warp;
  float scale = 0.0f;
#if STAGED
  u8* ring = memory + warp * (STAGES * STAGE_BYTES);
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    const int turn = first_turn + s * WARPS, first = start + turn * KEYS;
    if (turn >= end || first + KEYS > positions[0]) break;
    fetch(ring + s * STAGE_BYTES, stretch, first);
    if (s == 0) scale = load_scale(stretch, first);
  }
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    const int turn = first_turn + s * WARPS, first = start + turn * KEYS;
    if (turn < end && first + KEYS > positions[0]) {
      fetch(ring + s * STAGE_BYTES, stretch, first);
      if (s == 0) scale = load_scale(stretch, first);
    }
    end_copy_group();  // the first one has all early copies
  }
#else
  Keys ahead;
  Values v;
  const int earliest = start + first_turn * KEYS;
  const bool is_early = earliest + KEYS <= positions[0], has_turn = first_turn < end;
  if (has_turn && is_early) load_keys(ahead, stretch, earliest), load_values(v, stretch, earliest), scale = load_scale(stretch, earliest);
  wait_for_previous();
  if (has_turn && !is_early) load_keys(ahead, stretch, earliest), load_values(v, stretch, earliest), scale = load_scale(stretch, earliest);
#endif

  u32 q[STEPS][4];
  load_queries(q, in, sequence, head, first_row);
  int position[2];
#pragma unroll
  for (int half = 0; half < 2; half++) position[half] = positions[min((first_row + (lane >> 2) + 8 * half) / in.group, in.queries - 1)];
  State state;
#pragma unroll
  for (int row = 0; row < 2; row++) state.top[row] = -INFINITY, state.total[row] = 0.0f;
#pragma unroll
  for (int n = 0; n < DIM / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) state.o[n][i] = 0.0f;

#if STAGED
  int stage = 0;
#endif
  for (int turn = first_turn; turn < end; turn += WARPS) {
    const int first = start + turn * KEYS, next = first + WARPS * KEYS;
    const bool goes_on = turn + WARPS < end;
    const float now = scale;
    if (goes_on) scale = load_scale(stretch, next);
#if STAGED
    const int later = turn + (STAGES - 1) * WARPS;
    wait_for_copies<STAGES - 2>();
    Keys k;
    Values v;
    take(k, v, ring + stage * STAGE_BYTES);
    if (later < end) fetch(ring + (stage ? stage - 1 : STAGES - 1) * STAGE_BYTES, stretch, start + later * KEYS);
    end_copy_group();
    if (++stage == STAGES) stage = 0;
#else
    const Keys k = ahead;
    if (goes_on) load_keys(ahead, stretch, next);
#endif
    attend(state, q, k, v, now, how, first, position);
#if !STAGED
    if (goes_on) load_values(v, stretch, next);
#endif
  }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    state.total[row] += shuffle_xor(state.total[row], 1);
    state.total[row] += shuffle_xor(state.total[row], 2);
  }

  // Over the warps, then over the splits. With large heads two warps at a time.
  const int width = in.group * cache.heads * DIM, at_once = DIM > 128 ? 2 : WARPS;
  Partial* own = workspace + ((u64)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x * (WARPS / at_once);
  const bool direct = splits == 1 && at_once == WARPS;
  block_barrier();  // every warp is done with its stages
  for (int round = 0; round < WARPS / at_once; round++) {
    if (warp / at_once == round) write_partial(shared[warp % at_once], state);
    block_barrier();
    if (!direct) {
      Partial& mine = own[split * (WARPS / at_once) + round];
      for (int i = threadIdx.x; i < rows * (DIM / 4); i += 32 * WARPS) {
        const int row = i / (DIM / 4);
        float top, total;
        mine.o[i] = merged(shared, at_once, row, i % (DIM / 4), top, total);
        if (i % (DIM / 4) == 0) mine.top[row] = top, mine.total[row] = total;
      }
      block_barrier();
    }
  }
  if (!direct && !is_last_block(counters + (u64)blockIdx.z * gridDim.y + blockIdx.y, splits)) return;
  const Partial* parts = direct ? shared : own;
  const int count = direct ? WARPS : splits * (WARPS / at_once);
  for (int i = threadIdx.x; i < rows * (DIM / 4); i += 32 * WARPS) {
    const int row = i / (DIM / 4), query = (first_row + row) / in.group, of_group = (first_row + row) % in.group;
    float top, total;
    const f32x4 o = merged(parts, count, row, i % (DIM / 4), top, total);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    const int column = (head * in.group + of_group) * DIM + i % (DIM / 4) * 4;
    const u32x2 words = {pack<F16>(o.x * inverse, o.y * inverse), pack<F16>(o.z * inverse, o.w * inverse)};
    store_half_unit(out, first_token + sequence * in.queries + query, column / 4, width / 4, layout, words);
  }
}

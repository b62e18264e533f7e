// Attention of a few queries of many sequences over the paged cache: all turns (16 keys of a sequence) are shared out evenly, so that no
// multiprocessor waits for a long sequence, and arrive in shared memory in boxes that the copy engine fetches by itself.
//
// Compile-time: what `attend.cuh` says (IN_BOXES 1, one tile of rows), HEADS of keys and values of a block, GROUPS in all, STAGES boxes of
// a warp, BLOCKS that should fit a multiprocessor. BLOCK is a multiple of 16, a head's vector of 128 bytes (Boxes).
//
// A worker is a block; its range of turns may begin and end within a sequence. Each of its warps takes one head, with a ring of boxes of
// its own, and waits for no other. What a worker has of a sequence that others have a part of goes to `workspace`; who finishes a
// sequence last merges the parts, in their order.

#define MOST_SEQUENCES 512
#define LEAST_TURNS 2  // of a worker
#define ROW_BYTES (DIM * (KV8 ? 1 : 2))
#define SLICES (ROW_BYTES / 128)  // of a head's vector
#define BOX_BYTES (2 * SLICES * KEYS * 128)
#define SCALE_BYTES (KV8 ? KEYS * GROUPS * 2 : 0)  // of keys, or of values

struct Shares {
  int starts[MOST_SEQUENCES + 1];  // turns before each sequence
  int keys[MOST_SEQUENCES];        // first key that it sees
};

// What the sequences have of turns; one warp does.
DEVICE void share_out(Shares& shares, const Queries& in, int sequences, int window) {
  const int lane = threadIdx.x & 31, each = (sequences + 31) / 32, first = lane * each, end = min(first + each, sequences);
  int own = 0;
  for (int s = first; s < end; s++) {
    const int* positions = in.positions + s * in.queries;
    const int key = window ? max(0, positions[0] - window + 1) / KEYS * KEYS : 0;
    shares.keys[s] = key;
    shares.starts[s] = own;
    own += positions[0] < 0 ? 0 : (positions[in.queries - 1] - key) / KEYS + 1;
  }
  int before = own;
  for (int apart = 1; apart < 32; apart *= 2) {
    const int other = shuffle(before, lane >= apart ? lane - apart : lane);
    before += lane >= apart ? other : 0;
  }
  before -= own;
  for (int s = first; s < end; s++) shares.starts[s] += before;
  if (lane == 31) shares.starts[sequences] = before + own;
}

// A turn among all of them.
struct Turn {
  int at, sequence;
};

DEVICE Turn turn_at(const Shares& shares, int at, int sequences) {
  int found = 0;
  for (int s = threadIdx.x & 31; s < sequences; s += 32)
    if (shares.starts[s] <= at && at < shares.starts[s + 1]) found = s;
  for (int mask = 16; mask; mask >>= 1) found = max(found, shuffle_xor(found, mask));
  return Turn{at, found};
}

DEVICE void settle(Turn& turn, const Shares& shares) {
  while (turn.at >= shares.starts[turn.sequence + 1]) turn.sequence++;
}

DEVICE int first_key(const Turn& turn, const Shares& shares) {
  return shares.keys[turn.sequence] + (turn.at - shares.starts[turn.sequence]) * KEYS;
}

// A warp's boxes: `full` counts the bytes of each stage. With int8, the scales of all heads lie behind the boxes.
struct Ring {
  u8* boxes;
  u8* scales;
  u64* full;
  int stage;
};

DEVICE void go_on(int& stage) { stage = stage + 1 == STAGES ? 0 : stage + 1; }

// Where the next box comes from; `block` is asked for one turn before it is needed.
struct Fetcher {
  Turn turn;
  int end, head, block;
};

DEVICE void ask_for_block(Fetcher& next, const Shares& shares, const Queries& in) {
  if (next.turn.at >= next.end) return;
  settle(next.turn, shares);
  next.block = in.tables[next.turn.sequence * in.table_stride + first_key(next.turn, shares) / BLOCK];
}

DEVICE bool is_early(const Fetcher& next, const Shares& shares, const Queries& in) {
  return first_key(next.turn, shares) + KEYS <= in.positions[next.turn.sequence * in.queries];
}

DEVICE void fetch(Fetcher& next, Ring& ring, const BoxMap& map, const Cache& cache, const Shares& shares, const Queries& in) {
  if (next.turn.at >= next.end) return;
  if ((threadIdx.x & 31) == 0) {
    const int token = first_key(next.turn, shares) % BLOCK;
    u64* full = ring.full + ring.stage;
    expect_bytes(full, BOX_BYTES + 2 * SCALE_BYTES);
    copy_box(ring.boxes + ring.stage * BOX_BYTES, map, token, next.head * SLICES, next.block, full);
#if KV8
    const u8* row = cache.pool + next.block * cache.row_bytes + token * GROUPS * 2;
    u8* scales = ring.scales + ring.stage * 2 * SCALE_BYTES;
    copy_bulk(scales, row + cache.key_scales, SCALE_BYTES, full);
    copy_bulk(scales + SCALE_BYTES, row + cache.value_scales, SCALE_BYTES, full);
#endif
  }
  go_on(ring.stage);
  next.turn.at++;
  ask_for_block(next, shares, in);
}

// 16 bytes of key (or value) `token` of a box: the copy engine has put unit u of a slice to u ^ (token % 8).
DEVICE const u8* unit_of(const u8* box, int is_value, int slice, int token, int unit) {
  return box + (((is_value * SLICES + slice) * KEYS + token) * 8 + (unit ^ (token & 7))) * 16;
}

DEVICE void take_keys(Keys& k, const u8* box) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < KEY_LOADS; j++)
      k.words[half][j] = *reinterpret_cast<const u32x4*>(unit_of(box, 0, j >> 1, g + 8 * half, 2 * t + (j & 1)));
}

// Values of keys from `count` on do not exist: what lies there is not even a number.
DEVICE void take_values(Values& v, const u8* box, int count) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = pair_key(lane, i);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
#if KV8
      const u8* unit = unit_of(box, 1, piece >> 1, token, 4 * (piece & 1) + (g >> 1));
      const u32x2 found = reinterpret_cast<const u32x2*>(unit)[g & 1];
      v.words[i][piece][0] = found.x, v.words[i][piece][1] = found.y;
#else
      const u32x4 found = *reinterpret_cast<const u32x4*>(unit_of(box, 1, piece, token, g));
#pragma unroll
      for (int w = 0; w < 4; w++) v.words[i][piece][w] = word_of(found, w);
#endif
    }
  }
  if (count >= KEYS) return;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int w = 0; w < VALUE_WORDS; w++)
        if (pair_key(lane, i) >= count) v.words[i][piece][w] = 0;
}

// The scale of key `lane` (lanes 0 to 15) or of value `lane - 16`.
DEVICE float take_scale(const u8* scales, int head, int count) {
#if KV8
  const int lane = threadIdx.x & 31, token = lane & 15;
  const u16* plane = reinterpret_cast<const u16*>(scales + (lane < 16 ? 0 : SCALE_BYTES));
  return token < count ? half_value(plane[token * GROUPS + head]) : 0.0f;
#else
  return 1.0f;
#endif
}

// Where results go.
struct Target {
  u16* out;
  int layout, first_token;
};

// Row `row` of a tile: dimensions 8 `unit` to 8 `unit` + 7 of its head.
DEVICE void write_unit(const Target& to, const Queries& in, int sequence, int head, int row, int unit, const float (&x)[8]) {
  const int token = to.first_token + sequence * in.queries + row / in.group, column = (head * in.group + row % in.group) * DIM / 8 + unit;
  const u32x4 words = {pack<F16>(x[0], x[1]), pack<F16>(x[2], x[3]), pack<F16>(x[4], x[5]), pack<F16>(x[6], x[7])};
  store_unit(to.out, token, column, in.group * GROUPS * DIM / 8, to.layout, words);
}

// From registers: in each piece of 64 dimensions, a lane has 16 t to 16 t + 15 of rows g and g + 8.
DEVICE void write_state(const Target& to, const Queries& in, int sequence, int head, const State& state) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = g + 8 * half;
    if (row >= in.queries * in.group) continue;
    const float inverse = state.total[half] > 0.0f ? 1.0f / state.total[half] : 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = state.o[piece * 8 + e][2 * half + odd] * inverse;
        write_unit(to, in, sequence, head, row, piece * 8 + 2 * t + odd, x);
      }
  }
}

// The workers between whom the turns are shared, and the one that has turn `at`: the last that begins at or before it.
struct Workers {
  int count, turns;
};
DEVICE int begin_of(const Workers& workers, int worker) { return (u64)workers.turns * worker / workers.count; }
DEVICE int worker_of(const Workers& workers, int at) { return ((u64)(at + 1) * workers.count - 1) / workers.turns; }

// Merge the parts of one head of a sequence: the first worker's last part, then the others' first ones.
DEVICE void merge(const Target& to, const Queries& in, int sequence, int head, const Partial* parts, int first_worker, int count) {
  for (int i = threadIdx.x & 31; i < in.queries * in.group * (DIM / 8); i += 32) {
    const int row = i / (DIM / 8), unit = i % (DIM / 8);
    float top = -INFINITY, total = 0.0f, x[8] = {};
    for (int p = 0; p < count; p++) top = fmaxf(top, parts[2 * (first_worker + p) + (p == 0)].top[row]);
    for (int p = 0; p < count; p++) {
      const Partial& part = parts[2 * (first_worker + p) + (p == 0)];
      const float factor = shrink(part.top[row], top);
      const f32x4 a = part.o[row * (DIM / 4) + 2 * unit], b = part.o[row * (DIM / 4) + 2 * unit + 1];
      total += factor * part.total[row];
      x[0] += factor * a.x, x[1] += factor * a.y, x[2] += factor * a.z, x[3] += factor * a.w;
      x[4] += factor * b.x, x[5] += factor * b.y, x[6] += factor * b.z, x[7] += factor * b.w;
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] *= inverse;
    write_unit(to, in, sequence, head, row, unit, x);
  }
}

// Grid: workers, sets of HEADS heads. `out` is [tokens, GROUPS * group * DIM] in a layout, of which these are tokens from `first_token` on;
// `workspace` holds two Partials per head and worker, `counters` a zero per head and sequence.
KERNEL __launch_bounds__(32 * HEADS, BLOCKS) crowd(CONSTANT_ARGUMENT(BoxMap) map, Queries in, Cache cache, Scores how, Target to,
                                                   int sequences, Partial* workspace, u32* counters) {
  DYNAMIC_SHARED(memory);
  SHARED Shares shares;
  SHARED __align__(8) u64 barriers[HEADS * STAGES];
  const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x / 32), head = blockIdx.y * HEADS + warp;
  if (warp == 0) share_out(shares, in, sequences, how.window);  // positions and tables are constant within a step
  u8* boxes = aligned(memory, 1024);
  Ring ring = {boxes + warp * STAGES * BOX_BYTES, boxes + HEADS * STAGES * BOX_BYTES + warp * STAGES * 2 * SCALE_BYTES,
               barriers + warp * STAGES, 0};
  if (lane < STAGES) init_barrier(ring.full + lane, 1);
  barriers_are_ready();
  block_barrier();
  let_next_start();

  const int turns = shares.starts[sequences];
  const Workers workers = {max(1, min((int)gridDim.x, turns / LEAST_TURNS)), turns};
  const int worker = blockIdx.x, begin = begin_of(workers, worker), end = begin_of(workers, worker + 1);
  if (worker >= workers.count || begin >= end) return;

  // Keys of earlier steps need not wait.
  Turn turn = turn_at(shares, begin, sequences);
  Fetcher next = {turn, end, head, 0};
  ask_for_block(next, shares, in);
  int fetched = 0;
  while (fetched < STAGES && next.turn.at < end && is_early(next, shares, in)) fetch(next, ring, map, cache, shares, in), fetched++;
  wait_for_previous();
  for (; fetched < STAGES; fetched++) fetch(next, ring, map, cache, shares, in);

  int stage = 0, phase = 0;
  while (turn.at < end) {
    settle(turn, shares);
    const int sequence = turn.sequence, first = turn.at, stop = min(end, shares.starts[sequence + 1]);
    const int* positions = in.positions + sequence * in.queries;
    u32 q[STEPS][4];
    load_queries(q, in, sequence, head, 0);
    int position[2];
#pragma unroll
    for (int half = 0; half < 2; half++) position[half] = positions[min(((lane >> 2) + 8 * half) / in.group, in.queries - 1)];
    const int last = positions[in.queries - 1];
    State state;
    reset(state);
    for (; turn.at < stop; turn.at++) {
      const int key = first_key(turn, shares), count = last + 1 - key;
      wait_for_phase(ring.full + stage, phase);
      const u8* box = ring.boxes + stage * BOX_BYTES;
      Keys k;
      Values v;
      take_keys(k, box);
      take_values(v, box, count);
      attend(state, q, k, v, take_scale(ring.scales + stage * 2 * SCALE_BYTES, head, count), how, key, position);
      warp_barrier();  // everybody has read this box
      fetch(next, ring, map, cache, shares, in);
      go_on(stage);
      if (stage == 0) phase ^= 1;
    }
    sum_totals(state);
    const bool from_start = first == shares.starts[sequence], to_end = stop == shares.starts[sequence + 1];
    if (from_start && to_end) {
      write_state(to, in, sequence, head, state);
      continue;
    }
    Partial* parts = workspace + (u64)head * gridDim.x * 2;
    write_partial(parts[2 * worker + from_start], state, in.queries * in.group);
    const int first_worker = worker_of(workers, shares.starts[sequence]);
    const int count = worker_of(workers, shares.starts[sequence + 1] - 1) - first_worker + 1;
    if (is_last_warp(counters + head * sequences + sequence, count)) merge(to, in, sequence, head, parts, first_worker, count);
  }
}

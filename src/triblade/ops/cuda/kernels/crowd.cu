// Attention of a few queries of many sequences over the paged cache: all turns (16 keys of a sequence) are shared out evenly, so that no
// multiprocessor waits for a long sequence, and arrive in shared memory in boxes that the copy engine fetches by itself.
//
// Compile-time: what `attend.cuh` and `boxes.cuh` say (one tile of rows), HEADS of keys and values of a block, BLOCKS that should fit a
// multiprocessor.
//
// A worker is a block; its range of turns may begin and end within a sequence. Each of its warps takes one head, with a ring of boxes of
// its own, and waits for no other. What a worker has of a sequence that others have a part of goes to `workspace`; who finishes a
// sequence last merges the parts, in their order.

#define MOST_SEQUENCES 512
#define LEAST_TURNS 2  // of a worker

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
  fetch_box(ring, map, cache, Source{first_key(next.turn, shares) % BLOCK, next.head, next.block});
  next.turn.at++;
  ask_for_block(next, shares, in);
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

// Parts of one head of a sequence: the first worker's last part, then the others' first ones.
struct Parts {
  const Partial* of_head;
  int first_worker, count;
};

DEVICE const Partial& part_of(const Parts& parts, int number) { return parts.of_head[2 * (parts.first_worker + number) + (number == 0)]; }

// The result of one row and eight dimensions from parts, in their order; loads of several parts are on their way together.
DEVICE void merge_unit(float (&x)[8], const Parts& parts, int row, int unit) {
  float top = -INFINITY, total = 0.0f;
#pragma unroll 4
  for (int p = 0; p < parts.count; p++) {
    const Partial& part = part_of(parts, p);
    const f32x4 a = part.o[row * (DIM / 4) + 2 * unit], b = part.o[row * (DIM / 4) + 2 * unit + 1];
    const float part_top = part.top[row], new_top = fmaxf(top, part_top), old = shrink(top, new_top), factor = shrink(part_top, new_top);
    total = old * total + factor * part.total[row];
    x[0] = old * x[0] + factor * a.x, x[1] = old * x[1] + factor * a.y, x[2] = old * x[2] + factor * a.z, x[3] = old * x[3] + factor * a.w;
    x[4] = old * x[4] + factor * b.x, x[5] = old * x[5] + factor * b.y, x[6] = old * x[6] + factor * b.z, x[7] = old * x[7] + factor * b.w;
    top = new_top;
  }
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
  for (int e = 0; e < 8; e++) x[e] *= inverse;
}

DEVICE void merge(const Target& to, const Queries& in, int sequence, int head, const Parts& parts) {
#pragma unroll 2
  for (int i = threadIdx.x & 31; i < in.queries * in.group * (DIM / 8); i += 32) {
    float x[8] = {};
    merge_unit(x, parts, i / (DIM / 8), i % (DIM / 8));
    write_unit(to, in, sequence, head, i / (DIM / 8), i % (DIM / 8), x);
  }
}

// What this worker has of a sequence that others have a part of is there: if it is the last one, merge.
DEVICE void end_sequence(const Target& to, const Queries& in, int sequence, int head, const Shares& shares, const Workers& workers,
                         const Partial* of_head, u32* counter) {
  const int first = worker_of(workers, shares.starts[sequence]), last = worker_of(workers, shares.starts[sequence + 1] - 1);
  if (is_last_warp(counter, last - first + 1)) merge(to, in, sequence, head, Parts{of_head, first, last - first + 1});
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
  Ring ring = ring_of(memory, barriers, warp, HEADS);
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

  Partial* of_head = workspace + (u64)head * gridDim.x * 2;
  int stage = 0, phase = 0, first_part = -1, last_part = -1;  // sequences that this worker has a part of
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
    write_partial(of_head[2 * worker + from_start], state, in.queries * in.group);
    (from_start ? last_part : first_part) = sequence;
  }
  // Merging waits for others and for memory, so it comes when nothing else is left to do.
  if (first_part >= 0) end_sequence(to, in, first_part, head, shares, workers, of_head, counters + head * sequences + first_part);
  if (last_part >= 0) end_sequence(to, in, last_part, head, shares, workers, of_head, counters + head * sequences + last_part);
}

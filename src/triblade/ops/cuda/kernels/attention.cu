// Attention of a few queries of few sequences over the paged cache, split over the context, bound by reading keys and values once.
//
// Compile-time: what `attend.cuh` says. A block has WARPS warps and a stretch of the keys of one head; each warp takes 16 keys at a time,
// a turn. A lane loads what it needs itself, one turn ahead, into registers; or (IN_BOXES, for more sequences) boxes arrive several turns
// ahead (`boxes.cuh`). No warp waits for another.

#define WARPS 4

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

// What a block does: rows of one head of a sequence, over turns [begin, end) of its keys, one of so many splits.
struct Task {
  int sequence, head, first_row, rows;
  int start, stop;  // keys of the sequence that rows may see
  int begin, end, split, splits;
};

// Sequences too short for all splits use fewer, in pieces of whole turns. Positions and tables are constant within a step.
DEVICE Task task_of(const Queries& in, int heads, int window) {
  Task task = {(int)blockIdx.z, (int)blockIdx.y % heads, (int)blockIdx.y / heads * 16};
  const int* positions = in.positions + task.sequence * in.queries;
  task.rows = min(16, in.queries * in.group - task.first_row);
  task.stop = positions[min((task.first_row + 15) / in.group, in.queries - 1)] + 1;
  task.start = window ? max(0, positions[task.first_row / in.group] - window + 1) / KEYS * KEYS : 0;
  const int turns = positions[0] < 0 ? 0 : (task.stop - task.start + KEYS - 1) / KEYS;
  task.splits = min((int)gridDim.x, (turns + WARPS - 1) / WARPS), task.split = blockIdx.x;
  if (task.split < task.splits) task.begin = turns * task.split / task.splits, task.end = turns * (task.split + 1) / task.splits;
  return task;
}

struct Parts {
  const Partial* first;
  int count;  // 0: another block has them all
};

// Over the warps, then over the splits. With large heads two warps at a time.
DEVICE Parts put_together(Partial* shared, Partial* workspace, u32* counters, const State& state, const Task& task) {
  const int warp = threadIdx.x / 32, at_once = DIM > 128 ? 2 : WARPS, rounds = WARPS / at_once;
  const u64 number = (u64)blockIdx.z * gridDim.y + blockIdx.y;
  Partial* own = workspace + number * gridDim.x * rounds;
  const bool direct = task.splits == 1 && rounds == 1;
  for (int round = 0; round < rounds; round++) {
    if (warp / at_once == round) write_partial(shared[warp % at_once], state, task.rows);
    block_barrier();
    if (direct) return Parts{shared, WARPS};
    Partial& mine = own[task.split * rounds + round];
    for (int i = threadIdx.x; i < task.rows * (DIM / 4); i += 32 * WARPS) {
      const int row = i / (DIM / 4);
      float top, total;
      mine.o[i] = merged(shared, at_once, row, i % (DIM / 4), top, total);
      if (i % (DIM / 4) == 0) mine.top[row] = top, mine.total[row] = total;
    }
    block_barrier();
  }
  return Parts{own, is_last_block(counters + number, task.splits) ? task.splits * rounds : 0};
}

// Where results go: [tokens, heads * group * DIM] in a layout, of which these are tokens from `first_token` on.
struct Target {
  u16* values;
  int layout, first_token;
};

DEVICE void write_out(const Target& out, const Parts& parts, const Queries& in, int heads, const Task& task) {
  const int width = in.group * heads * DIM;
  for (int i = threadIdx.x; i < task.rows * (DIM / 4); i += 32 * WARPS) {
    const int row = i / (DIM / 4), query = (task.first_row + row) / in.group, of_group = (task.first_row + row) % in.group;
    float top, total;
    const f32x4 o = merged(parts.first, parts.count, row, i % (DIM / 4), top, total);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    const int column = (task.head * in.group + of_group) * DIM + i % (DIM / 4) * 4;
    const u32x2 words = {pack<F16>(o.x * inverse, o.y * inverse), pack<F16>(o.z * inverse, o.w * inverse)};
    store_half_unit(out.values, out.first_token + task.sequence * in.queries + query, column / 4, width / 4, out.layout, words);
  }
}

// A warp's turns: every WARPS-th from `first` on, before `end`. A turn's keys begin at start + turn * KEYS; this step's own at `new_key`.
struct Turns {
  int start, first, end, new_key;
};

DEVICE int key_of(const Turns& turns, int turn) { return turns.start + turn * KEYS; }

DEVICE bool is_early(const Turns& turns, int turn) { return key_of(turns, turn) + KEYS <= turns.new_key; }

#if IN_BOXES
// What is on its way to a warp: boxes, of which the next one read is at `stage`, and the block of the next one fetched.
struct Feed {
  Ring ring;
  int turn, block, stage, phase;
  float scale;
};

DEVICE void ask_for_block(Feed& feed, const Stretch& from, const Turns& turns) {
  if (feed.turn < turns.end) feed.block = from.table[key_of(turns, feed.turn) / BLOCK];
}

DEVICE void fetch(Feed& feed, const BoxMap& map, const Stretch& from, const Turns& turns) {
  if (feed.turn >= turns.end) return;
  fetch_box(feed.ring, map, Source{key_of(turns, feed.turn) % BLOCK, from.head, feed.block});
  feed.turn += WARPS;
  ask_for_block(feed, from, turns);
}

// Have the first turns on their way; keys of earlier steps before what the kernel before is still about.
DEVICE void begin(Feed& feed, const BoxMap& map, const Stretch& from, const Turns& turns) {
  const bool has_turn = turns.first < turns.end, early = is_early(turns, turns.first);
  warp_barrier();
  feed.turn = turns.first, feed.block = 0, feed.stage = 0, feed.phase = 0, feed.scale = 0.0f;
  ask_for_block(feed, from, turns);
  int fetched = 0;
  for (; fetched < STAGES && feed.turn < turns.end && is_early(turns, feed.turn); fetched++) fetch(feed, map, from, turns);
  if (has_turn && early) feed.scale = load_scale(from, key_of(turns, turns.first));
  wait_for_previous();
  for (; fetched < STAGES; fetched++) fetch(feed, map, from, turns);
  if (has_turn && !early) feed.scale = load_scale(from, key_of(turns, turns.first));
}
#else
// A warp's next turn, in registers.
struct Feed {
  Keys k;
  Values v;
  float scale;
};

DEVICE void load(Feed& feed, const Stretch& from, int first) {
  load_keys(feed.k, from, first), load_values(feed.v, from, first), feed.scale = load_scale(from, first);
}

// The first turn; keys of earlier steps before what the kernel before is still about.
DEVICE void begin(Feed& feed, const BoxMap&, const Stretch& from, const Turns& turns) {
  const bool has_turn = turns.first < turns.end, early = is_early(turns, turns.first);
  feed.scale = 0.0f;
  if (has_turn && early) load(feed, from, key_of(turns, turns.first));
  wait_for_previous();
  if (has_turn && !early) load(feed, from, key_of(turns, turns.first));
}
#endif

// Rows of queries, and the positions of a lane's two.
struct Rows {
  u32 q[STEPS][4];
  int position[2];
};

DEVICE void load_rows(Rows& rows, const Queries& in, const Task& task) {
  const int lane = threadIdx.x & 31;
  const int* positions = in.positions + task.sequence * in.queries;
  load_queries(rows.q, in, task.sequence, task.head, task.first_row);
#pragma unroll
  for (int half = 0; half < 2; half++)
    rows.position[half] = positions[min((task.first_row + (lane >> 2) + 8 * half) / in.group, in.queries - 1)];
}

// Rows over all turns of a warp, while the feed goes ahead.
DEVICE void attend_turns(State& state, Feed& feed, const Rows& rows, const Scores& how, const BoxMap& map, const Stretch& from,
                         const Turns& turns) {
  for (int turn = turns.first; turn < turns.end; turn += WARPS) {
    const int first = key_of(turns, turn), next = first + WARPS * KEYS;
    const bool goes_on = turn + WARPS < turns.end;
    const float now = feed.scale;
    if (goes_on) feed.scale = load_scale(from, next);
#if IN_BOXES
    const u8* box = feed.ring.boxes + feed.stage * BOX_BYTES;
    Keys k;
    Values v;
    wait_for_phase(feed.ring.full + feed.stage, feed.phase);
    take_keys(k, box);
    take_values(v, box, from.stop - first);
    attend(state, rows.q, k, v, now, how, first, rows.position);
    warp_barrier();  // everybody has read this box
    fetch(feed, map, from, turns);
    go_on(feed.stage);
    if (feed.stage == 0) feed.phase ^= 1;
#else
    const Keys k = feed.k;
    if (goes_on) load_keys(feed.k, from, next);
    attend(state, rows.q, k, feed.v, now, how, first, rows.position);
    if (goes_on) load_values(feed.v, from, next);
#endif
  }
}

// Grid: splits, key-value heads * tiles of rows, sequences. `workspace` holds a Partial per block (of the whole grid), `counters` a zero per
// (head and tile, sequence).
KERNEL __launch_bounds__(32 * WARPS) attention(CONSTANT_ARGUMENT(BoxMap) map, Queries in, Cache cache, Scores how, Target out,
                                               Partial* workspace, u32* counters) {
#if IN_BOXES
  DYNAMIC_SHARED(memory);
  SHARED __align__(8) u64 barriers[WARPS * STAGES];
  Partial* shared = reinterpret_cast<Partial*>(memory);  // once all boxes are read
#else
  SHARED Partial shared[DIM > 128 ? 2 : WARPS];
#endif
  let_next_start();
  const Task task = task_of(in, cache.heads, how.window);
  if (task.split >= task.splits) return;

  const int warp = threadIdx.x / 32, new_key = in.positions[task.sequence * in.queries];
  const Stretch stretch = {cache, in.tables + task.sequence * in.table_stride, task.head, task.stop};
  const Turns turns = {task.start, task.begin + warp, task.end, new_key};
  Feed feed;
#if IN_BOXES
  feed.ring = ring_of(memory, barriers, warp);
#endif
  begin(feed, map, stretch, turns);
  Rows rows;
  load_rows(rows, in, task);
  State state;
  reset(state);
  attend_turns(state, feed, rows, how, map, stretch, turns);
  sum_totals(state);
#if IN_BOXES
  block_barrier();
#endif
  const Parts parts = put_together(shared, workspace, counters, state, task);
  if (parts.count) write_out(out, parts, in, cache.heads, task);
}

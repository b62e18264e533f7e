// Attention of a few queries of few sequences over the paged cache, split over the context, bound by reading keys and values once.
//
// Compile-time: what `attend.cuh` says. A block has WARPS warps and a stretch of the keys of one head; each warp takes 16 keys at a time,
// a turn. A lane loads what it needs itself, one turn ahead, into registers; or (IN_BOXES, for more sequences) boxes arrive several turns
// ahead (`boxes.cuh`). No warp waits for another.

#define WARPS 4

#if IN_BOXES
// A warp's next turn to fetch; its block is asked for one turn before.
struct Ahead {
  const int* table;
  int start, turn, end, block;
};

DEVICE void ask_for_block(Ahead& next) {
  if (next.turn < next.end) next.block = next.table[(next.start + next.turn * KEYS) / BLOCK];
}

DEVICE void fetch(Ahead& next, Ring& ring, const BoxMap& map, int head) {
  if (next.turn >= next.end) return;
  fetch_box(ring, map, Source{(next.start + next.turn * KEYS) % BLOCK, head, next.block});
  next.turn += WARPS;
  ask_for_block(next);
}
#endif

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

  // The first turns' keys and values are those of earlier steps, unless this step's tokens are among them, and need not wait.
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, first_turn = task.begin + warp, earliest = task.start + first_turn * KEYS;
  const int* positions = in.positions + task.sequence * in.queries;
  const Stretch stretch = {cache, in.tables + task.sequence * in.table_stride, task.head, task.stop};
  const bool is_early = earliest + KEYS <= positions[0], has_turn = first_turn < task.end;
  float scale = 0.0f;
#if IN_BOXES
  Ring ring = ring_of(memory, barriers, warp);
  warp_barrier();
  Ahead ahead = {stretch.table, task.start, first_turn, task.end, 0};
  ask_for_block(ahead);
  int fetched = 0, stage = 0, phase = 0;
  while (fetched < STAGES && ahead.turn < task.end && task.start + ahead.turn * KEYS + KEYS <= positions[0])
    fetch(ahead, ring, map, task.head), fetched++;
  if (has_turn && is_early) scale = load_scale(stretch, earliest);
  wait_for_previous();
  for (; fetched < STAGES; fetched++) fetch(ahead, ring, map, task.head);
  if (has_turn && !is_early) scale = load_scale(stretch, earliest);
#else
  Keys ahead;
  Values v;
  if (has_turn && is_early) load_keys(ahead, stretch, earliest), load_values(v, stretch, earliest), scale = load_scale(stretch, earliest);
  wait_for_previous();
  if (has_turn && !is_early) load_keys(ahead, stretch, earliest), load_values(v, stretch, earliest), scale = load_scale(stretch, earliest);
#endif

  u32 q[STEPS][4];
  load_queries(q, in, task.sequence, task.head, task.first_row);
  int position[2];
#pragma unroll
  for (int half = 0; half < 2; half++) position[half] = positions[min((task.first_row + (lane >> 2) + 8 * half) / in.group, in.queries - 1)];
  State state;
  reset(state);
  for (int turn = first_turn; turn < task.end; turn += WARPS) {
    const int first = task.start + turn * KEYS, next = first + WARPS * KEYS;
    const bool goes_on = turn + WARPS < task.end;
    const float now = scale;
    if (goes_on) scale = load_scale(stretch, next);
#if IN_BOXES
    Keys k;
    Values v;
    wait_for_phase(ring.full + stage, phase);
    take_keys(k, ring.boxes + stage * BOX_BYTES);
    take_values(v, ring.boxes + stage * BOX_BYTES, task.stop - first);
    attend(state, q, k, v, now, how, first, position);
    warp_barrier();  // everybody has read this box
    fetch(ahead, ring, map, task.head);
    go_on(stage);
    if (stage == 0) phase ^= 1;
#else
    const Keys k = ahead;
    if (goes_on) load_keys(ahead, stretch, next);
    attend(state, q, k, v, now, how, first, position);
    if (goes_on) load_values(v, stretch, next);
#endif
  }
  sum_totals(state);
#if IN_BOXES
  block_barrier();
#endif
  const Parts parts = put_together(shared, workspace, counters, state, task);
  if (parts.count) write_out(out, parts, in, cache.heads, task);
}

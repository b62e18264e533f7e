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

DEVICE void fetch(Ahead& next, Ring& ring, const BoxMap& map, const Cache& cache, int head) {
  if (next.turn >= next.end) return;
  fetch_box(ring, map, cache, Source{(next.start + next.turn * KEYS) % BLOCK, head, next.block});
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

// Grid: splits, key-value heads * tiles of rows, sequences. `out` is [tokens, heads * group * DIM] in the layout `layout`, of which these
// are tokens from `first_token` on; `workspace` holds a Partial per block (of the whole grid), `counters` a zero per (head and tile,
// sequence).
KERNEL __launch_bounds__(32 * WARPS) attention(CONSTANT_ARGUMENT(BoxMap) map, Queries in, Cache cache, Scores how, u16* out, int layout,
                                               int first_token, Partial* workspace, u32* counters) {
#if IN_BOXES
  DYNAMIC_SHARED(memory);
  SHARED __align__(8) u64 barriers[WARPS * STAGES];
  Partial* shared = reinterpret_cast<Partial*>(memory);  // once all boxes are read
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
  const int* table = in.tables + sequence * in.table_stride;
  const int first_turn = begin + warp;
#if IN_BOXES
  Ring ring = ring_of(memory, barriers, warp, WARPS);
  warp_barrier();
  Ahead ahead = {table, start, first_turn, end, 0};
  ask_for_block(ahead);
  int fetched = 0;
  while (fetched < STAGES && ahead.turn < end && start + ahead.turn * KEYS + KEYS <= positions[0])
    fetch(ahead, ring, map, cache, head), fetched++;
  wait_for_previous();
  for (; fetched < STAGES; fetched++) fetch(ahead, ring, map, cache, head);
  int stage = 0, phase = 0;
#else
  const Stretch stretch = {cache, table, head, stop};
  float scale = 0.0f;
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
  reset(state);

  for (int turn = first_turn; turn < end; turn += WARPS) {
    const int first = start + turn * KEYS;
#if IN_BOXES
    Keys k;
    Values v;
    wait_for_phase(ring.full + stage, phase);
    take_keys(k, ring.boxes + stage * BOX_BYTES);
    take_values(v, ring.boxes + stage * BOX_BYTES, stop - first);
    attend(state, q, k, v, take_scale(ring.scales + stage * 2 * SCALE_BYTES, head, stop - first), how, first, position);
    warp_barrier();  // everybody has read this box
    fetch(ahead, ring, map, cache, head);
    go_on(stage);
    if (stage == 0) phase ^= 1;
#else
    const int next = first + WARPS * KEYS;
    const bool goes_on = turn + WARPS < end;
    const float now = scale;
    if (goes_on) scale = load_scale(stretch, next);
    const Keys k = ahead;
    if (goes_on) load_keys(ahead, stretch, next);
    attend(state, q, k, v, now, how, first, position);
    if (goes_on) load_values(v, stretch, next);
#endif
  }
  sum_totals(state);

  // Over the warps, then over the splits. With large heads two warps at a time.
  const int width = in.group * cache.heads * DIM, at_once = DIM > 128 ? 2 : WARPS;
  Partial* own = workspace + ((u64)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x * (WARPS / at_once);
  const bool direct = splits == 1 && at_once == WARPS;
#if IN_BOXES
  block_barrier();
#endif
  for (int round = 0; round < WARPS / at_once; round++) {
    if (warp / at_once == round) write_partial(shared[warp % at_once], state, rows);
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

// Attention of whole prompts and long chunks over the paged cache, by the instruction of warpgroups: bound by arithmetic.
//
// Compile-time: DIM of a head (64 or 128), BLOCK tokens of a cache block (a multiple of 16), STAGES tiles of keys and values on their way.
// The cache holds the type of activations.
//
// A block has 128 queries of one head, 64 for each of two warpgroups, and takes 128 keys at a time. A third one has the copy engine fetch
// them: `full` counts the bytes of a stage, `empty` the warps that are done with it. Scores of a tile stay in registers, where
// they become the first operand of the product with the values (FlashAttention-3: Shah et al. 2024, without its exchange between the
// warpgroups: each multiplies while the other one weighs).

constexpr bool F16 = FLOAT16;

#define QUERIES 128
#define KEYS 128
#define GROUPS 2
#define THREADS (128 * (GROUPS + 1))  // one warpgroup fetches
#define BOX_TOKENS 16
#define SLICES (DIM / 64)
#define SLICE_BYTES (KEYS * 128)       // of a tile
#define TILE_BYTES (SLICES * SLICE_BYTES)  // of keys, or of values
#define STEPS (DIM / 16)

struct Prompts {
  const u16* q;             // [tokens, q_stride]: query heads first
  const int* query_starts;  // [sequences + 1] rows of q
  const int* key_starts;    // [sequences + 1], in whole blocks
  const int* lengths;       // [sequences] keys
  const int* blocks;        // of all sequences, one after the other
  int q_stride, group;
};

struct Scores {
  float scale;
  int window;  // 0: everything
};

struct Ring {
  u8* tiles;  // of each stage: keys, then values
  u64 *full, *empty;
};

// What a block has to do: queries from `first_query` on of a sequence, over tiles [begin, end) of its keys.
struct Part {
  int first_query, queries, length, begin, end;
  const int* table;
};

DEVICE Part part_of(const Prompts& in, int tile, int sequence, int window) {
  const int queries = in.query_starts[sequence + 1] - in.query_starts[sequence], length = in.lengths[sequence];
  const int first = tile * QUERIES, before = length - queries;  // keys before the first query
  const int last_position = before + min(first + QUERIES, queries) - 1;
  const int begin = window ? max(0, before + first - window + 1) / KEYS : 0;
  return Part{first, queries, length, begin, last_position / KEYS + 1, in.blocks + in.key_starts[sequence] / BLOCK};
}

struct Box {
  int stage, key, number;  // of the tile
};

DEVICE void fetch_box(const Ring& ring, const BoxMap& map, const Part& part, int head, const Box& box) {
  u8* to = ring.tiles + box.stage * 2 * TILE_BYTES + box.number * BOX_TOKENS * 128;
  const int block = part.table[box.key / BLOCK];
#pragma unroll
  for (int kind = 0; kind < 2; kind++)
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      const Corner corner = {box.key % BLOCK, head * SLICES + slice, kind, block};
      copy_box(to + kind * TILE_BYTES + slice * SLICE_BYTES, map, corner, ring.full + box.stage);
    }
}

// Keys and values of the part's tiles, in the order in which they are needed. Lane i has the tile's box i; boxes behind the last key do not
// come.
DEVICE void fetch(const Ring& ring, const BoxMap& map, const Part& part, int head) {
  const int lane = threadIdx.x & 31;
  for (int tile = part.begin, i = 0; tile < part.end; tile++, i++) {
    const int stage = i % STAGES, key = tile * KEYS + lane * BOX_TOKENS;
    const int boxes = min(KEYS / BOX_TOKENS, (part.length - tile * KEYS + BOX_TOKENS - 1) / BOX_TOKENS);
    if (i >= STAGES) wait_for_phase(ring.empty + stage, (i / STAGES - 1) & 1);
    if (lane < boxes) fetch_box(ring, map, part, head, Box{stage, key, lane});
    warp_barrier();
    if (lane == 0) expect_bytes(ring.full + stage, boxes * BOX_TOKENS * 128 * SLICES * 2);  // ends the phase once they have come
  }
}

// A lane's rows g and g + 8 of a block's queries.
struct Place {
  int row, head, sequence;
};

// Queries as first operand.
DEVICE void load_queries(u32 (&q)[STEPS][4], const Prompts& in, const Part& part, const Place& place) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = part.first_query + place.row + 8 * half;
    const bool exists = query < part.queries;
    const u64 token = in.query_starts[place.sequence] + (exists ? query : 0);
    const u32* vector = reinterpret_cast<const u32*>(in.q + token * in.q_stride + place.head * DIM);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      q[step][half] = exists ? vector[step * 8 + t] : 0;
      q[step][2 + half] = exists ? vector[step * 8 + 4 + t] : 0;
    }
  }
}

// Running maximum, sum and result of a lane's two rows.
struct State {
  float o[DIM / 8][4];
  float top[2], total[2];
};

// What a row may see: keys (first, last].
struct Sight {
  int after[2], last[2];
};

DEVICE void hide(float (&s)[KEYS / 8][4], const Sight& sight, int first_key) {
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = first_key + 8 * n + 2 * (threadIdx.x & 3) + (i & 1);
      if (key > sight.last[i >> 1] || key <= sight.after[i >> 1]) s[n][i] = -INFINITY;
    }
}

// Scores become weights, and the state is scaled to the new maximum.
DEVICE void weigh(float (&s)[KEYS / 8][4], State& state, float scale) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float top = state.top[row];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * row], s[n][2 * row + 1]));
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    const float origin = top == -INFINITY ? 0.0f : top * scale, factor = exponential2(state.top[row] * scale - origin);
    state.top[row] = top;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float weight = exponential2(s[n][2 * row + e] * scale - origin);
        s[n][2 * row + e] = weight;
        sum += weight;
      }
    state.total[row] = state.total[row] * factor + sum;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) state.o[n][2 * row] *= factor, state.o[n][2 * row + 1] *= factor;
  }
}

DEVICE void score(float (&s)[KEYS / 8][4], const u32 (&q)[STEPS][4], const u8* keys) {
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
  begin_products();
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    multiply_wide<F16>(s, q[step], operand_of_inputs(keys + (step >> 2) * SLICE_BYTES + (step & 3) * 32));
  end_products();
  wait_for_products<0>();
}

DEVICE void add_values(State& state, const float (&s)[KEYS / 8][4], const u8* values) {
  u32 p[KEYS / 16][4];
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float(&pair)[4] = s[2 * step + (i >> 1)];
      p[step][i] = pack<F16>(pair[2 * (i & 1)], pair[2 * (i & 1) + 1]);
    }
  begin_products();
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) multiply_wide<F16, true>(state.o, p[step], operand_of_columns(values + step * 2048, SLICE_BYTES));
  end_products();
  wait_for_products<0>();
}

// Values behind the last key of a sequence are not even numbers, and boxes behind it have not come.
DEVICE void clear_values(u8* values, int count) {
  const u32x4 zeros = {0, 0, 0, 0};
  for (int i = threadIdx.x; i < SLICES * KEYS * 8; i += 128 * GROUPS)
    if (i / 8 % KEYS >= count) reinterpret_cast<u32x4*>(values)[i] = zeros;
  part_barrier<128 * GROUPS>();
}

DEVICE void write_rows(u32* out, const State& state, const Prompts& in, const Part& part, const Place& place, int out_stride) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = state.total[half];
    total += shuffle_xor(total, 1);
    total += shuffle_xor(total, 2);
    const int query = part.first_query + place.row + 8 * half;
    if (query >= part.queries) continue;
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    u32* vector = out + ((u64)(in.query_starts[place.sequence] + query) * out_stride + place.head * DIM) / 2;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) vector[n * 4 + t] = pack<F16>(state.o[n][2 * half] * inverse, state.o[n][2 * half + 1] * inverse);
  }
}

DEVICE Sight sight_of(const Part& part, int row, int window) {
  Sight sight;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sight.last[half] = part.length - part.queries + part.first_query + row + 8 * half;
    sight.after[half] = window ? sight.last[half] - window : -1;
  }
  return sight;
}

DEVICE void attend(const Ring& ring, const Prompts& in, const Part& part, const Scores& how, const Place& place, u32* out, int out_stride) {
  const float scale = how.scale * 1.4426950408889634f;
  const int first_position = part.length - part.queries + part.first_query;
  const Sight sight = sight_of(part, place.row, how.window);
  u32 q[STEPS][4];
  load_queries(q, in, part, place);
  State state = {};
  state.top[0] = state.top[1] = -INFINITY;
  for (int tile = part.begin, i = 0; tile < part.end; tile++, i++) {
    const int stage = i % STAGES, key = tile * KEYS;
    u8* keys = ring.tiles + stage * 2 * TILE_BYTES;
    wait_for_phase(ring.full + stage, i / STAGES & 1);
    if (part.length - key < KEYS) clear_values(keys + TILE_BYTES, part.length - key);
    float s[KEYS / 8][4];
    score(s, q, keys);
    if (key + KEYS - 1 > first_position || how.window) hide(s, sight, key);
    weigh(s, state, scale);
    add_values(state, s, keys + TILE_BYTES);
    if ((threadIdx.x & 31) == 0) arrive(ring.empty + stage);
  }
  write_rows(out, state, in, part, place, out_stride);
}

// Grid: query heads, tiles of queries of the longest chunk, sequences. out [tokens, out_stride], the last queries first, since they see most.
KERNEL __launch_bounds__(THREADS, 1) prompt(CONSTANT_ARGUMENT(BoxMap) map, Prompts in, Scores how, u32* out, int out_stride) {
  DYNAMIC_SHARED(memory);
  SHARED __align__(8) u64 barriers[2 * STAGES];
  const Ring ring = {aligned(memory, 1024), barriers, barriers + STAGES};
  const int head = blockIdx.x, sequence = blockIdx.z, warp = uniform(threadIdx.x / 32);
  if (threadIdx.x < STAGES) init_barrier(ring.full + threadIdx.x, 1), init_barrier(ring.empty + threadIdx.x, 4 * GROUPS);
  barriers_are_ready();
  block_barrier();
  let_next_start();
  wait_for_previous();
  const Part part = part_of(in, gridDim.y - 1 - blockIdx.y, sequence, how.window);
  if (part.first_query >= part.queries) return;
  if (warp >= 4 * GROUPS) {
    leave_registers<24>();
    if (warp == 4 * GROUPS) fetch(ring, map, part, head / in.group);
  } else {
    take_registers<240>();
    attend(ring, in, part, how, Place{warp * 16 + ((int)(threadIdx.x & 31) >> 2), head, sequence}, out, out_stride);
  }
}

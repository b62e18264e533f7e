// y = x W^T for more tokens than `linear.cu` takes well (8 NT: 32 or 64), by the instruction of whole warpgroups. Each warp spells its 16
// rows of weights out in registers, the first operand; the inputs of all tokens, the second one, are read once per block into shared
// memory and used by all its warps, so that a block of many rows asks the second-level cache for few of them.
//
// Compile-time: what `weights.cuh` says with ROWS 1, GROUPS of 4 warps (64 rows) in a block, DEPTH chunks of codes in flight per warp,
// BLOCKS that should fit a multiprocessor.
//
// One more warp fetches inputs, chunk after chunk, into a ring of stages: `full` counts the bytes of a stage, `empty` the warps that are
// done with it. Codes go from memory to registers, as in `linear.cu`. Sums over blocks are taken in a fixed order.

#define WARPS (4 * GROUPS)
#define THREADS (32 * WARPS + 32)
#define STAGES (NT >= 8 ? 5 : 8)
#define STAGE_BYTES (NT * 8 * CHUNK * 2)

// Bytes between the two halves of 16 inputs, and between tiles of 8 tokens; see the layout.
#define INPUTS_APART (NT * 128)
#define TOKENS_APART 128

struct Ring {
  u8* stages;
  u64 *full, *empty;
};

// Fetches chunks of inputs while there is room; one thread does.
DEVICE void fetch(const Ring& ring, const u8* x, int count) {
  for (int i = 0; i < count; i++) {
    const int stage = i % STAGES;
    if (i >= STAGES) wait_for_phase(ring.empty + stage, (i / STAGES - 1) & 1);
    expect_bytes(ring.full + stage, STAGE_BYTES);
    copy_bulk(ring.stages + stage * STAGE_BYTES, x + (u64)i * STAGE_BYTES, STAGE_BYTES, ring.full + stage);
  }
}

// A chunk's weights as the instruction takes them, scaled.
DEVICE void spell_out(u32 (&a)[STEPS][4], const Fragments& f, const Fragments& scaled) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    weights_of_step(a[s], f.codes[0], s);
#if BITS != 16
    const int of_chunk = SCALES > 1 ? s * 16 * SCALES / CHUNK : 0;
#if OFFSETS
    scale_weights(a[s], scaled.scales[0][of_chunk], scaled.offsets[0][of_chunk]);
#else
    scale_weights(a[s], scaled.scales[0][of_chunk], 0);
#endif
#endif
  }
}

// Sums of a warp's 16 rows over `count` chunks, of which the first are in flight.
DEVICE void multiply_rows(Sums& sums, Fragments (&ahead)[DEPTH], Source& source, const Ring& ring, int count) {
  int stage = 0, phase = 0;
  Fragments scaled;
  for (int base = 0; base < count; base += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if (base + d >= count) break;
      if (d % UNIT == 0) scaled = ahead[d];
      u32 a[STEPS][4];
      spell_out(a, ahead[d], scaled);
      if (base + d + DEPTH < count) load_chunk(ahead[d], source, d + DEPTH);
      wait_for_phase(ring.full + stage, phase);
      begin_products();
#pragma unroll
      for (int s = 0; s < STEPS; s++)
        multiply_wide<F16>(sums.total[0], a[s], operand(ring.stages + stage * STAGE_BYTES + s * 2 * INPUTS_APART, INPUTS_APART, TOKENS_APART));
      end_products();
      wait_for_products<0>();
      if ((threadIdx.x & 31) == 0) arrive(ring.empty + stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    advance(source, DEPTH);
  }
}

// Grid: sets of WARPS tiles of 16 rows, splits of the inputs. x in the layout NT | WIDE. `partial` and `counters` (a zero per set) are
// needed for more than one split.
KERNEL __launch_bounds__(THREADS, BLOCKS) wide(Matrix m, const u8* x, Output out, f32x4* partial, u32* counters, int tokens) {
  SHARED __align__(128) u8 stages[STAGES * STAGE_BYTES];
  SHARED __align__(8) u64 barriers[2 * STAGES];
  const Ring ring = {stages, barriers, barriers + STAGES};
  const int warp = uniform(threadIdx.x / 32), tiles = (m.rows + 15) / 16, first_tile = blockIdx.x * WARPS + warp;
  const int units = m.inputs / CHUNK / UNIT;
  const int begin = units * blockIdx.y / gridDim.y * UNIT, count = units * (blockIdx.y + 1) / gridDim.y * UNIT - begin;
  const bool multiplies = warp < WARPS;

  Source source = source_of(m, first_tile, tiles, begin);
  Fragments ahead[DEPTH];
  if (multiplies) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
      if (d < count) load_chunk(ahead[d], source, d);
  }
  if (threadIdx.x < STAGES) init_barrier(ring.full + threadIdx.x, 1), init_barrier(ring.empty + threadIdx.x, WARPS);
  barriers_are_ready();
  block_barrier();
  let_next_start();
  wait_for_previous();

  Sums sums = {};
  if (multiplies) multiply_rows(sums, ahead, source, ring, count);
  else if ((threadIdx.x & 31) == 0) fetch(ring, x + (u64)begin * STAGE_BYTES, count);
  if (gridDim.y > 1 && !sum_over_blocks(sums, partial, counters + blockIdx.x, first_tile, tiles, multiplies)) return;
  if (multiplies) write_results(sums, out, m, first_tile, tiles, tokens);
}

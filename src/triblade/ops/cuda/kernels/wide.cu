// y = x W^T for more tokens than `linear.cu` takes well (8 NT: 32 or 64), by the instruction of whole warpgroups. Each warp spells its 16
// rows of weights out in registers, the first operand; the inputs of all tokens, the second one, are read once per block into shared
// memory and used by all its warps, so that a block of many rows asks the second-level cache for few of them.
//
// Compile-time: what `weights.cuh` says with ROWS 1 and BITS 4 or 8, GROUPS of 4 warps (64 rows) in a block, AHEAD pairs of chunks of codes
// that a warp has room for, BLOCKS that should fit a multiprocessor.
//
// A turn is a pair of chunks, 128 inputs. A lane copies the codes and scales that it will need itself into its own places of shared
// memory, AHEAD - 1 turns ahead. Inputs come through a ring of stages: `full` counts the bytes of a stage, `empty` the warps that are
// done with it; the first thread refills a stage when the others had two turns' time to leave it. While the matrix units work on a chunk,
// its warps spell out the next one. Sums over blocks are taken in a fixed order.

#define WARPS (4 * GROUPS)
#define THREADS (32 * WARPS)
#define STAGES 4  // ops/cuda/tilings.py counts their bytes, and those of the codes
#define BEHIND 2  // turns between the stage in use and the one that is refilled
#define CHUNK_BYTES (NT * 8 * CHUNK * 2)
#define STAGE_BYTES (2 * CHUNK_BYTES)
#define PAIR_SCALES (2 * CHUNK / GROUP)
#define CODE_BYTES (2 * LOADS * 512)
#define SLOT_BYTES (CODE_BYTES + PAIR_SCALES * (1 + OFFSETS) * 128)

// Bytes between the two halves of 16 inputs, and between tiles of 8 tokens; see the layout.
#define INPUTS_APART (NT * 128)
#define TOKENS_APART 128

struct Ring {
  const u8* x;  // of the block's first turn
  u8* stages;
  u64 *full, *empty;
  int count;  // of turns
};

DEVICE void fetch_inputs(const Ring& ring, int turn) {
  const int stage = turn % STAGES;
  expect_bytes(ring.full + stage, STAGE_BYTES);
  copy_bulk(ring.stages + stage * STAGE_BYTES, ring.x + (u64)turn * STAGE_BYTES, STAGE_BYTES, ring.full + stage);
}

// Before a turn's inputs are used: another stage may be refilled, and this one must have come.
DEVICE void enter(const Ring& ring, int turn) {
  const int left = turn - BEHIND, next = left + STAGES;
  if (threadIdx.x == 0 && left >= 0 && next < ring.count) {
    wait_for_phase(ring.empty + left % STAGES, left / STAGES & 1);
    fetch_inputs(ring, next);
  }
  wait_for_phase(ring.full + turn % STAGES, turn / STAGES & 1);
}

// A lane's next codes and scales in memory, and its places for them.
struct Codes {
  Source source;
  u8* slots;  // of the warp
};

DEVICE void fetch_codes(Codes& from, int turn, bool exists) {
  const int lane = threadIdx.x & 31;
  u8* slot = from.slots + turn % AHEAD * SLOT_BYTES;
#pragma unroll
  for (int j = 0; j < 2 * LOADS; j++) copy_own<16>(slot + (j * 32 + lane) * 16, from.source.codes[0] + j * 32, exists);
#pragma unroll
  for (int n = 0; n < PAIR_SCALES; n++) {
    copy_own<4>(slot + CODE_BYTES + (n * 32 + lane) * 4, from.source.scales[0] + n * 8, exists);
#if OFFSETS
    copy_own<4>(slot + CODE_BYTES + ((PAIR_SCALES + n) * 32 + lane) * 4, from.source.offsets[0] + n * 8, exists);
#endif
  }
  end_copy_group();
  from.source.codes[0] += 2 * LOADS * 32, from.source.scales[0] += PAIR_SCALES * 8;
#if OFFSETS
  from.source.offsets[0] += PAIR_SCALES * 8;
#endif
}

// Weights of one chunk of a turn as the instruction takes them, scaled.
DEVICE void spell_out(u32 (&a)[STEPS][4], const u8* slot, int chunk) {
  const int lane = threadIdx.x & 31;
  u32x4 codes[LOADS];
#pragma unroll
  for (int j = 0; j < LOADS; j++) codes[j] = reinterpret_cast<const u32x4*>(slot)[(chunk * LOADS + j) * 32 + lane];
  const u32* scales = reinterpret_cast<const u32*>(slot + CODE_BYTES) + lane;
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const int n = (chunk * CHUNK + s * 16) / GROUP;
    weights_of_step(a[s], codes, s);
    scale_weights(a[s], scales[n * 32], OFFSETS ? scales[(PAIR_SCALES + n) * 32] : 0);
  }
}

DEVICE void multiply_chunk(Sums& sums, const u32 (&a)[STEPS][4], const u8* inputs) {
  begin_products();
#pragma unroll
  for (int s = 0; s < STEPS; s++)
    multiply_wide<F16>(sums.total[0], a[s], operand(inputs + s * 2 * INPUTS_APART, INPUTS_APART, TOKENS_APART));
  end_products();
}

// Sums of a warp's 16 rows over all turns, of which the codes of the first are on their way.
DEVICE void multiply_rows(Sums& sums, Codes& codes, const Ring& ring) {
  u32 first[STEPS][4], second[STEPS][4];
  for (int turn = 0; turn < ring.count; turn++) {
    const u8* slot = codes.slots + turn % AHEAD * SLOT_BYTES;
    const u8* inputs = ring.stages + turn % STAGES * STAGE_BYTES;
    wait_for_copies<AHEAD - 2>();
    spell_out(first, slot, 0);
    fetch_codes(codes, turn + AHEAD - 1, turn + AHEAD - 1 < ring.count);
    enter(ring, turn);
    multiply_chunk(sums, first, inputs);
    wait_for_products<1>();  // the turn before this one is over
    if (turn > 0 && (threadIdx.x & 31) == 0) arrive(ring.empty + (turn - 1) % STAGES);
    spell_out(second, slot, 1);
    multiply_chunk(sums, second, inputs + CHUNK_BYTES);
    wait_for_products<1>();
  }
  wait_for_products<0>();
}

// Grid: sets of WARPS tiles of 16 rows, splits of the inputs. x in the layout NT | WIDE. `partial` and `counters` (a zero per set) are
// needed for more than one split.
KERNEL __launch_bounds__(THREADS, BLOCKS) wide(Matrix m, const u8* x, Output out, f32x4* partial, u32* counters, int tokens) {
  DYNAMIC_SHARED(memory);
  SHARED __align__(8) u64 barriers[2 * STAGES];
  const int warp = uniform(threadIdx.x / 32), tiles = (m.rows + 15) / 16, first_tile = blockIdx.x * WARPS + warp;
  const int turns = m.inputs / (2 * CHUNK), begin = turns * blockIdx.y / gridDim.y, count = turns * (blockIdx.y + 1) / gridDim.y - begin;
  const Ring ring = {x + (u64)begin * STAGE_BYTES, memory, barriers, barriers + STAGES, count};

  Codes codes = {source_of(m, first_tile, tiles, begin * 2), memory + STAGES * STAGE_BYTES + warp * AHEAD * SLOT_BYTES};
#pragma unroll
  for (int turn = 0; turn < AHEAD - 1; turn++) fetch_codes(codes, turn, turn < count);
  if (threadIdx.x < STAGES) init_barrier(ring.full + threadIdx.x, 1), init_barrier(ring.empty + threadIdx.x, WARPS);
  barriers_are_ready();
  block_barrier();
  let_next_start();
  wait_for_previous();
  if (threadIdx.x == 0)
    for (int turn = 0; turn < min(count, STAGES); turn++) fetch_inputs(ring, turn);

  Sums sums = {};
  multiply_rows(sums, codes, ring);
  if (gridDim.y > 1 && !sum_over_blocks(sums, partial, counters + blockIdx.x, first_tile, tiles, true)) return;
  write_results(sums, out, m, first_tile, tiles, tokens);
}

// y = x W^T for few tokens (1 to 8 NT), bound by reading W once. Weights are the first operand of the matrix instruction (16 rows
// each) and tokens the narrow second one (8 each), so one token wastes arithmetic only, which there is plenty of.
//
// Compile-time: what `weights.cuh` says, WM x WK warps of a block along rows and inputs, DEPTH chunks in flight, BLOCKS that should
// fit a multiprocessor.
//
// A warp walks over chunks of 64 inputs; activations lie in memory in the order of the instruction's registers as well (`layout.cuh`).
// Loads of codes begin before the kernel waits for its predecessor. Sums over warps and over blocks are taken in a fixed order, so the
// result does not depend on timing.

#define THREADS (32 * WM * WK)

// A lane's part of chunk `number` from x on; x in tiles (see `layout.cuh`).
DEVICE void load_tokens(u32x4 (&b)[NT][2], const u32x4* x, int number) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) b[n][h] = x[((number * NT + n) * 2 + h) * 32];
}

#if BITS != 16 && !SCALED_WEIGHTS
// The end of a group: its sums, with their scale, become part of the whole.
DEVICE void end_group(Sums& sums, const Fragments& f, int of_chunk) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 scales = f.scales[r][of_chunk];
    const float scale[2] = {low<true>(scales), high<true>(scales)};
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums.total[r][n][i] += sums.group[r][n][i] * scale[i >> 1];
#if OFFSETS
        const u32 offsets = f.offsets[r][of_chunk];
        sums.total[r][n][i] += sums.inputs[n][i] * (i < 2 ? low<true>(offsets) : high<true>(offsets));
#endif
        sums.group[r][n][i] = 0.0f;
      }
  }
#if OFFSETS
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums.inputs[n][i] = 0.0f;
#endif
}
#endif

// One chunk. Scales are those of the chunk in which the unit began, `scaled`.
DEVICE void add_chunk(Sums& sums, const Fragments& f, const Fragments& scaled, const u32x4 (&b)[NT][2], bool ends_unit) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const int of_chunk = SCALES > 1 ? s * 16 * SCALES / CHUNK : 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      u32 a[4];
      weights_of_step(a, f.codes[r], s);
#if SCALED_WEIGHTS
#if OFFSETS
      scale_weights(a, scaled.scales[r][of_chunk], scaled.offsets[r][of_chunk]);
#else
      scale_weights(a, scaled.scales[r][of_chunk], 0);
#endif
#endif
#pragma unroll
      for (int n = 0; n < NT; n++)
#if BITS == 16 || SCALED_WEIGHTS
        multiply<F16>(sums.total[r][n], a, word_of(b[n][s >> 1], 2 * (s & 1)), word_of(b[n][s >> 1], 2 * (s & 1) + 1));
#else
        multiply<F16>(sums.group[r][n], a, word_of(b[n][s >> 1], 2 * (s & 1)), word_of(b[n][s >> 1], 2 * (s & 1) + 1));
#endif
    }
#if BITS != 16 && !SCALED_WEIGHTS
#if OFFSETS
    const u32 one = F16 ? 0x3c003c00u : 0x3f803f80u, ones[4] = {one, one, one, one};
#pragma unroll
    for (int n = 0; n < NT; n++)
      multiply<F16>(sums.inputs[n], ones, word_of(b[n][s >> 1], 2 * (s & 1)), word_of(b[n][s >> 1], 2 * (s & 1) + 1));
#endif
    if (SCALES > 1 ? (s + 1) * 16 % (CHUNK / SCALES) == 0 : s == STEPS - 1 && ends_unit) end_group(sums, scaled, of_chunk);
#endif
  }
}

// Sums over the warps of a block that share rows, in the order of the inputs; the result is in the first of them.
DEVICE void sum_over_warps(Sums& sums, f32x4* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, wm = warp % WM, wk = warp / WM;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int n = 0; n < NT; n++)
      if (wk > 0) {
        const float(&c)[4] = sums.total[r][n];
        shared[((((wk - 1) * WM + wm) * ROWS + r) * NT + n) * 32 + lane] = f32x4{c[0], c[1], c[2], c[3]};
      }
  block_barrier();
  if (wk > 0) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int k = 0; k < WK - 1; k++) {
        const f32x4 other = shared[(((k * WM + wm) * ROWS + r) * NT + n) * 32 + lane];
        float(&c)[4] = sums.total[r][n];
        c[0] += other.x, c[1] += other.y, c[2] += other.z, c[3] += other.w;
      }
}

// Grid: sets of WM * ROWS tiles of rows, splits of the inputs. `partial` and `counters` (a zero per set) are needed for more than one
// split.
KERNEL __launch_bounds__(THREADS, BLOCKS) linear(Matrix m, const u32x4* x, Output out, f32x4* partial, u32* counters, int tokens) {
  SHARED f32x4 shared[WK > 1 ? (WK - 1) * WM * ROWS * NT * 32 : 1];
  const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x / 32), wm = warp % WM, wk = warp / WM;
  const int units = m.inputs / CHUNK / UNIT, tiles = (m.rows + 15) / 16, first_tile = (blockIdx.x * WM + wm) * ROWS;
  const int part = blockIdx.y * WK + wk, parts = gridDim.y * WK;
  const int begin = units * part / parts * UNIT, count = units * (part + 1) / parts * UNIT - begin;

  Source source = source_of(m, first_tile, tiles, begin);
  Fragments ahead[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (d < count) load_chunk(ahead[d], source, d);
  let_next_start();
  wait_for_previous();
  x += (u64)begin * NT * 64 + lane;
  u32x4 b[NT][2];
  if (count > 0) load_tokens(b, x, 0);

  Sums sums = {};
  for (int base = 0; base < count; base += DEPTH) {
    Fragments scaled;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if (base + d >= count) break;
      if (d % UNIT == 0) scaled = ahead[d];
      add_chunk(sums, ahead[d], scaled, b, d % UNIT == UNIT - 1);
      if (base + d + DEPTH < count) load_chunk(ahead[d], source, d + DEPTH);
      if (base + d + 1 < count) load_tokens(b, x, d + 1);
    }
    advance(source, DEPTH);
    x += DEPTH * NT * 64;
  }

  if (WK > 1) sum_over_warps(sums, shared);
  if (gridDim.y > 1 && !sum_over_blocks(sums, partial, counters + blockIdx.x, first_tile, tiles, wk == 0)) return;
  if (wk == 0) write_results(sums, out, m, first_tile, tiles, tokens);
}

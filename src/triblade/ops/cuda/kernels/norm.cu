// Norms of rows, with what is added to them first.
//
// Compile-time: ROW_THREADS of a row (32: a warp for each of many rows, which then waits for nobody; NORM_THREADS: a block for each of
// few), LOADS of eight numbers per thread, which stay in registers.

#define NORM_THREADS 256
#define BLOCK_ROWS (NORM_THREADS / ROW_THREADS)

// Over the threads of a row.
DEVICE float sum_of_row(float value) {
  for (int mask = 16; mask; mask >>= 1) value += shuffle_xor(value, mask);
#if ROW_THREADS > 32
  SHARED float sums[ROW_THREADS / 32];
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = value;
  block_barrier();
  value = 0.0f;
#pragma unroll
  for (int i = 0; i < ROW_THREADS / 32; i++) value += sums[i];
  block_barrier();
#endif
  return value;
}

DEVICE float squares_of(const float (&v)[8]) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; j++) squares += v[j] * v[j];
  return squares;
}

// Eight numbers times `factor` and their weights.
DEVICE void weigh(float (&v)[8], const f32x4* weight, int i, float factor) {
  const f32x4 w0 = weight[2 * i], w1 = weight[2 * i + 1];
  const float w[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] *= factor * w[j];
}

// A row's loads of a thread; zeros behind its end.
DEVICE void load_row(u32x4 (&row)[LOADS], const u32x4* x, int loads) {
#pragma unroll
  for (int n = 0; n < LOADS; n++) {
    const int i = threadIdx.x % ROW_THREADS + n * ROW_THREADS;
    row[n] = i < loads ? x[i] : u32x4{0, 0, 0, 0};
  }
}

DEVICE float factor_of(const u32x4 (&row)[LOADS], int width, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < LOADS; n++) {
    float v[8];
    unpack8(row[n], v);
    squares += squares_of(v);
  }
  return rsqrtf(sum_of_row(squares) / width + eps);
}

// x [rows, width]: out = norm(x) * weight, in the layout `layout` (layout.cuh). With `added`: x += norm(added) * added_weight first, which
// is stored. Grid: rows in blocks of BLOCK_ROWS.
KERNEL __launch_bounds__(NORM_THREADS) rms_norm(u32x4* x, const u32x4* added, const f32x4* added_weight, const f32x4* weight, u32x4* out,
                                                int rows, int width, float eps, int layout) {
  let_next_start();
  wait_for_previous();
  const int loads = width / 8, row = blockIdx.x * BLOCK_ROWS + threadIdx.x / ROW_THREADS, first = threadIdx.x % ROW_THREADS;
  if (row >= rows) return;
  x += (u64)row * loads;
  u32x4 kept[LOADS];
  load_row(kept, x, loads);
  if (added) {
    u32x4 more[LOADS];
    load_row(more, added + (u64)row * loads, loads);
    const float factor = factor_of(more, width, eps);
#pragma unroll
    for (int n = 0; n < LOADS; n++) {
      const int i = first + n * ROW_THREADS;
      if (i >= loads) continue;
      float sum[8], v[8];
      unpack8(kept[n], sum), unpack8(more[n], v);
      weigh(v, added_weight, i, factor);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += v[j];
      x[i] = kept[n] = pack8(sum);
    }
  }
  const float factor = factor_of(kept, width, eps);
#pragma unroll
  for (int n = 0; n < LOADS; n++) {
    const int i = first + n * ROW_THREADS;
    if (i >= loads) continue;
    float v[8];
    unpack8(kept[n], v);
    weigh(v, weight, i, factor);
    store_unit(out, row, i, loads, layout, pack8(v));
  }
}

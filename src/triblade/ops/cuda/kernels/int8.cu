// Products whose inputs are rounded to 8 bits as well, around the library's product of integers: tokens to codes with a scale each,
// packed codes of weights as rows of signed bytes, and the integer sums back to numbers. One block per token, one warp per chunk.

constexpr bool F16 = FLOAT16;

#define ROUND_THREADS 256

DEVICE void unpack8(const u32x4& words, float (&x)[8]) {
  x[0] = low<F16>(words.x), x[1] = high<F16>(words.x), x[2] = low<F16>(words.y), x[3] = high<F16>(words.y);
  x[4] = low<F16>(words.z), x[5] = high<F16>(words.z), x[6] = low<F16>(words.w), x[7] = high<F16>(words.w);
}

DEVICE u32 bytes4(const int (&x)[8], int first) {
  return (x[first] & 255) | (x[first + 1] & 255) << 8 | (x[first + 2] & 255) << 16 | static_cast<u32>(x[first + 3]) << 24;
}

// x [tokens, width]: out = x / scale, rounded, with the smallest scale that holds the token in 127 steps. Grid: tokens.
KERNEL __launch_bounds__(ROUND_THREADS) round_tokens(const u32x4* x, u32x2* out, float* scales, int width) {
  SHARED float tops[ROUND_THREADS / 32];
  let_next_start();
  wait_for_previous();
  const int loads = width / 8;
  x += (u64)blockIdx.x * loads;
  float top = 0.0f;
  for (int i = threadIdx.x; i < loads; i += ROUND_THREADS) {
    float v[8];
    unpack8(x[i], v);
    for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(v[j]));
  }
  for (int mask = 16; mask; mask >>= 1) top = fmaxf(top, shuffle_xor(top, mask));
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x / 32] = top;
  block_barrier();
  for (int i = 0; i < ROUND_THREADS / 32; i++) top = fmaxf(top, tops[i]);
  const float scale = fmaxf(top / 127.0f, 1e-12f);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int i = threadIdx.x; i < loads; i += ROUND_THREADS) {
    float v[8];
    int codes[8];
    unpack8(x[i], v);
    for (int j = 0; j < 8; j++) codes[j] = static_cast<int>(rintf(v[j] / scale));
    out[(u64)blockIdx.x * loads + i] = u32x2{bytes4(codes, 0), bytes4(codes, 4)};
  }
}

// Packed 8-bit codes [tiles, chunks, 2, 32] (`packing.py`) as signed bytes [rows, inputs], in the order of the matrix itself.
// Grid: chunks / warps of a block rounded up, tiles.
KERNEL codes_to_rows(const u32x4* codes, u32x2* out, int rows, int inputs, int is_gated) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = blockIdx.y, chunks = inputs / 64;
  const int chunk = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (chunk >= chunks) return;
  const u32x4* from = codes + ((u64)tile * chunks + chunk) * 64 + lane;
  const int row = is_gated ? tile * 8 + g : tile * 16 + g, row8 = is_gated ? row + rows / 2 : row + 8;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32x4 v = from[half * 32];
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    int x[2][8];  // rows g, g + 8; the lane's 8 inputs of this half
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          x[i & 1][4 * s + 2 * (i >> 1) + e] = static_cast<int>(words[2 * s + (i >> 1)] >> (8 * (2 * (i & 1) + e)) & 255u) - 128;
    u32x2* to = out + (chunk * 64 + 32 * half) / 8 + t;
    if (row < rows) to[(u64)row * inputs / 8] = u32x2{bytes4(x[0], 0), bytes4(x[0], 4)};
    if (row8 < rows) to[(u64)row8 * inputs / 8] = u32x2{bytes4(x[1], 0), bytes4(x[1], 4)};
  }
}

// out [tokens, rows] = sums [tokens, rows] * token scale * row scale (+ bias) (+ residual). Grid: parts of a row, tokens.
KERNEL rescale(const int* sums, const float* token_scales, const float* row_scales, const u16* bias, const u16* residual, u16* out,
               int rows) {
  let_next_start();
  wait_for_previous();
  const float scale = token_scales[blockIdx.y];
  const u64 first = (u64)blockIdx.y * rows;
  for (int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x); i < rows; i += 2 * gridDim.x * blockDim.x) {
    float x[2];
    for (int j = 0; j < 2; j++) {
      x[j] = sums[first + i + j] * (scale * row_scales[i + j]);
      if (bias) x[j] += low<F16>(bias[i + j]);
      if (residual) x[j] += low<F16>(residual[first + i + j]);
    }
    *reinterpret_cast<u32*>(out + first + i) = pack<F16>(x[0], x[1]);
  }
}

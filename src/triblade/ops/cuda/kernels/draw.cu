// Tokens drawn from logits by temperature and min_p, seed for seed as the host's sampler draws them (`spec.distribution`,
// `spec.random_numbers`). Weights are integers, so that no order of summation changes a draw. Knows no model.

// How a row's token is drawn, as columns of an int matrix [5, rows]: the seed's halves, the number of output tokens before it, and the
// bits of temperature and min_p. Temperature 0 leaves the best token.
struct Draws {
  const int* columns;
  int rows;
};

DEVICE float setting(const Draws& draws, int number, int row) {
  return __uint_as_float(static_cast<u32>(draws.columns[number * draws.rows + row]));
}

// One step of SplitMix64, and the number in [0, 1) of a seed and a position: as `spec.random_numbers`.
DEVICE u64 mixed(u64 state) {
  state += 0x9e3779b97f4a7c15ull;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}
DEVICE double uniform_number(const Draws& draws, int row) {
  const u64 seed = static_cast<u32>(draws.columns[row]) | (u64)static_cast<u32>(draws.columns[draws.rows + row]) << 32;
  return (mixed(mixed(mixed(seed)) + draws.columns[2 * draws.rows + row]) >> 11) * 1.1102230246251565e-16;
}

#define DRAW_THREADS 256
#define DRAW_TOKENS 256  // summed together

// Integer weights in units of 2^-44 of the best token's: as `spec.distribution`.
struct Weights {
  const float* logits;
  int vocabulary;
  float top, temperature, least;
};
DEVICE u64 weight_of(const Weights& in, int token) {
  if (token >= in.vocabulary) return 0;
  const float weight = truncf(expf(fmaxf((in.logits[token] - in.top) / in.temperature, -64.0f)) * 17592186044416.0f);
  return weight < in.least ? 0 : static_cast<u64>(weight);
}

// Sums up to and including each thread of a block.
DEVICE u64 running_sum(u64 value) {
  SHARED u64 sums[DRAW_THREADS];
  const int me = threadIdx.x;
  sums[me] = value;
  block_barrier();
  for (int apart = 1; apart < DRAW_THREADS; apart *= 2) {
    const u64 before = me >= apart ? sums[me - apart] : 0;
    block_barrier();
    sums[me] += before;
    block_barrier();
  }
  value = sums[me];
  block_barrier();
  return value;
}

// Replaces the best tokens of rows with a temperature by draws: the cumulative distribution inverted, in the order of token ids. Sums
// are integers, so their order does not matter. Grid: splits, rows; `sums` [rows, blocks of tokens], a zero counter per row.
KERNEL __launch_bounds__(DRAW_THREADS) draw_token(const float* logits, int columns, int vocabulary, Draws draws, u64* sums, u32* counters,
                                                  int* tokens) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.y, best = tokens[row];
  const float temperature = setting(draws, 3, row), min_p = setting(draws, 4, row);
  if (best < 0 || temperature <= 0.0f) return;
  const float* mine = logits + (u64)row * columns;
  const Weights weights = {mine, vocabulary, mine[best], temperature, static_cast<float>(min_p * 17592186044416.0)};
  const int lane = threadIdx.x & 31, blocks = (vocabulary + DRAW_TOKENS - 1) / DRAW_TOKENS;
  sums += (u64)row * blocks;
  for (int block = blockIdx.x * (DRAW_THREADS / 32) + threadIdx.x / 32; block < blocks; block += gridDim.x * (DRAW_THREADS / 32)) {
    u64 sum = 0;
    for (int i = lane; i < DRAW_TOKENS; i += 32) sum += weight_of(weights, block * DRAW_TOKENS + i);
    for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
    if (lane == 0) sums[block] = sum;
  }
  if (!is_last_block(counters + row, gridDim.x)) return;

  SHARED u64 total, target;
  SHARED int chosen;
  const int each = (blocks + DRAW_THREADS - 1) / DRAW_THREADS, first = threadIdx.x * each, end = min(first + each, blocks);
  u64 own = 0;
  for (int block = first; block < end; block++) own += sums[block];
  u64 up_to = running_sum(own);
  if (threadIdx.x == DRAW_THREADS - 1) {
    total = up_to;
    const u64 at = static_cast<u64>(uniform_number(draws, row) * static_cast<double>(total));
    target = at < total ? at : total - 1;
  }
  block_barrier();
  const u64 wanted = target;
  u64 before = up_to - own;
  block_barrier();
  if (before <= wanted && wanted < up_to)
    for (int block = first; block < end; block++) {
      if (wanted < before + sums[block]) {
        chosen = block, target = wanted - before;
        break;
      }
      before += sums[block];
    }
  block_barrier();
  const int token = chosen * DRAW_TOKENS + threadIdx.x;
  own = weight_of(weights, token), up_to = running_sum(own);
  if (up_to - own <= target && target < up_to) tokens[row] = token;
}

// The sum of N rows: of every 32-bit word, times twice its place among all rows plus one, modulo 2^64. It does not depend on the order in
// which threads add, but on where a word lies. Each warp leaves its part, and the host adds them up.

DEVICE void store_sum(u64 sum, u64* sums) {
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  if ((threadIdx.x & 31) == 0) sums[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = sum;
}

DEVICE u64 weighed(u64 word, u64 place) { return word * (2 * place + 1); }

// KV rows from one pool to another, byte for byte; the other one may be the memory of another device. What is written is summed up on the
// way (`row_sums.cuh`), so that whoever owns the target can compare it with what is there.

#define UNROLL 4

// Rows blocks[0 .. count) of `source` become rows blocks[count .. 2 count) of `target`; without a target they are only summed up.
// `units` of 16 bytes make a row. Grid: any; a block takes UNROLL units of every thread at a time, and neighbours take neighbouring rows:
// so many pages are under way at once that nobody waits for their addresses, which takes longer than a row.
KERNEL copy_rows(const u8* source, u8* target, const int* blocks, int count, u32 units, u64* sums) {
  const u32 step = blockDim.x * UNROLL, pieces = (units + step - 1) / step;
  u64 sum = 0;
  for (u64 piece = blockIdx.x; piece < (u64)pieces * count; piece += gridDim.x) {
    const u32 row = piece % count, first = piece / count * step + threadIdx.x;
    const u32x4* from = reinterpret_cast<const u32x4*>(source) + (u64)blocks[row] * units;
    u32x4 values[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; j++)
      if (first + j * blockDim.x < units) values[j] = load_once(from + first + j * blockDim.x);
#pragma unroll
    for (int j = 0; j < UNROLL; j++) {
      const u32 unit = first + j * blockDim.x;
      if (unit >= units) continue;
      const u32x4 v = values[j];
      if (target) *(reinterpret_cast<u32x4*>(target) + (u64)blocks[count + row] * units + unit) = v;
      const u64 place = ((u64)row * units + unit) * 4;
      sum += weighed((u64)v.x + v.y + v.z + v.w, place) + 2 * ((u64)v.y + 2 * (u64)v.z + 3 * (u64)v.w);
    }
  }
  store_sum(sum, sums);
}

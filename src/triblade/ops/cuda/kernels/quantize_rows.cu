// KV rows from one pool to another, which may be the memory of another device: from numbers of 16 bits to int8 with float16 scales. What
// is written is summed up on the way (`row_sums.cuh`), so that whoever owns the target can compare it with what is there.
//
// Compile-time: FLOAT16 (the source's type), DIM of a head, a multiple of 4.

#define VECTORS 16  // of a warp at a time: their scales are written together

#define AT_ONCE 4   // of these are on their way from memory
#define QUADS (DIM / 4)
#define ITEMS ((QUADS + 31) / 32)

constexpr bool F16 = FLOAT16;

// Of a row: its bytes, those of a layer, and where the planes of a layer begin.
struct Place {
  u64 row_bytes, layer_bytes;
  int keys, values, key_scales, value_scales;
};

// The smallest float16 scale that holds the vector in 127 steps after rounding: as `kv.codecs.Int8Codec`.
DEVICE u16 scale_of(float most) {
  const float smallest = 5.9604644775390625e-8f;  // of float16
  const u16 bits = half_bits(most / 127.0f * (1.0f + 4.8828125e-4f) + 2.98023223876953125e-8f);
  return half_value(bits) < smallest ? half_bits(smallest) : bits;
}

// A lane's numbers of a vector of a head.
struct Numbers {
  u32x2 quads[ITEMS];
};

DEVICE Numbers load_vector(const u32x2* from) {
  const int lane = threadIdx.x & 31;
  Numbers numbers;
#pragma unroll
  for (int j = 0; j < ITEMS; j++) numbers.quads[j] = lane + 32 * j < QUADS ? from[lane + 32 * j] : u32x2{0, 0};
  return numbers;
}

// Returns the bits of the vector's scale and adds its codes to the sum.
DEVICE u16 quantize_vector(const Numbers& numbers, u32* to, u64 place, u64& sum) {
  const int lane = threadIdx.x & 31;
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    const u32x2 quad = numbers.quads[j];
    most = fmaxf(most, fmaxf(fabsf(low<F16>(quad.x)), fabsf(high<F16>(quad.x))));
    most = fmaxf(most, fmaxf(fabsf(low<F16>(quad.y)), fabsf(high<F16>(quad.y))));
  }
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  const u16 bits = scale_of(most);
  const float scale = half_value(bits);
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    if (lane + 32 * j >= QUADS) continue;
    const u32x2 quad = numbers.quads[j];
    const float x[4] = {low<F16>(quad.x), high<F16>(quad.x), low<F16>(quad.y), high<F16>(quad.y)};
    u32 codes = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) codes |= (static_cast<u32>(static_cast<int>(rintf(x[e] / scale))) & 255u) << 8 * e;
    to[lane + 32 * j] = codes;
    sum += weighed(codes, place + lane + 32 * j);
  }
  return bits;
}

// Rows blocks[0 .. count) of `source` become rows blocks[count .. 2 count) of `target`. `vectors` are those of one plane of a layer.
KERNEL quantize_rows(const u8* source, u8* target, const int* blocks, int count, Place from, Place to, int layers, int vectors, u64* sums) {
  const int lane = threadIdx.x & 31, warps = blockDim.x / 32, groups = (vectors + VECTORS - 1) / VECTORS;
  const u64 per_row = (u64)layers * 2 * groups;
  u64 sum = 0;
  for (u64 item = (u64)blockIdx.x * warps + threadIdx.x / 32; item < per_row * count; item += (u64)gridDim.x * warps) {
    const u32 row = item % count, in_row = item / count, layer = in_row / (2 * groups), in_layer = in_row % (2 * groups);
    const bool is_value = in_layer >= groups;
    const int first = (in_layer - (is_value ? groups : 0)) * VECTORS, some = min(VECTORS, vectors - first);
    const u8* vector = source + blocks[row] * from.row_bytes + layer * from.layer_bytes + (is_value ? from.values : from.keys);
    const u64 planes = layer * to.layer_bytes;  // bytes into the row
    const u64 codes = planes + (is_value ? to.values : to.keys) + (u64)first * DIM;
    const u64 scales = planes + (is_value ? to.value_scales : to.key_scales) + (u64)(first + lane) * 2;
    u8* out = target + blocks[count + row] * to.row_bytes;
    const u64 place = row * (to.row_bytes / 4);
    u16 mine = 0;
    for (int v = 0; v < some; v += AT_ONCE) {
      Numbers numbers[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)  // beyond the last one, the last one again
        numbers[i] = load_vector(reinterpret_cast<const u32x2*>(vector + (u64)(first + min(v + i, some - 1)) * DIM * 2));
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (v + i >= some) break;
        const u64 at = codes + (u64)(v + i) * DIM;
        const u16 bits = quantize_vector(numbers[i], reinterpret_cast<u32*>(out + at), place + at / 4, sum);
        if (lane == v + i) mine = bits;
      }
    }
    if (lane >= some) continue;
    *reinterpret_cast<u16*>(out + scales) = mine;
    sum += weighed((u64)mine << 16 * (scales >> 1 & 1), place + scales / 4);
  }
  store_sum(sum, sums);
}

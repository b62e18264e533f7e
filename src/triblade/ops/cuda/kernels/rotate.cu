// Rotation of queries and keys, with their norms, and the way of keys and values into the paged cache. A warp per head; float32 inside.
//
// Compile-time: DIM of a head, HALF of the dimensions that are rotated (even), KV8: the cache holds int8 with float16 scales, otherwise the
// type of activations. What is known then is not computed by every warp of the many that a prompt needs.

constexpr bool F16 = FLOAT16;

#define ITEMS (((DIM - HALF) / 2 + 31) / 32)

struct Pool {
  u8* pool;
  u64 row_bytes;
  int keys, values, key_scales, value_scales;  // byte offsets of this layer's planes in a row
  int block_size, heads;
};

struct Rotation {
  const float *cosines, *sines;  // [positions, HALF]
  const float* norm;             // [query and key heads, DIM], or null
  float eps;
};

// A lane's items of a head: two numbers in a row and, of those that are rotated, their two partners HALF numbers on.
struct Items {
  float x[ITEMS][4];
};
struct Item {
  int first;  // number in the head
  bool exists, has_partner;
};

DEVICE Item item_of(int j) {
  const int number = 2 * ((threadIdx.x & 31) + 32 * j);
  return Item{number < HALF ? number : number + HALF, number < DIM - HALF, number < HALF};
}

DEVICE Items load_items(const u32* vector) {
  Items items;
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    const Item item = item_of(j);
    const u32 word = item.exists ? vector[item.first / 2] : 0, partner = item.has_partner ? vector[(item.first + HALF) / 2] : 0;
    items.x[j][0] = low<F16>(word), items.x[j][1] = high<F16>(word);
    items.x[j][2] = low<F16>(partner), items.x[j][3] = high<F16>(partner);
  }
  return items;
}

DEVICE void norm_items(Items& items, const float* norm, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < ITEMS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) squares += items.x[j][i] * items.x[j][i];
  for (int mask = 16; mask; mask >>= 1) squares += shuffle_xor(squares, mask);
  const float factor = rsqrtf(squares / DIM + eps);
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    const Item item = item_of(j);
    if (!item.exists) continue;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      items.x[j][e] *= factor * norm[item.first + e];
      if (item.has_partner) items.x[j][2 + e] *= factor * norm[item.first + HALF + e];
    }
  }
}

DEVICE void rotate_items(Items& items, const Rotation& rotation, int position) {
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    const Item item = item_of(j);
    if (!item.has_partner) continue;
    const u64 at = (u64)position * HALF + item.first;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float cosine = rotation.cosines[at + e], sine = rotation.sines[at + e], x = items.x[j][e], y = items.x[j][2 + e];
      items.x[j][e] = x * cosine - y * sine, items.x[j][2 + e] = y * cosine + x * sine;
    }
  }
}

DEVICE void store_items(const Items& items, u32* vector) {
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    const Item item = item_of(j);
    if (item.exists) vector[item.first / 2] = pack<F16>(items.x[j][0], items.x[j][1]);
    if (item.has_partner) vector[(item.first + HALF) / 2] = pack<F16>(items.x[j][2], items.x[j][3]);
  }
}

#if KV8
DEVICE u16 code_pair(float first, float second, float scale) {
  return (static_cast<int>(rintf(first / scale)) & 255) | (static_cast<int>(rintf(second / scale)) & 255) << 8;
}

// Codes with the smallest scale that holds the vector in 127 steps after it was rounded to float16: as `kv.codecs.Int8Codec`. The reference
// rounds keys to the type of activations before the codec sees them.
DEVICE void store_codes(Items& items, u16* codes, u16* scale_at) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < ITEMS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      items.x[j][i] = low<F16>(pack<F16>(items.x[j][i], 0.0f));
      most = fmaxf(most, fabsf(items.x[j][i]));
    }
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  const float smallest = 5.9604644775390625e-8f;  // of float16
  u16 bits = half_bits(most / 127.0f * (1.0f + 4.8828125e-4f) + 2.98023223876953125e-8f);
  if (half_value(bits) < smallest) bits = half_bits(smallest);
  const float scale = half_value(bits);
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    const Item item = item_of(j);
    if (item.exists) codes[item.first / 2] = code_pair(items.x[j][0], items.x[j][1], scale);
    if (item.has_partner) codes[(item.first + HALF) / 2] = code_pair(items.x[j][2], items.x[j][3], scale);
  }
  if ((threadIdx.x & 31) == 0) *scale_at = bits;
}
#endif

// Item `token * heads + head` of a block's planes.
DEVICE void write_to_cache(Items& items, const Pool& pool, int slot, int head, bool is_value) {
  u8* row = pool.pool + (slot / pool.block_size) * pool.row_bytes;
  const u64 item = (u64)(slot % pool.block_size) * pool.heads + head;
  u8* plane = row + (is_value ? pool.values : pool.keys);
#if KV8
  u16* scales = reinterpret_cast<u16*>(row + (is_value ? pool.value_scales : pool.key_scales));
  store_codes(items, reinterpret_cast<u16*>(plane) + item * (DIM / 2), scales + item);
#else
  store_items(items, reinterpret_cast<u32*>(plane) + item * (DIM / 2));
#endif
}

// qkv [tokens, (query_heads + 2 heads) * DIM]: norm and rotate queries (in place) and keys, write keys and values of tokens with a
// slot (negative: none) to the cache. Grid: (query_heads + 2 heads) / warps of a block rounded up, tokens.
KERNEL rotate_and_write(u32* qkv, const int* positions, const int* slots, Pool pool, Rotation rotation, int query_heads) {
  let_next_start();
  const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, token = blockIdx.y;
  const int all = query_heads + 2 * pool.heads, slot = slots[token], position = positions[token];  // constant within a step
  wait_for_previous();
  if (head >= all || slot < 0) return;
  u32* vector = qkv + ((u64)token * all + head) * (DIM / 2);
  Items items = load_items(vector);
  if (head < query_heads + pool.heads) {
    if (rotation.norm) norm_items(items, rotation.norm + head * DIM, rotation.eps);
    rotate_items(items, rotation, position);
  }
  if (head < query_heads) store_items(items, vector);
  else write_to_cache(items, pool, slot, (head - query_heads) % pool.heads, head >= query_heads + pool.heads);
}

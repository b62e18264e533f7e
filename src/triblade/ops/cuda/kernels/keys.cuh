// Keys and values of a paged cache on their way into the registers of `attention.cu`: each lane loads what it needs itself.
//
// Compile-time: as in `attend.cuh`.

#define SHARES_BLOCK (BLOCK % KEYS == 0)  // all keys of a turn are in one cache block

// Where a sequence's keys and values of one head are: items `token * heads + head` of planes of its blocks.
struct Stretch {
  Cache cache;
  const int* table;
  int head, stop;  // keys from `stop` on do not exist
};

struct Place {
  const u8* row;
  u64 item;
};

// The cache block of a turn that begins with key `first`, a multiple of KEYS, if there is one.
DEVICE int block_of(const Stretch& in, int first) { return SHARES_BLOCK ? in.table[first / BLOCK] : 0; }

// Of key `first + offset`.
DEVICE Place place_of(const Stretch& in, int block, int first, int offset) {
#if SHARES_BLOCK
  const int token = first % BLOCK + offset;
#else
  const int key = first + offset < in.stop ? first + offset : first, token = key % BLOCK;
  block = in.table[key / BLOCK];
#endif
  return Place{in.cache.pool + block * in.cache.row_bytes, (u64)token * in.cache.heads + in.head};
}

DEVICE void load_keys(Keys& k, const Stretch& in, int first) {
  const int lane = threadIdx.x & 31, block = block_of(in, first);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int offset = (lane >> 2) + 8 * half;
    const bool exists = first + offset < in.stop;
    const Place place = place_of(in, block, first, offset);
    const u32x4* vector = reinterpret_cast<const u32x4*>(place.row + in.cache.keys + place.item * DIM * (KV8 ? 1 : 2));
#pragma unroll
    for (int j = 0; j < KEY_LOADS; j++) k.words[half][j] = exists ? vector[j * 4 + (lane & 3)] : u32x4{0, 0, 0, 0};
  }
}

DEVICE void load_values(Values& v, const Stretch& in, int first) {
  const int lane = threadIdx.x & 31, block = block_of(in, first);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int offset = pair_key(lane, i);
    const bool exists = first + offset < in.stop;
    const Place place = place_of(in, block, first, offset);
    const u8* vector = place.row + in.cache.values + place.item * DIM * (KV8 ? 1 : 2);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
#if KV8
      const u32x2 found = reinterpret_cast<const u32x2*>(vector)[piece * 8 + (lane >> 2)];
      v.words[i][piece][0] = exists ? found.x : 0, v.words[i][piece][1] = exists ? found.y : 0;
#else
      const u32x4 found = reinterpret_cast<const u32x4*>(vector)[piece * 8 + (lane >> 2)];
#pragma unroll
      for (int w = 0; w < 4; w++) v.words[i][piece][w] = exists ? word_of(found, w) : 0;
#endif
    }
  }
}

// The scale of key `lane` (lanes 0 to 15) or of value `lane - 16` of a turn.
DEVICE float load_scale(const Stretch& in, int first) {
#if KV8
  const int lane = threadIdx.x & 31, offset = lane & 15, block = block_of(in, first);
  const Place place = place_of(in, block, first, offset);
  const int plane = lane < 16 ? in.cache.key_scales : in.cache.value_scales;
  return first + offset < in.stop ? half_value(reinterpret_cast<const u16*>(place.row + plane)[place.item]) : 0.0f;
#else
  return 1.0f;
#endif
}


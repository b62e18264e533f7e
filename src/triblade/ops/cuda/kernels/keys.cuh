// Keys and values of a paged cache on their way into the registers of `attention.cu`, 16 keys of a warp at a time: each lane loads what
// it needs itself, into registers or (STAGED) into places of its own in shared memory.
//
// Compile-time: as in `attention.cu`.

#define WARPS 4
#define KEYS 16                  // per warp and turn
#define PIECES (DIM / 64)        // of 64 dimensions
#define STEPS (DIM / 16)
#define STAGES (DIM > 128 ? 2 : 3)  // turns of a warp in shared memory; ops/cuda/attention.py counts the bytes
#define STAGE_BYTES (2 * KEYS * DIM * (KV8 ? 1 : 2))
#define VALUE_BYTES (KV8 ? 8 : 16)  // of a lane's copies of values
#define SHARES_BLOCK (BLOCK % KEYS == 0)  // all keys of a turn are in one cache block

// int8 codes are exact in float16, so that is what the cache's instruction multiplies then.
constexpr bool F16 = FLOAT16;
constexpr bool MATH16 = FLOAT16 || KV8;

struct Cache {
  const u8* pool;  // rows of row_bytes
  u64 row_bytes;
  int keys, values, key_scales, value_scales;  // byte offsets of this layer's planes in a row
  int heads;                                   // of keys and values
};

DEVICE u32 word_of(const u32x4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Four signed bytes as two pairs of float16: biased into the last bits of 1024, from which 1024 + 128 is subtracted.
DEVICE void half_pairs(u32 bytes, u32& first, u32& second) {
  const u32 biased = bytes ^ 0x80808080u;
  first = fma2<true>(permute(biased, 0x64646464u, 0x4140), 0x3c003c00u, 0xe480e480u);
  second = fma2<true>(permute(biased, 0x64646464u, 0x4342), 0x3c003c00u, 0xe480e480u);
}

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

#if KV8
#define KEY_LOADS (DIM / 64)  // 16 dimensions of a lane's quarter of 64
#define VALUE_WORDS 2         // 8 dimensions
#else
#define KEY_LOADS (DIM / 32)
#define VALUE_WORDS 4
#endif

struct Keys {
  u32x4 words[2][KEY_LOADS];  // keys g and g + 8
};

struct Values {
  u32 words[4][PIECES][VALUE_WORDS];  // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9; dimensions 8 g to 8 g + 7 of each piece
};

DEVICE int pair_key(int lane, int i) { return 2 * (lane & 3) + (i & 1) + 8 * (i >> 1); }

#if !STAGED
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
#else
// A lane's own places in a stage of its warp.
DEVICE u8* key_slot(u8* stage, int half, int j) { return stage + ((half * KEY_LOADS + j) * 32 + (threadIdx.x & 31)) * 16; }
DEVICE u8* value_slot(u8* stage, int i, int piece) {
  return stage + STAGE_BYTES / 2 + ((i * PIECES + piece) * 32 + (threadIdx.x & 31)) * VALUE_BYTES;
}

// Start copying a turn's keys and values.
DEVICE void fetch(u8* stage, const Stretch& in, int first) {
  const int lane = threadIdx.x & 31, block = block_of(in, first);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int offset = (lane >> 2) + 8 * half;
    const Place place = place_of(in, block, first, offset);
    const u8* vector = place.row + in.cache.keys + place.item * DIM * (KV8 ? 1 : 2) + 16 * (lane & 3);
#pragma unroll
    for (int j = 0; j < KEY_LOADS; j++) copy_own<16>(key_slot(stage, half, j), vector + 64 * j, first + offset < in.stop);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int offset = pair_key(lane, i);
    const Place place = place_of(in, block, first, offset);
    const u8* vector = place.row + in.cache.values + place.item * DIM * (KV8 ? 1 : 2) + VALUE_BYTES * (lane >> 2);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
      copy_own<VALUE_BYTES>(value_slot(stage, i, piece), vector + piece * 8 * VALUE_BYTES, first + offset < in.stop);
  }
}

DEVICE void take(Keys& k, Values& v, u8* stage) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < KEY_LOADS; j++) k.words[half][j] = *reinterpret_cast<const u32x4*>(key_slot(stage, half, j));
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
#if KV8
      const u32x2 found = *reinterpret_cast<const u32x2*>(value_slot(stage, i, piece));
      v.words[i][piece][0] = found.x, v.words[i][piece][1] = found.y;
#else
      const u32x4 found = *reinterpret_cast<const u32x4*>(value_slot(stage, i, piece));
#pragma unroll
      for (int w = 0; w < 4; w++) v.words[i][piece][w] = word_of(found, w);
#endif
    }
}
#endif

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

// Keys and values of a paged cache on their way through shared memory: boxes of 16 tokens of a head, keys then values, which the copy
// engine fetches by itself. Each warp has a ring of them for itself.
//
// Compile-time: what `attend.cuh` says with IN_BOXES, STAGES of a ring. BLOCK is a multiple of 16, a head's vector one of 128 bytes.

#if IN_BOXES
#define ROW_BYTES (DIM * (KV8 ? 1 : 2))
#define SLICES (ROW_BYTES / 128)  // of a head's vector
#define BOX_BYTES (2 * SLICES * KEYS * 128)

// A warp's boxes: `full` counts the bytes of each stage.
struct Ring {
  u8* boxes;
  u64* full;
  int stage;
};

DEVICE void go_on(int& stage) { stage = stage + 1 == STAGES ? 0 : stage + 1; }

DEVICE Ring ring_of(u8* memory, u64* barriers, int warp) {
  const Ring ring = {aligned(memory, 1024) + warp * STAGES * BOX_BYTES, barriers + warp * STAGES, 0};
  if ((threadIdx.x & 31) < STAGES) init_barrier(ring.full + (threadIdx.x & 31), 1);
  barriers_are_ready();
  return ring;
}

// Where a box begins: a token of a cache block, and a head.
struct Source {
  int token, head, block;
};

// Have the next box of a ring fetched. Its stage must have been read by all lanes.
DEVICE void fetch_box(Ring& ring, const BoxMap& map, const Source& from) {
  if ((threadIdx.x & 31) == 0) {
    u64* full = ring.full + ring.stage;
    expect_bytes(full, BOX_BYTES);
    copy_box(ring.boxes + ring.stage * BOX_BYTES, map, Corner{from.token, from.head * SLICES, 0, from.block}, full);
  }
  go_on(ring.stage);
}

// 16 bytes of key (or value) `token` of a box: the copy engine has put unit u of a slice to u ^ (token % 8).
DEVICE const u8* unit_of(const u8* box, int is_value, int slice, int token, int unit) {
  return box + (((is_value * SLICES + slice) * KEYS + token) * 8 + (unit ^ (token & 7))) * 16;
}

DEVICE void take_keys(Keys& k, const u8* box) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < KEY_LOADS; j++)
      k.words[half][j] = *reinterpret_cast<const u32x4*>(unit_of(box, 0, j >> 1, g + 8 * half, 2 * t + (j & 1)));
}

// Values of keys from `count` on do not exist: what lies there is not even a number.
DEVICE void take_values(Values& v, const u8* box, int count) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = pair_key(lane, i);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
#if KV8
      const u8* unit = unit_of(box, 1, piece >> 1, token, 4 * (piece & 1) + (g >> 1));
      const u32x2 found = reinterpret_cast<const u32x2*>(unit)[g & 1];
      v.words[i][piece][0] = found.x, v.words[i][piece][1] = found.y;
#else
      const u32x4 found = *reinterpret_cast<const u32x4*>(unit_of(box, 1, piece, token, g));
#pragma unroll
      for (int w = 0; w < 4; w++) v.words[i][piece][w] = word_of(found, w);
#endif
    }
  }
  if (count >= KEYS) return;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int w = 0; w < VALUE_WORDS; w++)
        if (pair_key(lane, i) >= count) v.words[i][piece][w] = 0;
}

#endif


// Rotating queries and keys and writing the cache. Part of kernels.inl, which includes it inside its namespace.

inline void norm_head(float* head, const float* weight, int dim, float eps) {
  const F inverse = set(1.0f / std::sqrt(sum_of_squares(head, dim) / dim + eps));
  for (int d = 0; d < dim; d += kTile) store(head + d, mul(load(head + d), mul(inverse, load(weight + d))));
}

inline void rotate(float* head, const float* cos, const float* sin, int pairs) {
  int i = 0;
  for (; i + kTile <= pairs; i += kTile) {
    const F first = load(head + i), second = load(head + i + pairs), c = load(cos + i), s = load(sin + i);
    store(head + i, sub(mul(first, c), mul(second, s)));
    store(head + i + pairs, fma(first, s, mul(second, c)));
  }
  for (; i < pairs; i++) {
    const float first = head[i], second = head[i + pairs];
    head[i] = first * cos[i] - second * sin[i];
    head[i + pairs] = second * cos[i] + first * sin[i];
  }
}

// Int8 codes of a vector for the cache, and their float16 scale, rounded up so that 127 steps reach the largest number.
inline uint16_t cache_codes(const float* x, int dim, int8_t* codes) {
  F top = zero();
  for (int d = 0; d < dim; d += kTile) top = max(top, abs(load(x + d)));
  const float exact = highest(top) / 127.0f;
  const uint16_t scale = std::max<uint16_t>(to_half(exact * (1 + 0x1p-11f) + 0x1p-25f), 1);
  const F step = set(half_value(scale));
  for (int d = 0; d < dim; d += kTile) store_int8(codes + d, round(div(load(x + d), step)));
  return scale;
}

inline void write_token(const LayerCache& cache, int slot, int head, const float* key, const float* value) {
  const int dim = cache.head_dim, block = slot / cache.block_size, offset = slot % cache.block_size;
  const int tile = offset / kTile, token = offset % kTile;
  uint8_t* keys = cache.tile(cache.keys, block, tile, head);
  uint8_t* values = cache.tile(cache.values, block, tile, head);
  if (cache.cache == Cache::kBf16) {
    alignas(64) uint16_t halves[kMaxHeadDim];
    for (int d = 0; d < dim; d++) halves[d] = to_bf16(key[d]);
    for (int d = 0; d < dim; d += 2) std::memcpy(keys + (d / 2 * kTile + token) * 4, halves + d, 4);
    for (int d = 0; d < dim; d++) halves[d] = to_bf16(value[d]);
    std::memcpy(values + token * dim * 2, halves, sizeof(uint16_t) * dim);
    return;
  }
  alignas(64) int8_t codes[kMaxHeadDim];
  cache.scale_tile(cache.key_scales, block, tile, head)[token] = cache_codes(key, dim, codes);
  for (int d = 0; d < dim; d += 4) std::memcpy(keys + (d / 4 * kTile + token) * 4, codes + d, 4);
  cache.scale_tile(cache.value_scales, block, tile, head)[token] = cache_codes(value, dim, codes);
  uint8_t* quad = values + static_cast<int64_t>(token / 4) * dim * 4 + token % 4;
  for (int d = 0; d < dim; d++) quad[d * 4] = static_cast<uint8_t>(codes[d]);
}

void rope_write(float* qkv, const AttentionShape& shape, const float* norm, float eps, const float* cos, const float* sin,
                int rotary_pairs, const int32_t* positions, const int32_t* slots, const LayerCache& cache, Share tokens) {
  const int dim = shape.head_dim, rotated = shape.heads + shape.kv_heads, width = (rotated + shape.kv_heads) * dim;
  for (int t = tokens.begin; t < tokens.end; t++) {
    float* row = qkv + static_cast<int64_t>(t) * width;
    const int64_t angle = static_cast<int64_t>(positions[t]) * rotary_pairs;
    for (int h = 0; h < rotated; h++) {
      if (norm) norm_head(row + h * dim, norm + h * dim, dim, eps);
      rotate(row + h * dim, cos + angle, sin + angle, rotary_pairs);
    }
    for (int g = 0; g < shape.kv_heads; g++) {
      write_token(cache, slots[t], g, row + (shape.heads + g) * dim, row + (rotated + g) * dim);
    }
  }
}

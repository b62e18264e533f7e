// Rotating queries and keys, writing the cache, and attention over it. Part of kernels.inl, which includes it inside its namespace.

// ---- rope and the cache -----------------------------------------------------------------------------------------------------

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
    auto* k = reinterpret_cast<uint16_t*>(keys);
    auto* v = reinterpret_cast<uint16_t*>(values);
    for (int d = 0; d < dim; d++) k[(d / 2 * kTile + token) * 2 + d % 2] = to_bf16(key[d]);
    for (int d = 0; d < dim; d++) v[token * dim + d] = to_bf16(value[d]);
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

// ---- attention --------------------------------------------------------------------------------------------------------------

// A tile of up to kMaxRows query vectors (heads of one group of some tokens), in the form that the cache multiplies.
struct Queries {
  int rows = 0;
  int last_key[kMaxRows];   // position of the query: the last key it sees
  int first_key[kMaxRows];  // the first one
  float scale[kMaxRows];    // of the int8 codes, times the attention scale
  int32_t sum[kMaxRows];    // of the codes
  alignas(64) int8_t codes[kMaxRows * kMaxHeadDim];
  alignas(64) uint16_t halves[kMaxRows * kMaxHeadDim];
};

// The first key that the query at a position sees.
inline int first_key_of(int position, const AttentionShape& shape) {
  return shape.window ? std::max(0, position - shape.window + 1) : 0;
}

inline void load_query(Queries& q, const float* head, const AttentionShape& shape, Cache cache, int position) {
  const int dim = shape.head_dim, r = q.rows++;
  q.last_key[r] = position;
  q.first_key[r] = first_key_of(position, shape);
  if (cache == Cache::kBf16) {
    for (int d = 0; d < dim; d++) q.halves[r * dim + d] = to_bf16(head[d]);
    q.scale[r] = shape.scale;
    return;
  }
  float step;
  quantize_group(head, dim, q.codes + r * dim, &step, &q.sum[r]);
  q.scale[r] = step * shape.scale;
}

// The cache of one sequence, tile by tile.
struct Keys {
  const LayerCache& cache;
  const int32_t* table;

  int block(int key) const { return table[key / cache.block_size]; }
  int tile(int key) const { return key % cache.block_size / kTile; }
  int tile_bytes() const { return kTile * cache.head_dim * (cache.cache == Cache::kInt8 ? 1 : 2); }
  const uint8_t* keys(int key, int head) const { return cache.tile(cache.keys, block(key), tile(key), head); }
  const uint8_t* values(int key, int head) const { return cache.tile(cache.values, block(key), tile(key), head); }
  const uint16_t* key_scales(int key, int head) const {
    return cache.cache == Cache::kInt8 ? cache.scale_tile(cache.key_scales, block(key), tile(key), head) : nullptr;
  }
  const uint16_t* value_scales(int key, int head) const { return cache.scale_tile(cache.value_scales, block(key), tile(key), head); }
};

// The piece of keys and values that is attended to next. Blocks lie a whole row apart, where the processor does not look ahead by
// itself, so the lines are fetched one by one while the piece before is worked on; in the order of memory, all heads of a tile
// together, which is much faster than head after head.
class Upcoming {
 public:
  Upcoming() = default;

  // Keys [begin, end) of some heads, to be fetched within `steps` steps.
  Upcoming(const Keys& keys, int head_begin, int head_end, int begin, int end, int steps) {
    bytes_ = (head_end - head_begin) * keys.tile_bytes();
    for (int key = begin; key < end; key += kTile) {
      runs_[count_++] = keys.keys(key, head_begin);
      runs_[count_++] = keys.values(key, head_begin);
      if (keys.cache.cache == Cache::kInt8) prefetch(keys.key_scales(key, head_begin)), prefetch(keys.value_scales(key, head_begin));
    }
    lines_per_step_ = (count_ * (bytes_ / 64) + steps - 1) / std::max(steps, 1);
  }

  void step() {
    if (next_ == count_) return;
    for (int i = 0; i < lines_per_step_; i++) {
      prefetch(runs_[next_] + offset_);
      offset_ += 64;
      if (offset_ < bytes_) continue;
      offset_ = 0;
      if (++next_ == count_) return;
    }
  }

 private:
  int bytes_ = 0, lines_per_step_ = 0, count_ = 0, next_ = 0, offset_ = 0;
  const uint8_t* runs_[2 * kPieceKeys / kTile];
};

// Online softmax (Milakov and Gimelshein 2018) of some rows: highest score, sum of weights, weighted values.
struct Accumulator {
  float *top, *total;  // [R]
  float* out;          // [R, D]

  void clear(int rows, int dim) {
    std::fill_n(out, rows * dim, 0.0f);
    std::fill_n(top, rows, kMinusInfinity);
    std::fill_n(total, rows, 0.0f);
  }
};

// Scores of R queries against T tiles of 16 keys, unmasked: scores[t] [R]. Several tiles share what is read of a query.
template <int R, int T, class Dim>
inline void score_tiles(const Queries& q, int r0, const uint8_t* const* keys, const uint16_t* const* key_scales, Dim dim,
                        Upcoming& next, F (*scores)[kMaxRows]) {
  if (key_scales[0]) {
    I total[T][R];
    for (int t = 0; t < T; t++) {
      for (int r = 0; r < R; r++) total[t][r] = set_int(-128 * q.sum[r0 + r]);
    }
    for (int d = 0; d < dim; d += 4) {
      next.step();
      B tile[T];
      for (int t = 0; t < T; t++) tile[t] = flip_signs(load_bytes(keys[t] + d * kTile));
      for (int r = 0; r < R; r++) {
        const int8_t* four = q.codes + (r0 + r) * dim + d;
        for (int t = 0; t < T; t++) total[t][r] = dot(total[t][r], tile[t], four);
      }
    }
    for (int t = 0; t < T; t++) {
      const F step = load_half(key_scales[t]);
      for (int r = 0; r < R; r++) scores[t][r0 + r] = mul(to_float(total[t][r]), mul(step, set(q.scale[r0 + r])));
    }
    return;
  }
  F total[T][R];
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) total[t][r] = zero();
  }
  for (int d = 0; d < dim; d += 2) {
    next.step();
    B tile[T];
    for (int t = 0; t < T; t++) tile[t] = load_bytes(keys[t] + d * 2 * kTile);
    for (int r = 0; r < R; r++) {
      const uint16_t* pair = q.halves + (r0 + r) * dim + d;
      for (int t = 0; t < T; t++) total[t][r] = dot_bf16(total[t][r], tile[t], pair);
    }
  }
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) scores[t][r0 + r] = mul(total[t][r], set(q.scale[r0 + r]));
  }
}

// Call f(R, first row) for all rows in groups of R; R is a constant.
template <class Function> inline void in_groups(int rows, Function f) {
  int r = 0;
  for (; r + 6 <= rows; r += 6) f(std::integral_constant<int, 6>(), r);
  switch (rows - r) {
    case 1: return f(std::integral_constant<int, 1>(), r);
    case 2: return f(std::integral_constant<int, 2>(), r);
    case 3: return f(std::integral_constant<int, 3>(), r);
    case 4: return f(std::integral_constant<int, 4>(), r);
    case 5: return f(std::integral_constant<int, 5>(), r);
    default: return;
  }
}

// Softcap and mask a tile of scores.
inline void put_scores(const Queries& q, const AttentionShape& shape, int key, const F* tile, float* scores) {
  for (int r = 0; r < q.rows; r++) {
    F s = tile[r];
    if (shape.softcap > 0) s = mul(tanh(div(s, set(shape.softcap))), set(shape.softcap));
    float* row = scores + r * kKeyChunk;
    store(row, s);
    if (key + kTile - 1 > q.last_key[r] || key < q.first_key[r]) {
      for (int i = 0; i < kTile; i++) {
        if (key + i > q.last_key[r] || key + i < q.first_key[r]) row[i] = kMinusInfinity;
      }
    }
  }
}

// Scores of all queries against the tiles of one chunk of keys, masked: scores [R, kKeyChunk].
template <class Dim>
inline void score_chunk(const Queries& q, const Keys& keys, int head, const AttentionShape& shape, Dim dim, int begin, int end,
                        Upcoming& next, float* scores) {
  constexpr int kTogether = 4;
  F tiles[kTogether][kMaxRows];
  const uint8_t* at[kTogether];
  const uint16_t* scales[kTogether];
  for (int key = begin; key < end;) {
    const bool together = key + kTogether * kTile <= end;
    const int count = together ? kTogether : 1;
    for (int t = 0; t < count; t++) at[t] = keys.keys(key + t * kTile, head), scales[t] = keys.key_scales(key + t * kTile, head);
    in_groups(q.rows, [&](auto R, int r) {
      together ? score_tiles<R(), kTogether>(q, r, at, scales, dim, next, tiles) : score_tiles<R(), 1>(q, r, at, scales, dim, next, tiles);
    });
    for (int t = 0; t < count; t++, key += kTile) put_scores(q, shape, key, tiles[t], scores + key - begin);
  }
}

// Turn a query's scores of a chunk into weights and shrink what was summed before. False when it sees nothing here.
template <class Dim> inline bool weigh(float* scores, int count, Accumulator& acc, int r, Dim dim) {
  F top = set(kMinusInfinity);
  for (int i = 0; i < count; i += kTile) top = max(top, load(scores + i));
  const float chunk_top = highest(top);
  if (chunk_top <= kMinusInfinity) return false;
  const float new_top = std::max(acc.top[r], chunk_top);
  F total = zero();
  for (int i = 0; i < count; i += kTile) {
    const F difference = sub(load(scores + i), set(new_top));
    const F weight = zero_below(exp(difference), difference, -86.0f);  // exactly nothing for a key that is not seen
    store(scores + i, weight);
    total = add(total, weight);
  }
  const float shrink = acc.top[r] <= kMinusInfinity ? 0.0f : std::exp(acc.top[r] - new_top);
  acc.total[r] = acc.total[r] * shrink + sum(total);
  acc.top[r] = new_top;
  if (shrink != 1.0f) {
    for (int d = 0; d < dim; d += kTile) store(acc.out + r * dim + d, mul(load(acc.out + r * dim + d), set(shrink)));
  }
  return true;
}

// out[r] += weights x values of a chunk, bf16 values; W vectors of 16 columns from d on.
template <int R, int W, class Dim>
inline void add_values_bf16(const float* weights, const Keys& keys, int head, int begin, int end, Dim dim, int d, Upcoming& next, float* out) {
  F total[R][W];
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) total[r][w] = load(out + r * dim + d + w * kTile);
  }
  for (int key = begin; key < end; key += kTile) {
    const auto* values = reinterpret_cast<const uint16_t*>(keys.values(key, head)) + d;
    const int count = std::min(kTile, end - key);  // what lies behind is of a former owner, and may be NaN
    for (int i = 0; i < count; i++, values += dim) {
      next.step();
      F value[W];
      for (int w = 0; w < W; w++) value[w] = load_bf16(values + w * kTile);
      for (int r = 0; r < R; r++) {
        const F weight = set(weights[r * kKeyChunk + key - begin + i]);
        for (int w = 0; w < W; w++) total[r][w] = fma(value[w], weight, total[r][w]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) store(out + r * dim + d + w * kTile, total[r][w]);
  }
}

// The same with int8 values: weights are 8-bit codes in steps of their own.
template <int R, int W, class Dim>
inline void add_values_int8(const uint8_t (*codes)[kKeyChunk], const float* step, const Keys& keys, int head, int begin, int end,
                            Dim dim, int d, Upcoming& next, float* out) {
  I total[R][W];
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) total[r][w] = set_int(0);
  }
  for (int key = begin; key < end; key += kTile) {
    const uint8_t* values = keys.values(key, head) + 4 * d;
    for (int i = 0; i < kTile; i += 4, values += 4 * dim) {
      next.step();
      B tile[W];
      for (int w = 0; w < W; w++) tile[w] = load_bytes(values + w * 64);
      for (int r = 0; r < R; r++) {
        const uint8_t* four = codes[r] + key - begin + i;
        for (int w = 0; w < W; w++) total[r][w] = dot_signed(total[r][w], four, tile[w]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) {
      float* at = out + r * dim + d + w * kTile;
      store(at, fma(to_float(total[r][w]), set(step[r]), load(at)));
    }
  }
}

// A row's weights times its tokens' value scales, as 8-bit codes of the chunk's largest; returns the step.
inline float weight_codes(float* weights, const Keys& keys, int head, int begin, int end, uint8_t* codes) {
  F top = zero();
  for (int key = begin; key < end; key += kTile) {
    const F scaled = mul(load(weights + key - begin), load_half(keys.value_scales(key, head)));
    store(weights + key - begin, scaled);
    top = max(top, scaled);
  }
  const float largest = highest(top);
  const F inverse = set(largest > 0 ? 255.0f / largest : 0.0f);
  for (int i = 0; i < end - begin; i += kTile) store_uint8(codes + i, round(mul(load(weights + i), inverse)));
  return largest / 255.0f;
}

template <int R, class Dim>
inline void add_values(float* weights, const Keys& keys, int head, int begin, int end, Dim dim, Upcoming& next, float* out) {
  constexpr int kTogether = 4;
  int d = 0;
  if (keys.cache.cache == Cache::kInt8) {
    alignas(64) uint8_t codes[R][kKeyChunk];
    float step[R];
    for (int r = 0; r < R; r++) step[r] = weight_codes(weights + r * kKeyChunk, keys, head, begin, end, codes[r]);
    for (; d + kTogether * kTile <= dim; d += kTogether * kTile) {
      add_values_int8<R, kTogether>(codes, step, keys, head, begin, end, dim, d, next, out);
    }
    for (; d < dim; d += kTile) add_values_int8<R, 1>(codes, step, keys, head, begin, end, dim, d, next, out);
    return;
  }
  for (; d + kTogether * kTile <= dim; d += kTogether * kTile) {
    add_values_bf16<R, kTogether>(weights, keys, head, begin, end, dim, d, next, out);
  }
  for (; d < dim; d += kTile) add_values_bf16<R, 1>(weights, keys, head, begin, end, dim, d, next, out);
}

// The queries of one head against keys [begin, end) of one piece.
template <class Dim>
inline void attend_piece(const Queries& q, const Keys& keys, int head, const AttentionShape& shape, Dim dim, int begin, int end,
                         Upcoming& next, Accumulator& acc, float* scores) {
  acc.clear(q.rows, dim);
  for (int chunk = begin; chunk < end; chunk += kKeyChunk) {
    const int stop = std::min(end, chunk + kKeyChunk), padded = chunk + (stop - chunk + kTile - 1) / kTile * kTile;
    score_chunk(q, keys, head, shape, dim, chunk, stop, next, scores);
    for (int r = 0; r < q.rows; r++) {
      if (!weigh(scores + r * kKeyChunk, padded - chunk, acc, r, dim)) std::fill_n(scores + r * kKeyChunk, kKeyChunk, 0.0f);
    }
    in_groups(q.rows, [&](auto R, int r) {
      add_values<R()>(scores + r * kKeyChunk, keys, head, chunk, stop, dim, next, acc.out + r * dim);
    });
  }
}

// Join a row's next piece (highest score, sum of weights, weighted values) to those before it. Pieces are joined in order, whoever
// computed them, so that the bits are always the same.
inline void join_piece(float top, float total, const float* out, int dim, float* joined_top, float* joined_total, float* joined) {
  if (top <= kMinusInfinity) return;
  const float highest = std::max(top, *joined_top);
  const float before = *joined_top <= kMinusInfinity ? 0.0f : std::exp(*joined_top - highest), now = std::exp(top - highest);
  *joined_total = std::fma(now, total, *joined_total * before);
  *joined_top = highest;
  for (int d = 0; d < dim; d += kTile) store(joined + d, fma(set(now), load(out + d), mul(set(before), load(joined + d))));
}

// Rows of scratch: the scores of a chunk, a piece, and for each head what was joined so far.
struct AttentionScratch {
  float *scores, *piece, *joined, *states;
  int dim;

  AttentionScratch(float* start, int heads, int dim) : scores(start), dim(dim) {
    piece = scores + kMaxRows * kKeyChunk;
    joined = piece + kMaxRows * dim;
    states = joined + static_cast<int64_t>(heads) * kMaxRows * dim;
  }
  Accumulator current() const { return {states, states + kMaxRows, piece}; }
  Accumulator of_head(int head) const {
    float* state = states + 2 * kMaxRows * (head + 1);
    return {state, state + kMaxRows, joined + static_cast<int64_t>(head) * kMaxRows * dim};
  }
};

// One item: which rows of the step are its queries, and which keys they see.
struct ItemView {
  const AttentionItem& item;
  const AttentionShape& shape;
  const Sequences& sequences;
  const Keys keys;

  ItemView(const AttentionItem& item, const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache)
      : item(item), shape(shape), sequences(sequences), keys{cache, sequences.tables[item.sequence]} {}

  int heads() const { return item.head_end - item.head_begin; }
  int per_group() const { return shape.heads / shape.kv_heads; }
  int rows() const { return (item.query_end - item.query_begin) * per_group(); }  // of one head
  int token(int row) const { return item.query_begin + row / per_group(); }
  int first_row() const { return sequences.first_row[item.sequence]; }
  int position(int token) const {
    return sequences.length[item.sequence] - (sequences.first_row[item.sequence + 1] - first_row()) + token;
  }
  // Where a row lies in [T, H].
  int64_t place(int head, int row) const {
    return static_cast<int64_t>(first_row() + token(row)) * shape.heads + head * per_group() + row % per_group();
  }
  // The keys of a piece that some query of [begin, end) sees. Chunks begin at multiples of their size whatever is computed beside,
  // so that a row's bits never depend on it.
  Share keys_of(int piece, int query_begin, int query_end) const {
    const int first = first_key_of(position(query_begin), shape) / kKeyChunk * kKeyChunk;
    return {std::max(piece * kPieceKeys, first), std::min((piece + 1) * kPieceKeys, position(query_end - 1) + 1)};
  }
  Upcoming upcoming(int piece, int steps) const {
    const Share range = keys_of(piece, item.query_begin, item.query_end);
    return Upcoming(keys, item.head_begin, item.head_end, range.begin, range.end, steps);
  }
  void load(Queries& q, const float* qkv, int head, int first, int rows) const {
    const int width = shape.heads + 2 * shape.kv_heads;
    q.rows = 0;
    for (int r = first; r < first + rows; r++) {
      const int64_t row = static_cast<int64_t>(first_row() + token(r)) * width + head * per_group() + r % per_group();
      load_query(q, qkv + row * shape.head_dim, shape, keys.cache.cache, position(token(r)));
    }
  }
};

// How often `Upcoming::step` is called while `keys` keys of one head are attended to.
inline int steps_of(int keys, int dim, Cache cache) { return keys / (cache == Cache::kInt8 ? 2 : 1) * ((dim + 63) / 64); }

// Rows [first, first + count) of an item's heads against one of its pieces; to the joined ones, or out as it is.
template <class Dim>
inline void attend_rows(const ItemView& view, const float* qkv, Dim dim, int piece, int first, int count, Upcoming& next,
                        const AttentionScratch& space, const AttentionOutput& output) {
  static thread_local Queries q;
  const Share keys = view.keys_of(piece, view.token(first), view.token(first + count - 1) + 1);
  for (int head = view.item.head_begin; head < view.item.head_end; head++) {
    view.load(q, qkv, head, first, count);
    Accumulator current = space.current(), joined = space.of_head(head - view.item.head_begin);
    attend_piece(q, view.keys, head, view.shape, dim, keys.begin, keys.end, next, current, space.scores);
    for (int r = 0; r < count; r++) {
      const float* row = current.out + r * dim;
      if (!output.states) {
        join_piece(current.top[r], current.total[r], row, dim, joined.top + r, joined.total + r, joined.out + r * dim);
        continue;
      }
      const int64_t place = view.place(head, first + r);
      float* state = output.states + piece * output.states_stride + place * 2;
      state[0] = current.top[r], state[1] = current.total[r];
      std::memcpy(output.out + piece * output.piece_stride + place * dim, row, sizeof(float) * dim);
    }
  }
}

template <class Dim>
inline void attend_item(const ItemView& view, const ItemView* next_view, const float* qkv, Dim dim, const AttentionScratch& space,
                        const AttentionOutput& output) {
  const AttentionItem& item = view.item;
  for (int first = 0; first < view.rows(); first += kMaxRows) {
    const int count = std::min(kMaxRows, view.rows() - first);
    for (int h = 0; h < view.heads(); h++) space.of_head(h).clear(count, dim);
    for (int piece = item.piece_begin; piece < item.piece_end; piece++) {
      const Share keys = view.keys_of(piece, item.query_begin, item.query_end);
      const int steps = view.heads() * steps_of(keys.end - keys.begin, dim, view.keys.cache.cache);
      Upcoming next;
      if (piece + 1 < item.piece_end) {
        next = view.upcoming(piece + 1, steps);
      } else if (next_view) {
        next = next_view->upcoming(next_view->item.piece_begin, steps);
      }
      attend_rows(view, qkv, dim, piece, first, count, next, space, output);
    }
    if (output.states) continue;
    for (int head = item.head_begin; head < item.head_end; head++) {
      const Accumulator joined = space.of_head(head - item.head_begin);
      for (int r = 0; r < count; r++) {
        float* row = joined.out + r * dim;
        for (int d = 0; d < dim; d += kTile) {
          store(output.out + view.place(head, first + r) * dim + d, div(load(row + d), set(joined.total[r])));
        }
      }
    }
  }
}

void attend(const float* qkv, const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache,
            const AttentionItem& item, const AttentionItem* next, const AttentionOutput& output, float* scratch) {
  const ItemView view(item, shape, sequences, cache), after(next ? *next : item, shape, sequences, cache);
  const ItemView* next_view = next ? &after : nullptr;
  const AttentionScratch space(scratch, view.heads(), shape.head_dim);
  switch (shape.head_dim) {  // the loops over the usual sizes are unrolled
    case 64: return attend_item(view, next_view, qkv, std::integral_constant<int, 64>(), space, output);
    case 128: return attend_item(view, next_view, qkv, std::integral_constant<int, 128>(), space, output);
    default: return attend_item(view, next_view, qkv, shape.head_dim, space, output);
  }
}

void fetch(const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache, const AttentionItem& item) {
  ItemView(item, shape, sequences, cache).upcoming(item.piece_begin, 1).step();
}

void merge(const AttentionOutput& pieces, int count, const AttentionShape& shape, Share tokens, float* out) {
  const int dim = shape.head_dim;
  for (int64_t row = static_cast<int64_t>(tokens.begin) * shape.heads; row < static_cast<int64_t>(tokens.end) * shape.heads; row++) {
    float top = kMinusInfinity, total = 0;
    std::fill_n(out + row * dim, dim, 0.0f);
    for (int p = 0; p < count; p++) {
      const float* state = pieces.states + p * pieces.states_stride + row * 2;
      join_piece(state[0], state[1], pieces.out + p * pieces.piece_stride + row * dim, dim, &top, &total, out + row * dim);
    }
    for (int d = 0; d < dim; d += kTile) store(out + row * dim + d, div(load(out + row * dim + d), set(total)));
  }
}

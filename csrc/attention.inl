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
  int8_t* codes;            // [R, D]
  uint16_t* halves;         // [R, D]
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
  void load(Queries& q, const float* qkv, int head, int first, int rows) const {
    const int width = shape.heads + 2 * shape.kv_heads;
    q.rows = 0;
    for (int r = first; r < first + rows; r++) {
      const int64_t row = static_cast<int64_t>(first_row() + token(r)) * width + head * per_group() + r % per_group();
      load_query(q, qkv + row * shape.head_dim, shape, keys.cache.cache, position(token(r)));
    }
  }
};

// What an item reads next, fetched a fixed distance ahead of where it is. Blocks lie a whole row apart, where the processor does not
// look ahead by itself, so the lines are named one by one, in the order of memory: all heads of a tile together, which is much faster
// than head after head. They are asked for evenly over the time of a chunk, for in a burst they keep each other waiting, and without
// any the memory idles: three for every four that a product reads, the rest while weights are computed.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const ItemView& item, const ItemView* next) : view_(&item), next_(next), piece_(item.item.piece_begin) { open(); }

  // How far: the heads of `kUnit` keys are worked on one after the other.
  static int lines(const ItemView& view) {
    const int unit = view.heads() * view.keys.tile_bytes() * (kUnit / kTile);
    return std::max(kAheadBytes, unit + unit / 2) / kLine;
  }

  __attribute__((always_inline)) void step(int lines) {
    if (lines > left_) return cross(lines);
    for (int i = 0; i < lines; i++) prefetch(at_ + i * kLine);
    at_ += lines * kLine, left_ -= lines;
  }

  // Lines that were fetched already.
  void skip(int lines) {
    for (; lines > left_; next_run()) {
      if (!view_) return;
      lines -= left_;
    }
    at_ += lines * kLine, left_ -= lines;
  }

 private:
  static constexpr int kLine = 64, kAheadBytes = 24 << 10;
  struct Run {
    const uint8_t* start;
    const uint16_t* scales;
  };

  // A step over the end of a run; apart, so that the usual step stays small where it is used.
  __attribute__((noinline, cold)) void cross(int lines) {
    while (lines > left_) {
      for (; left_ > 0; left_--, lines--, at_ += kLine) prefetch(at_);
      next_run();
      if (!view_) return;
    }
    step(lines);
  }

  void next_run() {
    left_ = 0;
    if (!view_) return;
    if (++run_ == count_) return piece_++, open();
    begin();
  }

  void begin() {
    at_ = runs_[run_].start, left_ = run_lines_;
    const uint16_t* scales = runs_[run_].scales;
    if (scales) prefetch(scales), prefetch(scales + view_->heads() * kTile - 1);
  }

  // The runs of the piece, or of the first one after it that has keys to see.
  void open() {
    for (;; piece_++) {
      if (piece_ == view_->item.piece_end) {
        view_ = next_, next_ = nullptr;
        if (!view_) return;
        piece_ = view_->item.piece_begin;
      }
      run_ = count_ = 0;
      list(view_->keys_of(piece_, view_->item.query_begin, view_->item.query_end));
      if (count_ == 0) continue;
      run_lines_ = view_->heads() * view_->keys.tile_bytes() / kLine;
      return begin();
    }
  }

  void list(Share range) {
    const Keys& keys = view_->keys;
    const int head = view_->item.head_begin;
    const bool scaled = keys.cache.cache == Cache::kInt8;
    for (int chunk = range.begin; chunk < range.end; chunk += kKeyChunk) {
      const int stop = std::min(range.end, chunk + kKeyChunk);
      for (int key = chunk; key < stop; key += kTile) runs_[count_++] = {keys.keys(key, head), keys.key_scales(key, head)};
      for (int key = chunk; key < stop; key += kTile) {
        runs_[count_++] = {keys.values(key, head), scaled ? keys.value_scales(key, head) : nullptr};
      }
    }
  }

  const ItemView *view_ = nullptr, *next_ = nullptr;
  const uint8_t* at_ = nullptr;
  int left_ = 0;  // lines of the run
  int piece_ = 0, run_ = 0, count_ = 0, run_lines_ = 0;
  Run runs_[2 * kPieceKeys / kTile];
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
                        Ahead& ahead, F (*scores)[kMaxRows]) {
  if (key_scales[0]) {
    I total[T][R];
    for (int t = 0; t < T; t++) {
      for (int r = 0; r < R; r++) total[t][r] = set_int(-128 * q.sum[r0 + r]);
    }
    for (int d = 0; d < dim; d += 4) {
      if (r0 == 0 && d % 16 != 12) ahead.step(T);
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
    if (r0 == 0 && d % 8 != 6) ahead.step(T);
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

// Scores of all queries against some keys, masked: scores [R, kKeyChunk].
template <class Dim>
inline void score_keys(const Queries& q, const Keys& keys, int head, const AttentionShape& shape, Dim dim, Share range, Ahead& ahead,
                       float* scores) {
  constexpr int kTogether = 4;
  F tiles[kTogether][kMaxRows];
  const uint8_t* at[kTogether];
  const uint16_t* scales[kTogether];
  for (int key = range.begin; key < range.end;) {
    const bool together = key + kTogether * kTile <= range.end;
    const int count = together ? kTogether : 1;
    for (int t = 0; t < count; t++) at[t] = keys.keys(key + t * kTile, head), scales[t] = keys.key_scales(key + t * kTile, head);
    in_groups(q.rows, [&](auto R, int r) {
      together ? score_tiles<R(), kTogether>(q, r, at, scales, dim, ahead, tiles) : score_tiles<R(), 1>(q, r, at, scales, dim, ahead, tiles);
    });
    for (int t = 0; t < count; t++, key += kTile) put_scores(q, shape, key, tiles[t], scores + key - range.begin);
  }
}

// 2^x for x <= 0, relative error below 1e-7 (minimax polynomial of degree 5 on [-1/2, 1/2]); exactly nothing for a key that is not seen.
inline F power_of_2(F x) {
  const F n = round(max(x, set(-126.0f))), r = sub(x, n);
  F p = set(1.3264727e-3f);
  p = fma(p, r, set(9.6715129e-3f));
  p = fma(p, r, set(5.5507337e-2f));
  p = fma(p, r, set(2.4022242e-1f));
  p = fma(p, r, set(6.9314698e-1f));
  p = fma(p, r, set(1.0f));
  return zero_below(scale_by_power_of_2(p, n), x, -125.0f);
}

// Turn a query's scores of a chunk into weights, times `scales` where there are some, and shrink what was summed before; `pace` is
// called for every 16 keys. Returns the largest of what was written, negative when the query sees nothing here.
template <class Dim, class Pace>
inline float weigh(float* scores, int count, const float* scales, Accumulator& acc, int r, Dim dim, Pace pace) {
  constexpr float kLog2E = 1.44269504f;
  F top = set(kMinusInfinity);
  for (int i = 0; i < count; i += kTile) top = max(top, load(scores + i));
  const float chunk_top = highest(top), before = acc.top[r];
  if (chunk_top <= kMinusInfinity) return -1;
  const float new_top = std::max(before, chunk_top);
  F total = zero(), largest = zero();
  for (int i = 0; i < count; i += kTile) {
    pace();
    F weight = power_of_2(mul(sub(load(scores + i), set(new_top)), set(kLog2E)));
    total = add(total, weight);
    if (scales) weight = mul(weight, load(scales + i)), largest = max(largest, weight);
    store(scores + i, weight);
  }
  acc.top[r] = new_top;
  const float shrink = before == new_top ? 1.0f : before <= kMinusInfinity ? 0.0f : std::exp(before - new_top);
  acc.total[r] = acc.total[r] * shrink + sum(total);
  if (shrink != 1.0f) {
    for (int d = 0; d < dim; d += kTile) store(acc.out + r * dim + d, mul(load(acc.out + r * dim + d), set(shrink)));
  }
  return scales ? highest(largest) : 0.0f;
}

// out[r] += weights x values of some keys, bf16 values; W vectors of 16 columns from d on.
template <int R, int W, class Dim>
inline void add_values_bf16(const float* weights, const Keys& keys, int head, Share range, Dim dim, int d, Ahead* ahead, float* out) {
  F total[R][W];
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) total[r][w] = load(out + r * dim + d + w * kTile);
  }
  for (int key = range.begin; key < range.end; key += kTile) {
    const auto* values = reinterpret_cast<const uint16_t*>(keys.values(key, head)) + d;
    const int count = std::min(kTile, range.end - key);  // what lies behind is of a former owner, and may be NaN
    auto take = [&](int i) {
      F value[W];
      for (int w = 0; w < W; w++) value[w] = load_bf16(values + i * dim + w * kTile);
      for (int r = 0; r < R; r++) {
        const F weight = set(weights[r * kKeyChunk + key - range.begin + i]);
        for (int w = 0; w < W; w++) total[r][w] = fma(value[w], weight, total[r][w]);
      }
    };
    int i = 0;
    for (; i + 4 <= count; i += 4) {
      if (ahead) ahead->step(W + W / 2);
      for (int j = 0; j < 4; j++) take(i + j);
    }
    for (; i < count; i++) take(i);
  }
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) store(out + r * dim + d + w * kTile, total[r][w]);
  }
}

// sums[r] += codes x values of some keys, int8 values; exact, so that the order does not matter.
template <int R, int W, class Dim>
inline void add_values_int8(const uint8_t* codes, const Keys& keys, int head, Share range, Dim dim, int d, Ahead* ahead, int32_t* sums) {
  I total[R][W];
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) total[r][w] = load_int(sums + r * dim + d + w * kTile);
  }
  for (int key = range.begin; key < range.end; key += kTile) {
    const uint8_t* values = keys.values(key, head) + 4 * d;
    for (int i = 0; i < kTile; i += 4, values += 4 * dim) {
      if (ahead && i != 12) ahead->step(W);
      B tile[W];
      for (int w = 0; w < W; w++) tile[w] = load_bytes(values + w * 64);
      for (int r = 0; r < R; r++) {
        const uint8_t* four = codes + r * kKeyChunk + key - range.begin + i;
        for (int w = 0; w < W; w++) total[r][w] = dot_signed(total[r][w], four, tile[w]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) store_int(sums + r * dim + d + w * kTile, total[r][w]);
  }
}

// A row's scaled weights as 8-bit codes of the largest; returns the step.
inline float weight_codes(const float* weights, int count, float largest, uint8_t* codes) {
  const F inverse = set(largest > 0 ? 255.0f / largest : 0.0f);
  for (int i = 0; i < count; i += kTile) store_uint8(codes + i, mul(load(weights + i), inverse));
  return largest / 255.0f;
}

// What belongs to one head of an item, in scratch.
struct HeadSpace {
  Queries queries;
  float* scores;   // [R, kKeyChunk]: scores of a chunk of keys, then weights
  uint8_t* codes;  // [R, kKeyChunk]: the weights in 8 bits, for int8 values
  float steps[kMaxRows];
  int32_t* sums;   // [R, D]: codes times values
  Accumulator piece, joined;

  HeadSpace(uint8_t* start, int dim) {
    auto take = [&](auto** pointer, int64_t count) {
      *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(start);
      start += (count * static_cast<int64_t>(sizeof(**pointer)) + 63) / 64 * 64;
    };
    start += (sizeof(HeadSpace) + 63) / 64 * 64;
    take(&queries.codes, kMaxRows * dim), take(&queries.halves, kMaxRows * dim);
    take(&scores, kMaxRows * kKeyChunk), take(&codes, kMaxRows * kKeyChunk), take(&sums, kMaxRows * dim);
    for (Accumulator* part : {&piece, &joined}) {
      take(&part->top, kMaxRows), take(&part->total, kMaxRows), take(&part->out, kMaxRows * dim);
    }
  }
};
static_assert(sizeof(HeadSpace) <= kHeadSpaceBytes);

// Weights of a chunk from its scores; for int8 values in codes as well. A quarter of the lines that a chunk's time is worth are
// fetched here.
template <class Dim> inline void weigh_chunk(HeadSpace& head, const Keys& keys, int number, Share chunk, Dim dim, Ahead& ahead) {
  const bool coded = keys.cache.cache == Cache::kInt8;
  const int rows = head.queries.rows, padded = (chunk.end - chunk.begin + kTile - 1) / kTile * kTile, lines = keys.tile_bytes() / 128;
  alignas(64) float scales[kKeyChunk];
  for (int i = 0; coded && i < padded; i += kTile) store(scales + i, load_half(keys.value_scales(chunk.begin + i, number)));
  for (int r = 0; r < rows; r++) {
    float* scores = head.scores + r * kKeyChunk;
    const int share = (r + 1) * lines / rows - r * lines / rows;
    const float largest = weigh(scores, padded, coded ? scales : nullptr, head.piece, r, dim, [&] { ahead.step(share); });
    if (largest < 0) std::fill_n(scores, kKeyChunk, 0.0f);
    if (coded) head.steps[r] = weight_codes(scores, padded, largest, head.codes + r * kKeyChunk);
  }
  if (coded) std::fill_n(head.sums, rows * dim, 0);
}

// Add the values of some keys, which stand from `at` on in their chunk.
template <class Dim>
inline void add_values(HeadSpace& head, const Keys& keys, int number, Share range, int at, Dim dim, Ahead& ahead) {
  constexpr int kTogether = 4;
  in_groups(head.queries.rows, [&](auto R, int r) {
    Ahead* first = r == 0 ? &ahead : nullptr;  // the next rows read the same values again
    int d = 0;
    if (keys.cache.cache == Cache::kInt8) {
      const uint8_t* codes = head.codes + r * kKeyChunk + at;
      int32_t* sums = head.sums + r * dim;
      for (; d + kTogether * kTile <= dim; d += kTogether * kTile) {
        add_values_int8<R(), kTogether>(codes, keys, number, range, dim, d, first, sums);
      }
      for (; d < dim; d += kTile) add_values_int8<R(), 1>(codes, keys, number, range, dim, d, first, sums);
      return;
    }
    const float* weights = head.scores + r * kKeyChunk + at;
    float* out = head.piece.out + r * dim;
    for (; d + kTogether * kTile <= dim; d += kTogether * kTile) {
      add_values_bf16<R(), kTogether>(weights, keys, number, range, dim, d, first, out);
    }
    for (; d < dim; d += kTile) add_values_bf16<R(), 1>(weights, keys, number, range, dim, d, first, out);
  });
}

template <class Dim> inline void add_sums(HeadSpace& head, Dim dim) {
  for (int r = 0; r < head.queries.rows; r++) {
    for (int d = 0; d < dim; d += kTile) {
      float* at = head.piece.out + r * dim + d;
      store(at, fma(to_float(load_int(head.sums + r * dim + d)), set(head.steps[r]), load(at)));
    }
  }
}

// The heads of an item in scratch, one after the other.
struct HeadSpaces {
  uint8_t* start;
  int64_t bytes;
  HeadSpace& operator[](int head) const { return *reinterpret_cast<HeadSpace*>(start + head * bytes); }
};

// The queries of all heads of an item against some keys of one piece. The heads take turns every `kUnit` keys, so that what is read
// follows the order of memory.
template <class Dim>
inline void attend_piece(const ItemView& view, const HeadSpaces& heads, Share keys, Dim dim, Ahead& ahead) {
  const int count = view.heads(), first = view.item.head_begin, unit = count > 1 ? kUnit : kKeyChunk;
  for (int h = 0; h < count; h++) heads[h].piece.clear(heads[h].queries.rows, dim);
  for (int begin = keys.begin; begin < keys.end; begin += kKeyChunk) {
    const Share chunk{begin, std::min(keys.end, begin + kKeyChunk)};
    auto in_turns = [&](auto f) {
      for (int at = chunk.begin; at < chunk.end; at += unit) {
        for (int h = 0; h < count; h++) f(h, Share{at, std::min(at + unit, chunk.end)}, at - chunk.begin);
      }
    };
    in_turns([&](int h, Share range, int at) {
      score_keys(heads[h].queries, view.keys, first + h, view.shape, dim, range, ahead, heads[h].scores + at);
    });
    for (int h = 0; h < count; h++) weigh_chunk(heads[h], view.keys, first + h, chunk, dim, ahead);
    in_turns([&](int h, Share range, int at) { add_values(heads[h], view.keys, first + h, range, at, dim, ahead); });
    if (view.keys.cache.cache == Cache::kInt8) {
      for (int h = 0; h < count; h++) add_sums(heads[h], dim);
    }
  }
}
// Join a row's next piece (highest score, sum of weights, weighted values) to those before it. Pieces are joined in order, whoever
// computed them, so that the bits are always the same.
inline void join_piece(float top, float total, const float* out, int dim, float* joined_top, float* joined_total, float* joined) {
  if (top <= kMinusInfinity) return;
  float before = 1, now = 1;  // one of the two stays
  if (*joined_top <= kMinusInfinity) {
    before = 0;
  } else if (top > *joined_top) {
    before = std::exp(*joined_top - top);
  } else {
    now = std::exp(top - *joined_top);
  }
  *joined_total = std::fma(now, total, *joined_total * before);
  *joined_top = std::max(top, *joined_top);
  for (int d = 0; d < dim; d += kTile) store(joined + d, fma(set(now), load(out + d), mul(set(before), load(joined + d))));
}

// A head's rows of a piece: joined to the pieces before, or out as they are.
inline void keep_piece(const ItemView& view, HeadSpace& space, int head, int piece, int first, const AttentionOutput& output) {
  const int dim = view.shape.head_dim;
  const Accumulator &current = space.piece, &joined = space.joined;
  for (int r = 0; r < space.queries.rows; r++) {
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

inline void put_joined(const ItemView& view, const HeadSpace& space, int head, int first, float* out) {
  const int dim = view.shape.head_dim;
  for (int r = 0; r < space.queries.rows; r++) {
    const float* row = space.joined.out + r * dim;
    float* to = out + view.place(head, first + r) * dim;
    for (int d = 0; d < dim; d += kTile) store(to + d, div(load(row + d), set(space.joined.total[r])));
  }
}

template <class Dim>
inline void attend_item(const ItemView& view, const float* qkv, Dim dim, Ahead& ahead, uint8_t* scratch, const AttentionOutput& output) {
  const AttentionItem& item = view.item;
  const HeadSpaces heads{scratch, head_space_bytes(dim)};
  for (int h = 0; h < view.heads(); h++) new (&heads[h]) HeadSpace(reinterpret_cast<uint8_t*>(&heads[h]), dim);
  Ahead none;
  for (int first = 0; first < view.rows(); first += kMaxRows) {
    const int count = std::min(kMaxRows, view.rows() - first);
    for (int h = 0; h < view.heads(); h++) {
      view.load(heads[h].queries, qkv, item.head_begin + h, first, count);
      heads[h].joined.clear(count, dim);
    }
    for (int piece = item.piece_begin; piece < item.piece_end; piece++) {
      const Share keys = view.keys_of(piece, view.token(first), view.token(first + count - 1) + 1);
      attend_piece(view, heads, keys, dim, first == 0 ? ahead : none);
      for (int h = 0; h < view.heads(); h++) keep_piece(view, heads[h], item.head_begin + h, piece, first, output);
    }
    if (output.states) continue;
    for (int h = 0; h < view.heads(); h++) put_joined(view, heads[h], item.head_begin + h, first, output.out);
  }
}

void attend(const float* qkv, const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache,
            const AttentionItem& item, const AttentionItem* next, const AttentionOutput& output, uint8_t* scratch) {
  const ItemView view(item, shape, sequences, cache), after(next ? *next : item, shape, sequences, cache);
  Ahead ahead(view, next ? &after : nullptr);
  ahead.skip(Ahead::lines(view));
  switch (shape.head_dim) {  // the loops over the usual sizes are unrolled
    case 64: return attend_item(view, qkv, std::integral_constant<int, 64>(), ahead, scratch, output);
    case 128: return attend_item(view, qkv, std::integral_constant<int, 128>(), ahead, scratch, output);
    default: return attend_item(view, qkv, shape.head_dim, ahead, scratch, output);
  }
}

void fetch(const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache, const AttentionItem& item) {
  const ItemView view(item, shape, sequences, cache);
  Ahead(view, nullptr).step(Ahead::lines(view));
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

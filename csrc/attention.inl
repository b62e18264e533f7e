// Attention over the cache: scores, online softmax, weighted values, and pieces joined in order. Part of kernels.inl, which includes it
// inside its namespace, behind attention_items.inl. Invariant: a row's bits do not depend on who computed which piece.

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
    auto take = [&](int i) __attribute__((always_inline)) {  // or the sums go through memory for every key
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

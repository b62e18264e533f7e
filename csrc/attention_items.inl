// What attention works on: queries in the form that the cache multiplies, the keys of a sequence, one item of a step, and what an item
// fetches ahead. Computes no score. Part of kernels.inl, which includes it inside its namespace.

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

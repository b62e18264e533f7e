#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <numeric>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace triblade {
namespace {

constexpr int kMaxLayers = 1024;
constexpr int kMaxSplitTokens = 16;      // steps with more tokens have enough items without splitting sequences
constexpr int64_t kMaxSplitPieces = 256;  // tokens times pieces that the buffer for split sequences holds
constexpr int kItemsPerMember = 4;       // enough for the members to finish together
constexpr int kHeadBlocks = 32;          // of 16 columns of logits
constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void advise_huge_pages(void* start, int64_t bytes) {
#ifdef __linux__
  constexpr uintptr_t page = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(start) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

Arena::Arena(int64_t bytes) : bytes_(std::max<int64_t>((bytes + kHugePage - 1) / kHugePage * kHugePage, kHugePage)) {
  data_ = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, bytes_));
  if (!data_) throw std::bad_alloc();
  advise_huge_pages(data_, bytes_);
}

Arena::~Arena() { std::free(data_); }

Program::Program(const Kernels& kernels, std::shared_ptr<Team> team, const ProgramShape& shape)
    : kernels_(kernels), shape_(shape), team_(std::move(team)), next_item_(new std::atomic<int>[kMaxLayers]) {
  const AttentionShape& attention = shape.attention;
  const int64_t tokens = shape.max_tokens, rows = std::max(shape.max_tokens, shape.max_rows), inputs = shape.max_inputs;
  const int64_t heads = static_cast<int64_t>(attention.heads) * attention.head_dim;
  const int64_t qkv = heads + 2 * static_cast<int64_t>(attention.kv_heads) * attention.head_dim;
  scratch_bytes_ = scratch_bytes(shape.max_inputs, attention.head_dim, attention.kv_heads);
  int64_t offset = 0;
  std::vector<std::pair<void**, int64_t>> places;
  auto place = [&](auto** pointer, int64_t count) {
    places.emplace_back(reinterpret_cast<void**>(pointer), offset);
    offset += aligned(count * static_cast<int64_t>(sizeof(**pointer)));
  };
  place(&x_, tokens * shape.hidden);
  place(&qkv_, tokens * qkv);
  place(&attended_, tokens * heads);
  place(&hidden_, tokens * shape.intermediate);
  place(&projected_, tokens * shape.hidden);
  place(&partial_, kMaxSplitPieces * heads);
  place(&states_, 2 * kMaxSplitPieces * attention.heads);
  place(&own_states_, rows * shape.hidden);
  place(&positions_, tokens);
  place(&slots_, tokens);
  place(&activations_.codes, rows * inputs);
  place(&activations_.scales, rows * inputs / 16);
  place(&activations_.sums, rows * inputs / 16);
  place(&activations_.halves, rows * inputs);
  place(&activations_.floats, rows * inputs);
  place(&scratch_, scratch_bytes_ * team_->size());
  place(&some_logits_, rows * kHeadBlocks * 16 * team_->size());
  arena_ = std::make_unique<Arena>(offset);
  for (auto& [pointer, at] : places) *pointer = arena_->data() + at;
  best_rows_ = rows;
  best_.resize(team_->size() * best_rows_);
  items_.reserve((tokens + kMaxSplitPieces) * attention.kv_heads);
}

void Program::embed(const Matrix& table, float scale) {
  calls_.push_back([=, this](int member) { kernels_.embed(table, ids_, scale, shape_.hidden, tokens(member), x_); });
}

void Program::fuse(const Matrix& matrix, const float* norms, int inner, float eps) {
  const int64_t hidden = shape_.hidden, width = (2 + inner) * hidden;
  fused_ = std::make_unique<Arena>(shape_.max_tokens * (width + (1 + inner) * hidden) * static_cast<int64_t>(sizeof(float)));
  float* fused = reinterpret_cast<float*>(fused_->data());
  given_ = fused + shape_.max_tokens * width;
  calls_.push_back([=, this](int member) {
    const Share mine = tokens(member);
    const int known = before_is_own_ ? 0 : inner;
    for (int64_t t = mine.begin; t < mine.end; t++) {
      const float* before = before_ + t * (1 + known) * hidden;
      float* row = fused + t * width;
      std::copy_n(x_ + t * hidden, hidden, row);
      std::copy_n(before, hidden, row + hidden);
      std::fill_n(row + 2 * hidden, inner * hidden, 0.0f);
      for (int n = 0; n < known; n++) {
        kernels_.norm_add(before + (1 + n) * hidden, norms + n * hidden, eps, hidden, {0, 1}, row + (2 + n) * hidden);
      }
    }
    kernels_.quantize(fused, width, matrix, mine, activations_);
  });
  record_linear(matrix, Epilogue::kStore, x_, hidden);
}

void Program::keep(const std::vector<int>& layers) {
  const int64_t hidden = shape_.hidden, size = shape_.max_tokens * hidden;
  kept_ = std::make_unique<Arena>(layers.size() * size * sizeof(float));
  float* to = reinterpret_cast<float*>(kept_->data());
  for (int layer : layers) {  // written down by the next layer's first call, before which and in which nobody changes x
    Call& next = calls_[ends_.at(layer)];
    next = [=, this, then = next](int member) {
      const Share mine = tokens(member);
      std::copy_n(x_ + mine.begin * hidden, (mine.end - mine.begin) * hidden, to + mine.begin * hidden);
      then(member);
    };
    to += size;
  }
  kept_layers_ = static_cast<int>(layers.size());
}

void Program::norm(const float* weight, float eps, const Matrix& next) {
  calls_.push_back([=, this](int member) {
    kernels_.norm(x_, weight, eps, shape_.hidden, nullptr, next, tokens(member), activations_);
  });
}

void Program::record_linear(const Matrix& matrix, Epilogue epilogue, float* out, int stride) {
  const int unit = epilogue == Epilogue::kSilu || epilogue == Epilogue::kGelu ? 2 : 1;
  calls_.push_back([=, this](int member) {
    const Share blocks = share(matrix.blocks(), unit, member, team_->size());
    kernels_.linear(matrix, activations_, tokens_, epilogue, blocks, out, stride, scratch_ + member * scratch_bytes_);
  });
}

void Program::qkv(const Matrix& matrix) { record_linear(matrix, Epilogue::kStore, qkv_, matrix.rows); }

void Program::attention(const LayerCache& cache, int window, const RopeTable& rope, const float* qk_norm, float eps,
                        const Matrix& next) {
  AttentionShape shape = shape_.attention;
  shape.window = window;
  const int layer = layers_++;
  block_size_ = cache.block_size;
  const int width = shape.heads * shape.head_dim;
  calls_.push_back([=, this](int member) {
    kernels_.rope_write(qkv_, shape, qk_norm, eps, rope.cos, rope.sin, rope.pairs, positions_, slots_, cache,
                        tokens(member));
    if (member < static_cast<int>(items_.size())) kernels_.fetch(shape, sequences_, cache, items_[member]);
  });
  calls_.push_back([=, this](int member) { attend_all(layer, cache, shape, member); });
  calls_.push_back([=, this](int member) {
    if (is_split_) kernels_.merge(pieces(), pieces_, shape, tokens(member), attended_);
    kernels_.quantize(attended_, width, next, tokens(member), activations_);
  });
}

void Program::project(const Matrix& matrix, const float* post_norm, float eps) {
  if (!post_norm) {
    record_linear(matrix, Epilogue::kAdd, x_, shape_.hidden);
    return;
  }
  record_linear(matrix, Epilogue::kStore, projected_, shape_.hidden);
  calls_.push_back([=, this](int member) { kernels_.norm_add(projected_, post_norm, eps, shape_.hidden, tokens(member), x_); });
}

void Program::gate_up(const Matrix& matrix, Epilogue activation, const Matrix& next) {
  record_linear(matrix, activation, hidden_, shape_.intermediate);
  calls_.push_back([=, this](int member) {
    kernels_.quantize(hidden_, shape_.intermediate, next, tokens(member), activations_);
  });
}

void Program::head(const float* weight, float eps, const Matrix& matrix, float softcap) {
  norm_weight_ = weight, norm_eps_ = eps;
  head_calls_.push_back([=, this](int member) {
    const Share rows = share(row_count_, 1, member, team_->size());
    kernels_.norm(x_, weight, eps, shape_.hidden, rows_, matrix, rows, activations_);
  });
  head_calls_.push_back([=, this](int member) { head_share(matrix, softcap, member); });
  draw_calls_.push_back([this](int member) { weigh_share(member); });
  stride_ = matrix.rows;
}

// A member's columns of the logits, a few at a time, so that they are still near when they are looked at.
void Program::head_share(const Matrix& matrix, float softcap, int member) {
  const Share all = share(matrix.blocks(), 1, member, team_->size());
  Best* best = best_.data() + member * best_rows_;
  std::fill_n(best, row_count_, Best{});
  for (int block = all.begin; block < all.end; block += kHeadBlocks) {
    const Share blocks{block, std::min(block + kHeadBlocks, all.end)};
    const int begin = blocks.begin * 16, end = std::min(blocks.end * 16, matrix.rows), tokens = std::min(end, shape_.vocabulary) - begin;
    const int stride = logits_ ? matrix.rows : kHeadBlocks * 16;
    float* columns = logits_ ? logits_ + begin : some_logits_ + member * best_rows_ * stride;
    // `linear` counts columns from the matrix's first row on.
    kernels_.linear(matrix, activations_, row_count_, Epilogue::kStore, blocks, columns - begin, stride, scratch_ + member * scratch_bytes_);
    for (int r = 0; r < row_count_; r++) {
      float* row = columns + static_cast<int64_t>(r) * stride;
      if (softcap > 0) kernels_.softcap(row, end - begin, softcap);
      if (tokens > 0) look_at(row, tokens, begin, r, best[r]);
    }
  }
}

void Program::run(const int32_t* ids, const Sequences& sequences) {
  ids_ = ids;
  sequences_ = sequences;
  tokens_ = sequences.first_row[sequences.count];
  place_tokens();
  plan_attention();
  for (int layer = 0; layer < layers_; layer++) next_item_[layer].store(team_->size(), std::memory_order_relaxed);
  walked_ = &calls_;
  team_->run(walk, this);
}

void Program::look_at(float* logits, int count, int first, int row, Best& best) {
  const Best before = best;
  if (choices_ && choices_[row].allowed) {  // a fault is one even where it may not be chosen
    Best any;
    kernels_.find_best(logits, count, first, any);
    best.is_finite = best.is_finite && any.is_finite;
    kernels_.bar(logits, count, choices_[row].allowed + first / 16);
  }
  kernels_.find_best(logits, count, first, best);
  if (!wants_chances_) return;
  best.total = kernels_.sum_exp(logits, count, best.value);
  if (before.total > 0) best.total += before.total * std::exp(before.value - best.value);
}

void Program::score_rows(const int32_t* rows, int count, float* out) {
  rows_ = rows;
  row_count_ = count;
  logits_ = out;
  walked_ = &head_calls_;
  team_->run(walk, this);
}

Best Program::best_of(int row) const {
  Best whole = best_[row];
  for (int member = 1; member < team_->size(); member++) {
    Best part = best_[member * best_rows_ + row];
    const bool is_finite = whole.is_finite && part.is_finite;
    if (part.value > whole.value) std::swap(whole, part);
    if (part.total > 0) whole.total += part.total * std::exp(part.value - whole.value);
    whole.is_finite = is_finite;
  }
  return whole;
}

void Program::score(const int32_t* rows, int count, float* out, int32_t* best, const Choice* choices) {
  wants_chances_ = false;
  choices_ = choices;
  score_rows(rows, count, out);
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  bool draws = false;
  tops_.assign(count, kNone);
  for (int r = 0; r < count; r++) {
    const Best whole = best_of(r);
    best[r] = whole.is_finite ? whole.token : -1;
    if (choices && choices[r].temperature > 0 && whole.is_finite) tops_[r] = whole.value, draws = true;
  }
  if (draws) {
    weights_.resize(static_cast<size_t>(count) * draw_pieces());
    walked_ = &draw_calls_;
    team_->run(walk, this);
    for (int r = 0; r < count; r++) {
      if (tops_[r] > kNone) best[r] = drawn(r);
    }
  }
  choices_ = nullptr;
}

int Program::draw_pieces() const { return (shape_.vocabulary + kDrawTokens - 1) / kDrawTokens; }

double Program::weigh_piece(int row, int piece, float* out) const {
  const Choice& choice = choices_[row];
  const int first = piece * kDrawTokens, count = std::min(kDrawTokens, shape_.vocabulary - first);
  return kernels_.weigh(logits_ + row * stride_ + first, count, tops_[row], choice.temperature, choice.least, out);
}

// A member's pieces of the vocabulary, in every row that draws.
void Program::weigh_share(int member) {
  float ignored[kDrawTokens];
  const int pieces = draw_pieces();
  const Share mine = share(pieces, 1, member, team_->size());
  for (int r = 0; r < row_count_; r++) {
    if (tops_[r] == -std::numeric_limits<float>::infinity()) continue;
    for (int64_t piece = mine.begin; piece < mine.end; piece++) {
      weights_[static_cast<int64_t>(r) * pieces + piece] = static_cast<uint64_t>(weigh_piece(r, static_cast<int>(piece), ignored));
    }
  }
}

// The cumulative distribution inverted in the order of the tokens. Weights and their sums are integers, so nothing depends on who
// added what: see `spec.distribution`, whose draws these are up to the rounding of e^x.
int32_t Program::drawn(int row) const {
  const uint64_t* sums = weights_.data() + static_cast<int64_t>(row) * draw_pieces();
  const uint64_t total = std::accumulate(sums, sums + draw_pieces(), uint64_t{0});
  uint64_t target = std::min(static_cast<uint64_t>(choices_[row].uniform * static_cast<double>(total)), total - 1);
  int piece = 0;
  while (target >= sums[piece]) target -= sums[piece++];
  float weights[kDrawTokens];
  weigh_piece(row, piece, weights);
  int token = 0;
  while (target >= static_cast<uint64_t>(weights[token])) target -= static_cast<uint64_t>(weights[token++]);
  return piece * kDrawTokens + token;
}

void Program::states(const int32_t* rows, int count, float* out) {
  const int64_t hidden = shape_.hidden;
  const float* kept = kept_layers_ ? reinterpret_cast<const float*>(kept_->data()) : nullptr;
  for (int r = 0; r < count; r++, out += (1 + kept_layers_) * hidden) {
    std::fill_n(out, hidden, 0.0f);
    kernels_.norm_add(x_ + rows[r] * hidden, norm_weight_, norm_eps_, shape_.hidden, {0, 1}, out);
    for (int n = 0; n < kept_layers_; n++) {
      std::copy_n(kept + (static_cast<int64_t>(n) * shape_.max_tokens + rows[r]) * hidden, hidden, out + (1 + n) * hidden);
    }
  }
}

void Program::remember(StateMemory& memory, const Computed& computed) {
  own_rows_.resize(computed.stop - computed.start);
  std::iota(own_rows_.begin(), own_rows_.end(), static_cast<int32_t>(computed.first_row));
  const int count = static_cast<int>(own_rows_.size());
  states(own_rows_.data(), count, memory.extend(computed.request, computed.start, count));
}

void Program::draft(const int32_t* ids, StateMemory& memory, const int64_t* requests, const Sequences& sequences, const DraftOptions& options,
                    int32_t* out) {
  std::vector<int32_t> going, rows, next, first_row, length;  // who guesses on, and the row of each
  std::vector<const int32_t*> tables;
  std::vector<float> chances(sequences.count, 1.0f);
  for (int s = 0; s < sequences.count; s++) {
    const int first = sequences.first_row[s], end = sequences.first_row[s + 1];
    memory.take(requests[s], sequences.length[s] - (end - first) - 1, end - first, given_ + int64_t{first} * memory.width());
    std::fill_n(out + s * options.width, options.width, -1);
    if (options.lengths[s] > 0) going.push_back(s), rows.push_back(end - 1);
  }
  before_ = given_;
  before_is_own_ = false;
  run(ids, sequences);
  wants_chances_ = options.least_chance > 0;
  for (int guess = 0; !going.empty(); guess++) {
    score_rows(rows.data(), static_cast<int>(going.size()), nullptr);
    next.clear(), first_row.clear(), length.clear(), tables.clear();
    for (size_t n = 0; n < going.size(); n++) {
      const int s = going[n];
      const Best best = best_of(static_cast<int>(n));
      if (wants_chances_) chances[s] /= best.total;
      if (!best.is_finite || chances[s] < options.least_chance) continue;
      out[s * options.width + guess] = options.tokens[best.token];
      if (guess + 1 == options.lengths[s]) continue;
      const int count = static_cast<int>(next.size());
      going[count] = s, rows[count] = rows[n];
      next.push_back(options.tokens[best.token]), first_row.push_back(count);
      length.push_back(sequences.length[s] + guess + 1), tables.push_back(sequences.tables[s]);
    }
    const int count = static_cast<int>(next.size());
    going.resize(count), rows.resize(count), first_row.push_back(count);
    if (count == 0) return;
    this->states(rows.data(), count, own_states_);
    std::iota(rows.begin(), rows.end(), 0);
    before_ = own_states_;
    before_is_own_ = true;
    run(next.data(), {count, first_row.data(), length.data(), tables.data()});
  }
}

// Position and slot of every token, from its sequence's length and blocks.
void Program::place_tokens() {
  for (int s = 0; s < sequences_.count; s++) {
    const int end = sequences_.first_row[s + 1], first = sequences_.length[s] - end;
    for (int t = sequences_.first_row[s]; t < end; t++) {
      const int position = first + t;
      positions_[t] = position;
      slots_[t] = sequences_.tables[s][position / block_size_] * block_size_ + position % block_size_;
    }
  }
}

void Program::walk(void* context, int member) {
  auto* program = static_cast<Program*>(context);
  for (const Call& call : *program->walked_) {
    call(member);
    program->team_->barrier();
  }
}

// Cut the step's attention into items: queries that share keys stay together; a few long sequences are split along their keys. How
// they are cut decides who computes a piece, never what it is.
void Program::plan_attention() {
  const Sequences& sequences = sequences_;
  const AttentionShape& shape = shape_.attention;
  const int queries_per_item = std::max(1, kRowsPerItem * shape.kv_heads / shape.heads), enough = kItemsPerMember * team_->size();
  auto pieces_of = [&](int s) { return (sequences.length[s] + kPieceKeys - 1) / kPieceKeys; };
  auto queries_of = [&](int s) { return sequences.first_row[s + 1] - sequences.first_row[s]; };
  int tiles = 0;  // of queries
  pieces_ = 0;
  for (int s = 0; s < sequences.count; s++) {
    tiles += (queries_of(s) + queries_per_item - 1) / queries_per_item;
    pieces_ = std::max(pieces_, pieces_of(s));
  }
  is_split_ = pieces_ > 1 && team_->size() > 1 && tiles * shape.kv_heads < enough && tokens_ <= kMaxSplitTokens &&
              static_cast<int64_t>(tokens_) * pieces_ <= kMaxSplitPieces;
  // All heads of a tile of keys lie together in memory. Where many queries read the same keys, they come from the cache, and fewer
  // heads at a time fit better.
  const bool heads_together = tiles * (is_split_ ? pieces_ : 1) >= enough;
  items_.clear();
  auto push_item = [&](AttentionItem item) {
    item.query_end = std::min(item.query_end, queries_of(item.sequence));
    items_.push_back(item);
  };
  for (int s = 0; s < sequences.count; s++) {
    const int queries = queries_of(s), pieces = is_split_ ? pieces_ : pieces_of(s), step = is_split_ ? 1 : pieces;
    const int together = heads_together && queries <= queries_per_item ? shape.kv_heads : 1;
    // The last pieces of all go head by head, so that the members finish together.
    const int apart = is_split_ && s == sequences.count - 1 ? std::max(0, pieces - team_->size()) : pieces;
    for (int q = 0; q < queries; q += queries_per_item) {
      for (int head = 0; head < shape.kv_heads; head += together) {
        for (int p = 0; p < apart; p += step) push_item({s, head, head + together, q, q + queries_per_item, p, p + step});
      }
      for (int p = apart; p < pieces; p++) {
        for (int head = 0; head < shape.kv_heads; head++) push_item({s, head, head + 1, q, q + queries_per_item, p, p + 1});
      }
    }
  }
}

AttentionOutput Program::pieces() const {
  const int64_t rows = static_cast<int64_t>(tokens_) * shape_.attention.heads;
  return {partial_, states_, rows * shape_.attention.head_dim, rows * 2};
}

void Program::attend_all(int layer, const LayerCache& cache, const AttentionShape& shape, int member) {
  uint8_t* scratch = scratch_ + member * scratch_bytes_;
  const AttentionOutput output = is_split_ ? pieces() : AttentionOutput{attended_};
  auto item_at = [&](int n) { return n < static_cast<int>(items_.size()) ? &items_[n] : nullptr; };
  auto take = [&] { return item_at(next_item_[layer].fetch_add(1, std::memory_order_relaxed)); };
  const AttentionItem* item = item_at(member);  // the first one is fetched already
  while (item) {
    const AttentionItem* next = take();  // one item ahead, so that its keys are on their way when their turn comes
    kernels_.attend(qkv_, shape, sequences_, cache, *item, next, output, scratch);
    item = next;
  }
}

}  // namespace triblade

#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace triblade {
namespace {

constexpr int kMaxLayers = 1024;
constexpr int kMaxParts = 8;        // pieces a sequence's keys are split into
constexpr int kMaxSplitTokens = 16; // steps with more tokens have enough items without splitting
constexpr int kItemsPerMember = 4;  // enough for the members to finish together
constexpr int kKeyUnit = 128;
constexpr int kRowsPerItem = 12;    // queries times heads of a group
constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Arena::Arena(int64_t bytes) : bytes_(std::max<int64_t>((bytes + kHugePage - 1) / kHugePage * kHugePage, kHugePage)) {
  data_ = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, bytes_));
  if (!data_) throw std::bad_alloc();
#ifdef __linux__
  madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
}

Arena::~Arena() { std::free(data_); }

Program::Program(const Kernels& kernels, const TeamOptions& team, const ProgramShape& shape)
    : kernels_(kernels), shape_(shape), team_(team), next_item_(new std::atomic<int>[kMaxLayers]) {
  const AttentionShape& attention = shape.attention;
  const int64_t tokens = shape.max_tokens, rows = std::max(shape.max_tokens, shape.max_rows), inputs = shape.max_inputs;
  const int64_t heads = static_cast<int64_t>(attention.heads) * attention.head_dim;
  const int64_t qkv = heads + 2 * static_cast<int64_t>(attention.kv_heads) * attention.head_dim;
  scratch_bytes_ = scratch_bytes(shape.max_inputs, attention.head_dim);
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
  place(&partial_, kMaxParts * kMaxSplitTokens * heads);
  place(&states_, int64_t{2} * kMaxParts * kMaxSplitTokens * attention.heads);
  place(&activations_.codes, rows * inputs);
  place(&activations_.scales, rows * inputs / 16);
  place(&activations_.sums, rows * inputs / 16);
  place(&activations_.halves, rows * inputs);
  place(&activations_.floats, rows * inputs);
  place(&scratch_, scratch_bytes_ * team_.size());
  arena_ = std::make_unique<Arena>(offset);
  for (auto& [pointer, at] : places) *pointer = arena_->data() + at;
  const int64_t queries_per_item = std::max(1, kRowsPerItem * attention.kv_heads / std::max(1, attention.heads));
  items_.reserve((tokens / queries_per_item + tokens + 1) * attention.kv_heads + kMaxParts * kMaxSplitTokens * attention.kv_heads);
}

void Program::embed(const Matrix& table, float scale) {
  calls_.push_back([=, this](int member) { kernels_.embed(table, inputs_.ids, scale, shape_.hidden, tokens(member), x_); });
}

void Program::norm(const float* weight, float eps, const Matrix& next) {
  calls_.push_back([=, this](int member) {
    kernels_.norm(x_, weight, eps, shape_.hidden, nullptr, next, tokens(member), activations_);
  });
}

void Program::record_linear(const Matrix& matrix, Epilogue epilogue, float* out, int stride) {
  const int unit = epilogue == Epilogue::kSilu || epilogue == Epilogue::kGelu ? 2 : 1;
  calls_.push_back([=, this](int member) {
    const Share blocks = share(matrix.blocks(), unit, member, team_.size());
    kernels_.linear(matrix, activations_, inputs_.tokens, epilogue, blocks, out, stride, scratch_ + member * scratch_bytes_);
  });
}

void Program::qkv(const Matrix& matrix) { record_linear(matrix, Epilogue::kStore, qkv_, matrix.rows); }

void Program::attention(const LayerCache& cache, int window, const RopeTable& rope, const float* qk_norm, float eps,
                        const Matrix& next) {
  AttentionShape shape = shape_.attention;
  shape.window = window;
  const int layer = layers_++;
  const int width = shape.heads * shape.head_dim;
  calls_.push_back([=, this](int member) {
    kernels_.rope_write(qkv_, shape, qk_norm, eps, rope.cos, rope.sin, rope.pairs, inputs_.positions, inputs_.slots, cache,
                        tokens(member));
  });
  calls_.push_back([=, this](int member) { attend_all(layer, cache, shape, member); });
  calls_.push_back([=, this](int member) {
    if (parts_ > 1) {
      const int64_t stride = static_cast<int64_t>(inputs_.tokens) * width, states = static_cast<int64_t>(inputs_.tokens) * 2 * shape.heads;
      kernels_.merge(partial_, states_, parts_, stride, states, shape, tokens(member), attended_);
    }
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
  head_calls_.push_back([=, this](int member) {
    const Share rows = share(row_count_, 1, member, team_.size());
    kernels_.norm(x_, weight, eps, shape_.hidden, rows_, matrix, rows, activations_);
  });
  head_calls_.push_back([=, this](int member) {
    const Share blocks = share(matrix.blocks(), 1, member, team_.size());
    kernels_.linear(matrix, activations_, row_count_, Epilogue::kStore, blocks, logits_, matrix.rows,
                    scratch_ + member * scratch_bytes_);
    if (softcap <= 0) return;
    const int begin = blocks.begin * 16, end = std::min(blocks.end * 16, matrix.rows);
    for (int r = 0; r < row_count_; r++) {
      kernels_.softcap(logits_ + static_cast<int64_t>(r) * matrix.rows + begin, end - begin, softcap);
    }
  });
}

void Program::run(const StepInputs& inputs) {
  inputs_ = inputs;
  plan_attention();
  for (int layer = 0; layer < layers_; layer++) next_item_[layer].store(0, std::memory_order_relaxed);
  walked_ = &calls_;
  team_.run(walk, this);
}

void Program::logits(const int32_t* rows, int count, float* out) {
  rows_ = rows;
  row_count_ = count;
  logits_ = out;
  walked_ = &head_calls_;
  team_.run(walk, this);
}

void Program::walk(void* context, int member) {
  auto* program = static_cast<Program*>(context);
  for (const Call& call : *program->walked_) {
    call(member);
    program->team_.barrier();
  }
}

// Cut the step's attention into items: queries that share keys stay together; few long sequences are split along their keys.
void Program::plan_attention() {
  const Sequences& sequences = inputs_.sequences;
  const AttentionShape& shape = shape_.attention;
  const int queries_per_item = std::max(1, kRowsPerItem * shape.kv_heads / shape.heads);
  int pieces = 0, longest = 0;
  for (int s = 0; s < sequences.count; s++) {
    const int queries = sequences.first_row[s + 1] - sequences.first_row[s];
    pieces += (queries + queries_per_item - 1) / queries_per_item * shape.kv_heads;
    longest = std::max(longest, sequences.length[s]);
  }
  const int wanted = team_.size() > 1 ? (kItemsPerMember * team_.size() + pieces - 1) / std::max(1, pieces) : 1;
  const int units = (longest + kKeyUnit - 1) / kKeyUnit;
  parts_ = inputs_.tokens <= kMaxSplitTokens ? std::max(1, std::min({wanted, units, kMaxParts})) : 1;
  items_.clear();
  for (int s = 0; s < sequences.count; s++) {
    const int queries = sequences.first_row[s + 1] - sequences.first_row[s], length = sequences.length[s];
    const int part = (length + kKeyUnit * parts_ - 1) / (kKeyUnit * parts_) * kKeyUnit;
    for (int q = 0; q < queries; q += queries_per_item) {
      for (int head = 0; head < shape.kv_heads; head++) {
        for (int p = 0; p < parts_; p++) {
          const int begin = std::min(p * part, (length + 15) / 16 * 16), end = std::min((p + 1) * part, length);
          items_.push_back({s, head, q, std::min(q + queries_per_item, queries), begin, std::max(begin, end)});
        }
      }
    }
  }
}

void Program::attend_all(int layer, const LayerCache& cache, const AttentionShape& shape, int member) {
  const int64_t width = static_cast<int64_t>(shape.heads) * shape.head_dim;
  auto* scratch = reinterpret_cast<float*>(scratch_ + member * scratch_bytes_);
  for (;;) {
    const int n = next_item_[layer].fetch_add(1, std::memory_order_relaxed);
    if (n >= static_cast<int>(items_.size())) return;
    const AttentionItem& item = items_[n];
    if (parts_ == 1) {
      kernels_.attend(qkv_, shape, inputs_.sequences, cache, item, attended_, width, nullptr, 0, scratch);
      continue;
    }
    const int part = n % parts_;
    float* out = partial_ + part * static_cast<int64_t>(inputs_.tokens) * width;
    float* states = states_ + part * static_cast<int64_t>(inputs_.tokens) * 2 * shape.heads;
    kernels_.attend(qkv_, shape, inputs_.sequences, cache, item, out, width, states, 2 * shape.heads, scratch);
  }
}

}  // namespace triblade

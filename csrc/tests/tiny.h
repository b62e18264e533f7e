// Random matrices, caches and whole tiny programs for the drivers in this folder. Every buffer has its exact size, so that a sanitizer
// sees the first byte too many.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../program.h"

namespace triblade::tests {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  float normal() { return normal_(engine_); }
  int below(int end) { return static_cast<int>(engine_() % static_cast<unsigned>(end)); }
  std::vector<float> floats(int64_t count, float scale = 1) {
    std::vector<float> out(count);
    for (float& x : out) x = scale * normal();
    return out;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

// A packed matrix with what it points to.
struct OwnedMatrix {
  std::vector<uint8_t> weights;
  std::vector<uint16_t> scales, offsets;
  std::vector<float> bias;
  Matrix matrix;
};

inline std::unique_ptr<OwnedMatrix> random_matrix(Random& random, Format format, int rows, int inputs, int group, bool affine,
                                                  bool biased) {
  auto owned = std::make_unique<OwnedMatrix>();
  Matrix& m = owned->matrix;
  m.format = format, m.rows = rows, m.inputs = inputs;
  const bool integer = format == Format::kInt4 || format == Format::kInt8;
  m.group = integer ? group : 0;
  const int bits = format == Format::kInt4 ? 4 : format == Format::kInt8 ? 8 : format == Format::kBf16 ? 16 : 32;
  owned->weights.resize(static_cast<int64_t>(m.blocks()) * 16 * inputs * bits / 8);
  if (integer) {
    for (uint8_t& byte : owned->weights) byte = static_cast<uint8_t>(random.below(256));
    owned->scales.assign(static_cast<int64_t>(m.blocks()) * m.groups() * 16, 0x1c00);  // 2^-8
    if (affine) owned->offsets.assign(owned->scales.size(), 0x9c00);
  } else {
    for (size_t i = 0; i < owned->weights.size(); i += bits / 8) {
      const float value = 0.1f * random.normal();
      std::memcpy(owned->weights.data() + i, reinterpret_cast<const uint8_t*>(&value) + 4 - bits / 8, bits / 8);
    }
  }
  if (biased) owned->bias = random.floats(static_cast<int64_t>(m.blocks()) * 16);
  m.weights = owned->weights.data();
  m.scales = integer ? owned->scales.data() : nullptr;
  m.offsets = integer && affine ? owned->offsets.data() : nullptr;
  m.bias = biased ? owned->bias.data() : nullptr;
  return owned;
}

// Room for the inputs of a product.
struct OwnedActivations {
  std::vector<int8_t> codes;
  std::vector<float> scales, floats;
  std::vector<int32_t> sums;
  std::vector<uint16_t> halves;
  Activations view;

  OwnedActivations(int tokens, const Matrix& matrix)
      : codes(static_cast<int64_t>(tokens) * matrix.inputs),
        scales(static_cast<int64_t>(tokens) * matrix.groups()),
        floats(static_cast<int64_t>(tokens) * matrix.inputs),
        sums(static_cast<int64_t>(tokens) * matrix.groups()),
        halves(static_cast<int64_t>(tokens) * matrix.inputs),
        view{codes.data(), scales.data(), sums.data(), halves.data(), floats.data()} {}
};

// One layer's pool of blocks.
struct OwnedCache {
  std::vector<uint8_t> pool;
  LayerCache view;

  OwnedCache(Cache cache, int blocks, int block_size, int kv_heads, int head_dim) {
    const int64_t items = static_cast<int64_t>(block_size) * kv_heads;
    const int64_t plane = items * head_dim * (cache == Cache::kInt8 ? 1 : 2), scale_plane = cache == Cache::kInt8 ? items * 2 : 0;
    view.cache = cache, view.block_size = block_size, view.kv_heads = kv_heads, view.head_dim = head_dim;
    view.row_bytes = 2 * plane + 2 * scale_plane;
    view.values = plane, view.key_scales = 2 * plane, view.value_scales = 2 * plane + scale_plane;
    pool.resize(view.row_bytes * blocks);
    view.pool = pool.data();
  }
};

// A decoder of two layers with random weights.
class TinyModel {
 public:
  static constexpr int kHidden = 48, kIntermediate = 80, kVocabulary = 90, kHeads = 6, kKvHeads = 2, kDim = 16, kBlock = 16;
  static constexpr int kMaxTokens = 64, kContext = 640, kSequences = 3, kWidth = kContext / kBlock;

  TinyModel(const Kernels& kernels, Format format, Cache cache, int threads, int spin_us, bool post_norms)
      : random_(7), norm_(random_.floats(kIntermediate)), qk_norm_(random_.floats((kHeads + kKvHeads) * kDim)),
        cos_(random_.floats(kContext * kDim / 2, 0.7f)), sin_(random_.floats(kContext * kDim / 2, 0.7f)) {
    const ProgramShape shape{kMaxTokens, kMaxTokens, kHidden, kIntermediate, kVocabulary, kHeads * kDim,
                             {kHeads, kKvHeads, kDim, 0.25f, 0, 0}};
    program_ = std::make_unique<Program>(kernels, std::make_shared<Team>(TeamOptions{threads, spin_us, {}}), shape);
    const Matrix& table = add(format, kVocabulary, kHidden, false);
    program_->embed(table, 2.0f);
    for (int layer = 0; layer < 2; layer++) {
      caches_.push_back(std::make_unique<OwnedCache>(cache, kSequences * kWidth, kBlock, kKvHeads, kDim));
      const Matrix& qkv = add(format, (kHeads + 2 * kKvHeads) * kDim, kHidden, true);
      const Matrix& output = add(format, kHidden, kHeads * kDim, false);
      const Matrix& gate_up = add(format, 2 * kIntermediate, kHidden, true);
      const Matrix& down = add(format, kHidden, kIntermediate, false);
      const float* post = post_norms ? norm_.data() : nullptr;
      program_->norm(norm_.data(), 1e-5f, qkv);
      program_->qkv(qkv);
      program_->attention(caches_.back()->view, layer ? 20 : 0, {cos_.data(), sin_.data(), kDim / 2},
                          post_norms ? qk_norm_.data() : nullptr, 1e-5f, output);
      program_->project(output, post, 1e-5f);
      program_->norm(norm_.data(), 1e-5f, gate_up);
      program_->gate_up(gate_up, layer ? Epilogue::kGelu : Epilogue::kSilu, down);
      program_->project(down, post, 1e-5f);
    }
    program_->head(norm_.data(), 1e-5f, table, post_norms ? 30.0f : 0.0f);
  }

  // Advance every sequence by its count; logits of all rows.
  std::vector<float> step(const std::vector<int>& counts) {
    std::vector<int32_t> ids, rows{0}, lengths, index;
    std::vector<std::vector<int32_t>> blocks;
    std::vector<const int32_t*> tables;
    for (int s = 0; s < static_cast<int>(counts.size()); s++) {
      for (int n = 0; n < counts[s]; n++, done_[s]++) {
        ids.push_back((31 * done_[s] + 7 * s) % kVocabulary);
        index.push_back(static_cast<int32_t>(index.size()));
      }
      rows.push_back(static_cast<int32_t>(ids.size()));
      lengths.push_back(done_[s]);
      blocks.emplace_back();
      for (int b = 0; b < kWidth; b++) blocks.back().push_back(s * kWidth + b);
      tables.push_back(blocks.back().data());
    }
    const int tokens = static_cast<int>(ids.size());
    program_->run(ids.data(), {static_cast<int>(counts.size()), rows.data(), lengths.data(), tables.data()});
    std::vector<float> logits(static_cast<int64_t>(tokens) * kVocabulary);
    std::vector<int32_t> best(tokens);
    program_->score(index.data(), tokens, logits.data(), best.data());
    std::vector<int32_t> best_alone(tokens);
    program_->score(index.data(), tokens, nullptr, best_alone.data());
    require(best == best_alone, "the best token is the same without the logits");
    for (int t = 0; t < tokens; t++) {
      const float* row = logits.data() + static_cast<int64_t>(t) * kVocabulary;
      require(best[t] == std::max_element(row, row + kVocabulary) - row, "the best token has the largest logit");
    }
    choose(index, best);
    return logits;
  }

 private:
  // Each row its best token, a draw, or the best or a draw of every third token.
  void choose(const std::vector<int32_t>& rows, const std::vector<int32_t>& best) {
    std::vector<uint16_t> third((kVocabulary + 15) / 16);
    for (int token = 0; token < kVocabulary; token += 3) third[token / 16] |= 1 << token % 16;
    std::vector<Choice> choices(rows.size());
    for (size_t t = 0; t < rows.size(); t++) choices[t] = {0.37, t % 2 ? 1.5f : 0.0f, 0.0f, t % 4 < 2 ? nullptr : third.data()};
    std::vector<float> logits(rows.size() * kVocabulary);
    std::vector<int32_t> chosen(rows.size());
    program_->score(rows.data(), static_cast<int>(rows.size()), logits.data(), chosen.data(), choices.data());
    for (size_t t = 0; t < rows.size(); t++) {
      require(chosen[t] >= 0 && chosen[t] < kVocabulary, "a token was chosen");
      require(!choices[t].allowed || chosen[t] % 3 == 0, "what is barred is not chosen");
      require(t % 4 || chosen[t] == best[t], "without temperature and mask it is the best");
    }
  }

  const Matrix& add(Format format, int rows, int inputs, bool biased) {
    matrices_.push_back(random_matrix(random_, format, rows, inputs, 16, biased, biased));
    return matrices_.back()->matrix;
  }

  Random random_;
  std::vector<float> norm_, qk_norm_, cos_, sin_;
  std::vector<std::unique_ptr<OwnedMatrix>> matrices_;
  std::vector<std::unique_ptr<OwnedCache>> caches_;
  int done_[kSequences] = {};
  std::unique_ptr<Program> program_;
};

}  // namespace triblade::tests

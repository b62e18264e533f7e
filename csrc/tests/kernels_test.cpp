// Every kernel of every instruction set here, over odd shapes and exactly sized buffers. Meant to be run under a sanitizer: what is
// computed is checked by tests/contract, this only wants finite numbers.
#include <cmath>
#include <cstring>

#include "tiny.h"

namespace triblade::tests {
namespace {

void require_finite(const std::vector<float>& values, const char* what) {
  for (float x : values) require(std::isfinite(x), what);
}

void products(const Kernels& kernels) {
  Random random(1);
  for (Format format : {Format::kInt4, Format::kInt8, Format::kBf16, Format::kFp32}) {
    for (int inputs : {32, 96, 128}) {
      for (int variant = 0; variant < 4; variant++) {
        const int rows = variant % 2 ? 33 : 64;
        auto owned = random_matrix(random, format, rows, inputs, inputs == 128 ? 64 : 16, variant >= 2, variant % 2);
        std::vector<uint8_t> scratch(scratch_bytes(inputs, 16, 1));
        for (int tokens : {1, 2, 3, 7, 8, 9, 23, 24, 25}) {
          OwnedActivations x(tokens, owned->matrix);
          const auto source = random.floats(static_cast<int64_t>(tokens) * inputs), weight = random.floats(inputs);
          kernels.quantize(source.data(), inputs, owned->matrix, {0, tokens}, x.view);
          kernels.norm(source.data(), weight.data(), 1e-5f, inputs, nullptr, owned->matrix, {0, tokens}, x.view);
          for (Epilogue epilogue : {Epilogue::kStore, Epilogue::kAdd, Epilogue::kSilu, Epilogue::kGelu}) {
            const bool gated = epilogue == Epilogue::kSilu || epilogue == Epilogue::kGelu;
            if (gated && rows % 32) continue;
            const int width = gated ? rows / 2 : rows;
            std::vector<float> y(static_cast<int64_t>(tokens) * width);
            kernels.linear(owned->matrix, x.view, tokens, epilogue, {0, owned->matrix.blocks()}, y.data(), width, scratch.data());
            require_finite(y, "linear");
          }
        }
        const int32_t ids[] = {0, rows - 1, 16};
        std::vector<float> embedded(3 * static_cast<size_t>(inputs));
        kernels.embed(owned->matrix, ids, 1.5f, inputs, {0, 3}, embedded.data());
        require_finite(embedded, "embed");
      }
    }
  }
}

void rows_of_any_width(const Kernels& kernels) {
  Random random(2);
  for (int columns : {1, 15, 16, 17, 40}) {
    auto x = random.floats(3 * columns), residual = random.floats(3 * columns);
    const auto weight = random.floats(columns);
    kernels.norm_add(x.data(), weight.data(), 1e-5f, columns, {0, 3}, residual.data());
    kernels.softcap(x.data(), 3 * columns, 30.0f);
    require_finite(residual, "norm_add");
    require_finite(x, "softcap");
  }
}

void attention(const Kernels& kernels, Cache kind, int heads, int kv_heads, int dim, int window) {
  Random random(3);
  const AttentionShape shape{heads, kv_heads, dim, 0.2f, window ? 20.0f : 0.0f, window};
  const int width = (heads + 2 * kv_heads) * dim, length = 300, blocks = (length + 31) / 32, pairs = dim / 4;
  OwnedCache cache(kind, blocks, 32, kv_heads, dim);
  auto qkv = random.floats(static_cast<int64_t>(length) * width);
  const auto norm = random.floats((heads + kv_heads) * dim), cos = random.floats(length * pairs), sin = random.floats(length * pairs);
  std::vector<int32_t> positions, table;
  for (int t = 0; t < length; t++) positions.push_back(t);
  for (int b = 0; b < blocks; b++) table.push_back(b);
  kernels.rope_write(qkv.data(), shape, norm.data(), 1e-5f, cos.data(), sin.data(), pairs, positions.data(), positions.data(),
                     cache.view, {0, length});
  const int32_t first_row[] = {0, length}, lengths[] = {length};
  const int32_t* tables[] = {table.data()};
  const Sequences sequences{1, first_row, lengths, tables};
  const int pieces = (length + kPieceKeys - 1) / kPieceKeys;
  const int64_t row = static_cast<int64_t>(length) * heads;
  std::vector<float> out(row * dim), merged(row * dim), partial(pieces * row * dim), states(pieces * row * 2);
  std::vector<uint8_t> scratch(scratch_bytes(16, dim, kv_heads));
  for (int head = 0; head < kv_heads; head++) {
    for (int q = 0; q < length; q += 5) {
      AttentionItem item{0, head, head + 1, q, std::min(q + 5, length), 0, pieces};
      kernels.fetch(shape, sequences, cache.view, item);
      kernels.attend(qkv.data(), shape, sequences, cache.view, item, &item, {out.data(), nullptr, 0, 0}, scratch.data());
      for (int piece = 0; piece < pieces; piece++) {
        item.piece_begin = piece, item.piece_end = piece + 1;
        kernels.attend(qkv.data(), shape, sequences, cache.view, item, nullptr, {partial.data(), states.data(), row * dim, row * 2}, scratch.data());
      }
    }
  }
  kernels.merge({partial.data(), states.data(), row * dim, row * 2}, pieces, shape, {0, length}, merged.data());
  require_finite(out, "attend");
  require(std::memcmp(out.data(), merged.data(), out.size() * sizeof(float)) == 0, "pieces join to the whole");
}

void programs(const Kernels& kernels) {
  for (Format format : {Format::kInt4, Format::kInt8, Format::kBf16, Format::kFp32}) {
    const Cache cache = format == Format::kInt8 || format == Format::kFp32 ? Cache::kInt8 : Cache::kBf16;
    TinyModel model(kernels, format, cache, 2, 50, format == Format::kInt4);
    for (const auto& counts : std::vector<std::vector<int>>{{5, 40, 17}, {1, 1, 1}, {64, 0, 0}, {1, 7, 1}, {3}}) {
      require_finite(model.step(counts), "program");
    }
    for (int n = 0; n < 5; n++) model.step({64});
    require_finite(model.step({1, 1}), "program with a long context");
  }
}

}  // namespace
}  // namespace triblade::tests

int main() {
  using namespace triblade;
  using namespace triblade::tests;
  for (int rank = 0; const Kernels* kernels = kernels_at(rank); rank++) {
    products(*kernels);
    rows_of_any_width(*kernels);
    for (Cache cache : {Cache::kBf16, Cache::kInt8}) {
      attention(*kernels, cache, 4, 4, 16, 0);
      attention(*kernels, cache, 9, 3, 80, 33);
      attention(*kernels, cache, 13, 1, 32, 0);
    }
    programs(*kernels);
    std::printf("kernels: %s ok\n", kernels->name);
  }
  return 0;
}

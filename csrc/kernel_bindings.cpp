// Single kernels for Python, one call each, without a program: what the contract tests drive. Addresses in, nothing owned.
#include "kernel_bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace triblade {
namespace {

template <class T> T* at(uintptr_t value) { return reinterpret_cast<T*>(value); }

void norm(const Kernels& k, uintptr_t x, uintptr_t weight, float eps, int columns, uintptr_t gather, const Matrix& matrix, int tokens,
          const Activations& out) {
  k.norm(at<float>(x), at<float>(weight), eps, columns, at<int32_t>(gather), matrix, {0, tokens}, out);
}

// Memory for a kernel, aligned as the program's is.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(bytes + 64) {}
  uint8_t* data() { return bytes_.data() + 63 - (reinterpret_cast<uintptr_t>(bytes_.data()) + 63) % 64; }

 private:
  std::vector<uint8_t> bytes_;
};

void linear(const Kernels& k, const Matrix& matrix, const Activations& x, int tokens, int epilogue, std::pair<int, int> blocks,
            uintptr_t y, int stride) {
  Scratch scratch(scratch_bytes(matrix.inputs, 16, 1));
  k.linear(matrix, x, tokens, static_cast<Epilogue>(epilogue), {blocks.first, blocks.second}, at<float>(y), stride, scratch.data());
}

void rope_write(const Kernels& k, uintptr_t qkv, const AttentionShape& shape, uintptr_t weights, float eps, const RopeTable& rope,
                uintptr_t positions, uintptr_t slots, const LayerCache& cache, int tokens) {
  k.rope_write(at<float>(qkv), shape, at<float>(weights), eps, rope.cos, rope.sin, rope.pairs, at<int32_t>(positions),
               at<int32_t>(slots), cache, {0, tokens});
}

// Where T tokens' attention goes: piece after piece if there are states.
AttentionOutput output_at(uintptr_t out, uintptr_t states, const AttentionShape& shape, int tokens) {
  const int64_t rows = static_cast<int64_t>(tokens) * shape.heads;
  return {at<float>(out), at<float>(states), rows * shape.head_dim, rows * 2};
}

// `item` is the sequence and the ranges of KV heads, queries and pieces.
void attend(const Kernels& k, uintptr_t qkv, const AttentionShape& shape, const Sequences& sequences, const LayerCache& cache,
            std::vector<int> item, uintptr_t out, uintptr_t states) {
  const int tokens = sequences.first_row[sequences.count];
  Scratch scratch(scratch_bytes(16, shape.head_dim, shape.kv_heads));
  const AttentionItem only{item.at(0), item.at(1), item.at(2), item.at(3), item.at(4), item.at(5), item.at(6)};
  k.attend(at<float>(qkv), shape, sequences, cache, only, nullptr, output_at(out, states, shape, tokens), scratch.data());
}

void merge(const Kernels& k, uintptr_t partial, uintptr_t states, int pieces, const AttentionShape& shape, int tokens, uintptr_t out) {
  k.merge(output_at(partial, states, shape, tokens), pieces, shape, {0, tokens}, at<float>(out));
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<Activations>(m, "Activations")
      .def("__init__", [](Activations* self, uintptr_t codes, uintptr_t scales, uintptr_t sums, uintptr_t halves, uintptr_t floats) {
        new (self) Activations{at<int8_t>(codes), at<float>(scales), at<int32_t>(sums), at<uint16_t>(halves), at<float>(floats)};
      });
  nb::class_<AttentionShape>(m, "AttentionShape")
      .def("__init__", [](AttentionShape* self, int heads, int kv_heads, int head_dim, float scale, float softcap, int window) {
        new (self) AttentionShape{heads, kv_heads, head_dim, scale, softcap, window};
      });
  nb::class_<Sequences>(m, "Sequences")
      .def("__init__", [](Sequences* self, int count, uintptr_t first_row, uintptr_t length, uintptr_t tables) {
        new (self) Sequences{count, at<int32_t>(first_row), at<int32_t>(length), at<const int32_t*>(tables)};
      });
  nb::class_<Kernels>(m, "Kernels")
      .def_prop_ro("name", [](const Kernels& k) { return std::string(k.name); })
      .def("embed",
           [](const Kernels& k, const Matrix& table, uintptr_t ids, float scale, int columns, int tokens, uintptr_t out) {
             k.embed(table, at<int32_t>(ids), scale, columns, {0, tokens}, at<float>(out));
           })
      .def("norm", norm)
      .def("quantize",
           [](const Kernels& k, uintptr_t x, int columns, const Matrix& matrix, int tokens, const Activations& out) {
             k.quantize(at<float>(x), columns, matrix, {0, tokens}, out);
           })
      .def("linear", linear)
      .def("norm_add",
           [](const Kernels& k, uintptr_t x, uintptr_t weight, float eps, int columns, int tokens, uintptr_t residual) {
             k.norm_add(at<float>(x), at<float>(weight), eps, columns, {0, tokens}, at<float>(residual));
           })
      .def("rope_write", rope_write)
      .def("attend", attend)
      .def("merge", merge)
      .def("softcap", [](const Kernels& k, uintptr_t x, int64_t count, float cap) { k.softcap(at<float>(x), count, cap); })
      .def("find_best", [](const Kernels& k, uintptr_t x, int count, int part) {  // `part` at a time
        Best best;
        for (int i = 0; i < count; i += part) k.find_best(at<float>(x) + i, std::min(part, count - i), i, best);
        return best.is_finite ? best.token : -1;
      })
      .def("bar", [](const Kernels& k, uintptr_t x, int count, uintptr_t allowed) { k.bar(at<float>(x), count, at<uint16_t>(allowed)); })
      .def("weigh", [](const Kernels& k, uintptr_t x, int count, float top, float temperature, float least, uintptr_t out) {
        return k.weigh(at<float>(x), count, top, temperature, least, at<float>(out));
      });
  m.attr("PIECE_KEYS") = kPieceKeys;
  m.def("kernels", [](const std::string& isa) { return kernels_for(isa.c_str()); }, "isa"_a, nb::rv_policy::reference,
        "The kernels of one instruction set; None if this processor does not run it.");
}

}  // namespace triblade

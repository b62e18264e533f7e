// The Python module triblade._native: addresses in, nothing owned but the program's own buffers, the GIL released while it runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/string.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "kernel_bindings.h"
#include "program.h"
#include "state_memory.h"
#include "suffix_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace triblade;

namespace {

template <class T> const T* address(uintptr_t value) { return reinterpret_cast<const T*>(value); }

const Kernels& kernels_or_throw(const std::string& isa) {
  const Kernels* kernels = kernels_for(isa.c_str());
  if (!kernels) throw std::invalid_argument("this processor does not run the instruction set: " + isa);
  return *kernels;
}

Matrix make_matrix(int format, int rows, int inputs, int group, uintptr_t weights, uintptr_t scales, uintptr_t offsets, uintptr_t bias) {
  Matrix matrix;
  matrix.format = static_cast<Format>(format);
  matrix.rows = rows, matrix.inputs = inputs, matrix.group = group;
  matrix.weights = address<uint8_t>(weights);
  matrix.scales = address<uint16_t>(scales);
  matrix.offsets = address<uint16_t>(offsets);
  matrix.bias = address<float>(bias);
  return matrix;
}

// Guesses of each sequence, see Program::draft.
std::vector<std::vector<int32_t>> draft(Program& program, StateMemory& memory, const std::vector<int64_t>& requests,
                                        const std::vector<std::vector<int32_t>>& token_ids, const std::vector<int32_t>& starts,
                                        const std::vector<uintptr_t>& tables, const std::vector<int32_t>& lengths, uintptr_t tokens,
                                        float least_chance) {
  nb::gil_scoped_release release;
  const int count = static_cast<int>(requests.size()), width = *std::max_element(lengths.begin(), lengths.end());
  std::vector<int32_t> ids, first_rows{0}, ends, out(static_cast<size_t>(count) * width);
  for (int s = 0; s < count; s++) {
    ids.insert(ids.end(), token_ids.at(s).begin(), token_ids.at(s).end());
    first_rows.push_back(static_cast<int32_t>(ids.size()));
    ends.push_back(starts.at(s) + static_cast<int32_t>(token_ids[s].size()));
  }
  const Sequences sequences{count, first_rows.data(), ends.data(), address<const int32_t*>(reinterpret_cast<uintptr_t>(tables.data()))};
  program.draft(ids.data(), memory, requests.data(), sequences, {lengths.data(), address<int32_t>(tokens), width, least_chance}, out.data());
  std::vector<std::vector<int32_t>> guesses;
  for (int s = 0; s < count; s++) {
    const auto begin = out.begin() + s * width;
    guesses.emplace_back(begin, std::find(begin, begin + lengths.at(s), -1));
  }
  return guesses;
}

void release_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels and the step program; see triblade.ops.native.";

  m.def("isa", [](const std::string& wanted) { return std::string(kernels_or_throw(wanted).name); }, "wanted"_a = "",
        "The name of the best instruction set here, or `wanted` if this processor runs it.");
  m.def("isas", [] {
    std::vector<std::string> names;
    for (int rank = 0; const Kernels* kernels = kernels_at(rank); rank++) names.emplace_back(kernels->name);
    return names;
  }, "The instruction sets that this processor runs, best first.");

  m.def("advise_huge_pages", [](uintptr_t start, int64_t bytes) { advise_huge_pages(reinterpret_cast<void*>(start), bytes); },
        "Ask for huge pages under memory that is not touched yet; a wish, not a promise.");

  m.def("release_memory", release_memory, "Give memory that was freed back to the system, where the allocator kept it.");

  nb::class_<Matrix>(m, "Matrix").def_ro("rows", &Matrix::rows).def_ro("inputs", &Matrix::inputs);
  m.def("matrix", make_matrix, "format"_a, "rows"_a, "inputs"_a, "group"_a, "weights"_a, "scales"_a, "offsets"_a, "bias"_a);

  nb::class_<LayerCache>(m, "LayerCache")
      .def("__init__",
           [](LayerCache* self, uintptr_t pool, int64_t row_bytes, std::vector<int64_t> planes, int cache, int block_size, int kv_heads,
              int head_dim) {
             new (self) LayerCache();
             self->pool = reinterpret_cast<uint8_t*>(pool);
             self->row_bytes = row_bytes;
             self->keys = planes.at(0), self->values = planes.at(1);
             self->key_scales = planes.at(2), self->value_scales = planes.at(3);
             self->cache = static_cast<Cache>(cache);
             self->block_size = block_size, self->kv_heads = kv_heads, self->head_dim = head_dim;
           },
           "pool"_a, "row_bytes"_a, "planes"_a, "cache"_a, "block_size"_a, "kv_heads"_a, "head_dim"_a);

  nb::class_<RopeTable>(m, "RopeTable").def("__init__", [](RopeTable* self, uintptr_t cos, uintptr_t sin, int pairs) {
    new (self) RopeTable{address<float>(cos), address<float>(sin), pairs};
  });

  nb::class_<Team>(m, "Team")
      .def("__init__",
           [](Team* self, int threads, int spin_us, std::vector<int> cores) {
             new (self) Team(TeamOptions{threads, spin_us, std::move(cores)});
           },
           nb::kw_only(), "threads"_a, "spin_us"_a, "cores"_a)
      .def_prop_ro("size", &Team::size);

  nb::class_<StateMemory>(m, "StateMemory")
      .def(nb::init<int, int64_t>(), nb::kw_only(), "width"_a, "window"_a)
      .def("extend", [](StateMemory& self, int64_t request, int64_t start, int64_t count, uintptr_t states) {
        std::copy_n(address<float>(states), count * self.width(), self.extend(request, start, count));
      }, "request"_a, "start"_a, "count"_a, "states"_a)
      .def("first", &StateMemory::first, "request"_a)
      .def("take", [](StateMemory& self, int64_t request, int64_t start, int64_t count, uintptr_t out) {
        self.take(request, start, count, reinterpret_cast<float*>(out));
      }, "request"_a, "start"_a, "count"_a, "out"_a)
      .def("forget", &StateMemory::forget, "request"_a)
      .def_prop_ro("num_requests", &StateMemory::num_requests);

  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, const std::string& isa, std::shared_ptr<Team> team, int max_tokens, int max_rows, int hidden, int intermediate,
              int vocabulary, int max_inputs, int heads, int kv_heads, int head_dim, float scale, float softcap) {
             ProgramShape shape{max_tokens, max_rows,   hidden,
                                intermediate, vocabulary, max_inputs,
                                {heads, kv_heads, head_dim, scale, softcap, 0}};
             new (self) Program(kernels_or_throw(isa), std::move(team), shape);
           },
           nb::kw_only(), "isa"_a, "team"_a, "max_tokens"_a, "max_rows"_a, "hidden"_a, "intermediate"_a, "vocabulary"_a, "max_inputs"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "softcap"_a)
      .def("embed", &Program::embed)
      .def("fuse", [](Program& p, const Matrix& matrix, uintptr_t norms, int inner, float eps) { p.fuse(matrix, address<float>(norms), inner, eps); })
      .def("end_layer", &Program::end_layer)
      .def("keep", &Program::keep)
      .def("norm", [](Program& p, uintptr_t weight, float eps, const Matrix& next) { p.norm(address<float>(weight), eps, next); })
      .def("qkv", &Program::qkv)
      .def("attention",
           [](Program& p, const LayerCache& cache, int window, const RopeTable& rope, uintptr_t qk_norm, float eps, const Matrix& next) {
             p.attention(cache, window, rope, address<float>(qk_norm), eps, next);
           })
      .def("project", [](Program& p, const Matrix& matrix, uintptr_t post_norm, float eps) { p.project(matrix, address<float>(post_norm), eps); })
      .def("gate_up", [](Program& p, const Matrix& matrix, int activation, const Matrix& next) {
        p.gate_up(matrix, static_cast<Epilogue>(activation), next);
      })
      .def("head", [](Program& p, uintptr_t weight, float eps, const Matrix& matrix, float softcap) {
        p.head(address<float>(weight), eps, matrix, softcap);
      })
      .def("run",
           [](Program& p, uintptr_t ids, int sequences, uintptr_t first_row, uintptr_t length, uintptr_t tables) {
             const Sequences view{sequences, address<int32_t>(first_row), address<int32_t>(length), address<const int32_t*>(tables)};
             nb::gil_scoped_release release;
             p.run(address<int32_t>(ids), view);
           },
           "ids"_a, "sequences"_a, "first_row"_a, "length"_a, "tables"_a)
      .def("score",
           [](Program& p, uintptr_t rows, int count, uintptr_t out, uintptr_t best, nb::bytes choices) {
             const auto* chosen = choices.size() ? static_cast<const Choice*>(choices.data()) : nullptr;
             if (chosen && choices.size() != count * sizeof(Choice)) throw nb::value_error("choices");
             nb::gil_scoped_release release;
             p.score(address<int32_t>(rows), count, reinterpret_cast<float*>(out), reinterpret_cast<int32_t*>(best), chosen);
           },
           "rows"_a, "count"_a, "out"_a, "best"_a, "choices"_a = nb::bytes("", 0))
      .def("states",
           [](Program& p, uintptr_t rows, int count, uintptr_t out) {
             nb::gil_scoped_release release;
             p.states(address<int32_t>(rows), count, reinterpret_cast<float*>(out));
           },
           "rows"_a, "count"_a, "out"_a)
      .def("draft", draft, "memory"_a, "requests"_a, "token_ids"_a, "starts"_a, "tables"_a, "lengths"_a, "tokens"_a,
           "least_chance"_a)
      .def("remember",
           [](Program& p, StateMemory& memory, const std::vector<std::array<int64_t, 4>>& computed) {
             std::vector<int64_t> firsts;
             for (const auto& [request, first_row, start, stop] : computed) {
               p.remember(memory, {request, first_row, start, stop});
               firsts.push_back(memory.first(request));
             }
             return firsts;
           },
           "memory"_a, "computed"_a)
      .def_prop_ro("buffer_bytes", &Program::buffer_bytes);

  bind_kernels(m);
  bind_suffix_index(m);
}

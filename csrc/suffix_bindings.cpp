// SuffixIndex for Python, with the options of triblade.spec.suffix_index. Texts are lists of token ids, copied in.
#include "suffix_bindings.h"

#include <nanobind/stl/vector.h>

#include "suffix_index.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace triblade {
namespace {

SuffixOptions read_options(nb::handle options) {
  const auto number = [&](const char* name) { return nb::cast<int64_t>(options.attr(name)); };
  const auto real = [&](const char* name) { return nb::cast<double>(options.attr(name)); };
  const auto source = [&](const char* minimum, const char* doubt) {
    return SuffixOptions::Source{static_cast<int>(number(minimum)), real(doubt)};
  };
  return {number("shared_capacity_tokens"),
          static_cast<int>(number("longest_match")),
          static_cast<int>(number("max_candidates")),
          source("own_minimum_match", "own_doubt"),
          source("shared_minimum_match", "shared_doubt")};
}

}  // namespace

void bind_suffix_index(nb::module_& m) {
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def("__init__", [](SuffixIndex* self, nb::handle options) { new (self) SuffixIndex(read_options(options)); }, "options"_a)
      .def("propose", &SuffixIndex::propose, "request"_a, "tokens"_a, "length"_a, "least"_a)
      .def("share", &SuffixIndex::share, "tokens"_a)
      .def("drop", &SuffixIndex::drop, "request"_a)
      .def_prop_ro("num_requests", &SuffixIndex::num_requests)
      .def_prop_ro("num_shared_tokens", &SuffixIndex::num_shared_tokens);
}

}  // namespace triblade

// See suffix_bindings.cpp.
#pragma once
#include <nanobind/nanobind.h>

namespace triblade {

void bind_suffix_index(nanobind::module_& m);

}  // namespace triblade

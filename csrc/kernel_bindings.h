// See kernel_bindings.cpp.
#pragma once
#include <nanobind/nanobind.h>

namespace triblade {

void bind_kernels(nanobind::module_& m);

}  // namespace triblade

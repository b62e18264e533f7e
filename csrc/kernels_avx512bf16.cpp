#include "simd/avx512.h"

#define KERNELS kAvx512Bf16
#define KERNELS_NAME "avx512-bf16"
#include "kernels.inl"

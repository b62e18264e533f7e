#include "simd/avx512.h"

#define KERNELS kAvx512
#define KERNELS_NAME "avx512-vnni"
#include "kernels.inl"

#include "simd/avx2.h"

#define KERNELS kAvx2
#define KERNELS_NAME "avx2"
#include "kernels.inl"

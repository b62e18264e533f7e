#include "simd/avx2.h"

#define KERNELS kAvx2Vnni
#define KERNELS_NAME "avx2-vnni"
#include "kernels.inl"

#include "simd/portable.h"

#define KERNELS kPortable
#define KERNELS_NAME "portable"
#include "kernels.inl"

// Sixteen lanes on AVX-512 (F, BW, DQ, VL, VNNI; BF16 where the compiler is told so). See portable.h for what each function means.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {  // internal linkage: every instruction set compiles its own copy
namespace simd {

using F = __m512;   // 16 floats
using I = __m512i;  // 16 int32
using B = __m512i;  // 64 bytes: 16 lanes of 4

inline F zero() { return _mm512_setzero_ps(); }
inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F zero_below(F value, F x, float limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(limit), _CMP_GE_OQ), value); }
inline float sum(F a) { return _mm512_reduce_add_ps(a); }
inline float highest(F a) { return _mm512_reduce_max_ps(a); }
inline F scale_by_power_of_2(F a, F n) { return _mm512_scalef_ps(a, n); }

inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

inline I set_int(int32_t x) { return _mm512_set1_epi32(x); }
inline I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_int(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline void store_int8(int8_t* p, F rounded) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(rounded)));
}

inline void store_uint8(uint8_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline B load_bytes(const void* p) { return _mm512_loadu_si512(p); }
// By hand: GCC may take a loop of nothing but _mm_prefetch for an empty one and drop it.
inline void prefetch(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }
inline void prefetch_to_write(void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<char*>(p))); }
inline B low_nibbles(B a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline B high_nibbles(B a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
inline B flip_signs(B a) { return _mm512_xor_si512(a, _mm512_set1_epi8(static_cast<char>(0x80))); }
inline void store_bytes(void* p, B a) { _mm512_storeu_si512(p, a); }
// Four bytes for all lanes, read by the instruction that uses them: a detour through a register costs as much as the product.
typedef int32_t __attribute__((may_alias, aligned(1))) UnalignedInt;
inline I broadcast(const void* four_bytes) { return _mm512_set1_epi32(*static_cast<const UnalignedInt*>(four_bytes)); }
inline I dot(I sum, B unsigned_bytes, const int8_t* signed_4) { return _mm512_dpbusd_epi32(sum, unsigned_bytes, broadcast(signed_4)); }
inline I dot_signed(I sum, const uint8_t* unsigned_4, B signed_bytes) {
  return _mm512_dpbusd_epi32(sum, broadcast(unsigned_4), signed_bytes);
}

inline F dot_bf16(F sum, B pairs, const uint16_t* pair) {
  const I x = broadcast(pair);
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pairs), reinterpret_cast<__m512bh>(x));
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const F even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
  const F x_even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), x_odd = _mm512_castsi512_ps(_mm512_and_si512(x, high));
  return fma(odd, x_odd, fma(even, x_even, sum));
#endif
}

}  // namespace simd
}  // namespace

// Sixteen lanes as two halves on AVX2 with FMA and F16C, and VNNI where the compiler is told so. See portable.h for the meaning.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {  // internal linkage: every instruction set compiles its own copy
namespace simd {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
using B = I;

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F round(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F zero_below(F value, F x, float limit) {
  const __m256 least = _mm256_set1_ps(limit);
  return {_mm256_and_ps(value.a, _mm256_cmp_ps(x.a, least, _CMP_GE_OQ)), _mm256_and_ps(value.b, _mm256_cmp_ps(x.b, least, _CMP_GE_OQ))};
}
inline float sum(F x) {
  __m256 both = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float highest(F x) {
  __m256 both = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __m256 scale_half(__m256 x, __m256 n) {  // n is within the exponents of normal numbers
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline F scale_by_power_of_2(F x, F n) { return {scale_half(x.a, n.a), scale_half(x.b, n.b)}; }

inline F load_half(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline F load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }

inline I set_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I load_int(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store_int(int32_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a), _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline void store_int8(int8_t* p, F rounded) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(rounded.a), _mm256_cvtps_epi32(rounded.b));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline void store_uint8(uint8_t* p, F x) {
  const __m256i words = _mm256_packus_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline B load_bytes(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_bytes(void* p, B x) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a), _mm256_storeu_si256(q + 1, x.b);
}
// By hand: see avx512.h.
inline void prefetch(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }
inline void prefetch_to_write(void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<char*>(p))); }
inline B low_nibbles(B x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline B high_nibbles(B x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
inline B flip_signs(B x) {
  const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
  return {_mm256_xor_si256(x.a, top), _mm256_xor_si256(x.b, top)};
}
inline __m256i dot_half(__m256i sum, __m256i u, __m256i s) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, u, s);
#else
  // maddubs saturates at 16 bits for large unsigned bytes, so even and odd bytes are widened and multiplied apart.
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#endif
}
typedef int32_t __attribute__((may_alias, aligned(1))) UnalignedInt;
inline __m256i broadcast(const void* four_bytes) { return _mm256_set1_epi32(*static_cast<const UnalignedInt*>(four_bytes)); }
inline I dot(I sum, B unsigned_bytes, const int8_t* signed_4) {
  const __m256i x = broadcast(signed_4);
  return {dot_half(sum.a, unsigned_bytes.a, x), dot_half(sum.b, unsigned_bytes.b, x)};
}
inline I dot_signed(I sum, const uint8_t* unsigned_4, B signed_bytes) {
  const __m256i x = broadcast(unsigned_4);
  return {dot_half(sum.a, x, signed_bytes.a), dot_half(sum.b, x, signed_bytes.b)};
}

inline __m256 dot_bf16_half(__m256 sum, __m256i pairs, __m256i x) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
  const __m256 x_even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  const __m256 x_odd = _mm256_castsi256_ps(_mm256_and_si256(x, high));
  return _mm256_fmadd_ps(odd, x_odd, _mm256_fmadd_ps(even, x_even, sum));
}
inline F dot_bf16(F sum, B pairs, const uint16_t* pair) {
  const __m256i x = broadcast(pair);
  return {dot_bf16_half(sum.a, pairs.a, x), dot_bf16_half(sum.b, pairs.b, x)};
}

}  // namespace simd
}  // namespace

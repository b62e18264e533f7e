// Sixteen lanes in plain C++: what every vector function means, and the path for any other processor.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {  // internal linkage: every instruction set compiles its own copy
namespace simd {

constexpr int kLanes = 16;
struct F { float v[kLanes]; };
struct I { int32_t v[kLanes]; };
struct B { uint8_t v[4 * kLanes]; };  // lane i owns bytes 4 i .. 4 i + 3

template <class Function> inline F each(Function f) {
  F out;
  for (int i = 0; i < kLanes; i++) out.v[i] = f(i);
  return out;
}
inline F zero() { return each([](int) { return 0.0f; }); }
inline F set(float x) { return each([=](int) { return x; }); }
inline F load(const float* p) { return each([=](int i) { return p[i]; }); }
inline void store(float* p, const F& x) { std::memcpy(p, x.v, sizeof x.v); }
inline F add(const F& a, const F& b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline F sub(const F& a, const F& b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline F mul(const F& a, const F& b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline F div(const F& a, const F& b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(const F& a, const F& b, const F& c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F max(const F& a, const F& b) { return each([&](int i) { return std::max(a.v[i], b.v[i]); }); }
inline F min(const F& a, const F& b) { return each([&](int i) { return std::min(a.v[i], b.v[i]); }); }
inline F abs(const F& a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
inline F round(const F& a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
inline F scale_by_power_of_2(const F& a, const F& n) {
  return each([&](int i) { return std::ldexp(a.v[i], static_cast<int>(n.v[i])); });
}
// value where x >= limit, 0 elsewhere.
inline F zero_below(const F& value, const F& x, float limit) { return each([&](int i) { return x.v[i] >= limit ? value.v[i] : 0.0f; }); }
inline float sum(const F& a) {
  float total = 0;
  for (float x : a.v) total += x;
  return total;
}
inline float highest(const F& a) { return *std::max_element(a.v, a.v + kLanes); }

inline float half_to_float(uint16_t h) {
  const uint32_t exponent = (h >> 10) & 31, fraction = h & 1023;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                        : std::ldexp(static_cast<float>(fraction | 1024), static_cast<int>(exponent) - 25);
  return h & 0x8000 ? -magnitude : magnitude;  // scales are finite
}
inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline F load_half(const uint16_t* p) { return each([=](int i) { return half_to_float(p[i]); }); }
inline F load_bf16(const uint16_t* p) { return each([=](int i) { return bits_to_float(static_cast<uint32_t>(p[i]) << 16); }); }

inline I set_int(int32_t x) {
  I out;
  for (int32_t& lane : out.v) lane = x;
  return out;
}
inline I load_int(const int32_t* p) {
  I out;
  for (int i = 0; i < kLanes; i++) out.v[i] = p[i];
  return out;
}
inline void store_int(int32_t* p, const I& x) {
  for (int i = 0; i < kLanes; i++) p[i] = x.v[i];
}
inline F to_float(const I& a) { return each([&](int i) { return static_cast<float>(a.v[i]); }); }
inline void store_int8(int8_t* p, const F& rounded) {
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(std::clamp(rounded.v[i], -128.0f, 127.0f));
}

// Rounds to the nearest, ties to even.
inline void store_uint8(uint8_t* p, const F& x) {
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<uint8_t>(std::clamp(std::nearbyint(x.v[i]), 0.0f, 255.0f));
}

inline B load_bytes(const void* p) {
  B out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
inline void store_bytes(void* p, const B& a) { std::memcpy(p, a.v, sizeof a.v); }
template <class Function> inline B each_byte(const B& a, Function f) {
  B out;
  for (int i = 0; i < 4 * kLanes; i++) out.v[i] = static_cast<uint8_t>(f(a.v[i]));
  return out;
}
inline void prefetch(const void*) {}
inline void prefetch_to_write(void*) {}
inline B low_nibbles(const B& a) { return each_byte(a, [](uint8_t x) { return x & 15; }); }
inline B high_nibbles(const B& a) { return each_byte(a, [](uint8_t x) { return x >> 4; }); }
inline B flip_signs(const B& a) { return each_byte(a, [](uint8_t x) { return x ^ 0x80; }); }
// sum + the dot product of each lane's four unsigned bytes with four signed ones, exact in 32 bits.
inline I dot(I sum, const B& unsigned_bytes, const int8_t* signed_4) {
  for (int i = 0; i < 4 * kLanes; i++) sum.v[i / 4] += unsigned_bytes.v[i] * signed_4[i % 4];
  return sum;
}
// The same with the signs the other way round.
inline I dot_signed(I sum, const uint8_t* unsigned_4, const B& signed_bytes) {
  for (int i = 0; i < 4 * kLanes; i++) sum.v[i / 4] += unsigned_4[i % 4] * static_cast<int8_t>(signed_bytes.v[i]);
  return sum;
}
// sum + the dot product of each lane's pair of bfloat16 with one pair.
inline F dot_bf16(const F& sum, const B& pairs, const uint16_t* pair) {
  const float even = bits_to_float(static_cast<uint32_t>(pair[0]) << 16), odd = bits_to_float(static_cast<uint32_t>(pair[1]) << 16);
  return each([&](int i) {
    uint32_t lane;
    std::memcpy(&lane, pairs.v + 4 * i, 4);
    return sum.v[i] + bits_to_float(lane << 16) * even + bits_to_float(lane & 0xffff0000u) * odd;
  });
}

}  // namespace simd
}  // namespace

// What the machine allows a decode step: only the products of a model's int8 activations with its packed weights, nothing between.
//
//   g++ -std=c++17 -O3 -march=native -fopenmp limit_probe.cpp -o limit_probe
//   limit_probe THREADS HIDDEN QKV HEADS_WIDTH INTERMEDIATE VOCABULARY LAYERS
//
// It prints one JSON line: read bandwidth, and tokens per second at several numbers of tokens with a 4-bit and with an 8-bit head.
// No attention, norms, activations or sampling: a floor for the time of a step, which no engine with the same weights gets below.
// Needs AVX-512 VNNI. Weights are random; a line of 64 bytes holds four inputs of sixteen rows, nibbles two such lines. The next
// sixteen rows are asked for while these are multiplied, and more than kTile tokens go in turns: what is fastest here.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

constexpr int kRows = 16, kGroup = 64, kRepeats = 8, kRounds = 4, kMaxTokens = 16, kTile = 8;
constexpr size_t kBandwidthBytes = size_t{512} << 20;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T> using Memory = std::unique_ptr<T[], Free>;

template <class T> Memory<T> memory(size_t count, T value) {
  Memory<T> result(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
  std::fill_n(result.get(), count, value);
  return result;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Weights {
  int rows, inputs, bits;
  Memory<uint8_t> codes;
  Memory<float> scales;  // [rows / 16, groups, 16], then as many zero points
  Weights(int rows, int inputs, int bits)
      : rows(rows), inputs(inputs), bits(bits), codes(memory<uint8_t>(size_t(rows) * inputs * bits / 8, 0x35)),
        scales(memory<float>(size_t(rows) * inputs / kGroup * 2, 0.01f)) {}
};

struct Inputs {
  Memory<int8_t> codes = memory<int8_t>(size_t(kMaxTokens) << 16, 3);
  Memory<float> scales = memory<float>(size_t(kMaxTokens) << 10, 0.01f);
  Memory<float> sums = memory<float>(size_t(kMaxTokens) << 10, 5.0f);
};

inline __m512i dot(__m512i total, __m512i weights, const int8_t* four) {
  int32_t packed;
  __builtin_memcpy(&packed, four, 4);
  return _mm512_dpbusd_epi32(total, weights, _mm512_set1_epi32(packed));
}

// Sixteen rows times M tokens from `first_token` on: sum over groups of w_scale * x_scale * (codes . x - zero * sum(x)).
template <int M, int kBits> void multiply(const Weights& w, const Inputs& x, int block, int first_token, float* out) {
  const int groups = w.inputs / kGroup;
  const size_t bytes = size_t(kRows) * w.inputs * kBits / 8;
  const uint8_t* line = w.codes.get() + block * bytes;
  const bool asks = first_token == 0 && (kBits == 4 || M > 1);  // 8 bits at one token: the processor looks ahead better by itself
  const float* scales = w.scales.get() + size_t(block) * groups * kRows;
  const float* zeros = scales + size_t(w.rows) * groups;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 result[M];
  for (auto& r : result) r = _mm512_setzero_ps();
  for (int g = 0; g < groups; g++) {
    __m512i total[M];
    for (auto& t : total) t = _mm512_setzero_si512();
    for (int k = g * kGroup; k < (g + 1) * kGroup; k += 8) {
      for (int bit = 0; asks && bit < kBits; bit += 4) _mm_prefetch(reinterpret_cast<const char*>(line + bytes + bit * 16), _MM_HINT_T1);
      __m512i first = _mm512_load_si512(line), second;
      if (kBits == 4) {
        second = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
        first = _mm512_and_si512(first, low);
        line += 64;
      } else {
        second = _mm512_load_si512(line + 64);
        line += 128;
      }
      for (int m = 0; m < M; m++) {
        const int8_t* input = x.codes.get() + size_t(first_token + m) * w.inputs + k;
        total[m] = dot(dot(total[m], first, input), second, input + 4);
      }
    }
    const __m512 scale = _mm512_load_ps(scales + g * kRows), zero = _mm512_load_ps(zeros + g * kRows);
    for (int m = 0; m < M; m++) {
      const int at = (first_token + m) * groups + g;
      const __m512 sum = _mm512_set1_ps(x.sums[at]), both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at]));
      result[m] = _mm512_fmadd_ps(_mm512_fnmadd_ps(zero, sum, _mm512_cvtepi32_ps(total[m])), both, result[m]);
    }
  }
  for (int m = 0; m < M; m++) _mm512_storeu_ps(out + size_t(first_token + m) * w.rows + block * kRows, result[m]);
}

template <int M, int kBits> void multiply_all(const Weights& w, const Inputs& x, int block, float* out) {
  constexpr int kTogether = std::min(M, kTile);
  static_assert(M % kTogether == 0);
  for (int token = 0; token < M; token += kTogether) multiply<kTogether, kBits>(w, x, block, token, out);
}

template <int M> double step_seconds(const std::vector<Weights>& body, const Weights& head, const Inputs& x, float* out) {
  auto all = [&](const Weights& w) {
#pragma omp for schedule(static)
    for (int block = 0; block < w.rows / kRows; block++) {
      if (w.bits == 4) multiply_all<M, 4>(w, x, block, out);
      else multiply_all<M, 8>(w, x, block, out);
    }
  };
  double best = 1e9;
  for (int round = 0; round < kRounds; round++) {
    const double start = seconds();
#pragma omp parallel
    for (int repeat = 0; repeat < kRepeats; repeat++) {
      for (const Weights& w : body) all(w);
      all(head);
    }
    best = std::min(best, (seconds() - start) / kRepeats);
  }
  return best;
}

double bandwidth() {
  const size_t count = kBandwidthBytes / 8;
  const Memory<int64_t> data = memory<int64_t>(count, 1);
  double best = 1e9;
  for (int round = 0; round < kRounds; round++) {
    const double start = seconds();
    int64_t sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (size_t i = 0; i < count; i++) sum += data[i];
    if (sum != int64_t(count)) std::abort();  // keeps the loop from being left out
    best = std::min(best, seconds() - start);
  }
  return kBandwidthBytes / best / 1e9;
}

template <int... M>
void report(const char* name, const std::vector<Weights>& body, const Weights& head, const Inputs& x, float* out) {
  std::printf(", \"%s\": {", name);
  const char* separator = "";
  ((std::printf("%s\"%d\": %.1f", separator, M, M / step_seconds<M>(body, head, x, out)), separator = ", "), ...);
  std::printf("}");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 8) {
    std::fprintf(stderr, "usage: limit_probe THREADS HIDDEN QKV HEADS_WIDTH INTERMEDIATE VOCABULARY LAYERS\n");
    return 2;
  }
  int numbers[7];
  for (int i = 0; i < 7; i++) numbers[i] = std::atoi(arguments[i + 1]);
  const auto [threads, hidden, qkv, heads, intermediate, vocabulary, layers] = numbers;
  omp_set_num_threads(threads);
  std::vector<Weights> body;
  for (int layer = 0; layer < layers; layer++) {
    body.emplace_back(qkv, hidden, 4);
    body.emplace_back(hidden, heads, 4);
    body.emplace_back(2 * intermediate, hidden, 4);
    body.emplace_back(hidden, intermediate, 4);
  }
  const Weights small(vocabulary, hidden, 4), large(vocabulary, hidden, 8);
  const Inputs x;
  const Memory<float> out = memory<float>(size_t(kMaxTokens) * std::max(vocabulary, 2 * intermediate), 0.0f);
  std::printf("{\"bandwidth_gb_s\": %.1f", bandwidth());
  report<1, 4, 5, 8, 16>("int4_head", body, small, x, out.get());
  report<1, 4, 5, 8, 16>("int8_head", body, large, x, out.get());
  std::printf("}\n");
}

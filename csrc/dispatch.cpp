// Which kernels this processor runs.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace triblade {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool (*runs)();
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx2_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
bool always() { return true; }

const Candidate kBestFirst[] = {
#if defined(__x86_64__)
    {&kAvx512Bf16, has_avx512_bf16},
    {&kAvx512, has_avx512},
    {&kAvx2Vnni, has_avx2_vnni},
    {&kAvx2, has_avx2},
#endif
    {&kPortable, always},
};

}  // namespace

const Kernels* kernels_for(const char* name) {
  for (const Candidate& candidate : kBestFirst) {
    const bool wanted = !name || !*name || std::strcmp(name, candidate.kernels->name) == 0;
    if (wanted && candidate.runs()) return candidate.kernels;
  }
  return nullptr;
}

const Kernels* kernels_at(int rank) {
  for (const Candidate& candidate : kBestFirst) {
    if (candidate.runs() && rank-- == 0) return candidate.kernels;
  }
  return nullptr;
}

int64_t scratch_bytes(int max_inputs, int head_dim, int kv_heads) {
  const int64_t unpacked = 2 * 16 * static_cast<int64_t>(max_inputs), attention = kv_heads * head_space_bytes(head_dim);
  return (std::max(unpacked, attention) + 63) / 64 * 64;
}

}  // namespace triblade

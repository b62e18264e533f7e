#include "state_memory.h"

#include <algorithm>

namespace triblade {

float* StateMemory::extend(int64_t request, int64_t start, int64_t count) {
  Kept& kept = kept_[request];
  if (kept.first + size(kept) != start) kept = {start, 0, {}};
  const int64_t before = size(kept);
  drop(kept, std::clamp(before + count - window_, int64_t{0}, before));
  const size_t used = kept.rows.size();
  kept.rows.resize(used + static_cast<size_t>(count) * width_);
  return kept.rows.data() + used;
}

void StateMemory::take(int64_t request, int64_t start, int64_t count, float* out) {
  Kept& kept = kept_[request];
  const int64_t end = start + count, known_end = kept.first + size(kept);
  const int64_t from = std::clamp(kept.first, start, end), to = std::clamp(known_end, from, end);
  std::fill(out, out + count * width_, 0.0f);
  const auto source = kept.rows.begin() + (kept.dropped + from - kept.first) * width_;
  if (to > from) std::copy_n(source, (to - from) * width_, out + (from - start) * width_);
  drop(kept, std::clamp(end - kept.first, int64_t{0}, size(kept)));
}

// Rows move to the front only when most of the vector is dropped, so that each row moves once on average.
void StateMemory::drop(Kept& kept, int64_t count) {
  kept.first += count, kept.dropped += count;
  if (2 * kept.dropped * width_ < static_cast<int64_t>(kept.rows.size())) return;
  kept.rows.erase(kept.rows.begin(), kept.rows.begin() + kept.dropped * width_);
  kept.dropped = 0;
}

}  // namespace triblade

// States that a target computed and its head has not seen yet, by request and token. Knows no model; rows are numbers. Invariant: the
// states of a request stand here without a gap, `window` at most or those of one step; one that is not here reads as zero. Its slow
// twin is triblade.spec.state_memory.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace triblade {

class StateMemory {
 public:
  StateMemory(int width, int64_t window) : width_(width), window_(window) {}

  // Room for the states [count, width] of tokens start, start + 1, ... of a request, valid until the next call. What does not end
  // before `start` is forgotten with everything before it: the request was computed anew.
  float* extend(int64_t request, int64_t start, int64_t count);

  // The first token whose state is here.
  int64_t first(int64_t request) const { return kept_.at(request).first; }

  // States of `count` tokens from `start` on; afterwards those before `start + count` are forgotten.
  void take(int64_t request, int64_t start, int64_t count, float* out);

  void forget(int64_t request) { kept_.erase(request); }
  int64_t num_requests() const { return static_cast<int64_t>(kept_.size()); }
  int width() const { return width_; }

 private:
  struct Kept {
    int64_t first = 0;       // token of the oldest state
    int64_t dropped = 0;     // rows before it that still stand in `rows`
    std::vector<float> rows;
  };

  int64_t size(const Kept& kept) const { return static_cast<int64_t>(kept.rows.size()) / width_ - kept.dropped; }
  void drop(Kept& kept, int64_t count);

  int width_;
  int64_t window_;
  std::unordered_map<int64_t, Kept> kept_;
};

}  // namespace triblade

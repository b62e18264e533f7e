// Where a text was heading the last time it looked like this: the search behind the suffix drafter (SuffixDecoding, NeurIPS 2025),
// over hash chains as in LZ77 instead of a suffix tree. Knows tokens as numbers, no model and no Python. Invariants: an append costs
// O(1), a proposal O(candidates * longest) whatever the length of the texts, and the shared text never exceeds its capacity. Its slow
// twin, with the same results, is triblade.spec.suffix_index.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace triblade {

// The newest `capacity` tokens of a text. Positions count from its very first token and never change. Tokens that end the same run of
// `minimum` tokens are chained, newest first.
class Text {
 public:
  Text(int minimum, int64_t capacity) : minimum_(minimum), capacity_(capacity) {}

  void append(int32_t token);
  int64_t begin() const { return end_ - static_cast<int64_t>(tokens_.size()); }
  int64_t end() const { return end_; }
  int32_t at(int64_t position) const { return tokens_[position % capacity_]; }

  // The newest position where the run that ends `query` ended as well, other than that end itself; -1: none.
  int64_t newest(const Text& query) const;
  // The same before `position`, which newest or earlier gave.
  int64_t earlier(int64_t position) const { return alive(previous_[position % capacity_]); }

 private:
  uint64_t run_ending_at(int64_t position, int minimum) const;
  int64_t alive(int64_t position) const { return position >= begin() + minimum_ - 1 ? position : -1; }
  void forget_oldest();

  int minimum_;
  int64_t capacity_;
  int64_t end_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> previous_;  // of each token: where its run ended before
  std::unordered_map<uint64_t, int64_t> newest_;  // hash of a run -> where it ended last
};

struct SuffixOptions {
  struct Source {
    int minimum;   // shortest match
    double doubt;  // occurrences of another continuation, imagined for a match of the minimum
  };
  int64_t capacity;  // tokens of the shared text
  int longest;       // tokens of a match that are looked at
  int candidates;    // newest occurrences that are looked at
  Source own, shared;
};

// A text of its own for every request, and one of ended requests for all.
class SuffixIndex {
 public:
  explicit SuffixIndex(const SuffixOptions& options) : options_(options), shared_(options.shared.minimum, options.capacity) {}

  // Append to a request's text, then continue it by at most `length` tokens, as long as all of them are right with probability `least`.
  std::vector<int32_t> propose(int64_t request, const std::vector<int32_t>& tokens, int length, double least);
  // Append to the shared text. Matches and proposals never cross from one such call to another.
  void share(const std::vector<int32_t>& tokens);
  void drop(int64_t request) { own_.erase(request); }

  int64_t num_requests() const { return static_cast<int64_t>(own_.size()); }
  int64_t num_shared_tokens() const { return shared_.end() - shared_.begin(); }

 private:
  struct Proposal {
    std::vector<int32_t> tokens;
    double expected = 0;  // tokens accepted, as estimated
  };
  struct Count {
    int32_t token;
    int number;
  };

  Proposal search(const Text& text, const Text& query, const SuffixOptions::Source& source);
  int find_matches(const Text& text, const Text& query);
  Count most_frequent(const Text& text, const std::vector<int32_t>& proposed, int& total);
  void keep_matches(const Text& text, const std::vector<int32_t>& proposed, int32_t token);

  SuffixOptions options_;
  Text shared_;
  std::unordered_map<int64_t, Text> own_;
  // Of the search that runs: its limits; the position after each match, newest first; a buffer.
  int length_ = 0;
  double least_ = 0;
  std::vector<int64_t> matches_;
  std::vector<Count> counts_;
};

}  // namespace triblade

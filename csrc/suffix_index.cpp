// See suffix_index.h.
#include "suffix_index.h"

#include <algorithm>
#include <limits>

namespace triblade {
namespace {

constexpr int32_t kEnd = -1;  // closes each piece of the shared text; equal to no token

// How many tokens before and at both positions agree, `longest` at most.
int common_length(const Text& a, int64_t at_a, const Text& b, int64_t at_b, int longest) {
  const int64_t most = std::min({static_cast<int64_t>(longest), at_a - a.begin() + 1, at_b - b.begin() + 1});
  int length = 0;
  while (length < most && a.at(at_a - length) == b.at(at_b - length)) length++;
  return length;
}

// A token of a text, or of the proposal where the text has run into the present.
int32_t token_at(const Text& text, const std::vector<int32_t>& proposed, int64_t position) {
  return position < text.end() ? text.at(position) : proposed[position - text.end()];
}

}  // namespace

void Text::append(int32_t token) {
  if (static_cast<int64_t>(tokens_.size()) < capacity_) {
    tokens_.push_back(token);
    previous_.push_back(-1);
  } else {
    forget_oldest();
    tokens_[end_ % capacity_] = token;
    previous_[end_ % capacity_] = -1;
  }
  const int64_t position = end_++;
  if (position - begin() + 1 < minimum_) return;
  const auto [entry, is_new] = newest_.try_emplace(run_ending_at(position, minimum_), position);
  if (is_new) return;
  previous_[position % capacity_] = entry->second;
  entry->second = position;
}

// The oldest token goes, and with it the run that begins there, unless the same run came again.
void Text::forget_oldest() {
  const int64_t last = begin() + minimum_ - 1;
  const auto entry = newest_.find(run_ending_at(last, minimum_));
  if (entry != newest_.end() && entry->second == last) newest_.erase(entry);
}

uint64_t Text::run_ending_at(int64_t position, int minimum) const {
  uint64_t hash = 0;
  for (int64_t p = position - minimum + 1; p <= position; p++) {
    hash = (hash ^ static_cast<uint32_t>(at(p))) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

int64_t Text::newest(const Text& query) const {
  const int64_t last = query.end() - 1;
  if (this == &query) return last < 0 ? -1 : earlier(last);
  if (last - query.begin() + 1 < minimum_) return -1;
  const auto entry = newest_.find(query.run_ending_at(last, minimum_));
  return entry == newest_.end() ? -1 : alive(entry->second);
}

std::vector<int32_t> SuffixIndex::propose(int64_t request, const std::vector<int32_t>& tokens, int length, double least) {
  length_ = length, least_ = least;
  Text& text = own_.try_emplace(request, options_.own.minimum, std::numeric_limits<int64_t>::max()).first->second;
  for (int32_t token : tokens) text.append(token);
  Proposal own = search(text, text, options_.own);
  Proposal shared = search(shared_, text, options_.shared);
  return shared.expected > own.expected ? std::move(shared.tokens) : std::move(own.tokens);
}

void SuffixIndex::share(const std::vector<int32_t>& tokens) {
  for (int32_t token : tokens) shared_.append(token);
  shared_.append(kEnd);
}

// Follow the most frequent continuation of the longest matches. Of `total` occurrences `number` went on with a token, so it is accepted
// with probability number / (total + doubt / match): other continuations are imagined, the fewer the longer the match, which counts from
// the shortest that says anything.
SuffixIndex::Proposal SuffixIndex::search(const Text& text, const Text& query, const SuffixOptions::Source& source) {
  Proposal proposal;
  const int match = find_matches(text, query) - source.minimum + 1;
  double probability = 1;
  for (int i = 0; i < length_; i++) {
    int total = 0;
    const Count best = most_frequent(text, proposal.tokens, total);
    if (!total) break;
    probability *= best.number / (total + source.doubt / (match + i));
    if (probability < least_) break;
    keep_matches(text, proposal.tokens, best.token);
    proposal.tokens.push_back(best.token);
    proposal.expected += probability;
  }
  return proposal;
}

// Fill matches_ with the longest matches of the end of `query`, among the newest candidates; their length.
int SuffixIndex::find_matches(const Text& text, const Text& query) {
  matches_.clear();
  int longest = 0, seen = 0;
  for (int64_t last = text.newest(query); last >= 0 && seen < options_.candidates; last = text.earlier(last), seen++) {
    if (text.at(last + 1) == kEnd) continue;
    const int length = common_length(text, last, query, query.end() - 1, options_.longest);
    if (length > longest) matches_.clear(), longest = length;
    if (length == longest) matches_.push_back(last + 1);
  }
  return longest;
}

// The token that most matches go on with after `proposed`; of equals the one that came last.
SuffixIndex::Count SuffixIndex::most_frequent(const Text& text, const std::vector<int32_t>& proposed, int& total) {
  counts_.clear();
  for (int64_t match : matches_) {
    const int32_t token = token_at(text, proposed, match + static_cast<int64_t>(proposed.size()));
    if (token == kEnd) continue;
    total++;
    const auto same = std::find_if(counts_.begin(), counts_.end(), [token](const Count& count) { return count.token == token; });
    if (same == counts_.end()) counts_.push_back({token, 1});
    else same->number++;
  }
  const auto fewer = [](const Count& a, const Count& b) { return a.number < b.number; };
  const auto best = std::max_element(counts_.begin(), counts_.end(), fewer);  // the first of equals
  return best == counts_.end() ? Count{kEnd, 0} : *best;
}

void SuffixIndex::keep_matches(const Text& text, const std::vector<int32_t>& proposed, int32_t token) {
  const auto differs = [&](int64_t match) {
    return token_at(text, proposed, match + static_cast<int64_t>(proposed.size())) != token;
  };
  matches_.erase(std::remove_if(matches_.begin(), matches_.end(), differs), matches_.end());
}

}  // namespace triblade

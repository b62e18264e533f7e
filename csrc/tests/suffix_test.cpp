// The suffix index over random histories with tiny capacities, for a sanitizer; what it proposes is checked by tests/contract, this
// only wants proposals that occurred in a text and memory within its bounds.
#include <algorithm>

#include "../suffix_index.h"
#include "tiny.h"

namespace triblade::tests {
namespace {

std::vector<int32_t> random_tokens(Random& random, int most, int vocabulary) {
  std::vector<int32_t> tokens(random.below(most + 1));
  for (int32_t& token : tokens) token = random.below(vocabulary);
  return tokens;
}

void history(unsigned seed, const SuffixOptions& options, int vocabulary) {
  Random random(seed);
  SuffixIndex index(options);
  for (int call = 0; call < 2000; call++) {
    const auto tokens = random_tokens(random, 9, vocabulary);
    const int request = random.below(5), length = random.below(9);
    const auto proposal = index.propose(request, tokens, length, 0.1);
    require(static_cast<int>(proposal.size()) <= length, "no proposal is longer than asked");
    for (int32_t token : proposal) require(token >= 0 && token < vocabulary, "only tokens of a text are proposed");
    if (random.below(4) == 0) index.share(tokens);
    if (random.below(8) == 0) index.drop(request);
    require(index.num_requests() <= 5, "no request is kept that was dropped");
    require(index.num_shared_tokens() <= options.capacity, "the shared text has room for its capacity");
  }
}

}  // namespace
}  // namespace triblade::tests

int main() {
  using namespace triblade;
  for (int64_t capacity : {1, 2, 5, 64, 1000}) {
    for (int minimum : {1, 3, 4}) {
      for (int vocabulary : {1, 3, 50}) tests::history(capacity + minimum, {capacity, 8, 6, {1, 1.3}, {minimum, 8.0}}, vocabulary);
    }
  }
  std::printf("suffix index: ok\n");
  return 0;
}

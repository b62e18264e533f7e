// The thread team and the step program, for ThreadSanitizer: many short runs, parking in between, several teams at once.
#include <cstring>
#include <thread>

#include "tiny.h"

namespace triblade::tests {
namespace {

struct Counters {
  Team* team;
  std::vector<int> own, seen;  // plain numbers: the barrier alone orders them
};

void count(void* context, int member) {
  auto* counters = static_cast<Counters*>(context);
  for (int round = 0; round < 3; round++) {
    counters->own[member]++;
    counters->team->barrier();
    int sum = 0;
    for (int value : counters->own) sum += value;
    counters->seen[member] = sum;
    counters->team->barrier();
  }
}

void runs_and_barriers(int threads, int spin_us, int runs) {
  Team team({threads, spin_us, {}});
  Counters counters{&team, std::vector<int>(threads), std::vector<int>(threads)};
  for (int run = 1; run <= runs; run++) {
    team.run(count, &counters);
    for (int seen : counters.seen) require(seen == 3 * run * threads, "every member saw every other's work");
    if (run % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(3 * spin_us));  // long enough to park
  }
}

std::vector<float> generate(const Kernels& kernels, int threads, int spin_us) {
  TinyModel model(kernels, Format::kInt4, Cache::kInt8, threads, spin_us, true);
  std::vector<float> all;
  for (const auto& counts : std::vector<std::vector<int>>{{30, 20, 14}, {1, 1, 1}, {60, 0, 4}, {60}, {60}, {60}, {1}, {2, 1, 1}}) {
    for (float logit : model.step(counts)) all.push_back(logit);
  }
  return all;
}

}  // namespace
}  // namespace triblade::tests

int main() {
  using namespace triblade;
  using namespace triblade::tests;
  for (int threads : {1, 2, 3, 5}) {
    for (int spin_us : {0, 20, 200}) runs_and_barriers(threads, spin_us, 60);
  }
  const Kernels& kernels = *kernels_for("");
  const auto expected = generate(kernels, 1, 0);
  for (int threads : {2, 3}) {
    const auto made = generate(kernels, threads, 20);
    require(std::memcmp(made.data(), expected.data(), made.size() * sizeof(float)) == 0, "threads change no bit");
  }
  std::vector<std::thread> engines;  // two engines share nothing
  for (int n = 0; n < 2; n++) {
    engines.emplace_back([&] {
      const auto made = generate(kernels, 2, 20);
      require(std::memcmp(made.data(), expected.data(), made.size() * sizeof(float)) == 0, "engines do not meet");
    });
  }
  for (std::thread& engine : engines) engine.join();
  std::printf("team: ok\n");
  return 0;
}

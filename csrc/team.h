// A team of threads that run the same function side by side and meet at barriers.
//
// The caller is member 0. Between runs the others spin for a moment, then park; at a barrier a member spins, then sleeps, so that
// another process on the same core slows a run down but does not stop it. One team belongs to one engine; nothing is shared.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace triblade {

struct TeamOptions {
  int threads = 1;
  int spin_us = 200;       // how long an idle member spins before it parks
  std::vector<int> cores;  // where to pin members 1, 2, ...; empty: wherever the system puts them
};

class Team {
 public:
  explicit Team(const TeamOptions& options);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Run function(context, member) on every member; returns when all have returned.
  void run(void (*function)(void* context, int member), void* context);

  // Wait, inside a run, until every member is here.
  void barrier();

 private:
  void work(int member);
  bool wait_for_run(uint32_t seen);

  const int size_;
  const int spin_us_;
  std::vector<std::thread> threads_;

  alignas(64) std::atomic<uint32_t> run_{0};  // number of the current run; its change starts the members
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> parked_{0};
  std::atomic<int> sleepers_{0};  // members asleep in a barrier
  void (*function_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace triblade

#include "team.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace triblade {
namespace {

constexpr int kSpinsBeforeSleep = 2048;  // tens of microseconds; a barrier is usually over in well under one

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

void pin(std::thread& thread, int core) {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // a core we may not use: stay unpinned
#else
  (void)thread, (void)core;
#endif
}

}  // namespace

Team::Team(const TeamOptions& options) : size_(options.threads < 1 ? 1 : options.threads), spin_us_(options.spin_us) {
  for (int member = 1; member < size_; member++) {
    threads_.emplace_back([this, member] { work(member); });
    if (!options.cores.empty()) pin(threads_.back(), options.cores[(member - 1) % options.cores.size()]);
  }
}

Team::~Team() {
  stop_ = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    run_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(void (*function)(void*, int), void* context) {
  if (size_ > 1) {
    function_ = function;
    context_ = context;
    run_.fetch_add(1);  // sequentially consistent with parked_: a member that parks after this sees the new number
    if (parked_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }
  function(context, 0);
  barrier();  // the last member's work is done, too
}

void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);  // sequentially consistent with sleepers_: whoever goes to sleep after this sees the new phase
    if (sleepers_.load() > 0) phase_.notify_all();
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
    if (spins < kSpinsBeforeSleep) {
      pause();
      continue;
    }
    // The others are not running: another process has their core. Leaving this one lets the system move them here.
    sleepers_.fetch_add(1);
    phase_.wait(phase);
    sleepers_.fetch_sub(1);
  }
}

void Team::work(int member) {
  uint32_t seen = 0;
  while (wait_for_run(seen)) {
    seen++;
    function_(context_, member);
    barrier();
  }
}

// Spin, then park, until there is a run that this member has not seen; false when the team ends.
bool Team::wait_for_run(uint32_t seen) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
  for (int spins = 1; run_.load(std::memory_order_acquire) == seen; spins++) {
    pause();
    if (spins % 64 == 0 && std::chrono::steady_clock::now() > deadline) {
      std::unique_lock<std::mutex> lock(mutex_);
      parked_.fetch_add(1);
      wake_.wait(lock, [&] { return run_.load() != seen; });
      parked_.fetch_sub(1);
    }
  }
  return !stop_.load();
}

}  // namespace triblade

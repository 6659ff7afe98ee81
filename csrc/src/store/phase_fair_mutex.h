// A lock that readers share and in which nobody starves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "index/fork.h"

namespace fastdraft {

// Readers and writers take turns (phase-fair: Brandenburg and Anderson, 2010). A writer waits for
// the writers before it and for the readers that are inside when it comes. Readers that come later
// wait until one writer has left, and enter together then. With std::shared_mutex a writer may wait
// forever: glibc's admits readers for as long as there are any.
//
// For std::shared_lock and std::unique_lock. A thread that holds the lock must not ask for it
// again, not even to read: a writer may have come in between, and would wait for it.
//
// In the child of a fork it is free, and unless its turn is kNone what it guards is whole.
class PhaseFairMutex final : public ForkGuard {
 public:
  explicit PhaseFairMutex(Turn turn = Turn::kStore) : ForkGuard(turn) {}

  // One atomic addition each, unless there is a writer.
  void lock_shared() {
    if (state_.fetch_add(1, std::memory_order_acquire) >= kWriter) wait_for_writer();
  }
  void unlock_shared() {
    const std::uint64_t left = state_.fetch_sub(1, std::memory_order_release) - 1;
    if (left != 0 && left % kWriter == 0) wake_writer();
  }

  // In the order in which they are called.
  void lock();
  void unlock();
  // As unlock() and lock(), but of the readers only those enter that have been waiting. Between the
  // two calls others could go on for as long as this thread waits for a processor.
  void pass();

  void before_fork() override { lock_shared(); }
  void in_parent() noexcept override { unlock_shared(); }
  void in_child() noexcept override;

 private:
  static constexpr std::uint64_t kWriter = std::uint64_t{1} << 32;
  // A thread that waits lets others run so often before it falls asleep. What it waits for takes
  // microseconds, and waking a dozen readers would take a writer its processor for a hundred
  // milliseconds where there are more threads than processors.
  static constexpr int kYields = 256;

  void announce() { state_.fetch_add(kWriter, std::memory_order_relaxed); }
  void wait_for_readers();
  void wait_for_writer();
  void wake_writer();

  // The readers inside, and kWriter for each writer that has come and not left. A reader that finds
  // a writer is counted briefly too.
  std::atomic<std::uint64_t> state_{0};
  std::atomic<std::uint64_t> turn_{0};  // how many writers have left; set under the mutex

  std::mutex mutex_;  // of all below
  std::condition_variable readers_;
  std::condition_variable writers_;
  std::uint64_t next_turn_ = 0;  // how many writers have come
  std::uint64_t waiting_ = 0;    // readers that enter when a writer leaves
  std::uint32_t sleeping_ = 0;   // readers to wake then
};

}  // namespace fastdraft

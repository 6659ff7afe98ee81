#include "store/phase_fair_mutex.h"

#include <new>
#include <thread>

namespace fastdraft {
namespace {

template <typename Done>
bool yield_until(Done done, int yields) {
  for (; yields > 0; --yields) {
    if (done()) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace

void PhaseFairMutex::wait_for_writer() {
  unlock_shared();
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_.fetch_add(1, std::memory_order_acquire) < kWriter) return;  // it has left
  if (state_.fetch_sub(1, std::memory_order_release) % kWriter == 1) writers_.notify_all();
  ++waiting_;
  const std::uint64_t turn = turn_.load(std::memory_order_relaxed);
  const auto left = [&] { return turn_.load(std::memory_order_acquire) != turn; };
  lock.unlock();
  if (yield_until(left, kYields)) return;
  lock.lock();
  ++sleeping_;
  readers_.wait(lock, left);
  --sleeping_;
}

void PhaseFairMutex::wake_writer() {
  // The writer looks and falls asleep under the mutex, so it cannot do so in between.
  {
    const std::scoped_lock<std::mutex> lock(mutex_);
  }
  writers_.notify_all();
}

void PhaseFairMutex::lock() {
  // First of all, and not under the mutex: while this thread waits for that, or for a processor,
  // readers must not go on.
  announce();
  wait_for_readers();
}

void PhaseFairMutex::pass() {
  announce();
  unlock();
  wait_for_readers();
}

void PhaseFairMutex::wait_for_readers() {
  const auto left = [&] { return state_.load(std::memory_order_acquire) % kWriter == 0; };
  std::unique_lock<std::mutex> lock(mutex_);
  const std::uint64_t turn = next_turn_++;
  writers_.wait(lock, [&] { return turn_.load(std::memory_order_relaxed) == turn; });
  lock.unlock();
  if (yield_until(left, kYields)) return;
  lock.lock();
  writers_.wait(lock, left);
}

void PhaseFairMutex::unlock() {
  std::unique_lock<std::mutex> lock(mutex_);
  // The readers that wait are inside from now on, before they know it.
  state_.fetch_add(waiting_ - kWriter, std::memory_order_release);
  waiting_ = 0;
  const std::uint64_t left = turn_.fetch_add(1, std::memory_order_release) + 1;
  const bool asleep = sleeping_ > 0;
  const bool others = next_turn_ != left;
  lock.unlock();
  if (asleep) readers_.notify_all();
  if (others) writers_.notify_all();
}

// None of the threads that it knew of is here.
void PhaseFairMutex::in_child() noexcept {
  state_.store(0, std::memory_order_relaxed);
  turn_.store(0, std::memory_order_relaxed);
  new (&mutex_) std::mutex;
  new (&readers_) std::condition_variable;
  new (&writers_) std::condition_variable;
  next_turn_ = 0;
  waiting_ = 0;
  sleeping_ = 0;
}

}  // namespace fastdraft

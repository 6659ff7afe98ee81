// Locks across fork(). The child has only the thread that forked: what another thread held there
// would stay locked for ever, and what it was changing would stay half changed.
#pragma once

#include <cstdint>
#include <mutex>

namespace fastdraft {

// Something that a fork must find whole, from its construction to its destruction.
class ForkGuard {
 public:
  // Locks are taken in this order before a fork. A thread that holds one waits for none of an
  // earlier turn, so nobody waits in a circle. A fork does not wait for what has no turn.
  enum class Turn : std::uint8_t { kRunningTexts, kStore, kLast, kNone };

  explicit ForkGuard(Turn turn);
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
  virtual ~ForkGuard();

  // Waits until what it guards is whole, and keeps it so until one of the other two is called.
  virtual void before_fork() {}
  virtual void in_parent() noexcept {}
  virtual void in_child() noexcept = 0;

 private:
  friend class ForkGuards;

  const Turn turn_;
};

// A std::mutex that is free in a child. A thread that holds it must not wait for another lock.
class Mutex final : public ForkGuard {
 public:
  Mutex() : ForkGuard(Turn::kLast) {}
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  void before_fork() override { lock(); }
  void in_parent() noexcept override { unlock(); }
  void in_child() noexcept override { unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace fastdraft

// When to try again what does not seem to pay.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastdraft {

// Without trials nothing is learned, and each trial of something that does not pay costs time: so
// it is tried after `first` steps, and after twice as many each time that it still does not pay,
// `last` at most.
//
// Thread-safe without locks: of two threads that ask at once one may not be counted.
class BackOff {
 public:
  BackOff(std::int32_t first, std::int32_t last) noexcept
      : first_(first), last_(last), patience_(first) {}

  // Returns whether to do it in this step, where it seems to pay or not. Ask once a step.
  bool asks(bool pays) noexcept {
    const std::int32_t idle = pays ? 0 : idle_.load(std::memory_order_relaxed) + 1;
    const std::int32_t patience = patience_.load(std::memory_order_relaxed);
    const bool again = pays || idle >= patience;
    idle_.store(again ? 0 : idle, std::memory_order_relaxed);
    if (again) {
      patience_.store(pays ? first_ : std::min(2 * patience, last_), std::memory_order_relaxed);
    }
    return again;
  }

 private:
  const std::int32_t first_;
  const std::int32_t last_;
  std::atomic<std::int32_t> idle_{0};
  std::atomic<std::int32_t> patience_;
};

}  // namespace fastdraft

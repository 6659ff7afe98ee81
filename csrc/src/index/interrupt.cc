#include "fastdraft/interrupt.h"

#include <atomic>

namespace fastdraft {
namespace {

std::atomic<Interrupt> current{nullptr};

}  // namespace

void set_interrupt(Interrupt interrupt) noexcept {
  current.store(interrupt, std::memory_order_release);
}

void check_interrupt() {
  if (const Interrupt interrupt = current.load(std::memory_order_acquire)) interrupt();
}

}  // namespace fastdraft

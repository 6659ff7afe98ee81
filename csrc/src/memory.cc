#include "memory.h"

#include <string>

#include "fastdraft/error.h"

namespace fastdraft {

void MemoryBudget::charge(std::int64_t bytes) {
  const std::int64_t before = used_.fetch_add(bytes, std::memory_order_relaxed);
  if (before > limit_ - bytes) {
    refund(bytes);
    throw MemoryLimitError("max_bytes is " + std::to_string(limit_) + ": " +
                           std::to_string(before) + " bytes are in use and " +
                           std::to_string(bytes) + " more were asked for");
  }
}

void throw_out_of_memory(std::int64_t bytes) {
  throw MemoryLimitError("the operating system refused " + std::to_string(bytes) + " bytes");
}

}  // namespace fastdraft

#include "index/memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <memory>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

// Made while there is memory: a copy shares its text. Where there is none when the library is
// loaded, it cannot be loaded.
// NOLINTNEXTLINE(bugprone-throwing-static-initialization)
const MemoryLimitError kNoMemoryLeft("the operating system has no memory left");

}  // namespace

void MemoryBudget::charge(std::int64_t bytes) {
  const std::int64_t before = used_.fetch_add(bytes, std::memory_order_relaxed);
  if (before > limit_ - bytes) {
    refund(bytes);
    refuse_memory([&] {
      return "max_bytes is " + std::to_string(limit_) + ": " + std::to_string(before) +
             " bytes are in use and " + std::to_string(bytes) + " more were asked for";
    });
  }
}

void throw_no_memory_left() { throw MemoryLimitError(kNoMemoryLeft); }

void throw_out_of_memory(std::int64_t bytes) {
  refuse_memory([&] { return "the operating system refused " + std::to_string(bytes) + " bytes"; });
}

void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) noexcept {
#if defined(__linux__)
  // From the first whole page on. Refused, it is memory as any other.
  std::size_t space = bytes;
  if (std::align(kHugePage, kHugePage, memory, space) == nullptr) return;
  static_cast<void>(madvise(memory, space / kHugePage * kHugePage, MADV_HUGEPAGE));
#endif
}

void populate_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) noexcept {
#if defined(MADV_POPULATE_WRITE)
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kLeast = 16 * kPage;  // for fewer, a call takes as long as they do
  std::size_t space = bytes;
  if (bytes < kLeast || std::align(kPage, kPage, memory, space) == nullptr) return;
  static_cast<void>(madvise(memory, space / kPage * kPage, MADV_POPULATE_WRITE));
#endif
}

void discard_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) noexcept {
#if defined(__linux__)
  static_cast<void>(madvise(memory, bytes, MADV_DONTNEED));
#endif
}

}  // namespace fastdraft

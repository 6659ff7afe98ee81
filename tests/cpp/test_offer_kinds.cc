// Kinds of offers whose memory cannot be had.
#include "policy/offer_kinds.h"

#include <cstddef>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

namespace {

// Allocations of this thread until one fails; none does below 0.
thread_local int left = -1;

void* take(std::size_t size, std::size_t alignment) {
  size = (size + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, size == 0 ? alignment : size);
}

void* allocate(std::size_t size, std::size_t alignment) {
  if (left == 0) {
    left = -1;
    throw std::bad_alloc();
  }
  if (left > 0) --left;
  void* memory = take(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// All forms, since what one allocates another one frees, also in other tests: AddressSanitizer
// takes a mixture of these and its own for a mistake, and so does GCC an inlined std::free.
[[gnu::noinline]] void* operator new(std::size_t size) {
  return allocate(size, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return take(size, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment,
                                     const std::nothrow_t&) noexcept {
  return take(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace fastdraft {
namespace {

TEST(OfferKinds, OneWhoseMemoryCannotBeHadIsWholeWhenItIsAddedAgain) {
  for (int allocations = 0;; ++allocations) {
    OfferKinds kinds;
    const std::string name(40, 'k');  // no short one, which takes no memory of its own
    left = allocations;
    bool failed = false;
    try {
      kinds.add(name);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    left = -1;
    const OfferKind kind = kinds.add(name);
    EXPECT_EQ(kind, 0);
    EXPECT_EQ(kinds.size(), 1);
    EXPECT_EQ(kinds.names().size(), 1u);
    ASSERT_NE(&kinds.model(kind), nullptr);
    if (!failed) {
      EXPECT_GE(allocations, 3);
      return;
    }
  }
}

}  // namespace
}  // namespace fastdraft

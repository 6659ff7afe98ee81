// Memory that is counted: a budget shared by all indexes of an engine, and
// the flat arrays that draw on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "fastdraft/error.h"

namespace fastdraft {

// Counts the bytes held by all arrays that were made with it and refuses the
// growth that would pass its limit. Thread-safe, lock-free.
class MemoryBudget {
 public:
  explicit MemoryBudget(std::int64_t limit = std::numeric_limits<std::int64_t>::max()) noexcept
      : limit_(limit) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Counts `bytes`, or throws MemoryLimitError and counts nothing.
  void charge(std::int64_t bytes);
  void refund(std::int64_t bytes) noexcept { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  std::int64_t used() const noexcept { return used_.load(std::memory_order_relaxed); }
  std::int64_t limit() const noexcept { return limit_; }

 private:
  const std::int64_t limit_;
  std::atomic<std::int64_t> used_{0};
};

// Bytes of a budget while it lives. Throws MemoryLimitError.
class CountedBytes {
 public:
  CountedBytes(MemoryBudget& budget, std::int64_t bytes) : budget_(budget), bytes_(bytes) {
    budget.charge(bytes);
  }
  CountedBytes(const CountedBytes&) = delete;
  CountedBytes& operator=(const CountedBytes&) = delete;
  ~CountedBytes() { budget_.refund(bytes_); }

 private:
  MemoryBudget& budget_;
  const std::int64_t bytes_;
};

// The allocator of vectors whose memory counts in a budget, which must outlive them. It throws
// MemoryLimitError instead of std::bad_alloc.
template <typename T>
struct CountedAllocator {
  using value_type = T;

  explicit CountedAllocator(MemoryBudget& of) noexcept : budget(&of) {}
  template <typename U>
  // NOLINTNEXTLINE(google-explicit-constructor): containers convert their allocators.
  CountedAllocator(const CountedAllocator<U>& other) noexcept : budget(other.budget) {}

  T* allocate(std::size_t count);
  void deallocate(T* memory, std::size_t count) noexcept {
    std::allocator<T>().deallocate(memory, count);
    budget->refund(static_cast<std::int64_t>(count * sizeof(T)));
  }
  friend bool operator==(const CountedAllocator& a, const CountedAllocator& b) noexcept {
    return a.budget == b.budget;
  }
  friend bool operator!=(const CountedAllocator& a, const CountedAllocator& b) noexcept {
    return !(a == b);
  }

  MemoryBudget* budget;
};

// Throws MemoryLimitError without a message of its own, for which there is no memory either.
[[noreturn]] void throw_no_memory_left();

// Throws MemoryLimitError with what `message` returns. Never std::bad_alloc instead, which
// would pass by those who undo what they began.
template <typename Message>
[[noreturn]] void refuse_memory(Message message) {
  try {
    throw MemoryLimitError(message());
  } catch (const std::bad_alloc&) {
    throw_no_memory_left();
  }
}

// The operating system refused `bytes`.
[[noreturn]] void throw_out_of_memory(std::int64_t bytes);

template <typename T>
T* CountedAllocator<T>::allocate(std::size_t count) {
  const auto bytes = static_cast<std::int64_t>(count * sizeof(T));
  budget->charge(bytes);
  try {
    return std::allocator<T>().allocate(count);
  } catch (const std::bad_alloc&) {
    budget->refund(bytes);
    throw_out_of_memory(bytes);
  }
}

// Returns whether the system can be asked for pages of 2 MB, and to take memory back by the page.
#if defined(__linux__)
inline constexpr bool kHugePages = true;
#else
inline constexpr bool kHugePages = false;
#endif
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Asks the system to hold memory that is not used yet in pages of 2 MB, where it has whole ones:
// an access to a large index then seldom waits for the page's address.
void advise_huge_pages(void* memory, std::size_t bytes) noexcept;

// Has the system bring the pages of memory that is written soon, all at once.
void populate_pages(void* memory, std::size_t bytes) noexcept;

// Gives the pages that the memory consists of back to the system. What it held is lost.
void discard_pages(void* memory, std::size_t bytes) noexcept;

// A growable array of plain values. It grows by realloc, which moves large
// blocks by remapping pages instead of copying them, and by a quarter, which
// keeps the slack small. Its capacity is counted in a MemoryBudget that must
// outlive it. Growth throws MemoryLimitError and then leaves all as it was.
template <typename T>
class FlatArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit FlatArray(MemoryBudget& budget) noexcept : budget_(&budget) {}
  FlatArray(const FlatArray&) = delete;
  FlatArray& operator=(const FlatArray&) = delete;
  ~FlatArray() {
    std::free(data_);
    budget_->refund(bytes());
  }

  T& operator[](std::int64_t i) noexcept {
    assert(i >= 0 && i < size_);
    return data_[i];
  }
  const T& operator[](std::int64_t i) const noexcept {
    assert(i >= 0 && i < size_);
    return data_[i];
  }
  const T* data() const noexcept { return data_; }
  MemoryBudget& budget() const noexcept { return *budget_; }
  std::int64_t size() const noexcept { return size_; }
  std::int64_t bytes() const noexcept { return capacity_ * static_cast<std::int64_t>(sizeof(T)); }

  // Makes room for `count` elements in all.
  void reserve(std::int64_t count) {
    if (count > capacity_) grow(count);
  }

  // The same if there is memory. Returns whether there was.
  bool try_reserve(std::int64_t count) noexcept {
    try {
      reserve(count);
      return true;
    } catch (const MemoryLimitError&) {
      return false;
    }
  }

  // Has the system bring the pages of the reserved room at once: one by one, when they are first
  // written to, takes longer.
  void populate() noexcept {
    populate_pages(data_ + size_, static_cast<std::size_t>(capacity_ - size_) * sizeof(T));
  }

  // Gives back the room for more than `count` elements, of which there are no more.
  void trim(std::int64_t count) noexcept {
    assert(count >= size_);
    count = std::max(count, std::int64_t{kFirstCapacity});
    if (count >= capacity_) return;
    void* moved = std::realloc(data_, static_cast<std::size_t>(count) * sizeof(T));
    if (moved == nullptr) return;
    data_ = static_cast<T*>(moved);
    budget_->refund((capacity_ - count) * static_cast<std::int64_t>(sizeof(T)));
    capacity_ = count;
  }

  // Appends within the reserved room.
  void push_back(const T& value) noexcept {
    assert(size_ < capacity_);
    data_[size_++] = value;
  }
  void pop_back() noexcept { --size_; }

  // Appends `count` unset elements within the reserved room.
  void extend(std::int64_t count) noexcept {
    assert(size_ + count <= capacity_);
    size_ += count;
  }

 private:
  void grow(std::int64_t count) {
    const std::int64_t capacity =
        std::max({count, capacity_ + capacity_ / 4, std::int64_t{kFirstCapacity}});
    const std::int64_t more = (capacity - capacity_) * static_cast<std::int64_t>(sizeof(T));
    budget_->charge(more);
    void* moved = std::realloc(data_, static_cast<std::size_t>(capacity) * sizeof(T));
    if (moved == nullptr) {
      budget_->refund(more);
      throw_out_of_memory(more);
    }
    data_ = static_cast<T*>(moved);
    capacity_ = capacity;
    const auto held = static_cast<std::size_t>(bytes());
    if (kHugePages && held >= 2 * kHugePage) advise_huge_pages(data_, held);
  }

  static constexpr int kFirstCapacity = 32;

  MemoryBudget* budget_;
  T* data_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t capacity_ = 0;
};

}  // namespace fastdraft

#include "index/transition_table.h"

#include <limits>

namespace fastdraft {

TransitionTable::TransitionTable(MemoryBudget& budget) noexcept : pool_(budget) {
  free_.fill(kNoState);
}

Edges TransitionTable::copy(const Edges& edges) {
  if (!is_block(edges)) return edges;
  const int log2_capacity = log2_capacity_of(edges);
  const std::uint32_t offset = allocate(log2_capacity);
  std::memcpy(&pool_[kUnit * offset], &pool_[kUnit * edges.value],
              static_cast<std::size_t>(bytes_of(log2_capacity)));
  return {edges.key, offset};
}

// The offset of a block without edges.
std::uint32_t TransitionTable::allocate(int log2_capacity) {
  const auto units_of = [](int size) { return static_cast<std::uint32_t>(bytes_of(size) / kUnit); };
  std::int64_t offset = 0;
  // The smallest free block that is large enough; what is not needed of it
  // stays free.
  if (const std::uint32_t large_enough = has_free_ >> log2_capacity; large_enough != 0) {
    int size = log2_capacity + lowest_bit(large_enough);
    StateId& first = free_[static_cast<std::size_t>(size)];
    offset = static_cast<std::uint32_t>(first);
    first = read(&pool_[kUnit * offset]);
    if (first == kNoState) has_free_ &= ~(1u << size);
    while (size-- > log2_capacity) {
      release(static_cast<std::uint32_t>(offset) + units_of(size), size);
    }
  } else {
    const std::int64_t end = pool_.size() + bytes_of(log2_capacity);
    if (end / kUnit > std::numeric_limits<std::uint32_t>::max()) {
      throw MemoryLimitError("an index cannot hold more edges");
    }
    offset = pool_.size() / kUnit;
    pool_.reserve(end);
    pool_.extend(bytes_of(log2_capacity));
  }
  // No group is shorter than the marks of the longest.
  for (std::int64_t at = 0; at < bytes_of(log2_capacity); at += kGroupBytes) {
    std::memset(&pool_[kUnit * offset + at], kFree, std::size_t{1} << kLog2Group);
  }
  return static_cast<std::uint32_t>(offset);
}

void TransitionTable::release(std::uint32_t offset, int log2_capacity) noexcept {
  write(&pool_[kUnit * offset], free_[static_cast<std::size_t>(log2_capacity)]);
  free_[static_cast<std::size_t>(log2_capacity)] = static_cast<StateId>(offset);
  has_free_ |= 1u << log2_capacity;
}

// Writes an edge that is not there yet into a block with room for it, which
// holds `count` edges.
void TransitionTable::insert_into(std::uint32_t offset, int log2_capacity, std::uint32_t count,
                                  Token token, StateId target) noexcept {
  const int slots = 1 << std::min(log2_capacity, kLog2Group);
  std::uint8_t* group = home(offset, log2_capacity, token);
  auto i = static_cast<int>(count);
  if (log2_capacity > kLog2Group) {
    std::uint64_t free = same_bytes(load_64(group), kFree, slots);
    while (free == 0) {
      group = after(group, offset, log2_capacity);
      free = same_bytes(load_64(group), kFree, slots);
    }
    i = lowest_bit(free) / 8;
  }
  group[i] = mark_of(token);
  write(group + slots + 4 * i, target);
}

}  // namespace fastdraft

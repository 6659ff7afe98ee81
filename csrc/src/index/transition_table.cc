#include "index/transition_table.h"

#include <cstring>

#include "index/bits.h"

namespace fastdraft {
namespace {

constexpr int kCountBits = 26;
constexpr std::uint32_t kCountMask = (1u << kCountBits) - 1;
// Blocks of up to eight edges fill one cache line and are scanned.
constexpr int kLargestScanned = 3;
// Marks a free place in a hashed block.
constexpr Token kFree = -1;

bool is_block(const Edges& edges) noexcept {
  return edges.key != Edges::kEmpty && (edges.key & Edges::kBlock) != 0;
}
std::uint32_t count_of(const Edges& edges) noexcept { return edges.key & kCountMask; }
int log2_capacity_of(const Edges& edges) noexcept {
  return static_cast<int>((edges.key & ~Edges::kBlock) >> kCountBits);
}
std::uint32_t block_key(int log2_capacity, std::uint32_t count) noexcept {
  return Edges::kBlock | (static_cast<std::uint32_t>(log2_capacity) << kCountBits) | count;
}
bool is_full(int log2_capacity, std::uint32_t count) noexcept {
  const std::uint32_t capacity = 1u << log2_capacity;
  return log2_capacity <= kLargestScanned ? count == capacity : count >= capacity / 8 * 7;
}
// Fibonacci hashing: neighbouring ids spread over the whole block.
std::uint32_t home(Token token, int log2_capacity) noexcept {
  return (static_cast<std::uint32_t>(token) * 0x9E3779B1u) >> (32 - log2_capacity);
}

}  // namespace

TransitionTable::TransitionTable(MemoryBudget& budget) noexcept : pool_(budget) {
  free_.fill(kNoState);
}

TransitionTable::Edge* TransitionTable::find_edge(const Edges& edges, Token token) noexcept {
  const int log2_capacity = log2_capacity_of(edges);
  Edge* block = &pool_[edges.value];
  if (log2_capacity <= kLargestScanned) {
    const std::uint32_t count = count_of(edges);
    for (std::uint32_t i = 0; i < count; ++i) {
      if (block[i].token == token) return block + i;
    }
    return nullptr;
  }
  const std::uint32_t mask = (1u << log2_capacity) - 1;
  for (std::uint32_t i = home(token, log2_capacity);; i = (i + 1) & mask) {
    if (block[i].token == token) return block + i;
    if (block[i].token == kFree) return nullptr;
  }
}

void TransitionTable::prefetch(const Edges& edges, Token token) const noexcept {
  if (!is_block(edges)) return;
  const int log2_capacity = log2_capacity_of(edges);
  const std::uint32_t first = log2_capacity <= kLargestScanned ? 0 : home(token, log2_capacity);
  fastdraft::prefetch(&pool_[edges.value + first]);
}

StateId TransitionTable::find(const Edges& edges, Token token) const noexcept {
  if (!is_block(edges)) {
    // kEmpty is no token: every token is below 2^31.
    return edges.key == static_cast<std::uint32_t>(token) ? static_cast<StateId>(edges.value)
                                                          : kNoState;
  }
  const Edge* edge = const_cast<TransitionTable*>(this)->find_edge(edges, token);
  return edge == nullptr ? kNoState : edge->target;
}

TransitionTable::Found TransitionTable::find_or_insert(Edges& edges, Token token, StateId target) {
  if (!is_block(edges)) {
    if (edges.key == static_cast<std::uint32_t>(token)) {
      return {static_cast<StateId>(edges.value), 0};
    }
    if (edges.key == Edges::kEmpty) {
      edges = {static_cast<std::uint32_t>(token), static_cast<std::uint32_t>(target)};
      return {kNoState, 0};
    }
    const std::uint32_t offset = allocate(1);
    pool_[offset] = {static_cast<Token>(edges.key), static_cast<StateId>(edges.value)};
    pool_[offset + 1] = {token, target};
    edges = {block_key(1, 2), offset};
    return {kNoState, 0};
  }
  if (const Edge* edge = find_edge(edges, token)) {
    return {edge->target, static_cast<std::uint32_t>(edge - pool_.data())};
  }
  if (is_full(log2_capacity_of(edges), count_of(edges))) grow(edges);
  place(edges.value, log2_capacity_of(edges), count_of(edges), {token, target});
  ++edges.key;
  return {kNoState, 0};
}

void TransitionTable::redirect(Edges& edges, Token token, StateId target) noexcept {
  if (is_block(edges)) {
    find_edge(edges, token)->target = target;
  } else {
    edges.value = static_cast<std::uint32_t>(target);
  }
}

void TransitionTable::redirect(Edges& edges, Found found, StateId target) noexcept {
  if (is_block(edges)) {
    pool_[found.place].target = target;
  } else {
    edges.value = static_cast<std::uint32_t>(target);
  }
}

// The edge was added last, so no other one was moved on because its place was taken: it is simply
// freed.
void TransitionTable::erase(Edges& edges, Token token) noexcept {
  if (!is_block(edges)) {
    edges = {};
    return;
  }
  find_edge(edges, token)->token = kFree;
  --edges.key;
}

Edges TransitionTable::copy(const Edges& edges) {
  if (!is_block(edges)) return edges;
  const int log2_capacity = log2_capacity_of(edges);
  const std::uint32_t offset = allocate(log2_capacity);
  std::memcpy(&pool_[offset], &pool_[edges.value], sizeof(Edge) << log2_capacity);
  return {edges.key, offset};
}

std::uint32_t TransitionTable::allocate(int log2_capacity) {
  // The smallest free block that is large enough; what is not needed of it stays free.
  if (const std::uint32_t large_enough = has_free_ >> log2_capacity; large_enough != 0) {
    int size = log2_capacity + lowest_bit(large_enough);
    StateId& first = free_[static_cast<std::size_t>(size)];
    const auto offset = static_cast<std::uint32_t>(first);
    first = pool_[offset].target;
    if (first == kNoState) has_free_ &= ~(1u << size);
    while (size-- > log2_capacity) release(offset + (1u << size), size);
    return offset;
  }
  const std::int64_t offset = pool_.size();
  const std::int64_t capacity = std::int64_t{1} << log2_capacity;
  pool_.reserve(offset + capacity);
  pool_.extend(capacity);
  return static_cast<std::uint32_t>(offset);
}

void TransitionTable::release(std::uint32_t offset, int log2_capacity) noexcept {
  pool_[offset].target = free_[static_cast<std::size_t>(log2_capacity)];
  free_[static_cast<std::size_t>(log2_capacity)] = static_cast<StateId>(offset);
  has_free_ |= 1u << log2_capacity;
}

// Writes an edge that is not there yet into a block with room for it, which
// holds `count` edges.
void TransitionTable::place(std::uint32_t offset, int log2_capacity, std::uint32_t count,
                            Edge edge) noexcept {
  Edge* block = &pool_[offset];
  if (log2_capacity <= kLargestScanned) {
    block[count] = edge;
    return;
  }
  const std::uint32_t mask = (1u << log2_capacity) - 1;
  std::uint32_t i = home(edge.token, log2_capacity);
  while (block[i].token != kFree) i = (i + 1) & mask;
  block[i] = edge;
}

void TransitionTable::grow(Edges& edges) {
  const int from = log2_capacity_of(edges);
  const int to = from + 1;
  const std::uint32_t count = count_of(edges);
  const std::uint32_t offset = allocate(to);
  const Edge* old_block = &pool_[edges.value];
  Edge* block = &pool_[offset];
  if (to <= kLargestScanned) {
    std::memcpy(block, old_block, sizeof(Edge) << from);
  } else {
    for (std::uint32_t i = 0; i < (1u << to); ++i) block[i].token = kFree;
    for (std::uint32_t i = 0; i < (1u << from); ++i) {
      if (old_block[i].token != kFree) place(offset, to, i, old_block[i]);
    }
  }
  release(edges.value, from);
  edges = {block_key(to, count), offset};
}

}  // namespace fastdraft

// The edges of an automaton's states.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "fastdraft/token.h"
#include "index/bits.h"
#include "index/memory.h"

namespace fastdraft {

// A state's number in its automaton.
using StateId = std::int32_t;
inline constexpr StateId kNoState = -1;

// The edges of one state, in 8 bytes. Most states of real text have one edge,
// which is held here itself; more go to a block of the TransitionTable.
//   no edge:   key = kEmpty
//   one edge:  key = its token, value = its target
//   a block:   key = kBlock | log2(capacity) << 26 | number of edges,
//              value = the block's offset in the table
struct Edges {
  static constexpr std::uint32_t kEmpty = 0xFFFFFFFFu;
  static constexpr std::uint32_t kBlock = 0x80000000u;

  std::uint32_t key = kEmpty;
  std::uint32_t value = 0;
};

// The blocks of all states with several edges, in one flat array. An edge takes
// five bytes: its target, and a mark, eight bits of its token's hash. The token
// itself is known to whoever knows the target, since all edges to a state have
// one token: callers give `token_of(target)`, which is asked where a mark is
// the same.
//
// A block holds 2^k edges, in groups of eight or fewer: the marks, then the
// targets. In a group the used entries come first. A block of several groups is
// a hash table of groups, at most seven eighths full; an edge whose group is
// full goes into the next one. Blocks that a state outgrew are reused by others. find is
// O(1) expected; insert is O(1) amortised; copy costs the state's edges, which
// the automaton pays once for each edge of the copy.
//
// Prefetching the block that the suffix link's state needs made no difference.
//
// Not thread-safe; const calls may overlap.
class TransitionTable {
 public:
  // An edge that was looked for: its target, or kNoState where there was none,
  // and its slot, which is its own until edges are added or taken away.
  struct Found {
    StateId target;
    std::int64_t slot;
  };

  explicit TransitionTable(MemoryBudget& budget) noexcept;

  // The target of `edges` over `token`, or kNoState.
  template <typename TokenOf>
  StateId find(const Edges& edges, Token token, TokenOf token_of) const noexcept {
    if (!is_block(edges)) {
      // kEmpty is no token: every token is below 2^31.
      return edges.key == static_cast<std::uint32_t>(token) ? static_cast<StateId>(edges.value)
                                                            : kNoState;
    }
    const std::uint8_t* target = find_in_block(edges, token, token_of).target;
    return target == nullptr ? kNoState : read(target);
  }

  // Asks for the memory that a search for an edge over `token` reads first.
  void prefetch(const Edges& edges, Token token) const noexcept {
    if (is_block(edges)) fastdraft::prefetch(home(edges.value, log2_capacity_of(edges), token));
  }

  // The edge over `token` if there is one; otherwise adds one to `target`.
  // Throws MemoryLimitError and then leaves `edges` as it was.
  template <typename TokenOf>
  Found find_or_insert(Edges& edges, Token token, StateId target, TokenOf token_of) {
    if (!is_block(edges)) {
      if (edges.key == static_cast<std::uint32_t>(token)) {
        return {static_cast<StateId>(edges.value), 0};
      }
      if (edges.key == Edges::kEmpty) {
        edges = {static_cast<std::uint32_t>(token), static_cast<std::uint32_t>(target)};
        return {kNoState, 0};
      }
      const std::uint32_t offset = allocate(1);
      insert_into(offset, 1, 0, static_cast<Token>(edges.key), static_cast<StateId>(edges.value));
      insert_into(offset, 1, 1, token, target);
      edges = {block_key(1, 2), offset};
      return {kNoState, 0};
    }
    if (const std::uint8_t* found = find_in_block(edges, token, token_of).target) {
      return {read(found), found - pool_.data()};
    }
    if (is_full(edges)) grow(edges, token_of);
    insert_into(edges.value, log2_capacity_of(edges), count_of(edges), token, target);
    ++edges.key;
    return {kNoState, 0};
  }

  // Sends an edge to `target`: the one over `token`, which must exist, or one
  // that was found.
  template <typename TokenOf>
  void redirect(Edges& edges, Token token, StateId target, TokenOf token_of) noexcept {
    if (is_block(edges)) {
      write(find_in_block(edges, token, token_of).target, target);
    } else {
      edges.value = static_cast<std::uint32_t>(target);
    }
  }
  void redirect(Edges& edges, Found found, StateId target) noexcept {
    if (is_block(edges)) {
      write(&pool_[found.slot], target);
    } else {
      edges.value = static_cast<std::uint32_t>(target);
    }
  }

  // Takes the edge over `token`, which was added last, away again: no other one
  // was moved on because its slot was taken.
  template <typename TokenOf>
  void erase(Edges& edges, Token token, TokenOf token_of) noexcept {
    if (!is_block(edges)) {
      edges = {};
      return;
    }
    *find_in_block(edges, token, token_of).mark = kFree;
    --edges.key;
  }

  // The same edges in a block of their own. Throws MemoryLimitError.
  Edges copy(const Edges& edges);

  // Makes room for `count` more edges if there is memory, and has the system
  // bring it.
  void try_reserve(std::int64_t count) noexcept {
    if (pool_.try_reserve(pool_.size() + count * kEdgeBytes)) pool_.populate();
  }
  // Gives back the room for more than `count` more edges.
  void trim(std::int64_t count) noexcept { pool_.trim(pool_.size() + count * kEdgeBytes); }

  std::int64_t bytes() const noexcept { return pool_.bytes(); }

 private:
  // The bytes of an edge in a block; null: it is not there.
  struct Slot {
    std::uint8_t* mark;
    std::uint8_t* target;
  };

  static constexpr int kCountBits = 26;
  static constexpr int kLog2Group = 3;
  static constexpr int kEdgeBytes = 5;
  static constexpr int kGroupBytes = kEdgeBytes << kLog2Group;
  // Blocks lie at multiples of this many bytes, which the smallest one has five
  // of.
  static constexpr std::int64_t kUnit = 2;
  static constexpr std::uint8_t kFree = 0;  // the mark of no edge

  static bool is_block(const Edges& edges) noexcept {
    return edges.key != Edges::kEmpty && (edges.key & Edges::kBlock) != 0;
  }
  static std::uint32_t count_of(const Edges& edges) noexcept {
    return edges.key & ((1u << kCountBits) - 1);
  }
  static int log2_capacity_of(const Edges& edges) noexcept {
    return static_cast<int>((edges.key & ~Edges::kBlock) >> kCountBits);
  }
  static std::uint32_t block_key(int log2_capacity, std::uint32_t count) noexcept {
    return Edges::kBlock | (static_cast<std::uint32_t>(log2_capacity) << kCountBits) | count;
  }
  static bool is_full(const Edges& edges) noexcept {
    const std::uint32_t capacity = 1u << log2_capacity_of(edges);
    const bool is_group = log2_capacity_of(edges) <= kLog2Group;
    return count_of(edges) == (is_group ? capacity : capacity / 8 * 7);
  }
  static std::int64_t bytes_of(int log2_capacity) noexcept {
    return std::int64_t{kEdgeBytes} << log2_capacity;
  }

  // Fibonacci hashing: the high bits depend on all bits of the token, and
  // neighbouring ids spread over the whole block. The highest eight are the
  // mark, and those below choose the group.
  static std::uint32_t hash(Token token) noexcept {
    return static_cast<std::uint32_t>(token) * 0x9E3779B1u;
  }
  static std::uint8_t mark_of(Token token) noexcept {
    return static_cast<std::uint8_t>(std::max(hash(token) >> 24, 1u));
  }
  std::uint8_t* home(std::uint32_t offset, int log2_capacity, Token token) const noexcept {
    std::uint8_t* block = const_cast<std::uint8_t*>(pool_.data()) + kUnit * offset;
    if (log2_capacity <= kLog2Group) return block;
    const std::uint32_t group = (hash(token) << 8) >> (32 - (log2_capacity - kLog2Group));
    return block + std::int64_t{kGroupBytes} * group;
  }

  static StateId read(const std::uint8_t* target) noexcept {
    return static_cast<StateId>(load_32(target));
  }
  static void write(std::uint8_t* target, StateId value) noexcept {
    std::memcpy(target, &value, sizeof(value));
  }
  // The highest bit of each byte that is `byte`, of the first `slots`.
  static std::uint64_t same_bytes(std::uint64_t bytes, std::uint8_t byte, int slots) noexcept {
    constexpr std::uint64_t kOnes = 0x0101010101010101u;
    constexpr std::uint64_t kLow = 0x7F * kOnes;
    const std::uint64_t differs = bytes ^ (byte * kOnes);
    const std::uint64_t same = ~(((differs & kLow) + kLow) | differs | kLow);
    return same & (~std::uint64_t{0} >> (64 - 8 * slots));
  }

  template <typename TokenOf>
  Slot find_in_block(const Edges& edges, Token token, TokenOf token_of) const noexcept {
    const int log2_capacity = log2_capacity_of(edges);
    const int slots = 1 << std::min(log2_capacity, kLog2Group);
    std::uint8_t* group = home(edges.value, log2_capacity, token);
    for (;;) {
      const std::uint64_t marks = load_64(group);
      std::uint64_t same = same_bytes(marks, mark_of(token), slots);
      for (; same != 0; same &= same - 1) {
        const int i = lowest_bit(same) / 8;
        std::uint8_t* target = group + slots + 4 * i;
        if (token_of(read(target)) == token) return {group + i, target};
      }
      if (log2_capacity <= kLog2Group || same_bytes(marks, kFree, slots) != 0) return {};
      group = after(group, edges.value, log2_capacity);
    }
  }
  // The group after one of a block, around its end.
  std::uint8_t* after(std::uint8_t* group, std::uint32_t offset, int log2_capacity) const noexcept {
    group += kGroupBytes;
    const std::uint8_t* block = pool_.data() + kUnit * offset;
    return group == block + bytes_of(log2_capacity) ? const_cast<std::uint8_t*>(block) : group;
  }

  std::uint32_t allocate(int log2_capacity);
  void release(std::uint32_t offset, int log2_capacity) noexcept;
  void insert_into(std::uint32_t offset, int log2_capacity, std::uint32_t count, Token token,
                   StateId target) noexcept;

  template <typename TokenOf>
  void grow(Edges& edges, TokenOf token_of) {
    const int from = log2_capacity_of(edges);
    const std::uint32_t offset = allocate(from + 1);
    const int slots = 1 << std::min(from, kLog2Group);
    const std::uint8_t* const block = &pool_[kUnit * edges.value];
    if (from < kLog2Group) {
      std::uint8_t* const larger = &pool_[kUnit * offset];
      for (int i = 0; i < slots; ++i) larger[i] = block[i];
      for (int i = 0; i < slots; ++i) {
        write(larger + 2 * slots + 4 * i, read(block + slots + 4 * i));
      }
    } else {
      const std::uint8_t* const end = block + bytes_of(from);
      for (const std::uint8_t* group = block; group != end; group += kGroupBytes) {
        for (int i = 0; i < slots; ++i) {
          if (group[i] == kFree) continue;
          const StateId target = read(group + slots + 4 * i);
          insert_into(offset, from + 1, 0, token_of(target), target);
        }
      }
    }
    release(edges.value, from);
    edges = {block_key(from + 1, count_of(edges)), offset};
  }

  FlatArray<std::uint8_t> pool_;
  // Head of the list of free blocks of each size, linked through their first
  // bytes, and a bit for each that is not empty.
  std::array<StateId, 32> free_;
  std::uint32_t has_free_ = 0;
};

}  // namespace fastdraft

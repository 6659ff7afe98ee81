// The edges of an automaton's states.
#pragma once

#include <array>
#include <cstdint>

#include "fastdraft/token.h"
#include "memory.h"

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

// The blocks of all states with several edges, in one flat array. A block
// holds 2^k edges; up to eight are scanned, more are hashed with linear
// probing at a load of at most three quarters. Blocks that a state outgrew
// are reused by others of their size. find is O(1) expected; insert is O(1)
// amortised; copy costs the state's edges, which the automaton pays once for
// each edge of the copy.
//
// Not thread-safe; const calls may overlap.
class TransitionTable {
 public:
  explicit TransitionTable(MemoryBudget& budget) noexcept;

  // The target of `edges` over `token`, or kNoState.
  StateId find(const Edges& edges, Token token) const noexcept;

  // The target over `token` if there is one; otherwise adds an edge to
  // `target` and returns kNoState. Throws MemoryLimitError and then leaves
  // `edges` as it was.
  StateId find_or_insert(Edges& edges, Token token, StateId target);

  // Sends the edge over `token`, which must exist, to `target`.
  void redirect(Edges& edges, Token token, StateId target) noexcept;

  // Takes the edge over `token`, which must exist, away again.
  void erase(Edges& edges, Token token) noexcept;

  // The same edges in a block of their own. Throws MemoryLimitError.
  Edges copy(const Edges& edges);

  std::int64_t bytes() const noexcept { return pool_.bytes(); }

 private:
  struct Edge {
    Token token;
    StateId target;
  };

  Edge* find_edge(const Edges& edges, Token token) noexcept;
  std::uint32_t allocate(int log2_capacity);
  void release(std::uint32_t offset, int log2_capacity) noexcept;
  void place(std::uint32_t offset, int log2_capacity, std::uint32_t count, Edge edge) noexcept;
  void grow(Edges& edges);

  FlatArray<Edge> pool_;
  // Head of the list of free blocks of each size, linked through the first
  // edge's target.
  std::array<StateId, 32> free_;
};

}  // namespace fastdraft

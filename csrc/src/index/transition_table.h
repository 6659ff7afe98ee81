// The edges of an automaton's states.
#pragma once

#include <array>
#include <cstdint>

#include "fastdraft/token.h"
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

// The blocks of all states with several edges, in one flat array. A block
// holds 2^k edges; up to eight are scanned, more are hashed with linear
// probing at a load of at most seven eighths. Blocks that a state outgrew
// are reused by others. find is O(1) expected; insert is O(1)
// amortised; copy costs the state's edges, which the automaton pays once for
// each edge of the copy.
//
// The scan is a loop of branches: comparing the eight tokens at once (SSE2) took
// 1.1 to 1.2 of the time on an AMD EPYC, since a guessed branch goes on at once.
// Prefetching the block that the suffix link's state needs made no difference.
//
// Not thread-safe; const calls may overlap.
class TransitionTable {
 public:
  // An edge that was looked for: its target, or kNoState where there was none, and its place, which
  // is its own until edges are added or taken away.
  struct Found {
    StateId target;
    std::uint32_t place;
  };

  explicit TransitionTable(MemoryBudget& budget) noexcept;

  // The target of `edges` over `token`, or kNoState.
  StateId find(const Edges& edges, Token token) const noexcept;

  // Asks for the memory that a search for an edge over `token` reads first.
  void prefetch(const Edges& edges, Token token) const noexcept;

  // The edge over `token` if there is one; otherwise adds one to `target`.
  // Throws MemoryLimitError and then leaves `edges` as it was.
  Found find_or_insert(Edges& edges, Token token, StateId target);

  // Sends an edge to `target`: the one over `token`, which must exist, or one
  // that was found.
  void redirect(Edges& edges, Token token, StateId target) noexcept;
  void redirect(Edges& edges, Found found, StateId target) noexcept;

  // Takes the edge over `token`, which was added last, away again.
  void erase(Edges& edges, Token token) noexcept;

  // The same edges in a block of their own. Throws MemoryLimitError.
  Edges copy(const Edges& edges);

  // Makes room for `count` more edges if there is memory, and has the system bring it.
  void try_reserve(std::int64_t count) noexcept {
    if (pool_.try_reserve(pool_.size() + count)) pool_.populate();
  }
  // Gives back the room for more than `count` more edges.
  void trim(std::int64_t count) noexcept { pool_.trim(pool_.size() + count); }

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
  // edge's target, and a bit for each that is not empty.
  std::array<StateId, 32> free_;
  std::uint32_t has_free_ = 0;
};

}  // namespace fastdraft

// Blocks of many edges. That edges are found is tested with automata.
#include "index/transition_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fastdraft {
namespace {

// In these tables an edge's token is its target.
constexpr auto token_of = [](StateId target) { return target; };

TEST(TransitionTable, GivesBlocksThatWereOutgrownToOthers) {
  MemoryBudget budget;
  TransitionTable table(budget);
  Edges large;
  for (Token token = 0; token < 4096; ++token) table.find_or_insert(large, token, token, token_of);
  const std::int64_t bytes = table.bytes();
  // The blocks of 2, 4, ... 4096 edges that `large` left hold all of these.
  std::vector<Edges> small(100);
  for (Edges& edges : small) {
    for (Token token = 0; token < 20; ++token) table.find_or_insert(edges, token, token, token_of);
  }
  EXPECT_LE(table.bytes(), bytes * 3 / 2);
}

// An automaton that gets no memory for a token removes the edges that it added for it. Tried at
// every size of a block.
TEST(TransitionTable, TakesTheLastEdgeAwayAgain) {
  MemoryBudget budget;
  TransitionTable table(budget);
  Edges edges;
  for (Token token = 0; token < 100; ++token) {
    for (int again = 0; again < 2; ++again) {
      EXPECT_EQ(table.find_or_insert(edges, token, token, token_of).target, kNoState);
      if (again == 0) table.erase(edges, token, token_of);
      EXPECT_EQ(table.find(edges, token, token_of), again == 0 ? kNoState : token);
    }
  }
}

}  // namespace
}  // namespace fastdraft

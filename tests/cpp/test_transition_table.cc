#include "index/transition_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace fastdraft {
namespace {

TEST(TransitionTable, AgreesWithMapsUnderInsertEraseRedirectAndCopy) {
  constexpr Token kLargest = std::numeric_limits<Token>::max();
  MemoryBudget budget;
  TransitionTable table(budget);
  std::vector<Edges> states(1);
  std::vector<std::map<Token, StateId>> expected(1);
  std::vector<std::optional<Token>> last(1);  // added to each state, until it has been taken away
  std::mt19937 random(1);
  for (int step = 0; step < 40000; ++step) {
    const std::size_t state = random() % states.size();
    const Token token = kLargest - static_cast<Token>(random() % 300);
    const auto target = static_cast<StateId>(random() % 1000);
    auto& edges = expected[state];
    switch (random() % 8) {
      case 0:
        if (const std::optional<Token> added = std::exchange(last[state], std::nullopt)) {
          table.erase(states[state], *added);
          edges.erase(*added);
        }
        break;
      case 1:
        if (edges.count(token) != 0) {
          table.redirect(states[state], token, target);
          edges[token] = target;
        }
        break;
      case 2:
        if (states.size() < 200) {
          const Edges copied = table.copy(states[state]);
          states.push_back(copied);
          expected.push_back(expected[state]);
          last.push_back(last[state]);
        }
        break;
      default: {
        const auto [place, inserted] = edges.try_emplace(token, target);
        const auto found = table.find_or_insert(states[state], token, target);
        ASSERT_EQ(found.target, inserted ? kNoState : place->second);
        if (inserted) {
          last[state] = token;
        } else if (random() % 2 == 0) {
          table.redirect(states[state], found, target);
          place->second = target;
        }
      }
    }
    const auto found = expected[state].find(token);
    ASSERT_EQ(table.find(states[state], token),
              found == expected[state].end() ? kNoState : found->second);
  }
  for (std::size_t state = 0; state < states.size(); ++state) {
    for (Token token = kLargest; token > kLargest - 300; --token) {
      const auto found = expected[state].find(token);
      ASSERT_EQ(table.find(states[state], token),
                found == expected[state].end() ? kNoState : found->second);
    }
  }
}

TEST(TransitionTable, GivesBlocksThatWereOutgrownToOthers) {
  MemoryBudget budget;
  TransitionTable table(budget);
  Edges large;
  for (Token token = 0; token < 4096; ++token) table.find_or_insert(large, token, token);
  const std::int64_t bytes = table.bytes();
  // The blocks of 2, 4, ... 4096 edges that `large` left hold all of these.
  std::vector<Edges> small(100);
  for (Edges& edges : small) {
    for (Token token = 0; token < 20; ++token) table.find_or_insert(edges, token, token);
  }
  EXPECT_LE(table.bytes(), bytes * 3 / 2);
}

}  // namespace
}  // namespace fastdraft

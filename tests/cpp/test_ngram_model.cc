#include "draft/ngram_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fastdraft/error.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

NgramModel make(const Tokens& text, std::int32_t order, MemoryBudget& budget) {
  return {text.data(), static_cast<std::int64_t>(text.size()), order, budget};
}

// What follows the longest suffix of `context` that `text` goes on after.
struct Expected {
  Token token = -1;
  double probability = 0.0;
};

// By counting everywhere.
Expected find_continuation(const Tokens& text, const Tokens& context, std::int32_t order) {
  const auto longest = std::min<std::size_t>(context.size(), static_cast<std::size_t>(order) - 1);
  for (std::size_t length = longest + 1; length-- > 0;) {
    Tokens following;
    for (std::size_t at = length; at < text.size(); ++at) {
      if (std::equal(context.end() - static_cast<std::ptrdiff_t>(length), context.end(),
                     text.begin() + static_cast<std::ptrdiff_t>(at - length))) {
        following.push_back(text[at]);
      }
    }
    std::ptrdiff_t most = 0;
    Expected expected;
    for (const Token token : following) {
      const std::ptrdiff_t count = std::count(following.begin(), following.end(), token);
      if (count < most) continue;
      most = count;
      expected.token = token;
    }
    expected.probability = static_cast<double>(most) / static_cast<double>(following.size());
    if (!following.empty()) return expected;
  }
  return {};
}

TEST(NgramModel, GoesOnAsTheTextMostOftenDoes) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    MemoryBudget budget;
    const auto order = static_cast<std::int32_t>(1 + seed % 6);
    const Tokens text = testing::random_text(1 + seed * 3, static_cast<Token>(1 + seed % 5), seed);
    const NgramModel model = make(text, order, budget);
    NgramModel::Context context;
    Tokens other;
    for (const Token token :
         testing::random_text(60, static_cast<Token>(2 + seed % 5), seed + 1000)) {
      context = model.advance(context, token);
      other.push_back(token);
      ASSERT_LT(context.length, order);
      // Along a draft too: after each continuation comes that of the grown text.
      NgramModel::Context at = context;
      Tokens grown = other;
      for (int depth = 0; depth < 3; ++depth) {
        const NgramModel::Continuation next = model.continuation(at);
        const Expected expected = find_continuation(text, grown, order);
        ASSERT_EQ(next.token, expected.token);
        ASSERT_EQ(next.probability, expected.probability);
        at = next.context;
        grown.push_back(next.token);
      }
    }
  }
}

TEST(NgramModel, KnowsNothingOfAnEmptyText) {
  MemoryBudget budget;
  const NgramModel model = make({}, 4, budget);
  EXPECT_TRUE(model.empty());
  EXPECT_EQ(model.advance({}, 7).length, 0);
}

// A quadratic step anywhere would take hours here.
TEST(NgramModel, CountsAMillionHostileTokens) {
  constexpr std::size_t kSize = 1'000'000;
  for (const Tokens& text :
       {testing::repeated(kSize), testing::fibonacci(kSize), testing::random_text(kSize, 2, 1),
        testing::random_text(kSize, 1 << 30, 2)}) {
    MemoryBudget budget;
    const NgramModel model = make(text, 4, budget);
    NgramModel::Context context;
    for (const Token token : text) context = model.advance(context, token);
    EXPECT_EQ(context.length, 3);
    EXPECT_GT(model.continuation(context).probability, 0.0);
  }
}

TEST(NgramModel, GivesAllMemoryBackWhenItEnds) {
  const Tokens text = testing::random_text(600, 12, 5);
  bool fitted = false;
  for (std::int64_t limit = 100; !fitted; limit += 229) {
    MemoryBudget budget(limit);
    try {
      const NgramModel model = make(text, 4, budget);
      fitted = true;
      EXPECT_GT(budget.used(), 0);
      EXPECT_LE(budget.used(), limit);
    } catch (const MemoryLimitError&) {
      ASSERT_LT(limit, 1'000'000);
    }
    EXPECT_EQ(budget.used(), 0);
  }
}

}  // namespace
}  // namespace fastdraft

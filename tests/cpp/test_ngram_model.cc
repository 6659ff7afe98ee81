// Time and memory. What it finds is compared with an oracle in tests/core/test_ngram.py.
#include "draft/ngram_model.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "fastdraft/error.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

NgramModel make(const Tokens& text, std::int32_t order, MemoryBudget& budget) {
  return {text.data(), static_cast<std::int64_t>(text.size()), order, budget};
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

// Time. What it finds is compared with an oracle in tests/core/test_ngram.py.
#include "draft/ngram_model.h"

#include <gtest/gtest.h>

#include <cstdint>

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

}  // namespace
}  // namespace fastdraft

#include "token_links.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <unordered_map>

#include "fastdraft/error.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

// What the links are to say, token by token.
void expect_links(const TokenLinks& links, const Tokens& text) {
  ASSERT_LE(links.size(), static_cast<std::int64_t>(text.size()));
  std::unordered_map<Token, std::int32_t> latest;
  for (std::int32_t position = 0; position < links.size(); ++position) {
    const Token token = text[static_cast<std::size_t>(position)];
    const auto before = latest.find(token);
    ASSERT_EQ(links.previous(position), before == latest.end() ? -1 : before->second) << position;
    latest[token] = position;
  }
}

TEST(TokenLinks, LinkEachTokenToTheLatestOneBefore) {
  const Token any = std::numeric_limits<Token>::max();
  for (const Tokens& text :
       {Tokens{}, Tokens{0}, Tokens{any, 0, any, any, 0}, testing::repeated(1000),
        testing::fibonacci(1000), testing::random_text(5000, 20, 1),
        testing::random_text(5000, 5000, 2), testing::random_text(5000, any, 3)}) {
    MemoryBudget budget;
    TokenLinks links(budget);
    for (const Token token : text) links.append(token);
    ASSERT_EQ(links.size(), static_cast<std::int64_t>(text.size()));
    expect_links(links, text);
  }
}

// Tokens whose hashes collide in the table's low bits and in its high ones.
TEST(TokenLinks, StayApartWhateverTheTokens) {
  for (const Token step : {1, 64, 1 << 12, 1 << 20}) {
    MemoryBudget budget;
    TokenLinks links(budget);
    Tokens text;
    for (int round = 0; round < 3; ++round) {
      for (Token i = 0; i < 2000; ++i) text.push_back(i * step & 0x7fffffff);
    }
    for (const Token token : text) links.append(token);
    expect_links(links, text);
  }
}

TEST(TokenLinks, TakeLittleMemoryAndGiveItBack) {
  MemoryBudget budget;
  {
    TokenLinks links(budget);
    EXPECT_EQ(budget.used(), 0);
    for (const Token token : testing::repeated(100'000)) links.append(token);
    EXPECT_LE(budget.used(), 100'000 * 4 * 5 / 4 + 1024);
    for (const Token token : testing::random_text(100'000, 1000, 1)) links.append(token);
    EXPECT_LE(budget.used(), 200'000 * 4 * 5 / 4 + 32 * 1024);
  }
  EXPECT_EQ(budget.used(), 0);
}

TEST(TokenLinks, StayWholeWhenMemoryEnds) {
  const Tokens text = testing::random_text(600, 200, 4);
  int refusals = 0;
  for (std::int64_t limit = 0; limit < 8192; limit += 64) {
    MemoryBudget budget(limit + 1'000'000);
    budget.charge(1'000'000);
    TokenLinks links(budget);
    for (const Token token : text) {
      const std::int64_t before = links.size();
      try {
        links.append(token);
      } catch (const MemoryLimitError&) {
        ASSERT_EQ(links.size(), before);
        ASSERT_NO_FATAL_FAILURE(expect_links(links, text));
        ASSERT_LE(budget.used(), budget.limit());
        EXPECT_THROW(links.append(token), MemoryLimitError);
        ++refusals;
        budget.refund(1'000'000);  // and there is room again
        break;
      }
    }
    for (std::int64_t i = links.size(); i < static_cast<std::int64_t>(text.size()); ++i) {
      links.append(text[static_cast<std::size_t>(i)]);
    }
    expect_links(links, text);
  }
  EXPECT_GT(refusals, 50);
}

}  // namespace
}  // namespace fastdraft

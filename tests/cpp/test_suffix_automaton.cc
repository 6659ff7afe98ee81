#include "index/suffix_automaton.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "suffixes.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

// With any text and token, known or not: memory that it does not have is not read.
TEST(SuffixAutomaton, EndsEveryApproach) {
  for (const Tokens& text : {testing::random_text(300, 3, 1), testing::random_text(300, 80, 2),
                             testing::repeated(100), testing::fibonacci(200)}) {
    MemoryBudget budget;
    SuffixAutomaton index(budget);
    for (const Token next : text) {
      for (const Token token : {next, text.front(), Token{90}}) {
        SuffixAutomaton::Approach way{};
        int steps = 0;
        while (index.approach(way, token, steps)) ++steps;
        ASSERT_LT(steps, 10);
      }
      index.append(next);
    }
  }
}

// If paths are longer than kLatestWalk, the ends of a prompt are exact.
TEST(SuffixAutomaton, KnowsTheSuffixesOfHostileTexts) {
  for (const Tokens& text :
       {testing::repeated(300), testing::fibonacci(400), testing::thue_morse(400)}) {
    MemoryBudget budget;
    SuffixAutomaton prompt(budget);
    prompt.append(text.data(), static_cast<std::int64_t>(text.size()));
    EXPECT_TRUE(testing::knows_all(prompt, text, true));
    SuffixAutomaton grown(budget);
    for (const Token token : text) grown.append(token);
    EXPECT_TRUE(testing::knows_all(grown, text, false));
  }
}

// Long texts with paths of more than kLatestWalk states, and tokens whose hashes collide in the
// low and in the high bits.
TEST(SuffixAutomaton, KnowsWhereEachTokenStoodBefore) {
  constexpr Token kAny = std::numeric_limits<Token>::max();
  std::vector<Tokens> texts{Tokens{},
                            Tokens{0},
                            Tokens{kAny, 0, kAny, kAny, 0},
                            testing::repeated(1000),
                            testing::fibonacci(1000),
                            testing::random_text(5000, 20, 1),
                            testing::random_text(5000, 5000, 2),
                            testing::random_text(5000, kAny, 3)};
  for (const Token step : {1, 64, 1 << 12, 1 << 20}) {
    Tokens& text = texts.emplace_back();
    for (int round = 0; round < 3; ++round) {
      for (Token i = 0; i < 2000; ++i) text.push_back(i * step & kAny);
    }
  }
  // Runs of one token between others: the run's end is up to 99 links below its last token.
  Tokens& runs = texts.emplace_back();
  for (int run = 0; run < 100; ++run) {
    runs.insert(runs.end(), static_cast<std::size_t>(run * 37 % 100), 1);
    runs.push_back(static_cast<Token>(2 + run % 3));
  }
  for (const Tokens& text : texts) {
    MemoryBudget budget;
    SuffixAutomaton index(budget);
    index.append(text.data(), static_cast<std::int64_t>(text.size()));
    ASSERT_EQ(index.size(), static_cast<std::int64_t>(text.size()));
    EXPECT_TRUE(testing::knows_previous(index, text));
  }
}

// A quadratic step anywhere would take hours here.
TEST(SuffixAutomaton, IndexesAMillionHostileTokens) {
  constexpr std::size_t kSize = 1'000'000;
  for (const Tokens& text :
       {testing::repeated(kSize), testing::fibonacci(kSize), testing::thue_morse(kSize),
        testing::random_text(kSize, 2, 1), testing::random_text(kSize, 1 << 30, 2)}) {
    MemoryBudget budget;
    SuffixAutomaton index(budget);
    Match elsewhere;
    for (const Token token : text) index.append(token);
    for (const Token token : text) elsewhere = index.advance(elsewhere, token);
    EXPECT_EQ(elsewhere.length, static_cast<std::int32_t>(kSize));
    EXPECT_EQ(index.bytes(), budget.used());
    // Two states and three edges a token, with the slack of arrays and blocks.
    EXPECT_LE(index.bytes(), static_cast<std::int64_t>(80 * kSize));
    SuffixAutomaton prompt(budget);
    prompt.append(text.data(), static_cast<std::int64_t>(kSize));
    EXPECT_EQ(prompt.repeated_suffix().length, index.repeated_suffix().length);
  }
}

}  // namespace
}  // namespace fastdraft

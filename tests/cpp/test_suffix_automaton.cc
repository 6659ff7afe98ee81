#include "index/suffix_automaton.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "fastdraft/error.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

void expect_answers(const SuffixAutomaton& index, const Tokens& text) {
  const testing::RepeatedSuffix expected = testing::find_repeated_suffix(text);
  const Match match = index.repeated_suffix();
  ASSERT_EQ(match.length, expected.length);
  if (match.length == 0) return;
  ASSERT_EQ(index.first_end(match.state), expected.first_end);
  ASSERT_EQ(index.latest_end(match.state), expected.latest_end);
}

// previous() of all positions, by one pass over the text.
void expect_previous(const SuffixAutomaton& index, const Tokens& text) {
  std::unordered_map<Token, std::int32_t> latest;
  for (std::int32_t position = 0; position < static_cast<std::int32_t>(text.size()); ++position) {
    const auto [place, first] =
        latest.try_emplace(text[static_cast<std::size_t>(position)], position);
    ASSERT_EQ(index.previous(position), first ? -1 : place->second) << position;
    place->second = position;
  }
}

// Of any text and token, known or not: memory that it does not have is not read.
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

// Every suffix that occurs earlier: where first, and where last.
void expect_all_ends(const SuffixAutomaton& index, const Tokens& text) {
  ASSERT_NO_FATAL_FAILURE(expect_answers(index, text));
  for (Match match = index.repeated_suffix(); match.length > 0; match = index.shorter(match)) {
    std::vector<std::int32_t> ends;
    for (std::size_t end = 0; end + 1 < text.size(); ++end) {
      if (testing::common_suffix(text, text.size(), end + 1) >= match.length) {
        ends.push_back(static_cast<std::int32_t>(end));
      }
    }
    ASSERT_FALSE(ends.empty());
    ASSERT_EQ(index.first_end(match.state), ends.front()) << match.length;
    ASSERT_EQ(index.latest_end(match.state), ends.back()) << match.length;
  }
}

// Appends a text in parts of up to `most` tokens. What comes at once is marked at the end, what
// comes in small parts token by token.
void expect_all(const Tokens& whole, Token most, std::uint32_t seed) {
  MemoryBudget budget;
  SuffixAutomaton index(budget);
  const Tokens parts = testing::random_text(whole.size(), most, seed);
  Tokens text;
  for (std::size_t part = 0; text.size() < whole.size(); ++part) {
    const auto first = whole.begin() + static_cast<std::ptrdiff_t>(text.size());
    const auto count = std::min<std::ptrdiff_t>(parts[part] + 1, whole.end() - first);
    if (count == 1) {
      index.append(*first);
    } else {
      index.append(&*first, count);
    }
    text.insert(text.end(), first, first + count);
    if (most > 1) {
      ASSERT_NO_FATAL_FAILURE(expect_all_ends(index, text)) << seed;
    } else {
      ASSERT_NO_FATAL_FAILURE(expect_answers(index, text)) << seed;
    }
    ASSERT_NO_FATAL_FAILURE(expect_previous(index, text)) << seed;
  }
}

TEST(SuffixAutomaton, KnowsTheRepeatedSuffixesOfTokensThatComeInParts) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Tokens text = testing::random_text(200, static_cast<Token>(1 + seed % 7), seed);
    ASSERT_NO_FATAL_FAILURE(expect_all(text, 1, seed));
    if (seed % 7 != 0) {
      ASSERT_NO_FATAL_FAILURE(expect_all(text, static_cast<Token>(2 + seed), seed));
    }
  }
  // Where paths are longer than kLatestWalk, the ends of a prompt are exact.
  for (const Tokens& text :
       {testing::repeated(300), testing::fibonacci(400), testing::thue_morse(400)}) {
    ASSERT_NO_FATAL_FAILURE(expect_all(text, 1, 0));
    MemoryBudget budget;
    SuffixAutomaton index(budget);
    index.append(text.data(), static_cast<std::int64_t>(text.size()));
    ASSERT_NO_FATAL_FAILURE(expect_all_ends(index, text));
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
    ASSERT_NO_FATAL_FAILURE(expect_previous(index, text));
  }
}

TEST(SuffixAutomaton, MatchesOtherTextsByTheirLongestSuffix) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    MemoryBudget budget;
    SuffixAutomaton index(budget);
    const Tokens text = testing::random_text(80, static_cast<Token>(2 + seed % 3), seed);
    for (const Token token : text) index.append(token);
    Match match;
    Tokens other;
    for (const Token token :
         testing::random_text(80, static_cast<Token>(2 + seed % 4), seed + 1000)) {
      match = index.advance(match, token);
      other.push_back(token);
      std::int32_t longest = 0;
      for (std::size_t end = 1; end <= text.size(); ++end) {
        std::int32_t length = 0;
        while (length < static_cast<std::int32_t>(std::min(end, other.size())) &&
               text[end - 1 - static_cast<std::size_t>(length)] ==
                   other[other.size() - 1 - static_cast<std::size_t>(length)]) {
          ++length;
        }
        longest = std::max(longest, length);
      }
      ASSERT_EQ(match.length, longest);
    }
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

TEST(SuffixAutomaton, AnswersNothingForEmptyAndFreshTexts) {
  MemoryBudget budget;
  SuffixAutomaton index(budget);
  EXPECT_EQ(index.repeated_suffix().length, 0);
  EXPECT_EQ(index.advance({}, 3).length, 0);
  index.append(std::numeric_limits<Token>::max());
  EXPECT_EQ(index.repeated_suffix().length, 0);
  index.append(std::numeric_limits<Token>::max());
  EXPECT_EQ(index.repeated_suffix().length, 1);
}

// The prefix "ab" becomes an inner state when it occurs again, "a" alone later: matches from before
// stand for the same strings after.
TEST(SuffixAutomaton, RenewsAMatchOfAPrefixThatOccursAgain) {
  MemoryBudget budget;
  SuffixAutomaton index(budget);
  Match match;
  for (const Token token : {1, 2}) {
    index.append(token);
    match = index.advance(match, token);
  }
  for (const Token token : {3, 1, 2, 3, 1, 2}) index.append(token);
  match = index.renew(match);
  EXPECT_EQ(match.length, 2);
  EXPECT_EQ(index.first_end(match.state), 1);
  EXPECT_EQ(index.latest_end(match.state), 4);
  const Match next = index.advance(match, 3);
  EXPECT_EQ(next.length, 3);
  EXPECT_EQ(index.latest_end(next.state), 5);
  EXPECT_EQ(index.advance(next, 9).length, 0);
}

// Each allocation that a prompt could fail at.
TEST(SuffixAutomaton, TakesTheTokensThatFitWhereAPromptDoesNot) {
  const Tokens text = testing::random_text(600, 12, 5);
  for (std::int64_t limit = 1000; limit < 20000; limit += 631) {
    MemoryBudget budget(limit);
    SuffixAutomaton index(budget);
    try {
      index.append(text.data(), static_cast<std::int64_t>(text.size()));
    } catch (const MemoryLimitError&) {
      const Tokens taken(text.begin(), text.begin() + index.size());
      ASSERT_NO_FATAL_FAILURE(expect_all_ends(index, taken));
      ASSERT_NO_FATAL_FAILURE(expect_previous(index, taken));
    }
  }
}

// Whatever allocation fails, the text before it answers as if nothing was
// tried, and goes on when there is memory again.
TEST(SuffixAutomaton, StaysWholeWhenMemoryEnds) {
  const Tokens text = testing::random_text(600, 12, 5);
  for (std::int64_t limit = 1000; limit < 60000; limit += 229) {
    MemoryBudget budget(limit + 1'000'000);
    budget.charge(1'000'000);
    SuffixAutomaton index(budget);
    Tokens taken;
    bool refused = false;
    for (const Token token : text) {
      try {
        index.append(token);
      } catch (const MemoryLimitError& error) {
        refused = true;
        EXPECT_NE(std::string(error.what()).find("max_bytes is"), std::string::npos);
        ASSERT_EQ(index.size(), static_cast<std::int64_t>(taken.size()));
        ASSERT_NO_FATAL_FAILURE(expect_answers(index, taken));
        ASSERT_NO_FATAL_FAILURE(expect_previous(index, taken));
        ASSERT_LE(budget.used(), budget.limit());
        EXPECT_THROW(index.append(token), MemoryLimitError);
        break;
      }
      taken.push_back(token);
    }
    if (!refused) break;
    budget.refund(1'000'000);
    for (std::size_t i = taken.size(); i < text.size(); ++i) {
      index.append(text[i]);
      taken.push_back(text[i]);
      ASSERT_NO_FATAL_FAILURE(expect_answers(index, taken));
    }
    ASSERT_NO_FATAL_FAILURE(expect_previous(index, text));
  }
}

}  // namespace
}  // namespace fastdraft

#include "store/live_log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

constexpr std::int64_t kLogLimit = LiveLog::kSmallStore + 3 * LiveLog::kSlabBytes + 100'000;

// The limits of 23 bits, and marks.
constexpr std::array<Token, 5> kEdges{-1, -1 - static_cast<Token>(kContextTokens), 0,
                                      LiveLog::kLargestToken, LiveLog::kUnknown};

// A log, and all that was ever appended to it.
struct Appended {
  LiveLog log;
  std::vector<Token> all;
  std::vector<bool> outputs;
  std::mt19937 random{0};

  explicit Appended(std::int64_t limit) : log(limit, 0) {}

  void append(Token token) {
    if (log.wants_slab()) log.add_slab(LiveLog::allocate_slab());
    const bool output = random() % 3 == 0;
    log.append(token, output);
    all.push_back(token);
    outputs.push_back(output);
    ASSERT_LE(log.bytes(), log.max_bytes());
  }
  void append_some(std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      append(random() % 8 == 0 ? kEdges[random() % kEdges.size()]
                               : static_cast<Token>(random() % 50'000));
    }
  }

  // Expects what is held to be what was appended, and comparisons with it, every `step` tokens, to
  // be those of the tokens, also where the text has a token more or another one.
  void expect_held(std::int64_t step) {
    ASSERT_EQ(log.end(), static_cast<std::int64_t>(all.size()));
    const auto first = all.begin() + log.begin();
    ASSERT_EQ(log.num_tokens(), std::count_if(first, all.end(), [](Token t) { return t >= 0; }));
    std::vector<Token> copy(static_cast<std::size_t>(log.end() - log.begin()));
    log.copy(log.begin(), log.end() - log.begin(), copy.data());
    ASSERT_TRUE(std::equal(copy.begin(), copy.end(), first));
    for (std::int64_t position = log.begin(); position < log.end(); ++position) {
      const auto at = static_cast<std::size_t>(position);
      ASSERT_EQ(log.token(position), all[at]);
      ASSERT_EQ(log.output(position), outputs[at]);
      if (position % step == 0) {
        ASSERT_NO_FATAL_FAILURE(expect_compared(position));
      }
    }
  }

  void expect_compared(std::int64_t position) {
    const std::int64_t held = position - log.begin();
    Token text[40];
    const std::int64_t size = std::min(held, static_cast<std::int64_t>(random() % 40));
    std::copy_n(all.data() + position - size, size, text);
    std::int64_t same = size;
    if (size > 0 && random() % 2 == 0) {
      const auto changed = static_cast<std::int64_t>(random() % static_cast<unsigned>(size));
      const Token other = kEdges[2 + random() % (kEdges.size() - 2)];
      if (other != text[changed]) same = size - 1 - changed;
      text[changed] = other;
    }
    // No text has a mark.
    for (std::int64_t i = 0; i < size; ++i) {
      if (text[size - 1 - i] >= 0) continue;
      text[size - 1 - i] = text[size - 1 - i] & 0x7FFFFF;
      same = std::min(same, i);
    }
    ASSERT_EQ(log.common(position, text, size), std::min<std::int64_t>(same, 32));
    for (const std::int64_t count : {1, 2, 4, 31, 32}) {
      if (count <= size) {
        ASSERT_EQ(log.matches(position, text + size, count), same >= count);
      }
    }
    ASSERT_FALSE(log.matches(position, text + size, held + 1));
  }
};

// Beyond kSmallStore memory comes by the slab, then by the block again to the limit, then from the
// oldest chunks. What else the store needs, as wider directories, comes from those too: their
// memory goes back to the system, and is taken again later.
TEST(LiveLog, HoldsItsTokensWhateverTheMemoryIsTakenFrom) {
  Appended tokens(kLogLimit);
  LiveLog& log = tokens.log;
  std::int64_t bytes = 0;
  int slabs = 0;
  while (log.begin() == 0) {
    ASSERT_NO_FATAL_FAILURE(tokens.append_some(LiveLog::kChunkTokens));
    slabs += log.bytes() - bytes >= LiveLog::kSlab ? 1 : 0;
    bytes = log.bytes();
  }
  EXPECT_EQ(slabs, kHugePages ? 3 : 0);
  EXPECT_GT(log.bytes(), log.max_bytes() - LiveLog::kBlockBytes);
  const std::int64_t held = log.end() - log.begin();
  ASSERT_NO_FATAL_FAILURE(tokens.append_some(held + 77));
  ASSERT_NO_FATAL_FAILURE(tokens.expect_held(99));
  EXPECT_EQ(log.bytes(), bytes);

  // More than all blocks that were allocated one by one.
  constexpr std::int64_t kCharged = LiveLog::kSmallStore + LiveLog::kSlab;
  log.charge(kCharged);
  EXPECT_LE(log.bytes(), log.max_bytes());
  EXPECT_LT(log.end() - log.begin(), held);
  EXPECT_FALSE(log.wants_slab());
  EXPECT_THROW(log.charge(kLogLimit), MemoryLimitError);
  ASSERT_NO_FATAL_FAILURE(tokens.append_some(held));
  ASSERT_NO_FATAL_FAILURE(tokens.expect_held(99));
  while (log.drop_block()) {
  }
  ASSERT_NO_FATAL_FAILURE(tokens.expect_held(1));
  EXPECT_LE(log.end() - log.begin(), LiveLog::kChunkTokens);
  log.add_slab(nullptr);
  log.add_slab(LiveLog::allocate_slab());  // has no room any more
  ASSERT_LE(log.bytes(), log.max_bytes());
  log.release();
  EXPECT_EQ(log.bytes(), 0);
  EXPECT_EQ(log.num_tokens(), 0);
}

}  // namespace
}  // namespace fastdraft

#include "live_log.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

constexpr std::int64_t kLogLimit = LiveLog::kSmallStore + 3 * LiveLog::kSlabBytes + 50'000;

Token token_at(std::int64_t position) { return static_cast<Token>(position * 2654435761 % 50'000); }

// Appends the next tokens, and expects all that are held to be what was appended.
void append(LiveLog& log, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (log.wants_slab()) log.add_slab(LiveLog::allocate_slab());
    log.append(token_at(log.end()), log.end() % 3 == 0);
    ASSERT_LE(log.bytes(), log.max_bytes());
  }
}

void expect_tokens(const LiveLog& log) {
  ASSERT_EQ(log.num_tokens(), log.end() - log.begin());
  for (std::int64_t position = log.begin(); position < log.end(); ++position) {
    ASSERT_EQ(log.token(position), token_at(position));
    ASSERT_EQ(log.output(position), position % 3 == 0);
  }
}

// Beyond kSmallStore memory comes by the slab, then by the block again to the limit, then from the
// oldest chunks.
TEST(LiveLog, HoldsItsTokensWhateverTheMemoryIsTakenFrom) {
  LiveLog log(kLogLimit, 0);
  std::int64_t bytes = 0;
  int slabs = 0;
  while (log.begin() == 0) {
    ASSERT_NO_FATAL_FAILURE(append(log, LiveLog::kChunkTokens));
    slabs += log.bytes() - bytes >= LiveLog::kSlab ? 1 : 0;
    bytes = log.bytes();
  }
  EXPECT_EQ(slabs, kHugePages ? 3 : 0);
  EXPECT_GT(log.bytes(), log.max_bytes() - LiveLog::kBlockBytes);
  ASSERT_NO_FATAL_FAILURE(expect_tokens(log));
  ASSERT_NO_FATAL_FAILURE(append(log, 2 * (log.end() - log.begin()) + 77));
  ASSERT_NO_FATAL_FAILURE(expect_tokens(log));
  EXPECT_EQ(log.bytes(), bytes);
}

// What else the store needs, as wider directories, comes from the oldest chunks too: their memory
// goes back to the system, and is taken again later.
TEST(LiveLog, GivesMemoryOfItsOldestTokensUp) {
  LiveLog log(kLogLimit, 0);
  while (log.begin() == 0) ASSERT_NO_FATAL_FAILURE(append(log, 1));
  const std::int64_t held = log.end() - log.begin();
  // More than all blocks that were allocated one by one.
  constexpr std::int64_t kCharged = LiveLog::kSmallStore + LiveLog::kSlab;
  log.charge(kCharged);
  EXPECT_LE(log.bytes(), log.max_bytes());
  EXPECT_LT(log.end() - log.begin(), held);
  ASSERT_NO_FATAL_FAILURE(expect_tokens(log));
  EXPECT_FALSE(log.wants_slab());
  EXPECT_THROW(log.charge(kLogLimit), MemoryLimitError);
  EXPECT_EQ(log.num_tokens(), log.end() - log.begin());
  ASSERT_NO_FATAL_FAILURE(append(log, held));
  ASSERT_NO_FATAL_FAILURE(expect_tokens(log));
  log.add_slab(nullptr);
  log.add_slab(LiveLog::allocate_slab());  // has no room any more
  ASSERT_LE(log.bytes(), log.max_bytes());
  log.release();
  EXPECT_EQ(log.bytes(), 0);
  EXPECT_EQ(log.num_tokens(), 0);
}

// Blocks that tables take are as good as any.
TEST(LiveLog, GivesBlocksThatDoNotOverlap) {
  LiveLog log(kLogLimit, 0);
  std::vector<std::uint8_t*> blocks;
  while (log.bytes() + LiveLog::kBlockBytes + LiveLog::kSlabBytes < kLogLimit) {
    if (log.wants_slab()) log.add_slab(LiveLog::allocate_slab());
    blocks.push_back(static_cast<std::uint8_t*>(log.allocate_block(0)));
    std::memset(blocks.back(), static_cast<int>(blocks.size() % 251), sizeof(LiveLog::Chunk));
  }
  ASSERT_GT(blocks.size(), std::size_t{1000});
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto byte = static_cast<std::uint8_t>((i + 1) % 251);
    for (std::size_t at = 0; at < sizeof(LiveLog::Chunk); at += 1021) {
      ASSERT_EQ(blocks[i][at], byte);
    }
  }
}

}  // namespace
}  // namespace fastdraft

// Memory. What is found is compared with lists in tests/core and in fuzz/.
#include "fastdraft/datastore.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "stores.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

void add(Datastore& store, const Tokens& text) {
  const auto size = static_cast<std::int64_t>(text.size());
  store.add(text.data(), size, size);
}

constexpr std::int64_t kLeastBytes = 40 << 10;

TEST(Datastore, LimitHoldsWhileEveryKindOfGrowthHappens) {
  constexpr std::int64_t kLimit = 4 << 20;
  const auto store = Datastore::live(kLimit);
  std::int64_t most = 0;
  for (std::uint32_t round = 0; round < 200; ++round) {
    add(*store, testing::random_text(3000, round % 3 == 0 ? 4 : (1 << 22) - 1, round));
    most = std::max(most, store->bytes());
  }
  EXPECT_LE(most, kLimit);
  EXPECT_GT(most, kLimit * 19 / 20);
  EXPECT_GT(store->num_tokens(), kLimit / 60);
}

TEST(Datastore, ALowerLimitLetsTextGo) {
  // Small, and large enough for slabs.
  for (const std::int64_t tokens : {std::int64_t{20'000}, std::int64_t{2'000'000}}) {
    const auto store = Datastore::live(std::int64_t{128} << 20);
    Tokens text;
    for (Token i = 0; i < tokens; ++i) text.push_back(i % 5000);
    add(*store, text);
    const std::int64_t held = store->bytes();
    for (const std::int64_t limit : {held - held / 8, held - held / 4, held - held / 2}) {
      const std::int64_t before = store->num_tokens();
      EXPECT_EQ(store->limit(limit), limit);
      EXPECT_LE(store->bytes(), limit);
      EXPECT_LT(store->num_tokens(), before);
      add(*store, Tokens(text.begin(), text.begin() + 4000));
      EXPECT_LE(store->bytes(), limit);
      const Tokens query{1, 2, 3, 4};
      Occurrence found[4];
      const auto expected = testing::look_everywhere(*store, query, 4, 16);
      const Datastore::Reader reader(*store);
      ASSERT_EQ(reader.find(query.data(), 4, found, 4, 16), static_cast<int>(expected.size()));
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(found[i].next, expected[i].next);
      }
    }
    const std::int64_t least = store->limit(0);
    EXPECT_EQ(store->bytes(), least);
    EXPECT_GT(store->num_tokens(), 0);
    EXPECT_EQ(store->limit(held), held);
    add(*store, text);
    EXPECT_LE(store->bytes(), held);
    EXPECT_GT(store->bytes(), held - held / 4);
  }
}

// Samples of a few prompts, which enter again or not at all, while the limit moves.
TEST(Datastore, SamplesMoveWithinTheLimit) {
  for (const std::int64_t limit : {kLeastBytes, std::int64_t{300} << 10}) {
    const auto store = Datastore::live(limit);
    // A prompt comes again, which is known by its text from 32 tokens on.
    Tokens text(40, 7);
    for (const Token last : {8, 9}) {
      text.push_back(last);
      store->add(text.data(), 41, 40);
      text.pop_back();
    }
    std::int64_t added = 0;
    for (std::uint32_t round = 0; round < 300; ++round) {
      const auto prompt = static_cast<Token>(round * 7 % 5);
      text =
          testing::random_text(100 + round * 31 % 800, round % 3 == 0 ? 4 : (1 << 22) - 1, round);
      text.insert(text.begin(), 9, 100 + prompt);
      const auto size = static_cast<std::int64_t>(text.size());
      store->add(text.data(), size, 9);
      added += 1 + size;
      if (round % 50 == 49) store->limit(limit - (round % 100 == 49 ? limit / 3 : 0));
      ASSERT_LE(store->bytes(), store->max_bytes());
    }
    EXPECT_LE(Datastore::Reader(*store).end(), 2 * added + 100);
    EXPECT_GT(Datastore::Reader(*store).begin(), 0);
    store->close();
    EXPECT_EQ(store->bytes(), 0);
  }
}

}  // namespace
}  // namespace fastdraft

#include "policy/token_weights.h"

#include <gtest/gtest.h>

#include <memory>

#include "fastdraft/datastore.h"
#include "texts.h"

namespace fastdraft {
namespace {

void add(Datastore& store, std::int64_t tokens, std::uint32_t seed) {
  const testing::Tokens text = testing::random_text(static_cast<std::size_t>(tokens), 1000, seed);
  store.add(text.data(), tokens, 0);
}

TEST(TokenWeights, ALargerTableKnowsWhatTheSmallerOneLearned) {
  TokenWeights small(TokenWeights::kLeast);
  const auto learned = TokenWeights::indices(7, TokenWeights::Before(5, 6), 3, 1);
  const auto other = TokenWeights::indices(8, TokenWeights::Before(5, 6), 3, 1);
  EXPECT_EQ(small.weigh(learned), 0.0f);
  small.learn(learned, 0.5f);
  EXPECT_GE(small.weigh(learned), 7 * TokenWeights::kRate * 0.5f - 1e-3f);
  EXPECT_LT(small.weigh(other), small.weigh(learned));
  const TokenWeights large(TokenWeights::kMost, &small);
  EXPECT_EQ(large.weigh(learned), small.weigh(learned));
  EXPECT_EQ(large.weigh(other), small.weigh(other));
}

TEST(TokenWeights, AStoreHasAsManyAsItsTextIsWorth) {
  const auto store = Datastore::live(std::int64_t{8} << 20);
  EXPECT_EQ(store->token_weights(), nullptr);
  add(*store, 1365, 1);
  EXPECT_EQ(store->token_weights(), nullptr);
  add(*store, 1, 2);
  const std::int64_t before = store->bytes();
  const auto first = store->token_weights();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->size(), TokenWeights::kLeast);
  EXPECT_EQ(store->bytes() - before, first->bytes());
  EXPECT_EQ(store->token_weights(), first);
  first->learn(TokenWeights::indices(1, {}, 0, 0), 1.0f);
  add(*store, 5000, 3);
  const std::int64_t more = store->bytes();
  const auto second = store->token_weights();
  EXPECT_EQ(second->size(), TokenWeights::kMost);
  EXPECT_EQ(store->bytes() - more, second->bytes() - first->bytes());
  EXPECT_GE(second->weigh(TokenWeights::indices(1, {}, 0, 0)), 7 * TokenWeights::kRate - 1e-3f);
}

TEST(TokenWeights, GiveWayWhereAStoreGetsLittleMemory) {
  const auto store = Datastore::live(std::int64_t{8} << 20);
  add(*store, 6000, 1);
  ASSERT_NE(store->token_weights(), nullptr);
  store->limit(0);
  EXPECT_LT(store->bytes(), TokenWeights::bytes_of(TokenWeights::kMost));
  store->close();
  EXPECT_EQ(store->token_weights(), nullptr);
  EXPECT_EQ(store->bytes(), 0);
}

}  // namespace
}  // namespace fastdraft

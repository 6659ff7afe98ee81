#include "policy/token_weights.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "fastdraft/datastore.h"
#include "folder.h"
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
  EXPECT_EQ(store->token_weights(nullptr), nullptr);
  add(*store, 1365, 1);
  EXPECT_EQ(store->token_weights(nullptr), nullptr);
  add(*store, 1, 2);
  const std::int64_t before = store->bytes();
  const auto first = store->token_weights(nullptr);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->size(), TokenWeights::kLeast);
  EXPECT_EQ(store->bytes() - before, first->bytes());
  EXPECT_EQ(store->token_weights(nullptr), first);
  first->learn(TokenWeights::indices(1, {}, 0, 0), 1.0f);
  add(*store, 5000, 3);
  const std::int64_t more = store->bytes();
  const auto second = store->token_weights(nullptr);
  EXPECT_EQ(second->size(), TokenWeights::kMost);
  EXPECT_EQ(store->bytes() - more, second->bytes() - first->bytes());
  EXPECT_GE(second->weigh(TokenWeights::indices(1, {}, 0, 0)), 7 * TokenWeights::kRate - 1e-3f);
}

TEST(TokenWeights, GiveWayWhereAStoreGetsLittleMemory) {
  const auto store = Datastore::live(std::int64_t{8} << 20);
  add(*store, 6000, 1);
  ASSERT_NE(store->token_weights(nullptr), nullptr);
  store->limit(0);
  EXPECT_LT(store->bytes(), TokenWeights::bytes_of(TokenWeights::kMost));
  store->close();
  EXPECT_EQ(store->token_weights(nullptr), nullptr);
  EXPECT_EQ(store->bytes(), 0);
}

TEST(TokenWeights, AreSavedWithAStoreAndBeginAnother) {
  const auto indices = TokenWeights::indices(1, {}, 0, 0);
  const testing::Folder folder;
  const std::string path = folder.file("saved.fds");
  const auto store = Datastore::live(std::int64_t{8} << 20);
  add(*store, 3000, 1);
  store->save(path);
  EXPECT_EQ(Datastore::open(path)->learned_weights(), nullptr);
  store->token_weights(nullptr)->learn(indices, 1.0f);
  store->save(path);
  const auto saved = Datastore::open(path);
  const std::shared_ptr<const TokenWeights> learned = saved->learned_weights();
  ASSERT_NE(learned, nullptr);
  EXPECT_EQ(learned->values(), store->learned_weights()->values());
  EXPECT_EQ(saved->token_weights(nullptr), nullptr);
  // One saved again has them too.
  saved->save(folder.file("again.fds"));
  EXPECT_EQ(Datastore::open(folder.file("again.fds"))->learned_weights()->values(),
            learned->values());
  // An empty store begins with them, but for one of little memory.
  const auto other = Datastore::live(std::int64_t{8} << 20);
  const std::int64_t before = other->bytes();
  const auto begun = other->token_weights(learned.get());
  ASSERT_NE(begun, nullptr);
  EXPECT_EQ(begun->values(), learned->values());
  EXPECT_EQ(other->bytes() - before, begun->bytes());
  begun->learn(indices, 1.0f);
  EXPECT_EQ(other->token_weights(learned.get()), begun);
  EXPECT_NE(begun->weigh(indices), learned->weigh(indices));
  const auto small = Datastore::live(2 * learned->bytes());
  EXPECT_EQ(small->token_weights(learned.get()), nullptr);
}

}  // namespace
}  // namespace fastdraft

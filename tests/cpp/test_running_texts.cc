// Memory. What is found is compared with lists in fuzz/running_texts.cc and tests/core.
#include "store/running_texts.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fastdraft/datastore.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

constexpr std::int64_t kPromptSize = 40;

void grow(RunningTexts::Text& text, const Tokens& tokens, std::size_t size) {
  text.grow(tokens.data(), static_cast<std::int64_t>(size), kPromptSize);
}

// Returns whether what the text's first `size` tokens end with is found, and nothing but what
// follows.
bool is_found(const Datastore& store, RunningTexts::Owner reader, const Tokens& tokens,
              std::size_t size) {
  const RunningTexts::Reader running(*const_cast<Datastore&>(store).running(), reader);
  Occurrence found{};
  if (running.find(tokens.data(), static_cast<std::int64_t>(size), &found, 1, 7, 4) == 0) {
    return false;
  }
  Tokens next(10);
  EXPECT_GT(running.copy(found.next, next.data(), 10), 0);
  EXPECT_EQ(next.front(), tokens[size]);
  return true;
}

class RunningTextsTest : public ::testing::Test {
 protected:
  const std::shared_ptr<Datastore> store = Datastore::live(1 << 22);
  const Tokens tokens = testing::random_text(1000, 1000, 1);
  const int first_owner = 0;
  const int second_owner = 0;
  std::unique_ptr<RunningTexts::Text> first =
      std::make_unique<RunningTexts::Text>(*store->running(), &first_owner);
  std::unique_ptr<RunningTexts::Text> second =
      std::make_unique<RunningTexts::Text>(*store->running(), &second_owner);
};

TEST_F(RunningTextsTest, NoneEntersWhereOneRequestRuns) {
  const std::int64_t bytes = store->bytes();
  second.reset();
  grow(*first, tokens, 500);
  EXPECT_EQ(store->bytes(), bytes);
  EXPECT_TRUE(store->running()->empty());
  // Once there is another one, what has been written enters step by step.
  second = std::make_unique<RunningTexts::Text>(*store->running(), &second_owner);
  for (int step = 0; step < 4; ++step) grow(*first, tokens, 500);
  EXPECT_FALSE(store->running()->empty());
  EXPECT_TRUE(is_found(*store, &second_owner, tokens, 490));
  EXPECT_FALSE(is_found(*store, &first_owner, tokens, 490));
  EXPECT_GT(store->bytes(), bytes);
  EXPECT_EQ(store->num_tokens(), 0);
  first.reset();
  EXPECT_FALSE(is_found(*store, &second_owner, tokens, 490));
  EXPECT_EQ(store->bytes(), bytes);
}

TEST_F(RunningTextsTest, TheStoresLimitHolds) {
  const auto small = Datastore::live(200'000);
  std::vector<int> owners(50);
  std::vector<std::unique_ptr<RunningTexts::Text>> running;
  for (const int& owner : owners) {
    running.push_back(std::make_unique<RunningTexts::Text>(*small->running(), &owner));
  }
  const std::int64_t bytes = small->bytes();
  for (std::size_t size = kPromptSize; size <= tokens.size(); size += 64) {
    for (const auto& text : running) grow(*text, tokens, size);
    EXPECT_LE(small->bytes(), 200'000);
    EXPECT_LE(small->bytes() - bytes, 200'000 / 4);
  }
  EXPECT_TRUE(is_found(*small, nullptr, tokens, 60));
  const std::int64_t least = small->limit(0);
  EXPECT_LE(least, bytes);
  EXPECT_FALSE(is_found(*small, nullptr, tokens, 60));
}

TEST_F(RunningTextsTest, AClosedStoreHasNone) {
  grow(*first, tokens, 100);
  store->close();
  EXPECT_TRUE(store->running()->empty());
  grow(*first, tokens, 200);
  grow(*second, tokens, 200);
  EXPECT_FALSE(is_found(*store, nullptr, tokens, 60));
}

}  // namespace
}  // namespace fastdraft

#include "store/running_texts.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/engine.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

constexpr std::int64_t kPromptSize = 40;

void grow(RunningTexts::Text& text, const Tokens& tokens, std::size_t size) {
  text.grow(tokens.data(), static_cast<std::int64_t>(size), kPromptSize);
}

// What follows the last of the text's first `size` tokens where they occur, to `reader`.
std::vector<Tokens> following(const Datastore& store, RunningTexts::Owner reader,
                              const Tokens& tokens, std::size_t size, int links = 7) {
  Occurrence found[8];
  const RunningTexts::Reader running(*const_cast<Datastore&>(store).running(), reader);
  const int count =
      running.find(tokens.data(), static_cast<std::int64_t>(size), found, 8, links, 4);
  std::vector<Tokens> result;
  for (int i = 0; i < count; ++i) {
    Tokens copied(300);
    copied.resize(static_cast<std::size_t>(running.copy(found[i].next, copied.data(), 300)));
    result.push_back(copied);
  }
  return result;
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

TEST_F(RunningTextsTest, OthersFindWhatEntered) {
  const std::int64_t bytes = store->bytes();
  for (std::size_t size = kPromptSize; size <= tokens.size(); size += 10) {
    grow(*first, tokens, size);
    if (size == 500) {
      EXPECT_EQ(following(*store, &second_owner, tokens, 300),
                std::vector<Tokens>{Tokens(tokens.begin() + 300, tokens.begin() + 500)});
    }
  }
  EXPECT_GT(store->bytes(), bytes);
  for (std::size_t size = kPromptSize; size + 300 <= tokens.size(); ++size) {
    EXPECT_EQ(
        following(*store, &second_owner, tokens, size),
        std::vector<Tokens>{Tokens(tokens.begin() + static_cast<std::ptrdiff_t>(size),
                                   tokens.begin() + static_cast<std::ptrdiff_t>(size + 300))});
    EXPECT_TRUE(following(*store, &first_owner, tokens, size).empty());
  }
  // Nor is the prompt found.
  EXPECT_TRUE(following(*store, &second_owner, tokens, kPromptSize - 1).empty());
  first.reset();
  EXPECT_TRUE(following(*store, &second_owner, tokens, 300).empty());
  EXPECT_EQ(store->bytes(), bytes);
  EXPECT_EQ(store->num_tokens(), 0);
}

TEST_F(RunningTextsTest, NoneEntersWhereOneRequestRuns) {
  const std::int64_t bytes = store->bytes();
  second.reset();
  grow(*first, tokens, 500);
  EXPECT_EQ(store->bytes(), bytes);
  EXPECT_FALSE(store->running()->has_others(&second_owner));
  // Once there is another one, what has been written enters step by step.
  second = std::make_unique<RunningTexts::Text>(*store->running(), &second_owner);
  for (int step = 0; step < 4; ++step) grow(*first, tokens, 500);
  EXPECT_TRUE(store->running()->has_others(&second_owner));
  EXPECT_FALSE(store->running()->has_others(&first_owner));
  EXPECT_EQ(following(*store, &second_owner, tokens, 490),
            std::vector<Tokens>{Tokens(tokens.begin() + 490, tokens.begin() + 500)});
}

// When a text is taken out, the others stay as they are. The order does not matter.
TEST_F(RunningTextsTest, TextsLeaveInAnyOrder) {
  constexpr std::size_t kTexts = 12;
  const std::int64_t bytes = store->bytes();
  std::vector<Tokens> all;
  std::vector<int> owners(kTexts);
  std::vector<std::unique_ptr<RunningTexts::Text>> running;
  for (std::size_t i = 0; i < kTexts; ++i) {
    all.push_back(testing::random_text(400, 3, static_cast<std::uint32_t>(i % 5)));
    running.push_back(std::make_unique<RunningTexts::Text>(*store->running(), &owners[i]));
  }
  for (std::size_t size = kPromptSize; size <= 400; size += 9) {
    for (std::size_t i = 0; i < kTexts; ++i) grow(*running[i], all[i], size);
  }
  std::size_t left = kTexts;
  for (std::size_t i = 0; left > 0; i = (i + 5) % kTexts, --left) {
    running[i].reset();
    // Those of the others that have the same text, and no more.
    std::size_t alike = 0;
    for (std::size_t j = 0; j < kTexts; ++j) {
      if (running[j] != nullptr && all[j] == all[i]) ++alike;
    }
    EXPECT_GE(following(*store, nullptr, all[i], 300, 1000).size(), alike);
  }
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
  EXPECT_FALSE(following(*small, nullptr, tokens, 60).empty());
  const std::int64_t least = small->limit(0);
  EXPECT_LE(least, bytes);
  EXPECT_TRUE(following(*small, nullptr, tokens, 60).empty());
}

TEST_F(RunningTextsTest, AClosedStoreHasNone) {
  grow(*first, tokens, 100);
  store->close();
  EXPECT_FALSE(store->running()->has_others(&second_owner));
  grow(*first, tokens, 200);
  grow(*second, tokens, 200);
  EXPECT_TRUE(following(*store, nullptr, tokens, 60).empty());
}

}  // namespace
}  // namespace fastdraft

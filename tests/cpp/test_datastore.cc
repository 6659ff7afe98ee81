// Memory and files under sanitizers. What is found is compared with lists in tests/core.
#include "fastdraft/datastore.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "folder.h"
#include "stores.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Folder;
using testing::Tokens;

void add(Datastore& store, const Tokens& text) {
  const auto size = static_cast<std::int64_t>(text.size());
  store.add(text.data(), size, size);
}

constexpr int kLinks = 16;
constexpr std::int64_t kLeastBytes = 40 << 10;

std::vector<Occurrence> find(const Datastore& store, const Tokens& text, int most) {
  std::vector<Occurrence> found(static_cast<std::size_t>(most));
  const Datastore::Reader reader(store);
  const int count =
      reader.find(text.data(), static_cast<std::int64_t>(text.size()), found.data(), most, kLinks);
  found.resize(static_cast<std::size_t>(count));
  return found;
}

void expect_equal(const std::vector<Occurrence>& found, const std::vector<Occurrence>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].next, expected[i].next);
    EXPECT_EQ(found[i].length, expected[i].length);
  }
}

TEST(Datastore, FindsWhatStandsAnywhereAsTextLeaves) {
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const auto store = Datastore::live((48 << 10) + (static_cast<int>(seed) << 14));
    for (std::uint32_t round = 0; round < 12; ++round) {
      const Tokens text = testing::random_text(400 + 97 * round, static_cast<Token>(2 + 9 * seed),
                                               100 * seed + round);
      add(*store, text);
      ASSERT_LE(store->bytes(), store->max_bytes());
      for (std::size_t size = 1; size < text.size(); size += 131) {
        const Tokens query(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size));
        for (const int most : {1, 3, 40}) {
          expect_equal(find(*store, query, most),
                       testing::look_everywhere(*store, query, most, kLinks));
        }
      }
    }
    EXPECT_GT(Datastore::Reader(*store).begin(), 0);
  }
}

TEST(Datastore, HardTexts) {
  for (const Tokens& text : {testing::repeated(6000), testing::fibonacci(6000),
                             testing::thue_morse(6000), testing::random_text(6000, 1 << 30, 3)}) {
    const auto store = Datastore::live(1 << 20);
    add(*store, text);
    for (const std::size_t size : {3U, 50U, 2048U, 2049U, 5999U}) {
      const Tokens query(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size));
      expect_equal(find(*store, query, 8), testing::look_everywhere(*store, query, 8, kLinks));
    }
  }
}

// Tokens at both sides of what three bytes hold, of which documents leave, in the least store too;
// and read back from a file.
TEST(Datastore, HoldsTokensOfAnySize) {
  const Folder folder;
  for (const Token largest : {(1 << 22) - 1, 1 << 22, (1 << 23) - 1, 1 << 23, 2147483647}) {
    for (const std::int64_t limit : {kLeastBytes, std::int64_t{200} << 10}) {
      const auto store = Datastore::live(limit);
      Tokens text;
      for (std::uint32_t round = 0; round < 8; ++round) {
        text = testing::random_text(900, 3 + 9 * static_cast<Token>(round), round);
        for (Token& token : text) token = largest - token;
        add(*store, text);
        ASSERT_LE(store->bytes(), limit);
        for (std::size_t size = 1; size < text.size(); size += 131) {
          const Tokens query(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size));
          expect_equal(find(*store, query, 9), testing::look_everywhere(*store, query, 9, kLinks));
        }
      }
      store->save(folder.file("store.fds"));
      const auto frozen = Datastore::open(folder.file("store.fds"), {}, true);
      const auto again = Datastore::live(limit);
      again->add_all(*frozen);
      const Datastore::Reader reader(*again);
      const std::int64_t held = std::min<std::int64_t>(400, reader.end() - reader.begin() - 1);
      Tokens copy(static_cast<std::size_t>(held));
      ASSERT_EQ(reader.copy(reader.end() - held, copy.data(), held), held);
      EXPECT_TRUE(std::equal(copy.begin(), copy.end(), text.end() - held));
    }
  }
}

TEST(Datastore, LimitHoldsWhileEveryKindOfGrowthHappens) {
  constexpr std::int64_t kLimit = 4 << 20;
  const auto store = Datastore::live(kLimit);
  std::int64_t most = 0;
  for (std::uint32_t round = 0; round < 200; ++round) {
    add(*store, testing::random_text(3000, round % 3 == 0 ? 4 : 1 << 30, round));
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
      expect_equal(find(*store, {1, 2, 3, 4}, 4),
                   testing::look_everywhere(*store, {1, 2, 3, 4}, 4, kLinks));
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
      text = testing::random_text(100 + round * 31 % 800, round % 3 == 0 ? 4 : 1 << 30, round);
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

// Successors through the C++ interface. tests/core/test_successors.py compares trees with an
// oracle.
#include "fastdraft/successors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "fastdraft/error.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

TEST(Successors, TreesFollowTheLikeliestPaths) {
  Successors successors(16);
  const Tokens contexts = {1, 2, 2, 3};
  const Tokens tokens = {3, 4, 5, -1};
  const std::vector<float> chances = {0.5f, 0.25f, 0.75f, 0.0f};
  successors.learn(contexts.data(), 2, tokens.data(), chances.data(), 2);
  const Tokens ends = {0, 1, 2, 7, 8, -1};
  const Successors::Trees trees = successors.trees(ends.data(), 2);
  EXPECT_EQ(trees.offsets, (std::vector<std::int64_t>{0, 3, 3}));
  EXPECT_EQ(trees.token_ids, (Tokens{3, 5, 4}));
  EXPECT_EQ(trees.parents, (std::vector<std::int32_t>{-1, 0, -1}));
  EXPECT_EQ(trees.confidences, (std::vector<float>{0.5f, 0.75f, 0.25f}));
}

TEST(Successors, LearnAndGrowForSeveralTablesInOneCall) {
  Successors first(16);
  Successors second(16);
  const std::vector<Successors*> tables = {&first, &second, &first};
  const std::vector<std::int64_t> offsets = {0, 1, 1, 2};
  const Tokens contexts = {1, 2, 2, 3};
  const Tokens tokens = {3, 4, 5, 6};
  const std::vector<float> chances = {0.5f, 0.25f, 0.75f, 0.125f};
  Successors::learn_each(tables.data(), 3, offsets.data(), contexts.data(), tokens.data(),
                         chances.data(), 2);
  const Tokens ends = {0, 1, 2, 0, 1, 2, 1, 2, 3};
  const std::vector<const Successors*> rows = {&first, &second, &first};
  const Successors::Trees trees = Successors::trees_each(rows.data(), ends.data(), 3, 2);
  EXPECT_EQ(trees.offsets, (std::vector<std::int64_t>{0, 2, 2, 4}));
  EXPECT_EQ(trees.token_ids, (Tokens{3, 5, 5, 4}));
  EXPECT_EQ(trees.parents, (std::vector<std::int32_t>{-1, 0, -1, -1}));
  EXPECT_EQ(trees.confidences, (std::vector<float>{0.5f, 0.75f, 0.75f, 0.5f}));
}

TEST(Successors, RefuseWhatIsWrong) {
  EXPECT_THROW(Successors(0), InvalidValueError);
  Successors successors(1);
  const Tokens tokens = {1, -2};
  const float chance = 2.0f;
  EXPECT_THROW(successors.learn(tokens.data(), 1, tokens.data(), &chance, 0), InvalidValueError);
  EXPECT_THROW(successors.learn(tokens.data(), 0, nullptr, nullptr, 9), InvalidValueError);
  EXPECT_THROW(successors.trees(nullptr, 0, 0), InvalidValueError);
  EXPECT_THROW(successors.trees(nullptr, 0, Successors::kNodes + 1), InvalidValueError);
  const std::vector<std::int64_t> offsets = {0, 2, 1};
  const std::vector<Successors*> tables = {&successors, &successors};
  EXPECT_THROW(
      Successors::learn_each(tables.data(), 2, offsets.data(), nullptr, nullptr, nullptr, 1),
      InvalidValueError);
}

TEST(Successors, ServeThreadsInTurns) {
  Successors successors(8);
  const auto work = [&] {
    const Tokens tokens = {1, 2, 3};
    const std::vector<float> chances = {0.5f, 0.25f};
    for (int i = 0; i < 1000; ++i) {
      successors.learn(tokens.data(), 1, tokens.data() + 1, chances.data(), 2);
      successors.trees(tokens.data(), 1);
    }
  };
  std::thread other(work);
  work();
  other.join();
}

}  // namespace
}  // namespace fastdraft

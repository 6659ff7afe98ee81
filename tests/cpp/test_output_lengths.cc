#include "policy/output_lengths.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace fastdraft {
namespace {

double mean_of_rests(const std::vector<std::int64_t>& lengths, std::int64_t emitted) {
  double sum = 0.0;
  for (const std::int64_t each : lengths) sum += static_cast<double>(each - emitted);
  return std::max(sum / static_cast<double>(lengths.size()), 1.0);
}

double rest(const OutputLengths& lengths, OutputLengths::Key prompt, std::int64_t emitted) {
  return lengths.rests({{prompt, emitted, 1.0}}).at(0);
}

TEST(OutputLengths, ARestIsTheMeanOfLongerOutputsOfThePrompt) {
  std::mt19937 random(1);
  OutputLengths lengths;
  std::vector<std::vector<std::int64_t>> known(5);
  for (int i = 0; i < 300; ++i) {
    const auto prompt = random() % known.size();
    known[prompt].push_back(static_cast<std::int64_t>(random() % 3000));
    lengths.add(prompt, known[prompt].back());
    std::vector<std::int64_t> longer;
    const auto emitted = static_cast<std::int64_t>(random() % 2000);
    const std::size_t newest = std::min<std::size_t>(known[prompt].size(), 16);
    std::copy_if(known[prompt].end() - static_cast<std::ptrdiff_t>(newest), known[prompt].end(),
                 std::back_inserter(longer), [&](std::int64_t each) { return each > emitted; });
    if (!longer.empty()) {
      EXPECT_DOUBLE_EQ(rest(lengths, prompt, emitted), mean_of_rests(longer, emitted));
    }
  }
}

TEST(OutputLengths, WhereThePromptTellsNothingAllOutputsDo) {
  OutputLengths lengths;
  for (const std::int64_t each : {10, 100, 1000, 5000}) lengths.add(1, each);
  EXPECT_DOUBLE_EQ(rest(lengths, 2, 0), 6110.0 / 4.0);
  EXPECT_DOUBLE_EQ(rest(lengths, 2, 400), 3000.0 - 400.0);
  lengths.add(2, 300);
  EXPECT_DOUBLE_EQ(rest(lengths, 2, 200), 100.0);
  EXPECT_DOUBLE_EQ(rest(lengths, 2, 400), 3000.0 - 400.0);
}

TEST(OutputLengths, ALongerOneThanAllGoesOnForAPartOfItsLength) {
  OutputLengths lengths;
  EXPECT_DOUBLE_EQ(rest(lengths, 1, 0), 1.0);
  lengths.add(1, 50);
  EXPECT_DOUBLE_EQ(rest(lengths, 1, 1000), 300.0);
  EXPECT_GE(rest(lengths, 1, std::int64_t{1} << 31), 1.0);
}

TEST(OutputLengths, RowsThatAreNoneWeighNothing) {
  OutputLengths lengths;
  lengths.add(1, 16);
  const std::vector<float> weights = lengths.weights({{1, 0, 4.0}, {1, 0, 0.0}, {1, 0, 1.0}});
  EXPECT_FLOAT_EQ(weights[0], 2.0f / 3.0f);  // 2 and 4, by the time: 4 and 16 steps
  EXPECT_EQ(weights[1], 0.0f);
  EXPECT_FLOAT_EQ(weights[2], 4.0f / 3.0f);
  EXPECT_EQ(lengths.weights({{1, 0, 0.0}}), std::vector<float>{0.0f});
  EXPECT_TRUE(lengths.weights({}).empty());
}

TEST(OutputLengths, EveryTokenOfAPromptCounts) {
  const std::vector<Token> tokens{1, 2, 3};
  const auto key = OutputLengths::key_of(tokens.data(), 3);
  EXPECT_EQ(key, OutputLengths::key_of(std::vector<Token>(tokens).data(), 3));
  EXPECT_NE(key, OutputLengths::key_of(tokens.data(), 2));
  EXPECT_NE(key, OutputLengths::key_of(std::vector<Token>{1, 3, 2}.data(), 3));
}

}  // namespace
}  // namespace fastdraft

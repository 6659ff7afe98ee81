#include "policy/output_lengths.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace fastdraft {
namespace {

// The mean rest of the longer outputs of the prompt and, as one of them, of all longer outputs, in
// buckets of an eighth of an octave.
double expected_rest(const std::vector<std::int64_t>& of_prompt,
                     const std::vector<std::int64_t>& all, std::int64_t emitted) {
  const auto bucket = [](std::int64_t length) {
    return std::floor(8.0 * std::log2(static_cast<double>(length) + 1.0));
  };
  double count = 0.0;
  double sum = 0.0;
  for (const std::int64_t each : all) {
    if (bucket(each) <= bucket(emitted)) continue;
    count += 1.0;
    sum += static_cast<double>(each);
  }
  if (count > 0.0) {
    sum /= count;
    count = 1.0;
  }
  for (const std::int64_t each : of_prompt) {
    if (each <= emitted) continue;
    count += 1.0;
    sum += static_cast<double>(each);
  }
  const auto so_far = static_cast<double>(emitted);
  return std::max(count > 0.0 ? sum / count - so_far : 0.3 * so_far, 1.0);
}

double rest(const OutputLengths& lengths, OutputLengths::Key prompt, std::int64_t emitted) {
  return lengths.rests({{prompt, emitted, 1.0}}).at(0);
}

TEST(OutputLengths, ARestIsTheMeanOfLongerOutputsOfThePromptAndOfAll) {
  std::mt19937 random(1);
  OutputLengths lengths;
  std::vector<std::vector<std::int64_t>> known(5);
  std::vector<std::int64_t> all;
  EXPECT_DOUBLE_EQ(rest(lengths, 0, 0), 1.0);
  for (int i = 0; i < 300; ++i) {
    const auto prompt = random() % known.size();
    all.push_back(static_cast<std::int64_t>(random() % 3000));
    known[prompt].push_back(all.back());
    lengths.add(prompt, all.back());
    const auto emitted = static_cast<std::int64_t>(random() % 4000);  // longer than all, too
    const std::size_t newest = std::min<std::size_t>(known[prompt].size(), 16);
    const std::vector<std::int64_t> of_prompt(
        known[prompt].end() - static_cast<std::ptrdiff_t>(newest), known[prompt].end());
    EXPECT_NEAR(rest(lengths, prompt, emitted), expected_rest(of_prompt, all, emitted), 1e-6);
    EXPECT_NEAR(rest(lengths, known.size(), emitted), expected_rest({}, all, emitted), 1e-6);
  }
  EXPECT_GE(rest(lengths, 0, std::int64_t{1} << 31), 1.0);
}

TEST(OutputLengths, RowsThatAreNoneWeighNothing) {
  OutputLengths lengths;
  lengths.add(1, 16);
  const std::vector<float> weights = lengths.weights({{1, 0, 2.0}, {1, 0, 0.0}, {1, 0, 1.0}});
  EXPECT_FLOAT_EQ(weights[0], 2.0f / 3.0f);  // 8 and 16 steps
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

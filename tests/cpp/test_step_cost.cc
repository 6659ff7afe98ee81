#include "fastdraft/step_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace fastdraft {
namespace {

TEST(StepCost, IsRelativeToAStepWithoutDrafts) {
  EXPECT_DOUBLE_EQ(StepCost::constant(0.05).relative(1, 10), 1.5);
  EXPECT_DOUBLE_EQ(StepCost::constant(0.5).relative(3, 4), 2.0);
  const std::vector<double> times{2.0, 3.0, 3.5};
  const StepCost cost = StepCost::curve(times.data(), 3);
  EXPECT_DOUBLE_EQ(cost.relative(1, 0), 1.0);
  EXPECT_DOUBLE_EQ(cost.relative(1, 2), 1.75);
  EXPECT_DOUBLE_EQ(cost.relative(2, 1), 3.5 / 3.0);
}

TEST(StepCost, ThePremiumFadesWhereOnlyACertainTokenPays) {
  const StepCost cost = StepCost::constant(0.2);
  EXPECT_DOUBLE_EQ(cost.price_of_time(1, 2.0, 64), 2.0 * (1.0 + 0.3 * 0.6));
  EXPECT_DOUBLE_EQ(cost.price_of_time(1, 5.0, 64), 5.0);
  EXPECT_DOUBLE_EQ(cost.price_of_time(1, 9.0, 64), 9.0);
  // 6 tokens a step of 4 rows, of which each draft token takes an eighth.
  EXPECT_DOUBLE_EQ(cost.price_of_time(4, 6.0, 64), 6.0 * (1.0 + 0.3 * 0.25));
  const std::vector<double> stairs{4.0, 4.0, 6.0, 6.0};
  EXPECT_DOUBLE_EQ(StepCost::curve(stairs.data(), 4).price_of_time(1, 3.0, 3),
                   3.0 * (1.0 + 0.3 * 0.5));
}

TEST(StepCost, GoesOnWithItsLastSlope) {
  const std::vector<double> rising{2.0, 3.0};
  EXPECT_DOUBLE_EQ(StepCost::curve(rising.data(), 2).relative(1, 4), 3.0);
  const std::vector<double> falling{3.0, 2.0};
  EXPECT_DOUBLE_EQ(StepCost::curve(falling.data(), 2).relative(1, 9), 2.0 / 3.0);
  const std::vector<double> single{5.0};
  EXPECT_DOUBLE_EQ(StepCost::curve(single.data(), 1).relative(1, 9), 1.0);
}

struct Case {
  std::int64_t rows;
  std::int64_t stride;
  std::vector<float> probabilities;
  std::vector<std::int32_t> counts;
};

Case random_case(std::mt19937& random) {
  Case made;
  made.rows = 1 + static_cast<std::int64_t>(random() % 3);
  made.stride = 3;
  for (std::int64_t row = 0; row < made.rows; ++row) {
    float path = 1.0f;
    for (std::int64_t i = 0; i < made.stride; ++i) {
      path *= static_cast<float>(random() % 100) / 99.0f;
      made.probabilities.push_back(path);
    }
    made.counts.push_back(static_cast<std::int32_t>(random() % 4));
  }
  return made;
}

double value(const Case& made, const std::vector<std::int32_t>& counts, const StepCost& cost,
             double rate, bool padded) {
  double emitted = 0;
  std::int64_t drafted = 0;
  std::int32_t longest = 0;
  for (std::int64_t row = 0; row < made.rows; ++row) {
    const std::int32_t count = counts[static_cast<std::size_t>(row)];
    for (std::int32_t i = 0; i < count; ++i) {
      emitted +=
          static_cast<double>(made.probabilities[static_cast<std::size_t>(row * made.stride + i)]);
    }
    drafted += count;
    longest = std::max(longest, count);
  }
  return emitted - rate * cost.relative(made.rows, padded ? made.rows * longest : drafted);
}

// No other choice of lengths is worth more.
void expect_best(Case made, const StepCost& cost, double rate, bool padded) {
  std::vector<std::int32_t> kept = made.counts;
  keep_what_pays(cost, rate, padded, made.probabilities.data(), made.rows, made.stride,
                 kept.data());
  double best = -std::numeric_limits<double>::infinity();
  std::vector<std::int32_t> tried(kept.size(), 0);
  for (bool more = true; more;) {
    best = std::max(best, value(made, tried, cost, rate, padded));
    more = false;
    for (std::size_t row = 0; row < tried.size() && !more; ++row) {
      more = ++tried[row] <= made.counts[row];
      if (!more) tried[row] = 0;
    }
  }
  for (std::size_t row = 0; row < kept.size(); ++row) {
    ASSERT_GE(kept[row], 0);
    ASSERT_LE(kept[row], made.counts[row]);
  }
  ASSERT_NEAR(value(made, kept, cost, rate, padded), best, 1e-5);
}

TEST(KeepWhatPays, FindsTheBestLengths) {
  std::mt19937 random(3);
  for (int i = 0; i < 4000; ++i) {
    // Ups and downs: a wider forward may be the cheaper one.
    std::vector<double> times(1 + random() % 12);
    for (double& time : times) time = 1.0 + static_cast<double>(random() % 100) / 50.0;
    const StepCost cost =
        i % 2 == 0 ? StepCost::constant(static_cast<double>(random() % 100) / 100.0)
                   : StepCost::curve(times.data(), static_cast<std::int64_t>(times.size()));
    expect_best(random_case(random), cost, 0.5 + static_cast<double>(random() % 30) / 10.0,
                random() % 2 == 0);
  }
}

TEST(KeepWhatPays, DraftsAllThatIsFreeAndNothingThatCostsAStep) {
  const std::vector<float> probabilities{0.9f, 0.0f, 0.9f, 0.0f};
  std::vector<std::int32_t> counts{2, 2};
  keep_what_pays(StepCost::constant(0.0), 1.5, false, probabilities.data(), 2, 2, counts.data());
  EXPECT_EQ(counts, (std::vector<std::int32_t>{2, 2}));
  std::int32_t count = 2;
  keep_what_pays(StepCost::constant(0.0), 1.5, false, probabilities.data(), 1, 2, &count);
  EXPECT_EQ(count, 2);
  keep_what_pays(StepCost::constant(1.0), 1.0, false, probabilities.data(), 1, 2, &count);
  EXPECT_EQ(count, 0);
}

}  // namespace
}  // namespace fastdraft

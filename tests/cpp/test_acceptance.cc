#include "fastdraft/acceptance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace fastdraft {
namespace {

using Evidence = Acceptance::Evidence;

// Evidence with these values of the first features, and 0 of the others.
template <std::size_t kCount>
Evidence evidence_of(const std::array<int, kCount>& values) {
  Evidence evidence{};
  for (std::size_t i = 0; i < Acceptance::kFeatures; ++i) {
    evidence[i] =
        Acceptance::place(static_cast<Acceptance::Feature>(i), i < kCount ? values[i] : 0);
  }
  return evidence;
}

TEST(Acceptance, GivesEachValueOfEachFeatureAWeightOfItsOwn) {
  std::array<int, Acceptance::kWeights> uses{};
  for (std::size_t i = 0; i < Acceptance::kFeatures; ++i) {
    for (int value = 0; value < Acceptance::kValues[i]; ++value) {
      const std::uint16_t place = Acceptance::place(static_cast<Acceptance::Feature>(i), value);
      ASSERT_LT(place, Acceptance::kWeights);
      ++uses[place];
    }
  }
  for (const int count : uses) EXPECT_EQ(count, 1);
}

TEST(Acceptance, TellsLengthsAndCountsApartWhereItSaysSo) {
  const std::array<std::int32_t, 10> first = {0, 1, 2, 3, 4, 5, 7, 10, 16, 32};
  int value = 0;
  for (std::int32_t length = 0; length < 100; ++length) {
    if (value + 1 < Acceptance::kLengths && length == first[static_cast<std::size_t>(value) + 1]) {
      ++value;
    }
    EXPECT_EQ(Acceptance::length_value(length), value) << length;
  }
  EXPECT_EQ(Acceptance::length_value(std::numeric_limits<std::int32_t>::max()), 9);
  const std::array<int, 8> counts = {0, 1, 2, 3, 3, 4, 4, 4};
  for (std::int32_t count = 0; count < 8; ++count) {
    EXPECT_EQ(Acceptance::count_value(count), counts[static_cast<std::size_t>(count)]) << count;
  }
}

TEST(Acceptance, TellsTheLogisticFunctionOfTheWeights) {
  Acceptance acceptance;
  std::array<float, Acceptance::kWeights> weights{};
  const Evidence evidence = evidence_of<2>({3, 4});
  acceptance.set_weights(weights.data());
  EXPECT_FLOAT_EQ(Acceptance::chance(acceptance.weigh(evidence)), 0.5f);
  weights[evidence[0]] = 1.5f;
  weights[evidence[1]] = -0.5f;
  acceptance.set_weights(weights.data());
  EXPECT_FLOAT_EQ(Acceptance::chance(acceptance.weigh(evidence)), 1.0f / (1.0f + std::exp(-1.0f)));
  EXPECT_EQ(acceptance.weights(), weights);
  weights[evidence[2]] = 1000.0f;
  acceptance.set_weights(weights.data());
  EXPECT_EQ(Acceptance::chance(acceptance.weigh(evidence)), 1.0f);
  weights[evidence[2]] = -1000.0f;
  acceptance.set_weights(weights.data());
  EXPECT_EQ(Acceptance::chance(acceptance.weigh(evidence)), 0.0f);
}

// By as much as the chance was wrong.
TEST(Acceptance, LearnsOnlyWhatTheEvidenceTells) {
  Acceptance acceptance;
  const Evidence evidence = evidence_of<3>({5, 0, 2});
  std::array<bool, Acceptance::kWeights> taught{};
  for (const std::uint16_t place : evidence) taught[place] = true;
  float rate = 0.0f;
  for (const bool accepted : {true, false, true}) {
    const auto before = acceptance.weights();
    const float told = Acceptance::chance(acceptance.weigh(evidence));
    acceptance.learn(evidence, 1, told, acceptance.now(), accepted);
    const auto after = acceptance.weights();
    const float error = (accepted ? 1.0f : 0.0f) - told;
    if (rate == 0.0f) rate = (after[evidence[0]] - before[evidence[0]]) / error;
    EXPECT_GT(rate, 0.001f);
    for (std::size_t i = 0; i < after.size(); ++i) {
      EXPECT_NEAR(after[i] - before[i], taught[i] ? rate * error : 0.0f, 1e-6f);
    }
  }
}

TEST(Acceptance, ConvergesToWhatItSeesAndFollowsAChange) {
  Acceptance acceptance;
  const Evidence evidence = evidence_of<1>({4});
  const auto mean = [&](double rate, int steps) {
    std::mt19937 random(7);
    std::bernoulli_distribution accepted(rate);
    double sum = 0.0;
    for (int i = 0; i < 2 * steps; ++i) {
      const float told = Acceptance::chance(acceptance.weigh(evidence));
      if (i >= steps) sum += static_cast<double>(told);
      acceptance.learn(evidence, 1, told, acceptance.now(), accepted(random));
    }
    return sum / steps;
  };
  EXPECT_NEAR(mean(0.75, 5000), 0.75, 0.02);
  EXPECT_NEAR(mean(0.1, 5000), 0.1, 0.02);
  EXPECT_GT(mean(1.0, 500), 0.98);
}

// What the weights of the evidence come to after one batch of outcomes, `accepted` and
// `refused` ones spread evenly, all told before the first.
float weight_after(Acceptance& acceptance, const Evidence& evidence, int accepted, int refused,
                   bool copies = false) {
  const float told = Acceptance::chance(acceptance.weigh(evidence));
  const Acceptance::Moment moment = acceptance.now();
  const int rows = accepted + refused;
  for (int i = 0; i < rows; ++i) {
    const bool comes = (i + 1) * accepted / rows > i * accepted / rows;
    acceptance.learn(evidence, copies ? 1 : i, told, moment, comes);
  }
  return acceptance.weigh(evidence);
}

TEST(Acceptance, NoBatchCarriesTheWeightsPastItsOutcomes) {
  for (const int rows : {1, 4, 16, 64, 256, 1024}) {
    for (const int accepted : {0, rows / 4, rows / 2, rows}) {
      Acceptance acceptance;
      const Evidence evidence = evidence_of<1>({9});
      float weight = acceptance.weigh(evidence);
      auto told_before = static_cast<double>(Acceptance::chance(weight));
      const double came = static_cast<double>(accepted) / rows;
      for (int batch = 0; batch < 100; ++batch) {
        weight = weight_after(acceptance, evidence, accepted, rows - accepted);
        const auto told = static_cast<double>(Acceptance::chance(weight));
        // Nearer to what came than before, or near.
        EXPECT_LE(std::abs(told - came), std::max(std::abs(told_before - came), 0.1))
            << rows << " rows, " << accepted << " accepted, batch " << batch;
        told_before = told;
      }
    }
  }
}

TEST(Acceptance, TheStepOfABatchGrowsWithItsSquareRoot) {
  const Evidence evidence = evidence_of<1>({4});
  const auto moved = [&](int rows) {
    Acceptance acceptance;
    const float before = acceptance.weigh(evidence);
    return weight_after(acceptance, evidence, rows, 0) - before;
  };
  // 1 + 1 / sqrt(2) + 1 / sqrt(3) + 1 / sqrt(4), each a little less as the chance rises.
  EXPECT_GT(moved(4), 2.4f * moved(1));
  EXPECT_LT(moved(4), 2.785f * moved(1));
  EXPECT_LT(moved(64), 15.1f * moved(1));
}

TEST(Acceptance, CopiesOfARequestTeachLittleMoreThanOne) {
  const Evidence evidence = evidence_of<1>({4});
  const auto moved = [&](int rows) {
    Acceptance acceptance;
    const float before = acceptance.weigh(evidence);
    return weight_after(acceptance, evidence, rows, 0, true) - before;
  };
  // 1 + 1 / 2 + ... + 1 / 64.
  EXPECT_LT(moved(64), 4.75f * moved(1));
  EXPECT_LT(moved(1024), 7.6f * moved(1));
}

TEST(Acceptance, OutcomesThatAreLearnedBeforeTheNextChanceIsToldCountInFull) {
  const Evidence evidence = evidence_of<1>({4});
  const Evidence other = evidence_of<1>({5});
  Acceptance acceptance;
  Token token = 0;
  const auto move = [&](Acceptance::Moment moment) {
    const float before = acceptance.weigh(evidence);
    acceptance.learn(evidence, ++token, Acceptance::chance(before), moment, true);
    return (acceptance.weigh(evidence) - before) / (1.0f - Acceptance::chance(before));
  };
  const float full = move(acceptance.now());
  EXPECT_NEAR(move(acceptance.now()), full, 1e-5f);
  const Acceptance::Moment moment = acceptance.now();
  EXPECT_NEAR(move(moment), full, 1e-5f);
  // Another evidence is other news.
  acceptance.learn(other, 1, 0.5f, moment, true);
  EXPECT_NEAR(move(moment), full / std::sqrt(2.0f), 1e-5f);
  EXPECT_NEAR(move(moment), full / std::sqrt(3.0f), 1e-5f);
  EXPECT_NEAR(move(acceptance.now()), full, 1e-5f);
}

TEST(Acceptance, WeightsWithoutAChanceAreCountedSomewhere) {
  Acceptance acceptance;
  acceptance.learn(evidence_of<1>({1}), 1, std::numeric_limits<float>::quiet_NaN(),
                   acceptance.now(), true);
  acceptance.learn(evidence_of<1>({1}), 1, -1.0f, acceptance.now(), true);
  acceptance.learn(evidence_of<1>({1}), 1, 2.0f, acceptance.now(), true);
  double all = 0.0;
  for (const Acceptance::Bucket& bucket : acceptance.reliability()) all += bucket.count;
  EXPECT_EQ(all, 3.0);
}

TEST(Acceptance, KeepsApartWhatOneFeatureTellsApart) {
  Acceptance acceptance;
  const Evidence often = evidence_of<1>({2});
  const Evidence seldom = evidence_of<1>({3});
  std::mt19937 random(9);
  std::bernoulli_distribution nine(0.9);
  std::bernoulli_distribution two(0.2);
  double told_often = 0.0;
  double told_seldom = 0.0;
  for (int i = 0; i < 10000; ++i) {
    const float first = Acceptance::chance(acceptance.weigh(often));
    acceptance.learn(often, 1, first, acceptance.now(), nine(random));
    const float second = Acceptance::chance(acceptance.weigh(seldom));
    acceptance.learn(seldom, 1, second, acceptance.now(), two(random));
    if (i < 5000) continue;
    told_often += static_cast<double>(first) / 5000;
    told_seldom += static_cast<double>(second) / 5000;
  }
  EXPECT_NEAR(told_often, 0.9, 0.03);
  EXPECT_NEAR(told_seldom, 0.2, 0.03);
}

TEST(Acceptance, CountsWhatWasToldAndWhatCame) {
  Acceptance acceptance;
  const Evidence evidence = evidence_of<1>({1});
  for (const float told : {0.0f, 0.049f, 0.26f, 0.95f, 1.0f}) {
    acceptance.learn(evidence, 1, told, acceptance.now(), told > 0.25f);
  }
  const auto buckets = acceptance.reliability();
  double all = 0.0;
  for (const Acceptance::Bucket& bucket : buckets) all += bucket.count;
  EXPECT_EQ(all, 5.0);
  EXPECT_EQ(buckets[0].count, 2.0);
  EXPECT_EQ(buckets[0].accepted, 0.0);
  EXPECT_NEAR(buckets[0].told, 0.049, 1e-6);
  EXPECT_EQ(buckets[5].accepted, 1.0);
  EXPECT_EQ(buckets[19].count, 2.0);
  EXPECT_NEAR(buckets[19].told, 1.95, 1e-6);
}

TEST(Acceptance, TrustsLongMatchesMoreFromTheStart) {
  const Acceptance acceptance;
  float before = 0.0f;
  for (const std::int32_t length : {1, 3, 8, 40}) {
    const int value = Acceptance::length_value(length);
    Evidence evidence = evidence_of<6>({value, 0, 0, 1, 0, 1});
    evidence[Acceptance::kBothLengths] =
        Acceptance::place(Acceptance::kBothLengths, value * Acceptance::kLengths);
    evidence[Acceptance::kShare] =
        Acceptance::place(Acceptance::kShare, 5 + Acceptance::kShares * 1);
    evidence[Acceptance::kLengthAndRival] =
        Acceptance::place(Acceptance::kLengthAndRival, value * Acceptance::kLengths);
    EXPECT_GT(Acceptance::chance(acceptance.weigh(evidence)), before);
    before = Acceptance::chance(acceptance.weigh(evidence));
  }
  EXPECT_GT(before, 0.8f);
  EXPECT_LT(before, 1.0f);
}

}  // namespace
}  // namespace fastdraft

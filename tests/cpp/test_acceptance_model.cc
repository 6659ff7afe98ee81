#include "draft/acceptance_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace fastdraft {
namespace {

using Evidence = AcceptanceModel::Evidence;

// Evidence with these values of the first features, and 0 of the others.
template <std::size_t kCount>
Evidence evidence_of(const std::array<int, kCount>& values) {
  Evidence evidence{};
  for (std::size_t i = 0; i < AcceptanceModel::kFeatures; ++i) {
    evidence[i] = AcceptanceModel::place(static_cast<AcceptanceModel::Feature>(i),
                                         i < kCount ? values[i] : 0);
  }
  return evidence;
}

// A request's step that teaches one outcome.
void learn(AcceptanceModel& acceptance, const Evidence& evidence, Token token, float predicted,
           AcceptanceModel::Moment moment, bool accepted) {
  const float current = AcceptanceModel::chance(acceptance.weigh(evidence));
  acceptance.learn(evidence, token, moment, acceptance.now(), {accepted, predicted, current, 1});
}

TEST(AcceptanceModel, TellsWhenWeightsHaveChanged) {
  AcceptanceModel acceptance;
  const AcceptanceModel::Moment moment = acceptance.now();
  EXPECT_EQ(acceptance.now(), moment);
  learn(acceptance, evidence_of<1>({3}), 1, 0.5f, moment, true);
  const AcceptanceModel::Moment learned = acceptance.now();
  EXPECT_NE(learned, moment);
  acceptance.set_weights(acceptance.weights().data());
  EXPECT_NE(acceptance.now(), learned);
}

TEST(AcceptanceModel, GivesEachValueOfEachFeatureAWeightOfItsOwn) {
  std::array<int, AcceptanceModel::kWeights> uses{};
  for (std::size_t i = 0; i < AcceptanceModel::kValues.size(); ++i) {
    for (int value = 0; value < AcceptanceModel::kValues[i]; ++value) {
      const std::uint16_t place =
          AcceptanceModel::place(static_cast<AcceptanceModel::Feature>(i), value);
      ASSERT_LT(place, AcceptanceModel::kWeights);
      ++uses[place];
    }
  }
  for (const int count : uses) EXPECT_EQ(count, 1);
}

TEST(AcceptanceModel, TellsLengthsAndCountsApartWhereItSaysSo) {
  const std::array<std::int32_t, 10> first = {0, 1, 2, 3, 4, 5, 7, 10, 16, 32};
  int value = 0;
  for (std::int32_t length = 0; length < 100; ++length) {
    if (value + 1 < AcceptanceModel::kLengths &&
        length == first[static_cast<std::size_t>(value) + 1]) {
      ++value;
    }
    EXPECT_EQ(AcceptanceModel::length_value(length), value) << length;
  }
  EXPECT_EQ(AcceptanceModel::length_value(std::numeric_limits<std::int32_t>::max()), 9);
  const std::array<int, 8> counts = {0, 1, 2, 3, 3, 4, 4, 4};
  for (std::int32_t count = 0; count < 8; ++count) {
    EXPECT_EQ(AcceptanceModel::count_value(count), counts[static_cast<std::size_t>(count)])
        << count;
  }
}

TEST(AcceptanceModel, ItsTableIsTheLogisticFunction) {
  float before = 0.0f;
  for (int i = -2000; i <= 2000; ++i) {
    const double weight = i / 100.0;
    const double exact = 1.0 / (1.0 + std::exp(-weight));
    const float chance = AcceptanceModel::chance(static_cast<float>(weight));
    const auto told = static_cast<double>(chance);
    EXPECT_NEAR(told, exact, 1e-5) << weight;
    if (weight > -15.8) {
      EXPECT_NEAR(told / exact, 1.0, 1e-4) << weight;
    }
    EXPECT_GE(chance, before) << weight;
    EXPECT_LE(chance, 1.0f) << weight;
    before = chance;
  }
}

// By as much as the chance was wrong.
TEST(AcceptanceModel, LearnsOnlyWhatTheEvidenceTells) {
  AcceptanceModel acceptance;
  const Evidence evidence = evidence_of<3>({5, 0, 2});
  std::array<bool, AcceptanceModel::kWeights> taught{};
  for (const std::uint16_t place : evidence) taught[place] = true;
  float rate = 0.0f;
  for (const bool accepted : {true, false, true}) {
    const auto before = acceptance.weights();
    const float predicted = AcceptanceModel::chance(acceptance.weigh(evidence));
    learn(acceptance, evidence, 1, predicted, acceptance.now(), accepted);
    const auto after = acceptance.weights();
    const float error = (accepted ? 1.0f : 0.0f) - predicted;
    if (rate == 0.0f) rate = (after[evidence[0]] - before[evidence[0]]) / error;
    EXPECT_GT(rate, 0.001f);
    for (std::size_t i = 0; i < after.size(); ++i) {
      EXPECT_NEAR(after[i] - before[i], taught[i] ? rate * error : 0.0f, 1e-6f);
    }
  }
}

TEST(AcceptanceModel, ConvergesToWhatItSeesAndFollowsAChange) {
  AcceptanceModel acceptance;
  const Evidence evidence = evidence_of<1>({4});
  const auto mean = [&](double rate, int steps) {
    std::mt19937 random(7);
    std::bernoulli_distribution accepted(rate);
    double sum = 0.0;
    for (int i = 0; i < 2 * steps; ++i) {
      const float predicted = AcceptanceModel::chance(acceptance.weigh(evidence));
      if (i >= steps) sum += static_cast<double>(predicted);
      learn(acceptance, evidence, 1, predicted, acceptance.now(), accepted(random));
    }
    return sum / steps;
  };
  EXPECT_NEAR(mean(0.75, 5000), 0.75, 0.02);
  EXPECT_NEAR(mean(0.1, 5000), 0.1, 0.02);
  EXPECT_GT(mean(1.0, 500), 0.98);
}

TEST(AcceptanceModel, LearnsAllSurprisesAndOneOfFourExpectedOutcomesForFour) {
  AcceptanceModel::Sample sample;
  for (const float weight : {-1.9f, 0.0f, 1.9f}) {
    for (int i = 0; i < 100; ++i) {
      ASSERT_EQ(sample.next(weight, true), 1);
      ASSERT_EQ(sample.next(weight, false), 1);
    }
  }
  ASSERT_EQ(sample.next(-3.0f, true), 1);
  ASSERT_EQ(sample.next(3.0f, false), 1);
  // Where three outcomes take turns, each of them is learned about as often.
  std::array<int, 3> stand_for{};
  std::size_t learned = 0;
  constexpr int kOutcomes = 30'000;
  for (int i = 0; i < kOutcomes; ++i) {
    const int times = sample.next(i % 2 == 0 ? 3.0f : -3.0f, i % 2 == 0);
    ASSERT_TRUE(times == 0 || times == 4);
    learned += times > 0 ? 1 : 0;
    stand_for[static_cast<std::size_t>(i) % 3] += times;
  }
  EXPECT_NEAR(static_cast<double>(learned), kOutcomes / 4.0, 0.02 * kOutcomes);
  for (const int count : stand_for) EXPECT_NEAR(count, kOutcomes / 3.0, 0.03 * kOutcomes);
}

TEST(AcceptanceModel, AnOutcomeThatStandsForFourTakesFourSteps) {
  const Evidence evidence = evidence_of<1>({4});
  const auto moved = [&](int times) {
    AcceptanceModel acceptance;
    const float before = acceptance.weigh(evidence);
    const float chance = AcceptanceModel::chance(before);
    acceptance.learn(evidence, 1, acceptance.now(), acceptance.now(),
                     {false, chance, chance, times});
    const auto counts = acceptance.reliability();
    double count = 0.0;
    for (const ReliabilityBucket& bucket : counts) count += bucket.count;
    EXPECT_EQ(count, times);
    return acceptance.weigh(evidence) - before;
  };
  EXPECT_NEAR(moved(4), 4.0f * moved(1), 1e-6f);
}

// What the weights of the evidence come to after one batch of outcomes, `accepted` and
// `refused` ones spread evenly, all predicted before the first.
float weight_after(AcceptanceModel& acceptance, const Evidence& evidence, int accepted, int refused,
                   bool copies = false) {
  const float predicted = AcceptanceModel::chance(acceptance.weigh(evidence));
  const AcceptanceModel::Moment moment = acceptance.now();
  const int rows = accepted + refused;
  for (int i = 0; i < rows; ++i) {
    const bool comes = (i + 1) * accepted / rows > i * accepted / rows;
    learn(acceptance, evidence, copies ? 1 : i, predicted, moment, comes);
  }
  return acceptance.weigh(evidence);
}

TEST(AcceptanceModel, NoBatchCarriesTheWeightsPastItsOutcomes) {
  for (const int rows : {1, 4, 16, 64, 256, 1024}) {
    for (const int accepted : {0, rows / 4, rows / 2, rows}) {
      AcceptanceModel acceptance;
      const Evidence evidence = evidence_of<1>({9});
      float weight = acceptance.weigh(evidence);
      auto predicted_before = static_cast<double>(AcceptanceModel::chance(weight));
      const double came = static_cast<double>(accepted) / rows;
      for (int batch = 0; batch < 100; ++batch) {
        weight = weight_after(acceptance, evidence, accepted, rows - accepted);
        const auto predicted = static_cast<double>(AcceptanceModel::chance(weight));
        // Nearer to what came than before, or near.
        EXPECT_LE(std::abs(predicted - came), std::max(std::abs(predicted_before - came), 0.1))
            << rows << " rows, " << accepted << " accepted, batch " << batch;
        predicted_before = predicted;
      }
    }
  }
}

TEST(AcceptanceModel, TheStepOfABatchGrowsWithItsSquareRoot) {
  const Evidence evidence = evidence_of<1>({4});
  const auto moved = [&](int rows) {
    AcceptanceModel acceptance;
    const float before = acceptance.weigh(evidence);
    return weight_after(acceptance, evidence, rows, 0) - before;
  };
  // 1 + 1 / sqrt(2) + 1 / sqrt(3) + 1 / sqrt(4), each a little less as the chance rises.
  EXPECT_GT(moved(4), 2.4f * moved(1));
  EXPECT_LT(moved(4), 2.785f * moved(1));
  EXPECT_LT(moved(64), 15.1f * moved(1));
}

TEST(AcceptanceModel, CopiesOfARequestTeachLittleMoreThanOne) {
  const Evidence evidence = evidence_of<1>({4});
  const auto moved = [&](int rows) {
    AcceptanceModel acceptance;
    const float before = acceptance.weigh(evidence);
    return weight_after(acceptance, evidence, rows, 0, true) - before;
  };
  // 1 + 1 / 2 + ... + 1 / 64.
  EXPECT_LT(moved(64), 4.75f * moved(1));
  EXPECT_LT(moved(1024), 7.6f * moved(1));
}

TEST(AcceptanceModel, TheOutcomesOfOneStepAllCountInFull) {
  const Evidence evidence = evidence_of<1>({4});
  AcceptanceModel acceptance;
  const AcceptanceModel::Moment moment = acceptance.now();
  AcceptanceModel::Moment begun = moment;
  // What a token of the draft moves the weights by, for an error of 1.
  const auto move = [&](Token token) {
    const float before = acceptance.weigh(evidence);
    const float chance = AcceptanceModel::chance(before);
    acceptance.learn(evidence, token, moment, begun, {true, chance, chance, 1});
    return (acceptance.weigh(evidence) - before) / (1.0f - chance);
  };
  const float full = move(1);
  for (Token token = 2; token < 20; ++token) EXPECT_NEAR(move(token), full, 1e-5f);
  EXPECT_NEAR(move(19), full, 1e-5f);
  // The second request of the batch.
  begun = acceptance.now();
  for (Token token = 31; token < 50; ++token) {
    EXPECT_NEAR(move(token), full / std::sqrt(2.0f), 1e-5f);
  }
  EXPECT_NEAR(move(1), full / 2.0f, 1e-5f);
  begun = acceptance.now();
  EXPECT_NEAR(move(51), full / std::sqrt(3.0f), 1e-5f);
  EXPECT_NEAR(move(1), full / 3.0f, 1e-5f);
}

TEST(AcceptanceModel, CorrectsDeepPathsByWhatBecameOfThem) {
  AcceptanceModel acceptance;
  std::mt19937 random(3);
  std::uniform_real_distribution<float> any(0.55f, 0.7f);
  std::bernoulli_distribution accepted(0.3);
  for (int i = 0; i < 5000; ++i) acceptance.learn_path(30, any(random), accepted(random));
  for (const float path : {0.58f, 0.6f, 0.66f}) {
    EXPECT_NEAR(acceptance.path_chance(30, path), 0.3f, 0.1f) << path;
    EXPECT_EQ(acceptance.path_chance(24, path), acceptance.path_chance(39, path));
    // Others are as they were.
    for (const std::int32_t depth : {0, 3, 4, 15, 23, 40, 1000}) {
      EXPECT_EQ(acceptance.path_chance(depth, path), path) << depth;
    }
  }
  for (const float path : {0.0f, 0.1f, 0.5f, 0.75f, 1.0f}) {
    EXPECT_EQ(acceptance.path_chance(30, path), path);
  }
}

TEST(AcceptanceModel, ShallowPathsAreTakenAtTheirWord) {
  AcceptanceModel acceptance;
  const auto before = acceptance.weights();
  for (std::int32_t depth = 0; depth < 4; ++depth) acceptance.learn_path(depth, 0.5f, false);
  EXPECT_EQ(acceptance.weights(), before);
}

TEST(AcceptanceModel, ChancesOfPathsStayWithinTheirRange) {
  AcceptanceModel acceptance;
  auto weights = acceptance.weights();
  for (const float correction : {-1000.0f, 1000.0f}) {
    std::fill(weights.end() - AcceptanceModel::kValues.back(), weights.end(), correction);
    acceptance.set_weights(weights.data());
    for (const float path : {0.0f, 0.3f, 1.0f, std::numeric_limits<float>::quiet_NaN()}) {
      const float chance = acceptance.path_chance(50, path);
      EXPECT_TRUE(std::isnan(path) || chance == (correction < 0.0f ? 0.0f : 1.0f)) << path;
    }
  }
}

TEST(AcceptanceModel, OutcomesThatAreLearnedBeforeTheNextChanceIsToldCountInFull) {
  const Evidence evidence = evidence_of<1>({4});
  const Evidence other = evidence_of<1>({5});
  AcceptanceModel acceptance;
  Token token = 0;
  const auto move = [&](AcceptanceModel::Moment moment) {
    const float before = acceptance.weigh(evidence);
    learn(acceptance, evidence, ++token, AcceptanceModel::chance(before), moment, true);
    return (acceptance.weigh(evidence) - before) / (1.0f - AcceptanceModel::chance(before));
  };
  const float full = move(acceptance.now());
  EXPECT_NEAR(move(acceptance.now()), full, 1e-5f);
  const AcceptanceModel::Moment moment = acceptance.now();
  EXPECT_NEAR(move(moment), full, 1e-5f);
  // Another evidence is other news.
  learn(acceptance, other, 1, 0.5f, moment, true);
  EXPECT_NEAR(move(moment), full / std::sqrt(2.0f), 1e-5f);
  EXPECT_NEAR(move(moment), full / std::sqrt(3.0f), 1e-5f);
  EXPECT_NEAR(move(acceptance.now()), full, 1e-5f);
}

TEST(AcceptanceModel, WeightsWithoutAChanceAreCountedSomewhere) {
  AcceptanceModel acceptance;
  learn(acceptance, evidence_of<1>({1}), 1, std::numeric_limits<float>::quiet_NaN(),
        acceptance.now(), true);
  learn(acceptance, evidence_of<1>({1}), 1, -1.0f, acceptance.now(), true);
  learn(acceptance, evidence_of<1>({1}), 1, 2.0f, acceptance.now(), true);
  double all = 0.0;
  for (const ReliabilityBucket& bucket : acceptance.reliability()) all += bucket.count;
  EXPECT_EQ(all, 3.0);
}

TEST(AcceptanceModel, CountsWhatWasToldAndWhatCame) {
  AcceptanceModel acceptance;
  const Evidence evidence = evidence_of<1>({1});
  for (const float predicted : {0.0f, 0.049f, 0.26f, 0.95f, 1.0f}) {
    learn(acceptance, evidence, 1, predicted, acceptance.now(), predicted > 0.25f);
  }
  const auto buckets = acceptance.reliability();
  double all = 0.0;
  for (const ReliabilityBucket& bucket : buckets) all += bucket.count;
  EXPECT_EQ(all, 5.0);
  EXPECT_EQ(buckets[0].count, 2.0);
  EXPECT_EQ(buckets[0].accepted, 0.0);
  EXPECT_NEAR(buckets[0].predicted, 0.049, 1e-6);
  EXPECT_EQ(buckets[5].accepted, 1.0);
  EXPECT_EQ(buckets[19].count, 2.0);
  EXPECT_NEAR(buckets[19].predicted, 1.95, 1e-6);
}

}  // namespace
}  // namespace fastdraft

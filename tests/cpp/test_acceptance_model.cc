// Steps, paths and limits. What it learns is compared with an oracle in tests/core.
#include "policy/acceptance_model.h"

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

// Evidence with this value of the first feature, and 0 of the others.
Evidence evidence_of(int value) {
  Evidence evidence{};
  for (std::size_t i = 0; i < AcceptanceModel::kFeatures; ++i) {
    evidence[i] =
        AcceptanceModel::place(static_cast<AcceptanceModel::Feature>(i), i == 0 ? value : 0);
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
  learn(acceptance, evidence_of(3), 1, 0.5f, moment, true);
  const AcceptanceModel::Moment learned = acceptance.now();
  EXPECT_NE(learned, moment);
  acceptance.set_weights(acceptance.weights().data());
  EXPECT_NE(acceptance.now(), learned);
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

// What the weights of the evidence come to after one batch of outcomes, `accepted` and
// `refused` ones spread evenly, all predicted before the first.
float weight_after(AcceptanceModel& acceptance, const Evidence& evidence, int accepted,
                   int refused) {
  const float predicted = AcceptanceModel::chance(acceptance.weigh(evidence));
  const AcceptanceModel::Moment moment = acceptance.now();
  const int rows = accepted + refused;
  for (int i = 0; i < rows; ++i) {
    const bool comes = (i + 1) * accepted / rows > i * accepted / rows;
    learn(acceptance, evidence, i, predicted, moment, comes);
  }
  return acceptance.weigh(evidence);
}

TEST(AcceptanceModel, NoBatchCarriesTheWeightsPastItsOutcomes) {
  for (const int rows : {1, 4, 16, 64, 256, 1024}) {
    for (const int accepted : {0, rows / 4, rows / 2, rows}) {
      AcceptanceModel acceptance;
      const Evidence evidence = evidence_of(9);
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

TEST(AcceptanceModel, TheOutcomesOfOneStepAllCountInFull) {
  const Evidence evidence = evidence_of(4);
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

TEST(AcceptanceModel, ChancesOfPathsStayWithinTheirRange) {
  AcceptanceModel acceptance;
  auto weights = acceptance.weights();
  for (const float correction : {-1000.0f, 1000.0f}) {
    const auto end = weights.begin() + AcceptanceModel::place(AcceptanceModel::kNgram, 0);
    std::fill(end - AcceptanceModel::kValues[AcceptanceModel::kPath], end, correction);
    acceptance.set_weights(weights.data());
    for (const float path : {0.0f, 0.3f, 1.0f, std::numeric_limits<float>::quiet_NaN()}) {
      const float chance = acceptance.path_chance(50, path);
      EXPECT_TRUE(std::isnan(path) || chance == (correction < 0.0f ? 0.0f : 1.0f)) << path;
    }
  }
}

TEST(AcceptanceModel, WeightsWithoutAChanceAreCountedSomewhere) {
  AcceptanceModel acceptance;
  learn(acceptance, evidence_of(1), 1, std::numeric_limits<float>::quiet_NaN(), acceptance.now(),
        true);
  learn(acceptance, evidence_of(1), 1, -1.0f, acceptance.now(), true);
  learn(acceptance, evidence_of(1), 1, 2.0f, acceptance.now(), true);
  double all = 0.0;
  for (const ReliabilityBucket& bucket : acceptance.reliability()) all += bucket.count;
  EXPECT_EQ(all, 3.0);
}

}  // namespace
}  // namespace fastdraft

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

struct AcceptanceModelTestAccess {
  static void make_room(AcceptanceModel& acceptance, std::size_t size) {
    acceptance.make_room_beyond(size);
  }
  static std::size_t num_kinds(const AcceptanceModel& acceptance) {
    return acceptance.num_kinds_.load();
  }
};

namespace {

using Evidence = AcceptanceModel::Evidence;

// Evidence with this value of the first feature, and 0 of the others.
Evidence evidence_of(int value) {
  Evidence evidence{};
  for (std::size_t i = 0; i < AcceptanceModel::kFeatures; ++i) {
    evidence[i] =
        AcceptanceModel::weight_index(static_cast<AcceptanceModel::Feature>(i), i == 0 ? value : 0);
  }
  return evidence;
}

// A request's step that teaches one outcome.
void learn(AcceptanceModel& acceptance, const Evidence& evidence, Token token, float predicted,
           AcceptanceModel::Version version, bool accepted) {
  const float current = AcceptanceModel::probability(acceptance.weigh(evidence));
  acceptance.learn(evidence, token, version, acceptance.now(), {accepted, predicted, current, 1});
}

TEST(AcceptanceModel, TellsWhenWeightsHaveChanged) {
  AcceptanceModel acceptance;
  const AcceptanceModel::Version version = acceptance.now();
  EXPECT_EQ(acceptance.now(), version);
  learn(acceptance, evidence_of(3), 1, 0.5f, version, true);
  const AcceptanceModel::Version learned = acceptance.now();
  EXPECT_NE(learned, version);
  acceptance.set_weights(acceptance.weights().data());
  EXPECT_NE(acceptance.now(), learned);
}

TEST(AcceptanceModel, ItsTableIsTheLogisticFunction) {
  float before = 0.0f;
  for (int i = -2000; i <= 2000; ++i) {
    const double weight = i / 100.0;
    const double exact = 1.0 / (1.0 + std::exp(-weight));
    const float probability = AcceptanceModel::probability(static_cast<float>(weight));
    const auto predicted = static_cast<double>(probability);
    EXPECT_NEAR(predicted, exact, 1e-5) << weight;
    if (weight > -15.8) {
      EXPECT_NEAR(predicted / exact, 1.0, 1e-4) << weight;
    }
    EXPECT_GE(probability, before) << weight;
    EXPECT_LE(probability, 1.0f) << weight;
    before = probability;
  }
}

// Learns from one batch of outcomes, and returns the new weight of the evidence. The accepted and
// the refused outcomes alternate evenly, and all were predicted before the first was learned.
float weight_after(AcceptanceModel& acceptance, const Evidence& evidence, int accepted,
                   int refused) {
  const float predicted = AcceptanceModel::probability(acceptance.weigh(evidence));
  const AcceptanceModel::Version version = acceptance.now();
  const int rows = accepted + refused;
  for (int i = 0; i < rows; ++i) {
    const bool comes = (i + 1) * accepted / rows > i * accepted / rows;
    learn(acceptance, evidence, i, predicted, version, comes);
  }
  return acceptance.weigh(evidence);
}

TEST(AcceptanceModel, NoBatchCarriesTheWeightsPastItsOutcomes) {
  for (const int rows : {1, 4, 16, 64, 256, 1024}) {
    for (const int accepted : {0, rows / 4, rows / 2, rows}) {
      AcceptanceModel acceptance;
      const Evidence evidence = evidence_of(9);
      float weight = acceptance.weigh(evidence);
      auto predicted_before = static_cast<double>(AcceptanceModel::probability(weight));
      const double observed = static_cast<double>(accepted) / rows;
      for (int batch = 0; batch < 100; ++batch) {
        weight = weight_after(acceptance, evidence, accepted, rows - accepted);
        const auto predicted = static_cast<double>(AcceptanceModel::probability(weight));
        // Closer to the observed rate than before, or close.
        EXPECT_LE(std::abs(predicted - observed),
                  std::max(std::abs(predicted_before - observed), 0.1))
            << rows << " rows, " << accepted << " accepted, batch " << batch;
        predicted_before = predicted;
      }
    }
  }
}

TEST(AcceptanceModel, TheOutcomesOfOneStepAllCountInFull) {
  const Evidence evidence = evidence_of(4);
  AcceptanceModel acceptance;
  const AcceptanceModel::Version version = acceptance.now();
  AcceptanceModel::Version begun = version;
  // Returns by how much a token of the draft moves the weights, for an error of 1.
  const auto move = [&](Token token) {
    const float before = acceptance.weigh(evidence);
    const float probability = AcceptanceModel::probability(before);
    acceptance.learn(evidence, token, version, begun, {true, probability, probability, 1});
    return (acceptance.weigh(evidence) - before) / (1.0f - probability);
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

TEST(AcceptanceModel, CorrectsPathsByTheirOutcomes) {
  AcceptanceModel acceptance;
  std::mt19937 random(3);
  std::uniform_real_distribution<float> any(0.55f, 0.7f);
  std::bernoulli_distribution accepted(0.3);
  for (int i = 0; i < 5000; ++i) {
    for (const std::int32_t depth : {2, 30}) {
      acceptance.learn_path(depth, any(random), false, accepted(random));
    }
  }
  for (const float path : {0.58f, 0.6f, 0.66f}) {
    EXPECT_NEAR(acceptance.path_probability(30, path, false), 0.3f, 0.1f) << path;
    EXPECT_NEAR(acceptance.path_probability(0, path, false), 0.3f, 0.1f) << path;
    EXPECT_EQ(acceptance.path_probability(24, path, false),
              acceptance.path_probability(39, path, false));
    EXPECT_EQ(acceptance.path_probability(0, path, false),
              acceptance.path_probability(3, path, false));
    // Others are as they were.
    for (const std::int32_t depth : {4, 15, 23, 40, 1000}) {
      EXPECT_EQ(acceptance.path_probability(depth, path, false), path) << depth;
    }
  }
  for (const float path : {0.0f, 0.1f, 0.5f, 0.75f, 1.0f}) {
    EXPECT_EQ(acceptance.path_probability(30, path, false), path);
  }
}

TEST(AcceptanceModel, CorrectsATreeLessWhereAPathIsSureOrImprobable) {
  AcceptanceModel acceptance;
  auto weights = acceptance.weights();
  const auto end = weights.begin() + AcceptanceModel::weight_index(AcceptanceModel::kNgram, 0);
  std::fill(end - AcceptanceModel::kValues[AcceptanceModel::kPath], end, 0.1f);
  acceptance.set_weights(weights.data());
  EXPECT_FLOAT_EQ(acceptance.path_probability(9, 0.01f, false), 0.11f);
  EXPECT_FLOAT_EQ(acceptance.path_probability(9, 0.01f, true), 0.01f + 0.1f * 0.0396f);
  EXPECT_FLOAT_EQ(acceptance.path_probability(9, 0.5f, true), 0.6f);
  EXPECT_EQ(acceptance.path_probability(9, 0.0f, true), 0.0f);
  EXPECT_EQ(acceptance.path_probability(9, 1.0f, true), 1.0f);
  const float before = acceptance.path_probability(9, 0.5f, true);
  acceptance.learn_path(9, 0.5f, true, false);
  EXPECT_FLOAT_EQ(acceptance.path_probability(9, 0.5f, true), before - 0.02f * before);
}

TEST(AcceptanceModel, ProbabilitiesOfPathsStayWithinTheirRange) {
  AcceptanceModel acceptance;
  auto weights = acceptance.weights();
  for (const float correction : {-1000.0f, 1000.0f}) {
    const auto end = weights.begin() + AcceptanceModel::weight_index(AcceptanceModel::kNgram, 0);
    std::fill(end - AcceptanceModel::kValues[AcceptanceModel::kPath], end, correction);
    acceptance.set_weights(weights.data());
    for (const float path : {0.0f, 0.3f, 1.0f, std::numeric_limits<float>::quiet_NaN()}) {
      const float probability = acceptance.path_probability(50, path, false);
      EXPECT_TRUE(std::isnan(path) || probability == (correction < 0.0f ? 0.0f : 1.0f)) << path;
    }
  }
}

TEST(AcceptanceModel, AThreadThatMakesRoomLateNeverShrinksIt) {
  using Access = AcceptanceModelTestAccess;
  AcceptanceModel acceptance;
  const std::size_t first = Access::num_kinds(acceptance);
  Access::make_room(acceptance, first);
  Access::make_room(acceptance, 2 * first);
  Access::make_room(acceptance, first);  // by a thread that read the number before the others
  EXPECT_EQ(Access::num_kinds(acceptance), 4 * first);
}

TEST(AcceptanceModel, NotANumberIsCountedSomewhere) {
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

#include "fastdraft/acceptance.h"

#include <gtest/gtest.h>

namespace fastdraft {
namespace {

using Footing = CopyCursor::Footing;

TEST(Acceptance, TrustsLongMatchesAndDeepTokensMoreFromTheStart) {
  const Acceptance acceptance;
  const auto briefly = Acceptance::repetition(1, Agreement::kSingle);
  const auto at_length = Acceptance::repetition(40, Agreement::kSingle);
  EXPECT_LT(acceptance.chance(briefly, 0), acceptance.chance(at_length, 0));
  EXPECT_LT(acceptance.chance(briefly, 0), acceptance.chance(briefly, 3));
  EXPECT_LT(acceptance.chance(Acceptance::repetition(1, Agreement::kDisagree), 0),
            acceptance.chance(briefly, 0));
  EXPECT_LT(acceptance.chance(Acceptance::copy({9, 1, Footing::kFollowing}), 0),
            acceptance.chance(Acceptance::prediction({9, 1, Footing::kFollowing}), 0));
  EXPECT_LT(acceptance.chance(at_length, 1000), 1.0f);
}

TEST(Acceptance, TellsAllKindsOfEvidenceApart) {
  Acceptance acceptance;
  const auto taught = Acceptance::repetition(5, Agreement::kAgree);
  const auto other = {
      Acceptance::repetition(5, Agreement::kDisagree),
      Acceptance::repetition(5, Agreement::kSingle), Acceptance::repetition(4, Agreement::kAgree),
      Acceptance::copy({9, 5, Footing::kJumped}), Acceptance::prediction({9, 5, Footing::kJumped})};
  const Acceptance fresh;
  for (int i = 0; i < 100; ++i) acceptance.learn(taught, 0, true);
  EXPECT_LT(acceptance.chance(taught, 0), 0.05f);
  for (const auto evidence : other) {
    EXPECT_EQ(acceptance.chance(evidence, 0), fresh.chance(evidence, 0));
  }
}

TEST(Acceptance, JudgesADeepTokenAsTheFirstOneAfterALongerMatch) {
  Acceptance acceptance;
  for (int i = 0; i < 50; ++i) {
    acceptance.learn(Acceptance::repetition(4, Agreement::kSingle), 0, true);
  }
  const auto shorter = Acceptance::repetition(1, Agreement::kSingle);
  EXPECT_LT(acceptance.chance(shorter, 3), 0.06f);
  EXPECT_GT(acceptance.chance(shorter, 2), 0.5f);
}

TEST(Acceptance, ConvergesToWhatItSeesAndFollowsAChange) {
  Acceptance acceptance;
  const auto evidence = Acceptance::prediction({9, 0, Footing::kGuessed});
  // Three of four first tokens are accepted, and then all of the second.
  for (int i = 0; i < 20000; ++i) acceptance.learn(evidence, i % 4 == 0 ? 0 : 2, i % 4 == 0);
  EXPECT_NEAR(acceptance.chance(evidence, 0), 0.75f, 0.01f);
  EXPECT_GT(acceptance.chance(evidence, 1), 0.99f);
  for (int i = 0; i < 20000; ++i) acceptance.learn(evidence, 0, true);
  EXPECT_LT(acceptance.chance(evidence, 0), 0.05f);
}

}  // namespace
}  // namespace fastdraft

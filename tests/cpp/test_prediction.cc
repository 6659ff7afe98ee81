#include "draft/prediction.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

// 100, 101, 102, ...: every token says where it stands.
Tokens count_from_hundred(std::size_t size) {
  Tokens text(size);
  std::iota(text.begin(), text.end(), 100);
  return text;
}

class PredictionTest : public ::testing::Test {
 protected:
  Prediction make(const Tokens& text) {
    return {text.data(), static_cast<std::int64_t>(text.size()), budget_};
  }
  static CopyCursor::Place place_after(Prediction& prediction, const Tokens& output) {
    for (std::size_t i = 1; i <= output.size(); ++i) {
      prediction.advance(output.data(), static_cast<std::int64_t>(i));
    }
    return prediction.place();
  }

  MemoryBudget budget_;
};

TEST_F(PredictionTest, BeginsAtItsFirstToken) {
  const Prediction prediction = make(count_from_hundred(10));
  EXPECT_EQ(prediction.place().position, 0);
  EXPECT_EQ(prediction.place().footing, CopyCursor::Footing::kGuessed);
}

TEST_F(PredictionTest, FollowsTheOutput) {
  Prediction prediction = make(count_from_hundred(10));
  const CopyCursor::Place place = place_after(prediction, {100, 101, 102});
  EXPECT_EQ(place.position, 3);
  EXPECT_EQ(place.length, 3);
  EXPECT_EQ(place.footing, CopyCursor::Footing::kFollowing);
}

TEST_F(PredictionTest, WaitsAtItsBeginningForAPreambleToEnd) {
  Prediction prediction = make(count_from_hundred(10));
  EXPECT_EQ(place_after(prediction, {1, 2, 3}).position, 0);
}

TEST_F(PredictionTest, GoesOnAfterReplacedTokens) {
  Prediction prediction = make(count_from_hundred(40));
  const CopyCursor::Place guessed = place_after(prediction, {100, 101, 102, 9});
  EXPECT_EQ(guessed.position, 4);
  EXPECT_EQ(guessed.footing, CopyCursor::Footing::kGuessed);
  EXPECT_EQ(guessed.length, 0);
}

TEST_F(PredictionTest, ResumesOneTokenAfterAnInsertion) {
  Prediction prediction = make(count_from_hundred(40));
  const CopyCursor::Place place = place_after(prediction, {100, 101, 102, 7, 8, 9, 103});
  EXPECT_EQ(place.position, 4);
  EXPECT_EQ(place.footing, CopyCursor::Footing::kFollowing);
}

TEST_F(PredictionTest, ResumesOneTokenAfterADeletion) {
  Prediction prediction = make(count_from_hundred(40));
  EXPECT_EQ(place_after(prediction, {100, 101, 102, 120}).position, 21);
}

TEST_F(PredictionTest, PrefersTheOccurrenceNearestToWhereItParted) {
  // 1 2 3 stands three times; the output parts shortly before the second.
  Tokens text = count_from_hundred(60);
  for (const std::size_t at : {std::size_t{5}, std::size_t{30}, std::size_t{50}}) {
    text[at] = 1;
    text[at + 1] = 2;
    text[at + 2] = 3;
  }
  Prediction prediction = make(text);
  Tokens output(text.begin(), text.begin() + 28);
  output.insert(output.end(), {9, 1, 2});
  const CopyCursor::Place place = place_after(prediction, output);
  EXPECT_EQ(place.position, 32);
  EXPECT_EQ(place.footing, CopyCursor::Footing::kFollowing);
}

TEST_F(PredictionTest, JumpsToWhereALongerMatchStands) {
  const Tokens text = count_from_hundred(400);
  Prediction prediction = make(text);
  const CopyCursor::Place jumped = place_after(prediction, {100, 101, 350});
  EXPECT_EQ(jumped.position, 251);
  EXPECT_EQ(jumped.footing, CopyCursor::Footing::kJumped);
}

TEST_F(PredictionTest, StaysWithinItsTextAtTheEnd) {
  Prediction prediction = make(count_from_hundred(3));
  EXPECT_EQ(place_after(prediction, {100, 101, 102}).position, 3);
  EXPECT_EQ(place_after(prediction, {100, 101, 102, 9, 9, 9, 9, 9}).position, 3);
}

// Every place lies in the text, and the tokens said to stand before it do.
TEST_F(PredictionTest, NamesOnlyPlacesWhereTheOutputStands) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    const auto vocabulary = static_cast<Token>(2 + seed % 4);
    const Tokens text = testing::random_text(50 + seed % 200, vocabulary, seed);
    const Tokens output = testing::random_text(150, vocabulary, seed + 7000);
    constexpr std::size_t kPrompt = 20;
    Prediction prediction = make(text);
    for (std::size_t size = kPrompt + 1; size <= output.size(); ++size) {
      prediction.advance(output.data(), static_cast<std::int64_t>(size));
      const CopyCursor::Place place = prediction.place();
      if (place.position < 0) continue;  // given up
      ASSERT_LE(place.position, static_cast<std::int32_t>(text.size()));
      ASSERT_LE(place.length, static_cast<std::int32_t>(size));
      for (std::int32_t i = 1; i <= place.length; ++i) {
        ASSERT_EQ(text[static_cast<std::size_t>(place.position - i)],
                  output[size - static_cast<std::size_t>(i)]);
      }
    }
  }
}

}  // namespace
}  // namespace fastdraft

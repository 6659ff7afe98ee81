// In a text of its own past; tests of Prediction follow another text.

#include "draft/copy_cursor.h"

#include <gtest/gtest.h>

#include <numeric>

#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;
using Footing = CopyCursor::Footing;

// A prompt of 100, 101, ..., and an output that copies it with edits.
class OwnPast {
 public:
  OwnPast() : text_(60) { std::iota(text_.begin(), text_.end(), 100); }

  CopyCursor::Place emit(const Tokens& tokens, CopyCursor::Place elsewhere = {}) {
    for (const Token token : tokens) {
      text_.push_back(token);
      cursor_.advance(text_.data(), static_cast<std::int32_t>(text_.size()) - 1, text_.data(),
                      static_cast<std::int64_t>(text_.size()), elsewhere);
      elsewhere = {};
    }
    return cursor_.place();
  }

 private:
  Tokens text_;
  CopyCursor cursor_{-1};
};

TEST(CopyCursor, IsNowhereUntilTheOutputCopies) {
  OwnPast past;
  EXPECT_EQ(past.emit({1, 2, 103}).position, -1);
  const CopyCursor::Place jumped = past.emit({104}, {5, 4, Footing::kFollowing});
  EXPECT_EQ(jumped.position, 5);
  EXPECT_EQ(jumped.footing, Footing::kJumped);
  const CopyCursor::Place followed = past.emit({105, 106});
  EXPECT_EQ(followed.position, 7);
  EXPECT_EQ(followed.length, 6);
  EXPECT_EQ(followed.footing, Footing::kFollowing);
}

TEST(CopyCursor, ResumesNearbyByOneTokenAfterAnEdit) {
  OwnPast past;
  past.emit({104}, {5, 4, Footing::kFollowing});
  EXPECT_EQ(past.emit({105, 106, 9}).position, 8);  // one token replaced
  EXPECT_EQ(past.emit({8, 7}).position, 10);        // or three, or
  EXPECT_EQ(past.emit({107}).position, 8);          // three were inserted
}

TEST(CopyCursor, LosesPatienceFarFromItsLastPlace) {
  OwnPast past;
  past.emit({104}, {5, 4, Footing::kFollowing});
  EXPECT_GE(past.emit(Tokens(32, 9)).position, 0);
  EXPECT_EQ(past.emit({7}).position, -1);
  EXPECT_EQ(past.emit({106}).position, -1);
}

TEST(CopyCursor, NeverNamesTheTextsOwnEnd) {
  OwnPast past;
  const CopyCursor::Place end = past.emit(Tokens(10, 9), {58, 4, Footing::kFollowing});
  EXPECT_LT(end.position, 70);
}

}  // namespace
}  // namespace fastdraft

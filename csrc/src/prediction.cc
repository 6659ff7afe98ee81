#include "fastdraft/prediction.h"

#include <algorithm>

namespace fastdraft {

Prediction::Prediction(const Token* tokens, std::int64_t size, MemoryBudget& budget)
    : index_(budget) {
  for (std::int64_t i = 0; i < size; ++i) index_.append(tokens[i]);
}

void Prediction::advance(const Token* output, std::int64_t size, std::int64_t prompt) noexcept {
  const Token token = output[size - 1];
  match_ = index_.advance(match_, token);

  const bool expected = place_.position < index_.size() && text()[place_.position] == token;
  if (expected && place_.length + 1 == match_.length) {
    ++place_.position;
    ++place_.length;
    if (place_.footing == Footing::kGuessed || place_.length >= kSettled) {
      place_.footing = Footing::kFollowing;
    }
    return;
  }
  if (place_.footing == Footing::kFollowing) {
    parted_at_ = place_.position;
    since_ = 0;
  }
  ++since_;
  if (match_.length == 0) {
    // Before anything matched, the answer's preamble stands before the
    // prediction; later, a replaced token is the commonest edit.
    const bool begun = parted_at_ > 0;
    const auto end = static_cast<std::int32_t>(index_.size());
    place_ = {begun ? std::min(parted_at_ + since_, end) : 0, 0, Footing::kGuessed};
    return;
  }
  place_ = nearest(output, size, prompt);
}

// Of the places where the longest match stands: the one within the window
// that is nearest to where the output parted, else its first in the text.
Prediction::Place Prediction::nearest(const Token* output, std::int64_t size,
                                      std::int64_t prompt) const noexcept {
  const std::int64_t length = std::min<std::int64_t>(match_.length, size - prompt);
  const auto stands_before = [&](std::int64_t position) {
    if (position < length || position > index_.size()) return false;
    for (std::int64_t i = 1; i <= length; ++i) {
      if (text()[position - i] != output[size - i]) return false;
    }
    return true;
  };
  for (std::int32_t d = 0; d <= kWindow; ++d) {
    // After an edit the text goes on further down more often than further up.
    for (const std::int32_t position : {parted_at_ + d, parted_at_ - d}) {
      if (stands_before(position)) return {position, match_.length, Footing::kFollowing};
    }
  }
  return {index_.first_end(match_.state) + 1, match_.length, Footing::kJumped};
}

}  // namespace fastdraft

#include "draft/copy_cursor.h"

#include <algorithm>
#include <cstdlib>

namespace fastdraft {

void CopyCursor::advance(const Token* text, std::int32_t limit, const Token* output,
                         std::int64_t size, Place elsewhere) noexcept {
  elsewhere.footing = Footing::kJumped;
  if (place_.position >= 0 && place_.position < limit &&
      text[place_.position] == output[size - 1]) {
    const bool settled = place_.length >= kSettled;
    ++place_.position;
    ++place_.length;
    if (settled || place_.footing == Footing::kGuessed) place_.footing = Footing::kFollowing;
    if (!settled && elsewhere.length > place_.length + kSettled) place_ = elsewhere;
    return;
  }
  if (place_.length >= kSettled) {
    parted_at_ = place_.position;
    since_ = 0;
    begun_ = true;
  }
  // What comes before the copy begins is a preamble of any length, no edit.
  since_ += begun_ ? 1 : 0;
  const bool patient = parted_at_ >= 0 && since_ <= kPatience;
  place_ = patient ? nearby(text, limit, output, size) : Place{};
  if (place_.length > 0) return;
  if (elsewhere.length > 0) {
    place_ = elsewhere;
  } else if (patient) {
    // Of all edits, one that replaces as many tokens as it removes is the commonest.
    place_.position = std::min(parted_at_ + since_, limit);
  }
}

// The place within the window before which the most tokens are those at the
// output's end, the nearest of those; of two as near the later one, since after an
// edit a text goes on further down more often than further up.
CopyCursor::Place CopyCursor::nearby(const Token* text, std::int32_t limit, const Token* output,
                                     std::int64_t size) const noexcept {
  Place best;
  std::int32_t nearest = 0;
  const std::int32_t first = std::max(1, parted_at_ - kWindow);
  const std::int32_t last = std::min(limit, parted_at_ + kWindow);
  const Token token = output[size - 1];
  for (std::int32_t position = first; position <= last; ++position) {
    if (text[position - 1] != token) continue;
    const auto most = static_cast<std::int32_t>(
        std::min<std::int64_t>({kLongestCompared, std::int64_t{position}, size}));
    const auto length =
        static_cast<std::int32_t>(common_suffix(text + position, output + size, most));
    const std::int32_t distance = std::abs(position - parted_at_);
    if (length > best.length || (length == best.length && distance <= nearest)) {
      best = {position, length, Footing::kFollowing};
      nearest = distance;
    }
  }
  return best;
}

}  // namespace fastdraft

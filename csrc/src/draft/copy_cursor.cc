#include "draft/copy_cursor.h"

#include <algorithm>
#include <cstdlib>

namespace fastdraft {

void CopyCursor::advance(const Token* text, std::int32_t limit, const Token* output,
                         std::int64_t size, Continuation elsewhere) noexcept {
  elsewhere.kind = MatchKind::kJumped;
  if (continuation_.position >= 0 && continuation_.position < limit &&
      text[continuation_.position] == output[size - 1]) {
    const bool settled = continuation_.length >= kSettled;
    ++continuation_.position;
    ++continuation_.length;
    if (settled || continuation_.kind == MatchKind::kGuessed) {
      continuation_.kind = MatchKind::kFollowing;
    }
    if (!settled && elsewhere.length > continuation_.length + kSettled) continuation_ = elsewhere;
    return;
  }
  if (continuation_.length >= kSettled) {
    parted_at_ = continuation_.position;
    since_ = 0;
    begun_ = true;
  }
  // Text before the copy begins is a preamble of any length, no edit.
  since_ += begun_ ? 1 : 0;
  const bool patient = parted_at_ >= 0 && since_ <= kPatience;
  continuation_ = patient ? nearby(text, limit, output, size) : Continuation{};
  if (continuation_.length > 0) return;
  if (elsewhere.length > 0) {
    continuation_ = elsewhere;
  } else if (patient) {
    // The commonest edit replaces as many tokens as it removes.
    continuation_.position = std::min(parted_at_ + since_, limit);
  }
}

// The position within the window before which the most tokens are those at the
// output's end, the nearest of those; of two as near the later one, since after an
// edit a text goes on further down more often than further up.
CopyCursor::Continuation CopyCursor::nearby(const Token* text, std::int32_t limit,
                                            const Token* output, std::int64_t size) const noexcept {
  Continuation best;
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
      best = {position, length, MatchKind::kFollowing};
      nearest = distance;
    }
  }
  return best;
}

}  // namespace fastdraft

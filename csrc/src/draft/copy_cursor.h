// Follows an output through a text that it copies.
#pragma once

#include <cstdint>

#include "fastdraft/token.h"

namespace fastdraft {

// Follows an output that copies a text, and finds its position again after an
// edit: near where the two parted, even by a match so short that it occurs in
// many positions. The text may be the output's own past.
//
// Not thread-safe; const calls may overlap.
class CopyCursor {
 public:
  // How the position was found.
  enum class MatchKind : std::uint8_t {
    kFollowing,  // the output ran along the text up to here, or returned nearby
    kJumped,     // a match away from the last position, not confirmed yet
    kGuessed,    // nothing matches: where an edit of as many tokens would end
  };

  struct Continuation {
    std::int32_t position = -1;  // of the text's token that is expected next; -1: none
    std::int32_t length = 0;     // how many of the output's last tokens precede it
    MatchKind kind = MatchKind::kGuessed;
  };

  // Expects the output to begin at `start`, or nowhere yet where that is -1.
  explicit CopyCursor(std::int32_t start) noexcept
      : continuation_{start, 0, MatchKind::kGuessed}, parted_at_(start) {}

  // Takes the output's last token, output[size - 1]. `limit` is the greatest
  // position that may be named: the text's size, or one less than `size` for
  // the output's own past. `elsewhere` is a longer match, if there is one (its
  // length is above 0), to go to where the output does not go on nearby. O(1)
  // while following, O(kWindow) after an edit.
  void advance(const Token* text, std::int32_t limit, const Token* output, std::int64_t size,
               Continuation elsewhere) noexcept;

  Continuation continuation() const noexcept { return continuation_; }

 private:
  // On the recorded requests any window from 32 to 64, any patience from 16 to
  // 32 and any settling from 2 to 6 tokens were worth the same within half a percent.
  static constexpr std::int32_t kWindow = 32;    // how far from the last position to look
  static constexpr std::int32_t kPatience = 32;  // for how many tokens
  static constexpr std::int32_t kSettled = 3;    // a copy of this many tokens is no coincidence
  static constexpr std::int32_t kLongestCompared = 8;  // and a longer one says nothing more

  Continuation nearby(const Token* text, std::int32_t limit, const Token* output,
                      std::int64_t size) const noexcept;

  Continuation continuation_;
  std::int32_t parted_at_;  // where the output left the text last; -1: nowhere yet
  std::int32_t since_ = 0;  // tokens emitted since then
  bool begun_ = false;      // whether the output has been copying at all
};

}  // namespace fastdraft

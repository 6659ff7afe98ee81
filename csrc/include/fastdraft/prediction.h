// The text that a caller expects in a request's output.
#pragma once

#include <cstdint>

#include "fastdraft/memory.h"
#include "fastdraft/suffix_automaton.h"
#include "fastdraft/token.h"

namespace fastdraft {

// Follows a request's output through its prediction, and finds the place again
// after an edit: it knows the longest suffix of the output that stands
// anywhere in the prediction, and prefers the occurrence nearest to where the
// two parted.
//
// Not thread-safe; const calls may overlap.
class Prediction {
 public:
  // How the place was found.
  enum class Footing : std::uint8_t {
    kFollowing,  // the output ran along the prediction up to here
    kJumped,     // the output's last tokens stand here, away from the last place
    kGuessed,    // nothing matches: where an edit of as many tokens would end
  };

  struct Place {
    std::int32_t position;  // of the prediction's token that is expected next
    std::int32_t length;    // how many of the output's last tokens stand before it
    Footing footing;
  };

  // Indexes `size` tokens. Throws MemoryLimitError.
  Prediction(const Token* tokens, std::int64_t size, MemoryBudget& budget);

  // Takes the next output token; `output` is the request's text up to and with
  // it, `size` tokens of which the first `prompt` are its prompt. O(1) amortised
  // while following, up to kWindow comparisons a token elsewhere.
  void advance(const Token* output, std::int64_t size, std::int64_t prompt) noexcept;

  // Where the output goes on, if the prediction holds.
  Place place() const noexcept { return place_; }

  const Token* text() const noexcept { return index_.text(); }
  std::int64_t size() const noexcept { return index_.size(); }
  std::int64_t bytes() const noexcept { return index_.bytes(); }

 private:
  // How far from the last place an occurrence is looked for. An edit of one
  // statement moves the text by less.
  static constexpr std::int32_t kWindow = 64;
  // A jump that has held for so many tokens was no coincidence.
  static constexpr std::int32_t kSettled = 4;

  Place nearest(const Token* output, std::int64_t size, std::int64_t prompt) const noexcept;

  SuffixAutomaton index_;
  Match match_;  // the longest suffix of the output in the prediction
  Place place_{0, 0, Footing::kGuessed};
  std::int32_t parted_at_ = 0;  // where the output left the prediction last
  std::int32_t since_ = 0;      // tokens emitted since
};

}  // namespace fastdraft

// The text that a caller expects in a request's output.
#pragma once

#include <cstdint>

#include "draft/copy_cursor.h"
#include "fastdraft/token.h"
#include "index/memory.h"
#include "index/suffix_automaton.h"

namespace fastdraft {

// Follows a request's output through its prediction. Where the output does not
// go on near where the two parted, the longest suffix of the output that occurs
// anywhere in the prediction tells where it may.
//
// Not thread-safe; const calls may overlap.
class Prediction {
 public:
  // Indexes `size` tokens. Throws MemoryLimitError.
  Prediction(const Token* tokens, std::int64_t size, MemoryBudget& budget);

  // Takes the next output token; `text` is the request's text up to and with
  // it, `size` tokens. O(1) amortised while following, O(64) after an edit.
  void advance(const Token* text, std::int64_t size) noexcept;

  // The output's continuation, if the prediction holds.
  CopyCursor::Continuation continuation() const noexcept { return cursor_.continuation(); }

  const Token* text() const noexcept { return index_.text(); }
  std::int64_t size() const noexcept { return index_.size(); }

 private:
  SuffixAutomaton index_;
  Match match_;  // the longest suffix of the output in the prediction
  CopyCursor cursor_{0};
};

}  // namespace fastdraft

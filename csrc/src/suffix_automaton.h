// An index of one text that grows at its end.
#pragma once

#include <cstdint>

#include "fastdraft/token.h"
#include "memory.h"
#include "transition_table.h"

namespace fastdraft {

// The longest suffix of some text that an index contains: the state that
// stands for it, and its length. Length 0 is the root: nothing matches.
struct Match {
  StateId state = 0;
  std::int32_t length = 0;
};

// Suffix automaton of a text of tokens, built online (A. Blumer et al., The
// smallest automaton recognizing the subwords of a text, 1985). A state stands
// for all substrings that end at the same positions of the text.
//
// append is O(1) amortised and expected, whatever the text and the size of the
// vocabulary; memory is at most 2 states and 3 edges a token and in practice
// about 1.4 states. The longest suffix of the text that occurs earlier in it
// is known at all times: it is the suffix link of the newest state.
//
// Not thread-safe; const calls may overlap.
class SuffixAutomaton {
 public:
  // How many states up the suffix links of a position append marks with it
  // (see latest_end).
  static constexpr int kLatestWalk = 32;

  // Memory is counted in `budget`, which must outlive the automaton. Throws
  // MemoryLimitError.
  explicit SuffixAutomaton(MemoryBudget& budget);

  // Appends one token, 0 or greater. Throws MemoryLimitError and then leaves
  // the automaton as it was. At most kMaxTextTokens fit; the caller counts.
  void append(Token token);

  // The text, in the order it was appended.
  const Token* text() const noexcept { return text_.data(); }
  std::int64_t size() const noexcept { return text_.size(); }

  // The longest suffix of the text that also ends at an earlier position,
  // overlaps included. O(1).
  Match repeated_suffix() const noexcept {
    const StateId state = states_[last_].link;
    return state == kNoState ? Match{} : Match{state, states_[state].length};
  }

  // The match of `text + token`, given the match of some text: its longest
  // suffix in this index. O(1) amortised over a text.
  Match advance(Match match, Token token) const noexcept;

  // The state of the same string after append, which may have split it off.
  Match renew(Match match) const noexcept {
    while (match.length <= shortest(match.state)) match.state = states_[match.state].link;
    return match;
  }

  // The same match, cut to its last `length` tokens.
  Match shorten(Match match, std::int32_t length) const noexcept {
    match.length = std::min(match.length, length);
    return renew(match);
  }

  // The longest suffix of the match's string that ends at more positions; length
  // 0 where there is none.
  Match shorter(Match match) const noexcept {
    const StateId link = states_[match.state].link;
    return link == kNoState ? Match{} : Match{link, states_[link].length};
  }

  // Where the strings of `state` (not the root) end first in the text.
  std::int32_t first_end(StateId state) const noexcept { return states_[state].first_end; }

  // Where they end last, the text's own end left out: always an earlier end
  // of theirs, and the latest one unless every later one lay kLatestWalk suffix
  // links or more above its position's state when it was appended.
  // (An exact answer would cost quadratic time on repeated tokens.)
  std::int32_t latest_end(StateId state) const noexcept { return states_[state].latest_end; }

  std::int64_t num_states() const noexcept { return states_.size(); }
  std::int64_t bytes() const noexcept {
    return text_.bytes() + states_.bytes() + transitions_.bytes();
  }

 private:
  struct State {
    std::int32_t length;      // of the state's longest string
    StateId link;             // the longest suffix that ends at more positions
    std::int32_t first_end;   // last token's position of the first occurrence
    std::int32_t latest_end;  // the same of the latest one known
    Edges edges;
  };

  // Length of the longest string of the suffix link; -1 for the root.
  std::int32_t shortest(StateId state) const noexcept {
    const StateId link = states_[state].link;
    return link == kNoState ? -1 : states_[link].length;
  }

  FlatArray<Token> text_;
  FlatArray<State> states_;
  TransitionTable transitions_;
  StateId last_ = 0;
};

}  // namespace fastdraft

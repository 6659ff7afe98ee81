// An index of one text that grows at its end.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fastdraft/token.h"
#include "index/memory.h"
#include "index/transition_table.h"

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
// Every prefix of the text is the longest string of one state. Nearly all
// prefixes of real text occur once. The state of such a prefix, a *leaf*, needs
// nothing but its suffix link: it ends at one position, is as long as that, and
// its one edge leads to the next prefix by the next token. All other states are
// *inner* ones, and have a record:
//   - The root, the suffix links' targets, and every state with two ends or more
//     are inner.
//   - A leaf whose prefix occurs again is promoted: from then on its link is the
//     complement of its inner state's number. Edges that lead to it keep the
//     leaf's number; what this class returns is resolved to the inner one.
//   - The whole text is always a leaf, but for the empty one, which is the root.
//
// append is O(1) amortised and expected, whatever the text and the size of the
// vocabulary. Memory is at most 2 states and 3 edges a token, in practice about
// 0.34 inner states; 27 bytes a token of source code. The longest suffix of the
// text that occurs earlier in it is known at all times: it is the suffix link of
// the newest leaf.
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

  // The same of many tokens, faster. Where memory ends, those that fit have been appended. An
  // interrupt leaves a text that can only be destroyed.
  void append(const Token* tokens, std::int64_t count);

  // Asks for the memory that `append(token)` will read first.
  void prefetch_append(Token token) const noexcept {
    if (text_.size() == 0) return;
    const Inner* state = &inner_[leaves_[text_.size() - 1].link];
    transitions_.prefetch(state->edges, token);
    if (state->link == kNoState) return;
    transitions_.prefetch(inner_[state->link].edges, token);
  }

  // The way through memory that an append takes, walked before it.
  struct Approach {
    StateId state;   // of the path whose strings are given an edge, or are marked
    StateId target;  // of the first edge that is found; kNoState before
  };

  // Asks for the memory that `append(token)` reads, a part in each of the steps 0, 1, ...: each is
  // found in the one before. Returns whether there is more. Steps of several texts taken in turns
  // do not wait for each other's memory.
  bool approach(Approach& way, Token token, int step) const noexcept;

  // Asks for what follows the ends of a state (not a leaf), and for its suffix link.
  void prefetch_ends(StateId state) const noexcept;
  // Asks for the text before a position, and for the position before that holds the same token.
  void prefetch_position(std::int32_t position) const noexcept;

  // The text, in the order it was appended.
  const Token* text() const noexcept { return text_.data(); }
  std::int64_t size() const noexcept { return text_.size(); }

  // The longest suffix of the text that also ends at an earlier position,
  // overlaps included. O(1).
  Match repeated_suffix() const noexcept {
    if (text_.size() == 0) return {};
    const StateId state = leaves_[text_.size() - 1].link;
    return {state, inner_[state].length};
  }

  // The latest position before `position` that holds the same token; -1: none.
  // Positions are 0 .. size() - 1. O(1), expected for the last one.
  std::int32_t previous(std::int32_t position) const noexcept;

  // The match of `text + token`, given the match of some text: its longest
  // suffix in this index. O(1) amortised over a text.
  Match advance(Match match, Token token) const noexcept;

  // The state of the same string after append, which may have split it off or
  // promoted it. Matches from before an append must pass through this.
  Match renew(Match match) const noexcept {
    match.state = resolve(match.state);
    while (match.length <= shortest(match.state)) match.state = link(match.state);
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
    const StateId suffix = link(match.state);
    return suffix == kNoState ? Match{} : Match{suffix, inner_[suffix].length};
  }

  // The first end in the text of the strings of `state` (not the root).
  std::int32_t first_end(StateId state) const noexcept {
    return is_leaf(state) ? end_of(state) : inner_[state].first_end;
  }

  // Their last end, the text's own end left out: always an earlier end
  // of theirs, and the latest one unless every later one lay kLatestWalk suffix
  // links or more above its position's state when it was appended. Where one of the
  // strings is a single token it is always the latest one. (An exact answer would cost quadratic
  // time on repeated tokens.)
  std::int32_t latest_end(StateId state) const noexcept {
    return is_leaf(state) ? end_of(state) : inner_[state].latest_end;
  }

  std::int64_t bytes() const noexcept {
    return text_.bytes() + leaves_.bytes() + inner_.bytes() + transitions_.bytes();
  }

 private:
  // The state of the prefix that ends at a position: number kLeaf + position.
  struct Leaf {
    StateId link;           // of an inner state; its complement for a promoted leaf
    std::int32_t previous;  // see previous(); unset at the newest position
  };

  struct Inner {
    std::int32_t length;      // of the state's longest string
    StateId link;             // the longest suffix that ends at more positions
    std::int32_t first_end;   // last token's position of the first occurrence
    std::int32_t latest_end;  // the same of the latest one known
    Edges edges;
  };

  static constexpr StateId kRoot = 0;
  static constexpr StateId kLeaf = StateId{1} << 30;
  static_assert(2 * kMaxTextTokens < kLeaf);

  static bool is_leaf(StateId state) noexcept { return state >= kLeaf; }
  static std::int32_t end_of(StateId leaf) noexcept { return leaf - kLeaf; }

  // The number of a promoted leaf's inner state; any other state's own.
  StateId resolve(StateId state) const noexcept {
    if (!is_leaf(state)) return state;
    const StateId link = leaves_[end_of(state)].link;
    return link < 0 ? ~link : state;
  }
  // The token of all edges that lead to a state: its strings' last one.
  auto token_of() const noexcept {
    return [this](StateId state) {
      return text_[is_leaf(state) ? end_of(state) : inner_[state].first_end];
    };
  }
  StateId find(const Edges& edges, Token token) const noexcept {
    return transitions_.find(edges, token, token_of());
  }
  // Asks for a state's memory.
  void prefetch_state(StateId state) const noexcept;

  // For resolved states; the root has none.
  StateId link(StateId state) const noexcept {
    return is_leaf(state) ? leaves_[end_of(state)].link : inner_[state].link;
  }
  // Length of the longest string of the suffix link; -1 for the root.
  std::int32_t shortest(StateId state) const noexcept {
    const StateId suffix = link(state);
    return suffix == kNoState ? -1 : inner_[suffix].length;
  }

  void extend(Token token);
  void mark_last() noexcept;
  void link_tokens(std::int32_t begin, std::int32_t end) noexcept;
  void mark_from(std::int64_t first) noexcept;
  StateId link_of_newest(StateId before, Token token);
  StateId split(StateId p, TransitionTable::Found found, Token token);

  FlatArray<Token> text_;
  FlatArray<Leaf> leaves_;
  FlatArray<Inner> inner_;
  TransitionTable transitions_;
};

}  // namespace fastdraft

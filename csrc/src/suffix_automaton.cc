#include "suffix_automaton.h"

#include "fastdraft/error.h"

namespace fastdraft {

SuffixAutomaton::SuffixAutomaton(MemoryBudget& budget)
    : text_(budget), states_(budget), transitions_(budget) {
  states_.reserve(1);
  states_.push_back({0, kNoState, -1, -1, {}});
}

void SuffixAutomaton::append(Token token) {
  text_.reserve(text_.size() + 1);
  states_.reserve(states_.size() + 2);  // so that references to states stay valid below

  const auto position = static_cast<std::int32_t>(text_.size());
  const auto newest = static_cast<StateId>(states_.size());
  states_.push_back({position + 1, 0, position, position, {}});

  StateId p = last_;
  try {
    StateId q = kNoState;
    while (p != kNoState) {
      q = transitions_.find_or_insert(states_[p].edges, token, newest);
      if (q != kNoState) break;
      p = states_[p].link;
    }
    if (q != kNoState) {
      if (states_[q].length == states_[p].length + 1) {
        states_[newest].link = q;
      } else {
        // Some strings of q end here too, its longer ones do not: split them.
        State split = states_[q];
        split.length = states_[p].length + 1;
        split.edges = transitions_.copy(split.edges);
        const auto clone = static_cast<StateId>(states_.size());
        states_.push_back(split);
        states_[q].link = clone;
        states_[newest].link = clone;
        while (p != kNoState && transitions_.find(states_[p].edges, token) == q) {
          transitions_.redirect(states_[p].edges, token, clone);
          p = states_[p].link;
        }
      }
    }
  } catch (const MemoryLimitError&) {
    // Only edges to the newest state were added so far.
    for (StateId s = last_; s != p; s = states_[s].link) {
      transitions_.erase(states_[s].edges, token);
    }
    states_.pop_back();
    throw;
  }

  // The position before this one is an earlier end from now on.
  StateId s = last_;
  for (int i = 0; i < kLatestWalk && s > 0; ++i) {
    states_[s].latest_end = position - 1;
    s = states_[s].link;
  }
  text_.push_back(token);
  last_ = newest;
}

Match SuffixAutomaton::advance(Match match, Token token) const noexcept {
  for (;;) {
    const StateId next = transitions_.find(states_[match.state].edges, token);
    if (next != kNoState) return {next, match.length + 1};
    match.state = states_[match.state].link;
    if (match.state == kNoState) return {};
    match.length = states_[match.state].length;
  }
}

}  // namespace fastdraft

#include "suffix_automaton.h"

#include <algorithm>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

constexpr std::int64_t kRoomToGenerate = 2048;

}  // namespace

SuffixAutomaton::SuffixAutomaton(MemoryBudget& budget)
    : text_(budget), leaves_(budget), inner_(budget), transitions_(budget) {
  inner_.reserve(1);
  inner_.push_back({0, kNoState, -1, -1, {}});
}

void SuffixAutomaton::append(const Token* tokens, std::int64_t count) {
  // With room for what is generated after a prompt: the first tokens of it need not wait until a
  // long text has moved to a larger block.
  const std::int64_t room = count + std::min<std::int64_t>(count / 4, kRoomToGenerate);
  text_.reserve(text_.size() + room);
  leaves_.reserve(leaves_.size() + room);
  for (std::int64_t i = 0; i < count; ++i) append(tokens[i]);
}

void SuffixAutomaton::append(Token token) {
  text_.reserve(text_.size() + 1);
  leaves_.reserve(leaves_.size() + 1);
  inner_.reserve(inner_.size() + 1);  // so that references to states stay valid

  const auto position = static_cast<std::int32_t>(text_.size());
  // The edge from the last leaf to the newest one is implied.
  const StateId before = position == 0 ? kRoot : leaves_[position - 1].link;
  text_.push_back(token);
  leaves_.push_back({kRoot, -1});
  try {
    leaves_[position].link = link_of_newest(before, token);
  } catch (const MemoryLimitError&) {
    text_.pop_back();
    leaves_.pop_back();
    throw;
  }
  if (position == 0) return;

  // The position before this one is an earlier end from now on. What ended there before is what
  // the last state of the path, the token's own, is marked with.
  std::int32_t previous = -1;
  const auto mark = [&](Inner& state) {
    // A part of the last leaf is marked already, and its strings ended nowhere before.
    if (state.latest_end < position - 1) previous = state.latest_end;
    state.latest_end = position - 1;
  };
  // The last leaf ends nowhere else: it is the first state of the walk, and needs no mark.
  StateId s = link(resolve(kLeaf + position - 1));
  for (int i = 1; i < kLatestWalk && s != kRoot; ++i, s = inner_[s].link) mark(inner_[s]);
  if (s != kRoot) {
    mark(inner_[resolve(transitions_.find(inner_[kRoot].edges, text_[position - 1]))]);
  }
  leaves_[position - 1].previous = previous;
}

// Gives all suffixes of the text before the newest token an edge to the newest leaf, down to the
// first that has been followed by the token before. `before` is the longest of these suffixes but
// for the whole. Returns the state of the longest suffix that ends earlier too. Throws
// MemoryLimitError and then leaves the states as they were.
StateId SuffixAutomaton::link_of_newest(StateId before, Token token) {
  const StateId newest = kLeaf + static_cast<StateId>(leaves_.size() - 1);
  StateId p = before;
  try {
    for (; p != kNoState; p = inner_[p].link) {
      const StateId q = transitions_.find_or_insert(inner_[p].edges, token, newest);
      if (q != kNoState) return split(p, q, token);
    }
    return kRoot;
  } catch (const MemoryLimitError&) {
    // Only edges to the newest state were added so far.
    for (StateId s = before; s != p; s = inner_[s].link) transitions_.erase(inner_[s].edges, token);
    throw;
  }
}

// The inner state of the longest string of `p` and `token` after it, to which the edge from `p` to
// `q` leads. Where longer strings are of the same state, they do not end at the newest token: the
// string and its suffixes get a state of their own. Throws MemoryLimitError and then changes
// nothing.
StateId SuffixAutomaton::split(StateId p, StateId q, Token token) {
  const std::int32_t length = inner_[p].length + 1;
  const StateId target = resolve(q);
  const auto fresh = static_cast<StateId>(inner_.size());
  if (is_leaf(target)) {
    const std::int32_t end = end_of(target);
    StateId& link = leaves_[end].link;
    const Edges edges{static_cast<std::uint32_t>(text_[end + 1]),
                      static_cast<std::uint32_t>(target + 1)};
    inner_.push_back({length, link, end, end, edges});
    if (length == end + 1) {
      link = ~fresh;
      return fresh;
    }
    link = fresh;
  } else {
    if (inner_[target].length == length) return target;
    Inner part = inner_[target];
    part.length = length;
    part.edges = transitions_.copy(part.edges);
    inner_.push_back(part);
    inner_[target].link = fresh;
  }
  for (; p != kNoState && transitions_.find(inner_[p].edges, token) == q; p = inner_[p].link) {
    transitions_.redirect(inner_[p].edges, token, fresh);
  }
  return fresh;
}

std::int32_t SuffixAutomaton::previous(std::int32_t position) const noexcept {
  if (position < text_.size() - 1) return leaves_[position].previous;
  // The token's own state is the last one of the path. Its caller has most likely just been on it,
  // and it is short where little repeats.
  constexpr int kShortPath = 4;
  StateId state = leaves_[position].link;
  for (int i = 0; i < kShortPath && state != kRoot; ++i) {
    if (inner_[state].link == kRoot) return inner_[state].latest_end;
    state = inner_[state].link;
  }
  if (state == kRoot) return -1;
  return inner_[resolve(transitions_.find(inner_[kRoot].edges, text_[position]))].latest_end;
}

Match SuffixAutomaton::advance(Match match, Token token) const noexcept {
  for (;;) {
    if (is_leaf(match.state)) {
      const std::int32_t next = end_of(match.state) + 1;
      if (next < text_.size() && text_[next] == token) {
        return {resolve(kLeaf + next), match.length + 1};
      }
    } else {
      const StateId next = transitions_.find(inner_[match.state].edges, token);
      if (next != kNoState) return {resolve(next), match.length + 1};
    }
    match.state = link(match.state);
    if (match.state == kNoState) return {};
    match.length = inner_[match.state].length;
  }
}

}  // namespace fastdraft

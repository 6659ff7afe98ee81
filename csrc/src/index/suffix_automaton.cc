#include "index/suffix_automaton.h"

#include <algorithm>
#include <utility>

#include "fastdraft/error.h"
#include "fastdraft/interrupt.h"
#include "index/bits.h"

namespace fastdraft {
namespace {

constexpr std::int64_t kRoomToGenerate = 2048;
// Inner states and edges a token, of source code.
constexpr double kStatesOfCode = 0.34;
constexpr double kEdgesOfCode = 1.25;
// States are prefetched this many positions ahead.
constexpr std::int32_t kStatesAhead = 16;
// A prompt's tokens are listed by id if there are at most this many ids for each of them.
constexpr std::int64_t kIdsListed = 4;

}  // namespace

SuffixAutomaton::SuffixAutomaton(MemoryBudget& budget)
    : text_(budget), leaves_(budget), inner_(budget), transitions_(budget) {
  inner_.reserve(1);
  inner_.push_back({0, kNoState, -1, -1, {}});
}

void SuffixAutomaton::append(const Token* tokens, std::int64_t count) {
  // With room for what is generated after a prompt: the first tokens of it need not wait until a
  // long text has moved to a larger block.
  const std::int64_t before = text_.size();
  const std::int64_t more = std::min<std::int64_t>(count / 4, kRoomToGenerate);
  text_.reserve(before + count + more);
  leaves_.reserve(before + count + more);
  // To mark whole paths costs up to the text's length.
  if (count < before / 4) {
    for (std::int64_t i = 0; i < count; ++i) append(tokens[i]);
    return;
  }
  text_.populate();
  leaves_.populate();
  const auto expected = static_cast<double>(count);
  if (inner_.try_reserve(inner_.size() + static_cast<std::int64_t>(kStatesOfCode * expected))) {
    inner_.populate();
  }
  transitions_.try_reserve(static_cast<std::int64_t>(kEdgesOfCode * expected));
  constexpr std::int64_t kStep = std::int64_t{1} << 14;
  try {
    for (std::int64_t first = 0; first < count; first += kStep) {
      if (first > 0) check_interrupt();
      for (std::int64_t i = first; i < std::min(count, first + kStep); ++i) extend(tokens[i]);
    }
  } catch (const MemoryLimitError&) {
    mark_from(before);
    throw;
  }
  mark_from(before);
  inner_.trim(inner_.size() + more);
  transitions_.trim(2 * more);
}

void SuffixAutomaton::append(Token token) {
  extend(token);
  mark_last();
}

void SuffixAutomaton::prefetch_state(StateId state) const noexcept {
  if (state == kNoState) return;
  if (is_leaf(state)) {
    prefetch(&leaves_[end_of(state)]);
  } else {
    prefetch(&inner_[state]);
  }
}

void SuffixAutomaton::prefetch_ends(StateId state) const noexcept {
  const Inner& inner = inner_[state];
  prefetch_state(inner.link);
  prefetch(text_.data() + inner.latest_end + 1);
  prefetch(text_.data() + inner.first_end + 1);
}

void SuffixAutomaton::prefetch_position(std::int32_t position) const noexcept {
  prefetch(&leaves_[position]);
  prefetch(text_.data() + position);
}

bool SuffixAutomaton::approach(Approach& way, Token token, int step) const noexcept {
  constexpr int kSteps = 3;  // further ones cost what they save
  if (text_.size() == 0) return false;
  if (step == 0) {
    way = {leaves_[text_.size() - 1].link, kNoState};
  } else {
    if (way.target == kNoState) {
      way.target = find(inner_[way.state].edges, token);
      prefetch_state(way.target);
    } else if (way.target != kRoot) {
      // If a leaf was promoted, its state has the link.
      const StateId target = resolve(way.target);
      prefetch_state(target == way.target ? link(target) : target);
      way.target = kRoot;  // all of it was asked for
    }
    way.state = inner_[way.state].link;
    if (way.state == kNoState) return false;
  }
  const Inner& state = inner_[way.state];
  if (way.target == kNoState) transitions_.prefetch(state.edges, token);
  prefetch_state(state.link);
  return step < kSteps;
}

// Appends a token whose position is still to be marked.
void SuffixAutomaton::extend(Token token) {
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
}

// The position before the newest one is an earlier end from now on: the states of its path learn
// of it.
void SuffixAutomaton::mark_last() noexcept {
  const auto end = static_cast<std::int32_t>(text_.size()) - 2;
  if (end < 0) return;
  // The last state of the path, the token's own, is marked with the earlier end.
  std::int32_t previous = -1;
  const auto mark = [&](Inner& state) {
    // A part of the last leaf is marked already, and its strings ended nowhere before.
    if (state.latest_end < end) previous = state.latest_end;
    state.latest_end = end;
  };
  // The last leaf ends nowhere else: it is the first state of the walk, and needs no mark.
  StateId s = link(resolve(kLeaf + end));
  for (int i = 1; i < kLatestWalk && s != kRoot; ++i, s = inner_[s].link) mark(inner_[s]);
  if (s != kRoot) mark(inner_[resolve(find(inner_[kRoot].edges, text_[end]))]);
  leaves_[end].previous = previous;
}

// Tells the positions from `begin` to `end` where their tokens occurred last before.
void SuffixAutomaton::link_tokens(std::int32_t begin, std::int32_t end) noexcept {
  if (begin >= end) return;
  // If token ids are small enough, a table by id holds the latest position of each.
  FlatArray<std::int32_t> latest(text_.budget());
  const Token* const text = text_.data();
  const std::int64_t ids = std::int64_t{*std::max_element(text + begin, text + end)} + 1;
  const bool listed = ids <= kIdsListed * (end - begin) && latest.try_reserve(ids);
  if (listed) latest.extend(ids);
  for (std::int64_t id = 0; id < latest.size(); ++id) latest[id] = -1;
  for (std::int32_t i = begin; i < end; ++i) {
    std::int32_t previous = listed ? std::exchange(latest[text[i]], i) : -1;
    if (previous < 0) {
      // The token's own state knows. Where it was made meanwhile it may know this occurrence or a
      // later one before that is reached.
      const StateId own = resolve(find(inner_[kRoot].edges, text[i]));
      if (!is_leaf(own)) {
        previous = std::exchange(inner_[own].latest_end, i);
        if (previous >= i) previous = -1;
      }
    }
    leaves_[i].previous = previous;
  }
}

// The same for the positions from the one before `first` on, all at once and with whole paths.
void SuffixAutomaton::mark_from(std::int64_t first) noexcept {
  const auto begin = static_cast<std::int32_t>(std::max<std::int64_t>(first, 1)) - 1;
  const auto end = static_cast<std::int32_t>(text_.size()) - 1;
  link_tokens(begin, end);
  // From the last position on: the states above one that ends later end later too.
  const auto first_of_path = [&](std::int32_t position) {
    const StateId link = leaves_[position].link;
    return link < 0 ? ~link : link;
  };
  for (std::int32_t i = end; i-- > begin;) {
    if (i >= kStatesAhead) prefetch(&inner_[first_of_path(i - kStatesAhead)]);
    for (StateId s = first_of_path(i); s != kRoot && inner_[s].latest_end <= i;
         s = inner_[s].link) {
      inner_[s].latest_end = i;
    }
  }
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
      // If there is no edge, it is next; if there is one, it may lead to the same state.
      if (p != kRoot) prefetch(&inner_[inner_[p].link]);
      const TransitionTable::Found found =
          transitions_.find_or_insert(inner_[p].edges, token, newest, token_of());
      if (found.target != kNoState) return split(p, found, token);
    }
    return kRoot;
  } catch (const MemoryLimitError&) {
    // Only edges to the newest state were added so far.
    for (StateId s = before; s != p; s = inner_[s].link) {
      transitions_.erase(inner_[s].edges, token, token_of());
    }
    throw;
  }
}

// The inner state of the longest string of `p` and `token` after it, to which the edge that was
// found leads. Where longer strings are of the same state, they do not end at the newest token: the
// string and its suffixes get a state of their own. Throws MemoryLimitError and then changes
// nothing.
StateId SuffixAutomaton::split(StateId p, TransitionTable::Found found, Token token) {
  const std::int32_t length = inner_[p].length + 1;
  const StateId target = resolve(found.target);
  const auto fresh = static_cast<StateId>(inner_.size());
  StateId above = kRoot;
  if (is_leaf(target)) {
    const std::int32_t end = end_of(target);
    StateId& link = leaves_[end].link;
    above = link;
    const Edges edges{static_cast<std::uint32_t>(text_[end + 1]),
                      static_cast<std::uint32_t>(target + 1)};
    inner_.push_back({length, above, end, end, edges});
    if (length == end + 1) {
      link = ~fresh;
      return fresh;
    }
    link = fresh;
  } else {
    if (inner_[target].length == length) return target;
    Inner part = inner_[target];
    above = part.link;
    part.length = length;
    part.edges = transitions_.copy(part.edges);
    inner_.push_back(part);
    inner_[target].link = fresh;
  }
  // The target's strings are longer than its link's, so suffixes as long have edges to it.
  transitions_.redirect(inner_[p].edges, found, fresh);
  const std::int32_t longest = inner_[above].length;
  for (p = inner_[p].link; p != kNoState && inner_[p].length >= longest; p = inner_[p].link) {
    transitions_.redirect(inner_[p].edges, token, fresh, token_of());
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
  return inner_[resolve(find(inner_[kRoot].edges, text_[position]))].latest_end;
}

Match SuffixAutomaton::advance(Match match, Token token) const noexcept {
  for (;;) {
    if (is_leaf(match.state)) {
      const std::int32_t next = end_of(match.state) + 1;
      if (next < text_.size() && text_[next] == token) {
        return {resolve(kLeaf + next), match.length + 1};
      }
    } else {
      const StateId next = find(inner_[match.state].edges, token);
      if (next != kNoState) return {resolve(next), match.length + 1};
    }
    match.state = link(match.state);
    if (match.state == kNoState) return {};
    match.length = inner_[match.state].length;
  }
}

}  // namespace fastdraft

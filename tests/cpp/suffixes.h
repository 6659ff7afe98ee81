// The oracle of a SuffixAutomaton, by looking everywhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "index/suffix_automaton.h"
#include "texts.h"

namespace fastdraft::testing {

// How many tokens before `end` of one text and before `other_end` of another are alike.
inline std::int32_t alike(const Tokens& text, std::size_t end, const Tokens& other,
                          std::size_t other_end) {
  const auto most = static_cast<std::int64_t>(std::min(end, other_end));
  return static_cast<std::int32_t>(
      common_suffix(text.data() + end, other.data() + other_end, most));
}

// Returns whether it knows where each token stood before.
inline bool knows_previous(const SuffixAutomaton& index, const Tokens& text) {
  std::unordered_map<Token, std::int32_t> latest;
  for (std::int32_t position = 0; position < static_cast<std::int32_t>(text.size()); ++position) {
    const auto [entry, first] =
        latest.try_emplace(text[static_cast<std::size_t>(position)], position);
    if (index.previous(position) != (first ? -1 : entry->second)) return false;
    entry->second = position;
  }
  return true;
}

// Returns whether it also knows, of every suffix that occurs earlier, where it ends first and last.
// Of a text that arrived token by token, and has paths of more than 32 states, that may be any end.
inline bool knows_all(const SuffixAutomaton& index, const Tokens& text, bool exactly) {
  if (index.size() != static_cast<std::int64_t>(text.size())) return false;
  std::int32_t longest = 0;
  for (std::size_t end = 1; end < text.size(); ++end) {
    longest = std::max(longest, alike(text, text.size(), text, end));
  }
  Match match = index.repeated_suffix();
  if (match.length != longest) return false;
  for (; match.length > 0; match = index.shorter(match)) {
    const auto ends_at = [&](std::size_t end) {
      return alike(text, text.size(), text, end) >= match.length;
    };
    auto first = static_cast<std::size_t>(match.length);
    while (!ends_at(first)) ++first;
    std::size_t last = text.size() - 1;
    while (!ends_at(last)) --last;
    const auto latest = static_cast<std::size_t>(index.latest_end(match.state)) + 1;
    if (static_cast<std::size_t>(index.first_end(match.state)) + 1 != first) return false;
    const bool known =
        exactly ? latest == last : first <= latest && latest <= last && ends_at(latest);
    if (!known) return false;
  }
  return knows_previous(index, text);
}

}  // namespace fastdraft::testing

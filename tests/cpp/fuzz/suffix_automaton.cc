// Any text, against looking everywhere. The first byte chooses how
// many different tokens there are, and how soon memory ends.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "../texts.h"
#include "fastdraft/error.h"
#include "index/suffix_automaton.h"
#include "target.h"

namespace fastdraft::fuzz_suffix_automaton {

FASTDRAFT_FUZZ(SuffixAutomaton, 200) {
  if (size == 0) return 0;
  const unsigned vocabulary = 1U + data[0] % 16U;
  MemoryBudget budget(4096 + 512 * (data[0] / 16));
  SuffixAutomaton index(budget);
  testing::Tokens text;
  Match cut;
  std::size_t followed = 0;
  for (std::size_t i = 1; i < size && i < 400; ++i) {
    const auto token = static_cast<Token>(data[i] % vocabulary);
    try {
      index.append(token);
      text.push_back(token);
    } catch (const MemoryLimitError&) {
      if (budget.used() > budget.limit()) std::abort();
    }
    const auto expected = testing::find_repeated_suffix(text);
    const Match match = index.repeated_suffix();
    if (match.length != expected.length) std::abort();
    if (match.length > 0) {
      if (index.first_end(match.state) != expected.first_end) std::abort();
      // Exact where at most kLatestWalk states lie above any position.
      const std::int32_t latest = index.latest_end(match.state);
      if (latest < expected.first_end || latest > expected.latest_end) std::abort();
      if (text.size() <= index.kLatestWalk && latest != expected.latest_end) std::abort();
      if (testing::common_suffix(text, text.size(), static_cast<std::size_t>(latest) + 1) <
          match.length) {
        std::abort();
      }
    }
    // A match that is followed while the text grows, and cut: the text's last tokens.
    if (text.size() == followed + 1) {
      const Token last = text[followed++];
      cut = index.shorten(index.advance(index.renew(cut), last), 3);
      if (cut.length != std::min(3, static_cast<std::int32_t>(text.size()))) std::abort();
      auto end = static_cast<std::size_t>(cut.length);
      while (testing::common_suffix(text, text.size(), end) < cut.length) ++end;
      if (index.first_end(cut.state) != static_cast<std::int32_t>(end) - 1) std::abort();
    }
  }
  // The same text at once, and where each token stood before.
  MemoryBudget enough;
  SuffixAutomaton prompt(enough);
  prompt.append(text.data(), static_cast<std::int64_t>(text.size()));
  const auto expected = testing::find_repeated_suffix(text);
  const Match match = prompt.repeated_suffix();
  if (match.length != expected.length) std::abort();
  if (match.length > 0 && (prompt.first_end(match.state) != expected.first_end ||
                           prompt.latest_end(match.state) != expected.latest_end)) {
    std::abort();
  }
  for (std::int32_t position = 0; position < static_cast<std::int32_t>(text.size()); ++position) {
    std::int32_t before = position - 1;
    while (before >= 0 &&
           text[static_cast<std::size_t>(before)] != text[static_cast<std::size_t>(position)]) {
      --before;
    }
    if (index.previous(position) != before) std::abort();
    if (prompt.previous(position) != before) std::abort();
  }
  return 0;
}

}  // namespace fastdraft::fuzz_suffix_automaton

// Any text, in parts and at once, against looking everywhere. The first byte chooses how many
// different tokens there are, and how soon memory ends; the second how long the parts are.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "../suffixes.h"
#include "fastdraft/error.h"
#include "index/suffix_automaton.h"
#include "target.h"

namespace fastdraft::fuzz_suffix_automaton {

using testing::alike;
using testing::Tokens;

// If an allocation fails, what was appended answers as if nothing had been tried, and goes on
// when there is memory again.
void append_in_parts(const Tokens& whole, std::int64_t limit, std::size_t longest) {
  constexpr std::int64_t kHeld = 1 << 20;
  MemoryBudget budget(kHeld + limit);
  budget.charge(kHeld);
  SuffixAutomaton index(budget);
  Tokens text;
  Match last;  // the text's last tokens, three at most
  while (text.size() < whole.size()) {
    const std::size_t part = 1 + static_cast<std::size_t>(whole[text.size()]) * longest;
    const Token* next = whole.data() + text.size();
    const auto count = static_cast<std::int64_t>(std::min(part, whole.size() - text.size()));
    bool failed = false;
    try {
      count == 1 ? index.append(*next) : index.append(next, count);
    } catch (const MemoryLimitError&) {
      failed = true;
      if (budget.used() > budget.limit()) std::abort();
      budget.refund(kHeld);
    }
    last = index.renew(last);
    for (; static_cast<std::int64_t>(text.size()) < index.size(); ++next) {
      text.push_back(*next);
      last = index.shorten(index.advance(last, *next), 3);
    }
    if (last.length != std::min(3, static_cast<std::int32_t>(text.size()))) std::abort();
    auto end = static_cast<std::size_t>(last.length);
    while (alike(text, text.size(), text, end) < last.length) ++end;
    if (last.length > 0 && index.first_end(last.state) + 1 != static_cast<std::int32_t>(end)) {
      std::abort();
    }
    const bool exactly = text.size() <= 32;
    const bool looks = failed || text.size() % 8 == 0 || text.size() == whole.size();
    if (looks && !testing::knows_all(index, text, exactly)) std::abort();
  }
  // Another text, by its longest suffix in this one.
  Tokens other(whole.rbegin(), whole.rend());
  Match match;
  for (std::size_t i = 0; i < other.size(); ++i) {
    other[i] += static_cast<Token>(longest % 2);
    match = index.advance(match, other[i]);
    std::int32_t most = 0;
    for (std::size_t end = 1; end <= text.size(); ++end) {
      most = std::max(most, alike(text, end, other, i + 1));
    }
    if (match.length != most) std::abort();
  }
}

void append_at_once(const Tokens& whole, std::int64_t limit) {
  MemoryBudget budget(limit);
  SuffixAutomaton index(budget);
  try {
    index.append(whole.data(), static_cast<std::int64_t>(whole.size()));
  } catch (const MemoryLimitError&) {
  }
  const Tokens taken(whole.begin(), whole.begin() + index.size());
  if (!testing::knows_all(index, taken, true)) std::abort();
}

FASTDRAFT_FUZZ(SuffixAutomaton, 200) {
  if (size < 2) return 0;
  Tokens whole;
  for (std::size_t i = 2; i < std::min(size, std::size_t{400}); ++i) {
    whole.push_back(data[i] % (1 + data[0] % 16));
  }
  append_in_parts(whole, 1000 + 229 * (data[0] / 16), data[1] % 8);
  append_at_once(whole, 1000 + 77 * data[1]);
  append_at_once(whole, 1 << 20);
  return 0;
}

}  // namespace fastdraft::fuzz_suffix_automaton

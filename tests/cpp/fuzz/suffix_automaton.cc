// libFuzzer: any text, against looking everywhere. The first byte chooses how
// many different tokens there are, and how soon memory ends.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "../texts.h"
#include "fastdraft/error.h"
#include "suffix_automaton.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using fastdraft::MemoryLimitError;
  if (size == 0) return 0;
  const unsigned vocabulary = 1U + data[0] % 16U;
  fastdraft::MemoryBudget budget(4096 + 512 * (data[0] / 16));
  fastdraft::SuffixAutomaton index(budget);
  fastdraft::testing::Tokens text;
  for (std::size_t i = 1; i < size && i < 400; ++i) {
    const auto token = static_cast<fastdraft::Token>(data[i] % vocabulary);
    try {
      index.append(token);
      text.push_back(token);
    } catch (const MemoryLimitError&) {
      if (budget.used() > budget.limit()) std::abort();
    }
    const auto expected = fastdraft::testing::find_repeated_suffix(text);
    const fastdraft::Match match = index.repeated_suffix();
    if (match.length != expected.length) std::abort();
    if (match.length > 0 && index.first_end(match.state) != expected.first_end) std::abort();
  }
  return 0;
}

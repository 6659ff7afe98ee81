#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "draft/drafter.h"
#include "index/suffix_automaton.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

// On any text: while the output follows the prediction it is drafted, and after
// it left, nothing is until so many tokens have lined up again.
TEST(PredictedOutputsDrafter, DraftsOnlyWhereTheOutputLinesUp) {
  constexpr std::int32_t kLimit = 8;
  std::vector<std::int32_t> memory(static_cast<std::size_t>(DraftColumns::words(kLimit)));
  const DraftColumns draft = DraftColumns::in(memory.data(), kLimit);
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    MemoryBudget budget;
    SuffixAutomaton text(budget);
    const auto vocabulary = static_cast<Token>(2 + seed % 3);
    const auto recovery = static_cast<std::int32_t>(1 + seed % 5);
    const Tokens prediction = testing::random_text(seed * 3, vocabulary, seed);
    const auto drafter =
        make_drafter(PredictedOutputsConfig{recovery},
                     {text, prediction.data(), static_cast<std::int64_t>(prediction.size()),
                      /*stores=*/{}, kLimit, nullptr, budget});
    ASSERT_EQ(drafter->guess(kLimit, 0.0f, draft),
              std::min(kLimit, static_cast<std::int32_t>(prediction.size())));
    Tokens output;
    for (const Token token : testing::random_text(120, vocabulary, seed + 1000)) {
      output.push_back(token);
      text.append(token);
      drafter->advance();
      const std::int32_t count = drafter->guess(kLimit, 0.0f, draft);
      if (count == 0) continue;
      // The last tokens of the output, `recovery` of them or from its start,
      // and the draft stand in the prediction one behind the other.
      const auto known = std::min(output.size(), static_cast<std::size_t>(recovery));
      Tokens run(output.end() - static_cast<std::ptrdiff_t>(known), output.end());
      run.insert(run.end(), draft.token_ids, draft.token_ids + count);
      ASSERT_NE(std::search(prediction.begin(), prediction.end(), run.begin(), run.end()),
                prediction.end());
    }
  }
}

}  // namespace
}  // namespace fastdraft

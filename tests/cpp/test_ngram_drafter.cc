#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "draft/drafter.h"
#include "index/suffix_automaton.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

// What is drafted stands in the prompt, and never below the threshold.
TEST(NgramDrafter, KeepsToThePromptAndTheThreshold) {
  constexpr std::int32_t kLimit = 12;
  constexpr float kThreshold = 0.25f;
  std::vector<std::int32_t> memory(static_cast<std::size_t>(DraftColumns::words(kLimit)));
  const DraftColumns draft = DraftColumns::in(memory.data(), kLimit);
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    MemoryBudget budget;
    SuffixAutomaton text(budget);
    const Tokens prompt = testing::random_text(seed * 5, static_cast<Token>(2 + seed % 4), seed);
    for (const Token token : prompt) text.append(token);
    const NgramConfig config{static_cast<std::int32_t>(1 + seed % 6), double{kThreshold}};
    const auto drafter =
        make_drafter(config, {text, nullptr, 0, /*stores=*/{}, kLimit, nullptr, budget});
    for (const Token token : testing::random_text(60, 6, seed + 1000)) {
      text.append(token);
      drafter->advance();
      const std::int32_t count = drafter->guess(kLimit, 0.0f, draft);
      ASSERT_LE(count, kLimit);
      float last = 1.0f;
      for (std::int32_t i = 0; i < count; ++i) {
        ASSERT_NE(std::find(prompt.begin(), prompt.end(), draft.token_ids[i]), prompt.end());
        ASSERT_EQ(draft.parents[i], i - 1);
        ASSERT_GE(draft.probabilities[i], kThreshold);
        ASSERT_LE(draft.probabilities[i], last);
        last = draft.probabilities[i];
      }
    }
  }
}

}  // namespace
}  // namespace fastdraft

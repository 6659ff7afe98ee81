#include <algorithm>
#include <cstdint>
#include <memory>

#include "draft/drafter.h"
#include "draft/ngram_model.h"

namespace fastdraft {
namespace {

class NgramDrafter final : public Drafter {
 public:
  NgramDrafter(const NgramConfig& config, SuffixAutomaton& text, MemoryBudget& budget)
      : Drafter(text),
        model_(text.text(), text.size(), config.order, budget),
        min_probability_(config.min_probability) {
    // The model's context is shorter than the order.
    const std::int64_t first = std::max<std::int64_t>(0, text.size() - config.order + 1);
    for (std::int64_t i = first; i < text.size(); ++i) {
      last_ = model_.advance(last_, text.text()[i]);
    }
  }

  std::int32_t guess(std::int32_t limit, float, const RowOffers*,
                     const DraftColumns& draft) override {
    if (model_.empty()) return 0;
    NgramModel::Context before = last_;
    double path = 1.0;
    std::int32_t count = 0;
    for (; count < limit; ++count) {
      const NgramModel::Continuation next = model_.continuation(before);
      path *= next.probability;
      if (path < min_probability_) break;
      draft.token_ids[count] = next.token;
      draft.parents[count] = count - 1;
      draft.probabilities[count] = static_cast<float>(path);
      draft.sources[count] = Source::kContext;
      before = next.context;
    }
    return count;
  }

 private:
  void advance() override { last_ = model_.advance(last_, context().text()[context().size() - 1]); }

  const NgramModel model_;  // of the prompt alone
  const double min_probability_;
  NgramModel::Context last_;  // the last tokens of prompt and output
};

}  // namespace

std::unique_ptr<Drafter> make_drafter(const NgramConfig& config, const DrafterInputs& inputs) {
  return std::make_unique<NgramDrafter>(config, inputs.context, inputs.budget);
}

}  // namespace fastdraft

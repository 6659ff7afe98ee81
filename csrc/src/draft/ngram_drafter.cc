#include <algorithm>
#include <cstdint>
#include <memory>

#include "draft/drafter.h"
#include "draft/ngram_model.h"

namespace fastdraft {
namespace {

class NgramDrafter final : public Drafter {
 public:
  NgramDrafter(const NgramConfig& config, const SuffixAutomaton& text, MemoryBudget& budget)
      : text_(text),
        model_(text.text(), text.size(), config.order, budget),
        min_probability_(config.min_probability) {
    // The context is shorter than the order.
    const std::int64_t first = std::max<std::int64_t>(0, text.size() - config.order + 1);
    for (std::int64_t i = first; i < text.size(); ++i) {
      context_ = model_.advance(context_, text.text()[i]);
    }
  }

  void advance() override { context_ = model_.advance(context_, text_.text()[text_.size() - 1]); }

  std::int32_t guess(std::int32_t limit, float, const RowOffers*,
                     const DraftColumns& draft) override {
    if (model_.empty()) return 0;
    NgramModel::Context context = context_;
    double path = 1.0;
    std::int32_t count = 0;
    for (; count < limit; ++count) {
      const NgramModel::Continuation next = model_.continuation(context);
      path *= next.probability;
      if (path < min_probability_) break;
      draft.token_ids[count] = next.token;
      draft.parents[count] = count - 1;
      draft.probabilities[count] = static_cast<float>(path);
      draft.sources[count] = Source::kContext;
      context = next.context;
    }
    return count;
  }

 private:
  const SuffixAutomaton& text_;  // prompt and output; the model is the prompt's alone
  const NgramModel model_;
  const double min_probability_;
  NgramModel::Context context_;
};

}  // namespace

std::unique_ptr<Drafter> make_drafter(const NgramConfig& config, const DrafterInputs& inputs) {
  return std::make_unique<NgramDrafter>(config, inputs.context, inputs.budget);
}

}  // namespace fastdraft

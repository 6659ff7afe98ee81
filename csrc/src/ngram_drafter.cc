#include <algorithm>
#include <cstdint>
#include <memory>

#include "fastdraft/drafter.h"
#include "fastdraft/ngram_model.h"

namespace fastdraft {
namespace {

class NgramDrafter final : public Drafter {
 public:
  NgramDrafter(const SuffixAutomaton& text, std::int32_t order, double min_probability,
               MemoryBudget& budget)
      : text_(text),
        model_(text.text(), text.size(), order, budget),
        min_probability_(min_probability) {
    // The context is shorter than the order.
    for (std::int64_t i = std::max<std::int64_t>(0, text.size() - order + 1); i < text.size();
         ++i) {
      context_ = model_.advance(context_, text.text()[i]);
    }
  }

  void advance() override { context_ = model_.advance(context_, text_.text()[text_.size() - 1]); }

  std::int32_t guess(std::int32_t limit, float, const DraftColumns& draft) override {
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

  void learn(const Token*, std::int64_t) override {}

 private:
  const SuffixAutomaton& text_;  // prompt and output; the model is the prompt's alone
  const NgramModel model_;
  const double min_probability_;
  NgramModel::Context context_;
};

class NgramPolicy final : public DraftPolicy {
 public:
  NgramPolicy(std::int32_t order, double min_probability)
      : order_(order), min_probability_(min_probability) {}

  std::unique_ptr<Drafter> begin(const SuffixAutomaton& context, const Sources&,
                                 MemoryBudget& budget) override {
    return std::make_unique<NgramDrafter>(context, order_, min_probability_, budget);
  }

  bool drafts_what_pays() const noexcept override { return false; }

 private:
  const std::int32_t order_;
  const double min_probability_;
};

}  // namespace

std::unique_ptr<DraftPolicy> DraftPolicy::ngram(std::int32_t order, double min_probability) {
  return std::make_unique<NgramPolicy>(order, min_probability);
}

}  // namespace fastdraft

#include <algorithm>
#include <cstdint>
#include <memory>

#include "fastdraft/drafter.h"

namespace fastdraft {
namespace {

class PredictedOutputsDrafter final : public Drafter {
 public:
  PredictedOutputsDrafter(const SuffixAutomaton& context, const Sources& sources,
                          std::int32_t recovery, MemoryBudget& budget)
      : context_(context), recovery_(recovery), prediction_(budget) {
    for (std::int64_t i = 0; i < sources.prediction_size; ++i) {
      prediction_.append(sources.prediction[i]);
    }
  }

  void advance() override {
    const Token token = context_.text()[context_.size() - 1];
    if (next_ != kRecovering) {
      if (next_ < prediction_.size() && prediction_.text()[next_] == token) {
        ++next_;
        return;
      }
      next_ = kRecovering;
      match_ = {};  // nothing from before the two parted counts
    }
    match_ = prediction_.advance(match_, token);
    if (match_.length >= recovery_) next_ = prediction_.first_end(match_.state) + 1;
  }

  std::int32_t guess(std::int32_t limit, float, const DraftColumns& draft) override {
    if (next_ == kRecovering) return 0;
    const auto left = static_cast<std::int32_t>(prediction_.size()) - next_;
    const std::int32_t count = std::min(limit, left);
    draft.write_chain(prediction_.text() + next_, count, Source::kPrediction);
    std::fill_n(draft.probabilities, count, 1.0f);
    return count;
  }

  void learn(const Token*, std::int64_t) override {}

 private:
  static constexpr std::int32_t kRecovering = -1;

  const SuffixAutomaton& context_;
  const std::int32_t recovery_;
  SuffixAutomaton prediction_;
  std::int32_t next_ = 0;  // of the prediction's tokens, the one expected next
  Match match_;            // while recovering: what was emitted since, in the prediction
};

class PredictedOutputsPolicy final : public DraftPolicy {
 public:
  explicit PredictedOutputsPolicy(std::int32_t recovery) : recovery_(recovery) {}

  std::unique_ptr<Drafter> begin(const SuffixAutomaton& context, const Sources& sources,
                                 MemoryBudget& budget) override {
    return std::make_unique<PredictedOutputsDrafter>(context, sources, recovery_, budget);
  }

  bool drafts_what_pays() const noexcept override { return false; }

 private:
  const std::int32_t recovery_;
};

}  // namespace

std::unique_ptr<DraftPolicy> DraftPolicy::predicted_outputs(std::int32_t recovery) {
  return std::make_unique<PredictedOutputsPolicy>(recovery);
}

}  // namespace fastdraft

#include <algorithm>
#include <cstdint>
#include <memory>

#include "draft/drafter.h"

namespace fastdraft {
namespace {

class PredictedOutputsDrafter final : public Drafter {
 public:
  PredictedOutputsDrafter(std::int32_t recovery, const DrafterInputs& inputs)
      : Drafter(inputs.context), recovery_(recovery), prediction_(inputs.budget) {
    prediction_.append(inputs.prediction, inputs.prediction_size);
  }

  std::int32_t guess(std::int32_t limit, float, const RowOffers*,
                     const DraftColumns& draft) override {
    if (next_ == kRecovering) return 0;
    const auto left = static_cast<std::int32_t>(prediction_.size()) - next_;
    const std::int32_t count = std::min(limit, left);
    draft.write_chain(prediction_.text() + next_, count, Source::kPrediction);
    return count;
  }

 private:
  static constexpr std::int32_t kRecovering = -1;

  void advance() override {
    const Token token = context().text()[context().size() - 1];
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

  const std::int32_t recovery_;
  SuffixAutomaton prediction_;
  std::int32_t next_ = 0;  // of the prediction's tokens, the one expected next
  Match match_;            // while recovering: what was emitted since, in the prediction
};

}  // namespace

std::unique_ptr<Drafter> make_drafter(const PredictedOutputsConfig& config,
                                      const DrafterInputs& inputs) {
  return std::make_unique<PredictedOutputsDrafter>(config.recovery, inputs);
}

}  // namespace fastdraft

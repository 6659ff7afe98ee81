#include "policy/offer_value.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace fastdraft {

void OfferState::learn(const Accepted& step) noexcept {
  const std::uint32_t offered = std::exchange(given, 0);
  const float promised = std::exchange(own, -1.0f);
  if (promised < 0.0f) return;
  const auto accepted = static_cast<float>(step.tokens);
  const auto verified = static_cast<float>(step.drafted);
  // An offer can make engine tokens worth verifying that were not worth it alone.
  const float without =
      offered == 0 ? accepted : static_cast<float>(std::min(step.without_offers, own_drafted));
  engine_kinds.plain_steps().learn(promised, promised, {without, verified, 0.0f}, plain_steps);
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    OfKind& kind = kinds[k];
    const float expected = std::exchange(kind.promised, -1.0f);
    const double time = std::exchange(kind.time, 0.0);
    if ((offered >> k & 1) == 0) continue;
    const double part =
        time > 0.0 ? std::min(kind.spent / time, double{StepPromises::kLongestTime}) : 1.0;
    engine_kinds.model(static_cast<OfferKind>(k))
        .steps()
        .learn(expected < 0.0f ? promised : expected, kind.first,
               {accepted, verified, static_cast<float>(part)}, kind.steps);
  }
}

bool OfferValue::add(OfferState& state, const float* probabilities, std::int32_t drafted,
                     std::int32_t limit, float expected) noexcept {
  const float promised = std::accumulate(probabilities, probabilities + drafted, 0.0f);
  OfferState::OfKind& of_kind = state.kinds[static_cast<std::size_t>(kind_)];
  state.own = promised;
  state.own_drafted = drafted;
  of_kind.promised = std::max(promised, expected);
  of_kind.time = time_;
  const StepPromises::Promise without =
      kinds_.plain_steps().promise(promised, promised, state.plain_steps);
  // Ignorance about the offers must not raise the expectation of the engine's own draft.
  of_kind.first = std::max(without.accepted, expected);
  const StepPromises::Promise with =
      kinds_.model(kind_).steps().promise(of_kind.promised, of_kind.first, of_kind.steps);
  const double more = static_cast<double>(with.accepted) - static_cast<double>(without.accepted);
  emitted_ += 1.0 + static_cast<double>(without.accepted);
  own_.add(drafted);
  if (limit == 0 || more <= 0.0) {
    offered_.add(drafted);
    return false;
  }
  offered_.add(std::min(static_cast<double>(with.drafted), static_cast<double>(limit)));
  gain_ += more;
  spent_ = std::max(spent_, static_cast<double>(with.spent));
  return true;
}

bool OfferValue::pays(const StepCost& cost, std::int64_t rows, bool padded) const {
  const auto step_with = [&](const Tokens& drafts) {
    const double tokens = padded ? static_cast<double>(rows) * drafts.longest : drafts.sum;
    return cost.relative(rows, static_cast<std::int64_t>(std::lround(tokens)));
  };
  const double step = step_with(own_);
  const double more_time = spent_ * cost.part_of_step(rows, time_) + step_with(offered_) - step;
  return gain_ > emitted_ / step * more_time;
}

}  // namespace fastdraft

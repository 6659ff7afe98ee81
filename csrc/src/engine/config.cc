#include "fastdraft/config.h"

#include <string>

#include "fastdraft/step_cost.h"

namespace fastdraft {

void NgramConfig::check() const {
  check_range("order", order, 1, kMaxOrder);
  if (min_probability >= 0.0 && min_probability <= 1.0) return;  // false for NaN
  throw InvalidValueError("min_probability must be a number from 0 to 1, got " +
                          std::to_string(min_probability));
}

void EngineConfig::check() const {
  check_range("lookahead", lookahead, 1, 65536);
  std::visit([](const auto& config) { config.check(); }, drafter);
  check_range("max_request_tokens", max_request_tokens, 1, kMaxTextTokens);
  check_range("max_bytes", max_bytes, 1, kUnlimitedBytes);
  check_range("vocabulary", vocabulary, 1, kAllTokens);
  StepCost::constant(token_cost);
}

}  // namespace fastdraft

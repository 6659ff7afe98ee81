#include "fastdraft/config.h"

#include <string>

#include "fastdraft/ngram_table.h"
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
  check_range("threads", threads, 0, 64);
  StepCost::constant(token_cost);
  const auto* calibrated = std::get_if<CalibratedConfig>(&drafter);
  if (calibrated == nullptr || calibrated->ngrams == nullptr) return;
  const Token largest = calibrated->ngrams->largest_token();
  if (largest < vocabulary) return;
  throw InvalidValueError("ngrams must be of the target's tokenizer, got a table with token " +
                          std::to_string(largest) + " for a vocabulary of " +
                          std::to_string(vocabulary));
}

}  // namespace fastdraft

#include "fastdraft/config.h"

#include <string>

#include "fastdraft/error.h"
#include "fastdraft/step_cost.h"

namespace fastdraft {
namespace {

constexpr std::int64_t kMostDrafted = 1 << 16;
constexpr std::int64_t kMostOfTree = 1 << 12;

void check_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  const bool low = value < least;
  throw InvalidValueError(std::string(name) + " must be at " + (low ? "least " : "most ") +
                          std::to_string(low ? least : most) + ", got " + std::to_string(value));
}

void check_drafter(const CalibratedConfig& config) {
  if (config.tree_budget) check_range("tree_budget", *config.tree_budget, 1, kMostOfTree);
}

void check_drafter(const PromptLookupConfig& config) {
  check_range("max_ngram", config.max_ngram, 1, kMostDrafted);
}

void check_drafter(const NgramConfig& config) {
  check_range("order", config.order, 1, NgramConfig::kMaxOrder);
  if (config.min_probability >= 0.0 && config.min_probability <= 1.0) return;  // false for NaN
  throw InvalidValueError("min_probability must be a number from 0 to 1, got " +
                          std::to_string(config.min_probability));
}

void check_drafter(const PredictedOutputsConfig& config) {
  check_range("recovery", config.recovery, 1, kMaxTextTokens);
}

}  // namespace

void EngineConfig::check() const {
  check_range("lookahead", lookahead, 1, kMostDrafted);
  std::visit([](const auto& config) { check_drafter(config); }, drafter);
  check_range("max_request_tokens", max_request_tokens, 1, kMaxTextTokens);
  check_range("max_bytes", max_bytes, 1, kUnlimitedBytes);
  check_range("vocabulary", vocabulary, 1, kAllTokens);
  StepCost::constant(token_cost);
}

}  // namespace fastdraft

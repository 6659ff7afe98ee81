// How an engine drafts: its drafter, and the limits that hold for all drafters.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <variant>

#include "fastdraft/error.h"
#include "fastdraft/export.h"
#include "fastdraft/token.h"

namespace fastdraft {

class NgramTable;

// Each drafter's `check` throws InvalidValueError that names the first value outside its range.

// The goal that the drafts of a batch are chosen for.
enum class Objective : std::uint8_t {
  kTokens,  // the most tokens a second
  kLast,    // the earliest end of the last request
};

// The default drafter. It drafts the tokens most likely to be accepted, over all
// sources, as long as they pay for their cost; acceptance probabilities are learned.
struct CalibratedConfig {
  // The most tokens of a draft tree; empty: drafts are chains.
  std::optional<std::int32_t> tree_budget;
  // Frequent n-grams, used where nothing that can be copied reaches far; null: none. Its tokens
  // must be of the vocabulary.
  std::shared_ptr<const NgramTable> ngrams = nullptr;
  Objective objective = Objective::kTokens;

  void check() const {
    if (tree_budget) check_range("tree_budget", *tree_budget, 1, 4096);
  }
};

// Prompt lookup (A. Saxena, 2023) as transformers has it: the longest n-gram up to
// `max_ngram` tokens that ends the text and occurs earlier in it, its leftmost
// occurrence.
struct PromptLookupConfig {
  std::int32_t max_ngram = 3;

  void check() const { check_range("max_ngram", max_ngram, 1, 65536); }
};

// The n-gram autocomplete (J. Kim, K. Kim and A. Oh, 2024): the most frequent
// continuation by an n-gram model of the prompt, while the product of the
// conditional probabilities is at least `min_probability`.
struct FASTDRAFT_EXPORT NgramConfig {
  static constexpr std::int32_t kMaxOrder = 16;

  std::int32_t order = 4;        // 1 to kMaxOrder
  double min_probability = 0.3;  // 0 to 1

  void check() const;
};

// Predicted outputs as the service that named them drafts them: the prediction
// until the output leaves it; then nothing until `recovery` tokens in a row occur
// in it again, and on from their leftmost occurrence.
struct PredictedOutputsConfig {
  std::int32_t recovery = 32;

  void check() const { check_range("recovery", recovery, 1, kMaxTextTokens); }
};

using DrafterConfig =
    std::variant<CalibratedConfig, PromptLookupConfig, NgramConfig, PredictedOutputsConfig>;

struct FASTDRAFT_EXPORT EngineConfig {
  static constexpr std::int64_t kUnlimitedBytes = std::numeric_limits<std::int64_t>::max();

  DrafterConfig drafter;
  std::int32_t lookahead = 64;  // the longest draft, or the longest path of a tree; to 65536
  double token_cost = 0.02;     // for calls that give no cost of their own; see StepCost
  std::int64_t max_request_tokens = kMaxTextTokens;  // of a request, and of its prediction
  std::int64_t max_bytes = kUnlimitedBytes;          // of all indexes together
  std::int64_t vocabulary = kAllTokens;  // the target's: ids from here on are never drafted
  // That share the rows of a large batch, the caller's included; drafts do not depend on it. 0:
  // half the processors, four at most.
  std::int32_t threads = 0;

  // Throws InvalidValueError that names the first value outside its range.
  void check() const;

  // Returns whether drafts are cut to the tokens that pay. The other drafters draft as their papers
  // do.
  bool calibrated() const noexcept { return std::holds_alternative<CalibratedConfig>(drafter); }

  // The most tokens that a draft can have.
  std::int32_t most_drafted() const noexcept {
    const auto* config = std::get_if<CalibratedConfig>(&drafter);
    return config == nullptr ? lookahead : config->tree_budget.value_or(lookahead);
  }
};

}  // namespace fastdraft

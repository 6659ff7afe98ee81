// What guesses.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fastdraft/acceptance.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/memory.h"
#include "fastdraft/suffix_automaton.h"
#include "fastdraft/token.h"

namespace fastdraft {

using Stores = std::vector<std::shared_ptr<Datastore>>;

// Where a request may be drafted from, besides its own text.
struct Sources {
  const Token* prediction = nullptr;
  std::int64_t prediction_size = 0;
  Stores stores;
};

// Drafts for one request.
//
// Not thread-safe; calls on different requests may overlap.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Notes that the context grew by one output token. O(1) amortised. Throws
  // MemoryLimitError, and may then miss the token, nothing more.
  virtual void advance() = 0;

  // Writes the tokens that may be drafted to `draft`, at most `limit`, the most
  // probable first, and returns their number. A parent stands before its
  // children, and siblings differ. Tokens less probable than `least` are not
  // wanted.
  virtual std::int32_t guess(std::int32_t limit, float least, const DraftColumns& draft) = 0;

  // Compares what was guessed last, drafted or not, with the tokens that the
  // target emitted, of which the context holds none yet.
  virtual void learn(const Token* emitted, std::int64_t count) = 0;
};

// How an engine drafts: makes the drafter of each request, and holds what they
// share. Thread-safe.
class DraftPolicy {
 public:
  virtual ~DraftPolicy() = default;

  // The drafter of a request whose prompt `context` holds. Memory is counted in
  // `budget`; the context and the budget must outlive it. Throws MemoryLimitError.
  virtual std::unique_ptr<Drafter> begin(const SuffixAutomaton& context, const Sources& sources,
                                         MemoryBudget& budget) = 0;

  // Whether the engine drafts only what pays of a guess, or all of it.
  virtual bool drafts_what_pays() const noexcept = 0;

  // What is learned from all requests; null where nothing is.
  virtual Acceptance* acceptance() noexcept { return nullptr; }

  // Drafts what is most likely to be accepted by calibrated acceptance, over all
  // sources: chains or trees, at most `lookahead` tokens deep.
  static std::unique_ptr<DraftPolicy> calibrated(std::int32_t lookahead, bool tree);

  // Prompt lookup (A. Saxena, 2023) as transformers has it: the longest
  // n-gram up to `max_ngram` that ends the text and stands earlier in it, its
  // leftmost occurrence.
  static std::unique_ptr<DraftPolicy> prompt_lookup(std::int32_t max_ngram);

  // The n-gram autocomplete (J. Kim, K. Kim and A. Oh, 2024): what an n-gram
  // model of the prompt goes on with, while the product of the conditional
  // probabilities is at least `min_probability`. `order` is 1 to
  // NgramModel::kMaxOrder.
  static std::unique_ptr<DraftPolicy> ngram(std::int32_t order, double min_probability);

  // Predicted outputs as the service that named them drafts them: the prediction
  // until the output leaves it; then nothing until `recovery` tokens in a row
  // stand in it again, and on from their leftmost occurrence.
  static std::unique_ptr<DraftPolicy> predicted_outputs(std::int32_t recovery);
};

}  // namespace fastdraft

// What guesses.
#pragma once

#include <cstdint>
#include <memory>

#include "fastdraft/draft.h"
#include "fastdraft/memory.h"
#include "fastdraft/suffix_automaton.h"
#include "fastdraft/token.h"

namespace fastdraft {

// Where a request may be drafted from, besides its own text.
struct Sources {
  const Token* prediction = nullptr;
  std::int64_t prediction_size = 0;
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
  // children, and siblings differ.
  virtual std::int32_t guess(std::int32_t limit, const DraftColumns& draft) = 0;

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

  // Drafts what promises most by calibrated acceptance, over all sources.
  static std::unique_ptr<DraftPolicy> calibrated();

  // Prompt lookup (A. Saxena, 2023) as transformers has it: the longest
  // n-gram up to `max_ngram` that ends the text and stands earlier in it, its
  // leftmost occurrence.
  static std::unique_ptr<DraftPolicy> prompt_lookup(std::int32_t max_ngram);
};

}  // namespace fastdraft

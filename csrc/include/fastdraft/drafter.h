// What guesses: the state of one request, and the policies that draft for it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "fastdraft/acceptance.h"
#include "fastdraft/copy_cursor.h"
#include "fastdraft/draft.h"
#include "fastdraft/memory.h"
#include "fastdraft/prediction.h"
#include "fastdraft/suffix_automaton.h"
#include "fastdraft/token.h"

namespace fastdraft {

// A continuation copied from a text that is already known. It names the place
// instead of copying the tokens, and holds until that text grows.
struct Guess {
  const Token* from = nullptr;
  std::int32_t period = 1;  // the copy starts over after so many tokens
  std::int32_t count = 0;   // how many tokens it gives; 0: no guess
  Source source = Source::kContext;
  Acceptance::Evidence evidence{};

  Token operator[](std::int32_t i) const noexcept { return from[i < period ? i : i % period]; }

  // How many of its first `most` tokens `emitted` begins with.
  std::int32_t common_prefix(const Token* emitted, std::int32_t most) const noexcept {
    std::int32_t length = 0;
    while (length < most && (*this)[length] == emitted[length]) ++length;
    return length;
  }
};

// Counts over a request's life. See fastdraft.DraftStats for their meaning.
struct DraftCounts {
  std::int64_t steps = 0;
  std::int64_t emitted = 0;
  std::int64_t drafts = 0;
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
  std::int64_t accepted_prediction = 0;
  std::int64_t rejected_prediction = 0;
};

// Tokens emitted per unit of step time, a step without drafts being 1: a
// decaying mean that starts from `initial`.
class EmissionRate {
 public:
  explicit EmissionRate(double initial) noexcept : tokens_(initial * kWeight) {}
  double value() const noexcept { return tokens_ / time_; }
  void add(double tokens, double time) noexcept {
    tokens_ = kDecay * tokens_ + tokens;
    time_ = kDecay * time_ + time;
  }

 private:
  static constexpr double kDecay = 0.98;  // the last 50 steps or so count
  static constexpr double kWeight = 8.0;  // the first value counts as eight steps

  double tokens_;
  double time_ = kWeight;
};

// One generation: its text, the matches in its sources, and what was last
// proposed for it.
//
// Not thread-safe; the engine locks each request.
struct Request {
  // An empty text so far, the first `prompt` tokens of which will be the
  // prompt. `initial_rate` is the engine's. Throws MemoryLimitError.
  Request(std::int64_t prompt, double initial_rate, MemoryBudget& budget)
      : context(budget), prompt_size(prompt), rate(initial_rate) {}

  SuffixAutomaton context;
  const std::int64_t prompt_size;
  CopyCursor copy{-1};  // follows what the output copies from the text itself
  std::optional<Prediction> prediction;
  Match ngram;  // the text's last tokens, as many as prompt lookup looks at

  // The last proposal, until it is observed: all guesses, which of them was
  // drafted, how many of its tokens, and the time of the step by it.
  struct Proposal {
    std::array<Guess, 3> guesses;
    std::size_t chosen = 0;
    std::int32_t drafted = 0;
    double step_time = 1.0;
  };
  Proposal proposal;

  EmissionRate rate;
  double time = 0.0;  // of all steps; one without drafts takes 1
  DraftCounts counts;
};

// A drafting policy. Calls on different requests may overlap.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Notes that `request.context` grew by one token. O(1) amortised.
  virtual void advance(Request& request) const = 0;

  // Sets the guesses of request.proposal, at most `limit` tokens long, and which
  // of them to draft from, and writes the chance that each of its tokens is
  // accepted with all before it to `probabilities`. Returns its length.
  virtual std::int32_t guess(Request& request, std::int32_t limit, float* probabilities) const = 0;

  // Compares every guess with the `count` tokens that the target emitted.
  virtual void learn(const Request::Proposal& proposal, const Token* emitted,
                     std::int64_t count) = 0;

  // Whether the engine drafts only what pays of a guess, or all of it.
  virtual bool drafts_what_pays() const noexcept = 0;

  // Drafts what promises most by calibrated acceptance: what followed the
  // context's longest repeated suffix the last time, where the copy that the
  // output makes of the context goes on, or the prediction.
  static std::unique_ptr<Drafter> calibrated();

  // Prompt lookup (A. Saxena, 2023) as transformers has it: the longest
  // n-gram up to `max_ngram` that ends the text and stands earlier in it, its
  // leftmost occurrence.
  static std::unique_ptr<Drafter> prompt_lookup(std::int32_t max_ngram);
};

}  // namespace fastdraft

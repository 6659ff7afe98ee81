// One generation: its text, who drafts for it, and what was last proposed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "draft/drafter.h"
#include "draft/offer_model.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/token.h"
#include "index/memory.h"
#include "index/suffix_automaton.h"
#include "store/running_texts.h"

namespace fastdraft {

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

// What a request knows of offers, once there was one or one was asked about.
struct OfferState {
  struct OfKind {
    OfferRecord offers;
    StepRecord steps;
    // All four are of the last step. `promised` is the number of tokens that the engine's own
    // draft or the drafter expected to be accepted, below 0 if `wants` was not called; `first` is
    // what was expected before anything was learned. `time` is what the offer was expected to take,
    // `spent` what it took.
    float promised = -1.0f;
    float first = 0.0f;
    double time = 0.0;
    double spent = 0.0;
  };
  std::array<OfKind, static_cast<std::size_t>(kMostOfferKinds)> kinds;
  StepRecord plain_steps;
  // Of the last step: the tokens that it promised without offers, or less than 0 if nobody asked;
  // how many it would have drafted; and the kinds that were offered, a bit for each.
  float own = -1.0f;
  std::int32_t own_drafted = 0;
  std::uint32_t given = 0;
};

// Not thread-safe; the engine locks each request.
struct Request {
  // An empty text, and room for drafts of `most_drafted` tokens. `initial_rate`
  // is the engine's. Throws MemoryLimitError.
  Request(std::int32_t most_drafted, double initial_rate, MemoryBudget& budget)
      : context(budget),
        draft_memory(new std::int32_t[static_cast<std::size_t>(DraftColumns::words(most_drafted))]),
        draft(DraftColumns::in(draft_memory.get(), most_drafted)),
        rate(initial_rate) {}

  // Prompt and output, without the templates.
  std::int64_t size() const noexcept { return context.size() - templates_size; }
  const Token* text() const noexcept { return context.text() + templates_size; }

  SuffixAutomaton context;  // the templates, and then prompt and output
  SuffixAutomaton::Approach approach{};
  std::int64_t templates_size = 0;
  std::int64_t prompt_size = 0;
  Stores stores;                // those it was given, and then those that it only reads
  std::size_t num_entered = 0;  // the first so many are those that its text enters
  std::vector<std::unique_ptr<RunningTexts::Text>>
      running;  // its text in these, but in frozen ones
  std::unique_ptr<Drafter> drafter;

  // The last proposal, until it is observed: whether there is one, its tokens, how
  // many of them were guessed, how many of those drafted, and the time of the
  // step by it.
  const std::unique_ptr<std::int32_t[]> draft_memory;
  const DraftColumns draft;
  bool proposed = false;
  // Of a guess that was forgotten, though the text is still the same: its tokens, and what it was
  // made for. Less than 0: none.
  std::int32_t kept = -1;
  std::int32_t limit = 0;
  float least = 0.0f;
  std::int32_t guessed = 0;
  std::int32_t drafted = 0;
  double step_time = 1.0;

  std::unique_ptr<OfferState> offers;

  EmissionRate rate;
  double paced = 0.0;  // the tokens of all steps that the rate counts
  double time = 0.0;   // of these steps; one without drafts takes 1
  DraftCounts counts;
};

}  // namespace fastdraft

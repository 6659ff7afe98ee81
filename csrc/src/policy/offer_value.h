// Decides when it pays to have another drafter make offers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "fastdraft/offers.h"
#include "fastdraft/step_cost.h"
#include "policy/offer_kinds.h"
#include "policy/offer_model.h"

namespace fastdraft {

// A request's knowledge of offers, once there was one or one was asked about.
struct OfferState {
  explicit OfferState(OfferKinds& of_engine) noexcept : engine_kinds(of_engine) {}

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

  // Tokens of a step: those of the draft that were accepted, all of the draft, and those that would
  // have been accepted of a draft without offers.
  struct Accepted {
    std::int32_t tokens;
    std::int32_t drafted;
    std::int32_t without_offers;
  };

  // Learns what the step brought, if somebody asked before whether offers pay.
  void learn(const Accepted& step) noexcept;
  // The step was given up.
  void forget() noexcept {
    given = 0;
    own = -1.0f;
  }

  OfferKinds& engine_kinds;
  std::array<OfKind, static_cast<std::size_t>(kMostOfferKinds)> kinds;
  StepRecord plain_steps;
  // In the last step: the tokens that it promised without offers, or less than 0 if nobody asked;
  // how many it would have drafted; and the kinds that were offered, a bit for each.
  float own = -1.0f;
  std::int32_t own_drafted = 0;
  std::uint32_t given = 0;
};

// Adds up, row by row of a batch, what offers of a kind would bring to its next step and take.
class OfferValue {
 public:
  // `time`: what making the offers takes, as Offers::time.
  OfferValue(OfferKinds& kinds, OfferKind kind, double time) noexcept
      : kinds_(kinds), kind_(kind), time_(time) {}

  // Adds a row. `probabilities`: those of the `drafted` tokens that the engine itself would draft
  // for it. `limit`: the most tokens that it may draft. `expected`: how many the other drafter
  // expects to be accepted of its offer, 0 where it does not say. Returns whether the offer
  // promises more.
  //
  // A simulated draft model beside recorded answers, easy and hard by turns of 25 tokens, shows
  // what `expected` is worth: without it they take 1 % longer (worst family 5 %) where a draft
  // token takes .15 of a step, and 3 % (9 %) where it takes .3.
  bool add(OfferState& state, const float* probabilities, std::int32_t drafted, std::int32_t limit,
           float expected) noexcept;

  // Returns whether the tokens are worth the time. The price of time is the rate of this very step
  // without offers, not that of all steps: a hard passage has to be passed, and its tokens cost
  // what they take here.
  bool pays(const StepCost& cost, std::int64_t rows, bool padded) const;

 private:
  // The draft tokens of a step: those of its longest row, and of all.
  struct Tokens {
    void add(double tokens) noexcept {
      longest = tokens > longest ? tokens : longest;
      sum += tokens;
    }
    double longest = 0.0;
    double sum = 0.0;
  };

  OfferKinds& kinds_;
  const OfferKind kind_;
  const double time_;
  Tokens own_;
  Tokens offered_;
  double emitted_ = 0.0;  // without the offers
  double gain_ = 0.0;     // of the rows whose offers promise more
  double spent_ = 0.0;    // the largest share of the offer time that any row uses
};

}  // namespace fastdraft

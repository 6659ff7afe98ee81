#include "draft/drafter.h"

#include <algorithm>

#include "policy/offer_value.h"

namespace fastdraft {
namespace {

// For a step that verified the first tokens of the draft.
void compare_draft(const DraftColumns& draft, const Token* emitted, Outcome& outcome) noexcept {
  outcome.accepted = draft.accepted(outcome.drafted, emitted, outcome.taken);
  outcome.rejected_prediction =
      std::count(draft.sources, draft.sources + outcome.drafted, Source::kPrediction) -
      outcome.accepted.by_source[index_of(Source::kPrediction)];
}

// For a step that verified tokens of the host's choice: the target accepted all that it emitted but
// the last. Which of them the prediction expected is read from the last guess: of the
// accepted tokens exactly, of the rejected ones along the prediction's own path. The host drafted
// from an older guess, so the most probable path of this one may be another.
void compare_guess(const DraftColumns& guess, std::int32_t guessed, const Token* emitted,
                   Outcome& outcome) noexcept {
  const std::int32_t drafted = outcome.drafted;
  std::int32_t& accepted = outcome.accepted.tokens;
  accepted = static_cast<std::int32_t>(std::min<std::int64_t>(drafted, outcome.taken - 1));
  std::int32_t parent = -1;
  std::int32_t depth = 0;
  for (std::int32_t i = 0; i < guessed && depth < drafted; ++i) {
    const bool follows = depth < accepted ? guess.token_ids[i] == emitted[depth]
                                          : guess.sources[i] == Source::kPrediction;
    if (guess.parents[i] != parent || !follows) continue;
    if (depth < accepted) {
      ++outcome.accepted.by_source[index_of(guess.sources[i])];
    } else {
      ++outcome.rejected_prediction;
    }
    parent = i;
    ++depth;
  }
}

}  // namespace

Outcome Drafter::observe(const Step& step, const DraftColumns& draft) {
  const Token* const emitted = step.emitted.token_ids;
  Outcome outcome;
  // The lines that the append reads first arrive while the drafter learns.
  if (step.emitted.size > 0) context_.prefetch_append(emitted[0]);
  const std::int32_t without_offers = step.proposal ? learn(step.observed) : 0;
  try {
    while (outcome.taken < step.emitted.size) {
      context_.append(emitted[outcome.taken]);
      ++outcome.taken;
      advance();
    }
  } catch (const MemoryLimitError& error) {
    outcome.refused = error;
  }
  // The next guess reads these first.
  if (const Match suffix = context_.repeated_suffix(); suffix.length > 0) {
    context_.prefetch_ends(suffix.state);
  }
  if (outcome.taken > 0) {
    const Proposal proposal = step.proposal.value_or(Proposal());
    outcome.drafted = step.verified.value_or(std::min(proposal.drafted, step.most));
    if (step.verified) {
      compare_guess(draft, proposal.guessed, emitted, outcome);
    } else {
      compare_draft(draft, emitted, outcome);
    }
    if (step.offers != nullptr) {
      step.offers->learn({outcome.accepted.tokens, outcome.drafted, without_offers});
    }
  } else if (step.offers != nullptr) {
    step.offers->forget();
  }
  return outcome;
}

}  // namespace fastdraft

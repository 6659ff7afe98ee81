// The interface of all drafters.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "draft/row_offers.h"
#include "fastdraft/config.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/error.h"
#include "fastdraft/token.h"
#include "index/memory.h"
#include "index/suffix_automaton.h"
#include "policy/acceptance_model.h"
#include "policy/token_weights.h"

namespace fastdraft {

struct OfferState;

// The last proposal; its tokens are in the request's draft.
struct Proposal {
  std::int32_t guessed = 0;  // the tokens of the whole guess
  std::int32_t drafted = 0;  // the first of them, which the target was given
  double step_time = 1.0;    // of the step by them
  // The arguments of the drafter's guess. With offers the limit is -1: no other guess is like it.
  std::int32_t limit = -1;
  float least = 0.0f;
};

// A step of the target for one request.
struct Step {
  TokenSpan emitted;
  // Compared with the last guess: for a request with several rows the tokens of all.
  TokenSpan observed;
  // How many draft tokens of its own choice the host had the target verify. Empty: it verified
  // those that were proposed.
  std::optional<std::int32_t> verified = std::nullopt;
  // How many of the proposed draft tokens it verified at most.
  std::int32_t most = std::numeric_limits<std::int32_t>::max();
  std::optional<Proposal> proposal = std::nullopt;  // empty: there was none since the last step
  OfferState* offers = nullptr;                     // the request's; null: it has known none
};

// The draft compared with what its step emitted, once.
struct Outcome {
  std::int64_t taken = 0;  // the emitted tokens that memory had room for
  std::optional<MemoryLimitError> refused = std::nullopt;  // the error, where it had none for all
  // Without a token taken these are 0.
  std::int32_t drafted = 0;
  DraftColumns::Accepted accepted;
  std::int64_t rejected_prediction = 0;
};

// Drafts for one request.
//
// Not thread-safe; calls on different requests may overlap.
class Drafter {
 public:
  explicit Drafter(SuffixAutomaton& context) noexcept : context_(context) {}
  virtual ~Drafter() = default;

  // Asks for the memory that a guess reads, a part in each of the steps 0, 1, ..., as
  // SuffixAutomaton::approach does. Returns whether there is more.
  virtual bool approach(int /*step*/) { return false; }

  // Writes the tokens that may be drafted to `draft`, at most `limit`, the most
  // probable first, and returns their number. A parent precedes its children, and
  // siblings differ. Tokens less probable than `least` are not wanted. `offers`: what others guess,
  // for the calibrated drafter alone; null: nothing.
  virtual std::int32_t guess(std::int32_t limit, float least, const RowOffers* offers,
                             const DraftColumns& draft) = 0;

  // Takes a step: all that drafts for the request learns from it, its tokens enter the context,
  // and the drafter follows them there. `draft` holds the last guess. Tokens that memory has no
  // room for are left out. O(1) amortised a token, and O(lookahead).
  Outcome observe(const Step& step, const DraftColumns& draft);

 protected:
  const SuffixAutomaton& context() const noexcept { return context_; }

 private:
  // Compares what was guessed last, drafted or not, with the tokens that the target emitted. Of a
  // guess with offers, returns how many tokens the target would have accepted of one without them,
  // as far as what was weighed tells.
  virtual std::int32_t learn(TokenSpan /*observed*/) { return 0; }

  // Notes that the context grew by one output token: what follows it reads the context's match
  // after each. O(1) amortised. Throws MemoryLimitError, and may then miss the token, nothing more.
  virtual void advance() = 0;

  SuffixAutomaton& context_;
};

// The arguments of a request's drafter. All but the prediction must outlive it.
struct DrafterInputs {
  SuffixAutomaton& context;  // holds the prompt
  const Token* prediction;
  std::int64_t prediction_size;
  const Stores& stores;
  std::int32_t lookahead;
  AcceptanceModel* acceptance;  // shared by all requests; only CalibratedConfig needs one
  MemoryBudget& budget;
  std::size_t num_entered = 0;      // the first n stores are those that its text enters
  std::int64_t templates_size = 0;  // the first n tokens of the context are templates
  std::shared_ptr<TokenWeights> weights = nullptr;  // of the first live store that its text enters
};

// The drafter of a request. Throws MemoryLimitError.
std::unique_ptr<Drafter> make_drafter(const CalibratedConfig& config, const DrafterInputs& inputs);
std::unique_ptr<Drafter> make_drafter(const PromptLookupConfig& config,
                                      const DrafterInputs& inputs);
std::unique_ptr<Drafter> make_drafter(const NgramConfig& config, const DrafterInputs& inputs);
std::unique_ptr<Drafter> make_drafter(const PredictedOutputsConfig& config,
                                      const DrafterInputs& inputs);

}  // namespace fastdraft

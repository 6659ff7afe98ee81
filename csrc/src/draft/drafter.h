// The interface of all drafters.
#pragma once

#include <cstdint>
#include <memory>

#include "draft/row_offers.h"
#include "fastdraft/config.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/token.h"
#include "index/memory.h"
#include "index/suffix_automaton.h"
#include "policy/acceptance_model.h"
#include "policy/token_weights.h"

namespace fastdraft {

// Drafts for one request.
//
// Not thread-safe; calls on different requests may overlap.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Notes that the context grew by one output token. O(1) amortised. Throws
  // MemoryLimitError, and may then miss the token, nothing more.
  virtual void advance() = 0;

  // Asks for the memory that a guess reads, a part in each of the steps 0, 1, ..., as
  // SuffixAutomaton::approach does. Returns whether there is more.
  virtual bool approach(int /*step*/) { return false; }

  // Writes the tokens that may be drafted to `draft`, at most `limit`, the most
  // probable first, and returns their number. A parent precedes its children, and
  // siblings differ. Tokens less probable than `least` are not wanted. `offers`: what others guess,
  // for the calibrated drafter alone; null: nothing.
  virtual std::int32_t guess(std::int32_t limit, float least, const RowOffers* offers,
                             const DraftColumns& draft) = 0;

  // Compares what was guessed last, drafted or not, with the tokens that the
  // target emitted, of which the context holds none yet.
  virtual void learn(const Token* /*emitted*/, std::int64_t /*count*/) {}

  // After `learn` about a guess with offers: how many tokens the target would have accepted of a
  // guess without them, as far as what was weighed tells.
  virtual std::int32_t accepted_without_offers() const { return 0; }
};

// The arguments of a request's drafter. All but the prediction must outlive it.
struct DrafterInputs {
  const SuffixAutomaton& context;  // holds the prompt
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

// The drafting engine: requests by id, one at a time or a batch in one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fastdraft/calibration.h"
#include "fastdraft/config.h"
#include "fastdraft/continuations.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/export.h"
#include "fastdraft/offers.h"
#include "fastdraft/step_cost.h"
#include "fastdraft/token.h"

namespace fastdraft {

class AcceptanceModel;
class BatchThreads;
class EmissionRate;
class MemoryBudget;
class Mutex;
class OfferKinds;
class OutputLengths;
class RequestTable;
struct Request;
struct RowOffers;
struct Step;

using RequestId = std::int64_t;

// The arguments of a new request. The tokens are copied.
struct NewRequest {
  TokenSpan prompt;
  // Text that is expected in the output.
  TokenSpan prediction = {};
  // Text that parts of the output may look like, such as the form of a call of each of the
  // request's tools, one text after another. It is indexed as if it stood before the prompt, and
  // never enters a store. Only the calibrated drafter takes it.
  TokenSpan templates = {};
  // The stores that it is drafted from; empty: the engine's. Its text enters the live ones.
  std::optional<Stores> stores = std::nullopt;
  // Further stores that it is drafted from; its text does not enter them.
  // NOLINTNEXTLINE(readability-redundant-member-init): GCC warns where a request leaves it out.
  Stores read_only = {};
};

// Limits that hold for one call.
struct ProposeOptions {
  std::optional<StepCost> cost;          // empty: the config's token_cost
  const std::int32_t* limits = nullptr;  // for each row, the most draft tokens; null: the lookahead
  bool padded = false;                   // each row is padded to the longest draft
  // Guesses of others: `num_offers` of different kinds, kMostOffers at most.
  const Offers* offers = nullptr;
  std::int64_t num_offers = 0;
};

// A failed row of a batch, and its error.
struct RowError {
  std::int64_t row;
  std::exception_ptr error;
};

// Thread-safe: calls on different requests run side by side, calls on the same
// request one after another. Ids are never given out twice.
class FASTDRAFT_EXPORT Engine {
 public:
  // Requests see `stores` where they are given none of their own. Throws
  // InvalidValueError.
  explicit Engine(const EngineConfig& config, Stores stores = {});
  ~Engine();

  // Indexes the prompt, the prediction and the templates. Tokens of the last two must be below the
  // vocabulary; those of a prompt need not, since some stand for images. Templates and prompt
  // together have at most max_request_tokens, and so has the prediction. Of a live store the
  // request sees what the other running requests have written so far, and they see what it writes.
  //
  //   const RequestId id = engine.add_request({{prompt.data(), prompt_size}});
  //
  // O(tokens). Throws InvalidValueError, RequestLimitError or MemoryLimitError, and then
  // nothing was added.
  RequestId add_request(const NewRequest& asked);

  // Writes the draft for the request's next step to `draft`, which has room for
  // most_drafted() tokens, and returns its length; 0 where no token pays. Throws
  // UnknownRequestError, or InvalidValueError for a limit below 0 and for offers with more than
  // kMostOffered tokens, an id outside the vocabulary, a parent that is not before its child or a
  // confidence that is not from 0 to 1. O(lookahead + offered tokens).
  std::int32_t propose(RequestId id, const ProposeOptions& options, const DraftColumns& draft);

  // The drafts of `rows` requests, chosen together: the tokens most likely to
  // be accepted anywhere in the batch, as many as pay. A row whose request is
  // unknown gets an empty draft: another thread may just have ended it.
  // Throws InvalidValueError for a limit below 0 before any change. A row's offer that `propose`
  // would refuse is left out and counted by num_refused_offers(); what is wrong with all offers of
  // a kind, as falling offsets, throws.
  DraftBatch propose_batch(const RequestId* ids, std::int64_t rows, const ProposeOptions& options);

  // The kind of offers of this name; new names are added, kMostOfferKinds at most. Throws
  // InvalidValueError for a name that is empty or longer than 64 bytes, and where the drafter is
  // not the calibrated one, which alone takes offers.
  OfferKind offer_kind(std::string_view name);
  // The names of the kinds, in their order.
  std::vector<std::string> offer_kinds() const;
  // How many rows' offers were left out of batches since they were wrong.
  std::int64_t num_refused_offers() const noexcept {
    return num_refused_offers_.load(std::memory_order_relaxed);
  }

  // Decides whether it pays to make an offer of a kind for the next step: wanted[r] for
  // row r. `time` is what making them takes for all rows together, as Offers::time. Offers pay
  // where the tokens that they add, as learned from earlier steps whose drafts promised as much
  // without them, are worth the time that making and verifying them takes. Now and then the answer
  // is yes to learn whether it still holds. Call it once a step, before propose_batch.
  //
  // `expected`: for each row, how many tokens the drafter expects to be accepted of its offer, 0 to
  // kMostOffered; they need not be calibrated. Null: it does not say.
  //
  // The last draft of each request is forgotten. An unknown request gets no. Throws
  // InvalidValueError. O(rows * lookahead).
  void wants(OfferKind kind, const RequestId* ids, std::int64_t rows, const ProposeOptions& options,
             double time, bool* wanted, const float* expected = nullptr);

  // Takes the tokens that the target emitted in a step: compares them with the
  // last draft, learns, and appends them. O(1) amortised a token. Throws
  // UnknownRequestError, InvalidValueError (a negative token) or
  // RequestLimitError before any change. On MemoryLimitError the request holds,
  // and has counted, the tokens that still fitted.
  void observe(RequestId id, const Token* emitted, std::int64_t count);

  // The same for row r with emitted[offsets[r]] .. emitted[offsets[r + 1]], one
  // row after another. A row that fails does not affect the others. Returns the rows
  // that failed, in order, each with what `observe` throws. Throws
  // InvalidValueError for falling offsets, or `drafted` below 0, before any change.
  //
  // `drafted`: how many draft tokens of row r the target verified, where the host has cut drafts;
  // null: all.
  [[nodiscard]] std::vector<RowError> observe_batch(const RequestId* ids, std::int64_t rows,
                                                    const Token* emitted,
                                                    const std::int64_t* offsets,
                                                    const std::int32_t* drafted = nullptr);

  // For hosts that do not wait for drafts: observe_batch, and then each row's whole guess of what
  // comes next, with nothing cut, written to row slots[r] of `out` (null: to row r). A host that
  // has emitted further tokens when it arrives goes on below them; see Continuations.
  //
  // `drafted`: how many draft tokens of row r the target verified in the step, since the engine
  // does not know what the host made of earlier continuations; null: none. The drafter learns
  // from the emitted tokens and its own guess, whatever was verified.
  //
  // A row that fails does not affect the others; it gets no continuations. Returns these rows, in
  // order. Throws InvalidValueError before any change: falling offsets, a slot outside `out`, or
  // `drafted` below 0. O(out.nodes) a row. Rows of one request take their tokens in order; of
  // several rows that go to one slot only the last one's continuations are computed. The drafter
  // learns from all rows of a request.
  [[nodiscard]] std::vector<RowError> continue_batch(
      const RequestId* ids, std::int64_t rows, const Token* emitted, const std::int64_t* offsets,
      const std::int32_t* drafted, const std::int64_t* slots, const Continuations& out);

  DraftCounts counts(RequestId id);
  std::int64_t num_tokens(RequestId id);

  // Ends the request and frees its memory. Its text enters the live datastores that it was given
  // other than to read; one that is closed or out of memory is left out.
  DraftCounts finish(RequestId id);

  // Ends the request; its text enters no datastore, and no other request sees it any more.
  DraftCounts cancel(RequestId id);

  // The learned state, from all requests; empty where the drafter learns nothing.
  std::optional<Calibration> calibration() const;
  // Goes on from it; its kinds of offers are added. Throws InvalidValueError where the drafter
  // learns nothing, for a kind as `offer_kind`, and where the numbers are not as many, or not in
  // the range, of those that `calibration` gives; without `plain_steps` nothing is known of these.
  void set_calibration(const Calibration& learned);

  std::int64_t num_requests() const noexcept;
  std::int64_t bytes() const noexcept;  // of the indexes of all running requests
  // How many tokens from datastores were removed from drafts because they are not
  // in the vocabulary.
  std::int64_t num_foreign() const noexcept { return num_foreign_.load(std::memory_order_relaxed); }
  // The most tokens that a draft can have.
  std::int32_t most_drafted() const noexcept { return most_drafted_; }
  const EngineConfig& config() const noexcept { return config_; }

 private:
  friend struct EngineTestAccess;

  std::unique_ptr<Request> remove(RequestId id);
  std::int32_t guess(Request& request, std::int32_t limit, float least, const RowOffers* offers);
  // Called with a row and its locked request, or null if no request of this id is running.
  using VisitRow = std::function<void(std::int64_t row, Request* request)>;
  void visit_guesses(const RequestId* ids, std::int64_t rows, const VisitRow& visit);
  void check_kind(OfferKind kind) const;
  void check_offers(const ProposeOptions& options, std::int64_t rows) const;
  const RowOffers* read_offers(Request& request, const ProposeOptions& options, std::int64_t row,
                               bool refuse, RowOffers& read);
  void take(Request& request, RequestId id, Step step);
  template <typename Complete>
  std::vector<RowError> take_rows(const RequestId* ids, std::int64_t rows, const Token* emitted,
                                  const std::int64_t* offsets, Complete complete);
  std::int32_t leave_out_foreign(const DraftColumns& draft, std::int32_t count);
  struct Pace {
    double rate = 0.0;
    std::vector<float> weights;
  };
  Pace pace_of(const RequestId* ids, std::int64_t rows) const;
  std::int32_t limit_of(const ProposeOptions& options, std::int64_t row) const noexcept;

  const EngineConfig config_;
  const std::int32_t most_drafted_;
  const Stores stores_;
  const std::unique_ptr<MemoryBudget> budget_;
  const std::unique_ptr<AcceptanceModel> acceptance_;  // null where the drafter learns nothing
  const std::unique_ptr<OfferKinds> kinds_;
  const std::unique_ptr<OutputLengths> lengths_;  // null where drafts are chosen for all tokens
  const std::unique_ptr<RequestTable> requests_;
  const std::unique_ptr<BatchThreads> threads_;
  std::atomic<std::int64_t> num_foreign_{0};
  std::atomic<std::int64_t> num_refused_offers_{0};

  const std::unique_ptr<Mutex> rate_mutex_;
  const std::unique_ptr<EmissionRate> rate_;  // of the requests that ended
};

}  // namespace fastdraft

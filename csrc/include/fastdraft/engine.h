// The drafting engine: requests by id, one at a time or a batch in one call.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "fastdraft/draft.h"
#include "fastdraft/drafter.h"
#include "fastdraft/memory.h"
#include "fastdraft/request.h"
#include "fastdraft/step_cost.h"
#include "fastdraft/token.h"

namespace fastdraft {

using RequestId = std::int64_t;

struct EngineConfig {
  std::int32_t lookahead = 16;   // the longest draft, or the depth of the tree
  std::int32_t tree_budget = 0;  // the most tokens of a tree; 0: chains
  double token_cost = 0.02;      // where a call gives no cost of its own
  // One of these above 0 chooses a drafter instead of the calibrated one.
  std::int32_t max_ngram = 0;    // prompt lookup
  std::int32_t ngram_order = 0;  // the n-gram autocomplete
  std::int32_t recovery = 0;     // predicted outputs
  double min_probability = 0.3;  // of the n-gram autocomplete
  std::int64_t max_request_tokens = kMaxTextTokens;
  std::int64_t max_bytes = MemoryBudget::kUnlimited;
  std::int64_t vocabulary = kAllTokens;  // the target's: ids from here on are never drafted
};

// Limits that hold for one call.
struct ProposeOptions {
  std::optional<StepCost> cost;          // empty: the config's token_cost
  const std::int32_t* limits = nullptr;  // for each row, the most draft tokens; null: the lookahead
  bool padded = false;                   // each row is padded to the longest draft
};

// A failed row of a batch, and its error.
struct RowError {
  std::int64_t row;
  std::exception_ptr error;
};

// Thread-safe: calls on different requests run side by side, calls on the same
// request one after another. Ids are never given out twice.
class Engine {
 public:
  // Requests see `stores` where they are given none of their own. Throws
  // InvalidValueError.
  explicit Engine(const EngineConfig& config, Stores stores = {});
  ~Engine();

  // Indexes the prompt and, where there is one, the prediction, whose tokens must
  // be of the vocabulary; those of a prompt may stand for images. Throws
  // InvalidValueError, RequestLimitError or MemoryLimitError, and then holds
  // what it held before. O(tokens).
  // The request sees `stores` and no others; null: the engine's.
  RequestId add_request(const Token* prompt, std::int64_t prompt_size, const Token* prediction,
                        std::int64_t prediction_size, const Stores* stores = nullptr);

  // Writes the draft for the request's next step to `draft`, which has room for
  // most_drafted() tokens, and returns its length; 0 where nothing pays. Throws
  // UnknownRequestError, or InvalidValueError for a limit below 0. O(lookahead).
  std::int32_t propose(RequestId id, const ProposeOptions& options, const DraftColumns& draft);

  // The drafts of `rows` requests, chosen together: the tokens most likely to
  // be accepted anywhere in the batch, as many as pay. A row whose request is
  // unknown gets an empty draft, since another thread may just have ended it.
  // Throws InvalidValueError for a limit below 0 before any change.
  DraftBatch propose_batch(const RequestId* ids, std::int64_t rows, const ProposeOptions& options);

  // Takes the tokens that the target emitted in a step: compares them with the
  // last draft, learns, and appends them. O(1) amortised a token. Throws
  // UnknownRequestError, InvalidValueError (a negative token) or
  // RequestLimitError before any change. On MemoryLimitError the request holds,
  // and has counted, the tokens that still fitted.
  void observe(RequestId id, const Token* emitted, std::int64_t count);

  // The same for row r with emitted[offsets[r]] .. emitted[offsets[r + 1]], one
  // row after another: a row that fails costs that row alone. Returns the rows
  // that failed, rising, each with what `observe` throws. Throws
  // InvalidValueError for falling offsets before any change.
  [[nodiscard]] std::vector<RowError> observe_batch(const RequestId* ids, std::int64_t rows,
                                                    const Token* emitted,
                                                    const std::int64_t* offsets);

  DraftCounts counts(RequestId id);
  std::int64_t num_tokens(RequestId id);

  // Ends the request and frees its memory. Its text enters the live datastores
  // that it was given; one that is closed or finds no memory goes without.
  DraftCounts finish(RequestId id);

  // Ends the request and forgets it.
  DraftCounts cancel(RequestId id) { return take(id)->counts; }

  std::int64_t num_requests() const noexcept {
    return num_requests_.load(std::memory_order_relaxed);
  }
  std::int64_t bytes() const noexcept { return budget_.used(); }
  // How many tokens from datastores were removed from drafts because they are not
  // in the vocabulary.
  std::int64_t num_foreign() const noexcept { return num_foreign_.load(std::memory_order_relaxed); }
  // The most tokens that a draft can have.
  std::int32_t most_drafted() const noexcept {
    return config_.tree_budget > 0 ? config_.tree_budget : config_.lookahead;
  }
  // What was learned from all requests; null where the drafter learns nothing.
  Acceptance* acceptance() const noexcept { return policy_->acceptance(); }
  const EngineConfig& config() const noexcept { return config_; }

 private:
  friend struct EngineTestAccess;

  // A place for a request. Slots never move and are used again; the
  // generation, part of the id, tells their requests apart.
  struct Slot {
    std::mutex mutex;
    std::int64_t generation = 0;
    std::unique_ptr<Request> request;
  };
  class Locked;

  // Slots stand in chunks that double in size: chunk k has kFirstChunk << k.
  static constexpr int kLog2FirstChunk = 6;
  static constexpr int kNumChunks = 26;

  Slot* slot(std::int64_t index) const noexcept;
  std::optional<Locked> find(RequestId id) const;
  Locked lock(RequestId id) const;
  std::int64_t take_slot();
  std::unique_ptr<Request> take(RequestId id);
  std::int32_t guess(Request& request, std::int32_t limit, float least);
  static void count_step(Request& request, const Token* emitted, std::int64_t count,
                         std::int32_t drafted) noexcept;
  std::int32_t leave_out_foreign(const DraftColumns& draft, std::int32_t count);
  void check_room(const Request& request, RequestId id, std::int64_t count) const;
  std::int32_t limit_of(const ProposeOptions& options, std::int64_t row) const noexcept;

  const EngineConfig config_;
  const Stores stores_;
  MemoryBudget budget_;
  const std::unique_ptr<DraftPolicy> policy_;
  std::atomic<std::int64_t> num_requests_{0};
  std::atomic<std::int64_t> num_foreign_{0};

  std::array<std::atomic<Slot*>, kNumChunks> chunks_{};
  std::mutex slots_mutex_;  // guards the two below and the making of chunks
  std::int64_t num_slots_ = 0;
  std::vector<std::int64_t> free_slots_;

  std::mutex rate_mutex_;
  EmissionRate rate_;
};

}  // namespace fastdraft

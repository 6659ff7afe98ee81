// The tokens that may follow the nodes of one draft, weighed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft/copy_cursor.h"
#include "draft/matched_texts.h"
#include "fastdraft/draft.h"
#include "fastdraft/ngram_table.h"
#include "fastdraft/token.h"
#include "index/memory.h"
#include "policy/acceptance_model.h"
#include "policy/token_weights.h"

namespace fastdraft {

// The text that a cursor expects next: what the output copies of itself, or the prediction.
struct ExpectedText {
  const Token* next = nullptr;
  std::int32_t count = 0;
  CopyCursor::Continuation continuation;

  ExpectedText() = default;
  ExpectedText(CopyCursor::Continuation found, const Token* text, std::int64_t size) noexcept
      : continuation(found) {
    if (continuation.position < 0) return;
    next = text + continuation.position;
    count = static_cast<std::int32_t>(size) - continuation.position;
  }

  // The token `depth` tokens on; -1: none.
  Token token(std::int32_t depth) const noexcept { return depth < count ? next[depth] : -1; }

  // The value of the features kCopy and kPrediction for a candidate, where this text expects a
  // token at this depth. It depends on whether that is the candidate, on the length of the match,
  // and on whether the position in the text is a match or a guess.
  int value(std::int32_t depth, bool is_candidate) const noexcept {
    const int length = AcceptanceModel::length_value(continuation.length + depth);
    const bool guessed = depth == 0 && continuation.kind == CopyCursor::MatchKind::kGuessed;
    const int if_candidate = guessed ? 1 : 2 + std::min(4, length / 2);
    const int if_another = 8 + std::min(3, length / 3);
    return is_candidate ? if_candidate : if_another;
  }
};

// Which of the sources agree with a path of the draft, or with a token.
struct Agreement {
  MatchSet matches;
  bool copy;
  bool prediction;
};

// A cache line, since many are copied.
struct alignas(64) Candidate {
  Token token;
  float weight;  // of the evidence, and of its names: more is likelier
  Agreement agreement;
  AcceptanceModel::Evidence evidence;
  Source source;
  bool named;  // whether it has names
  TokenWeights::Indices names;
};
static_assert(sizeof(Candidate) == 64);

// Not thread-safe.
class Candidates {
 public:
  // How many of the table's likeliest tokens become candidates at a node of a tree, and of a chain.
  // In a chain, more than two take time and gain less than .1 %.
  static constexpr int kNgrams = 6;
  static constexpr int kNgramsOfChain = 2;
  // The most that follow one node.
  static constexpr std::size_t kMost = MatchedTexts::kMost + 2 + kNgrams;

  // Those that follow one node: candidates first .. last - 1.
  struct Range {
    std::size_t first;
    std::size_t last;
  };

  // For chains, or for trees, which draft from what a chain leaves out as unlikely. `weights` and
  // `ngrams` may be null.
  Candidates(const AcceptanceModel& acceptance, const TokenWeights* weights,
             const NgramTable* ngrams, MatchedTexts& matches, bool tree, MemoryBudget& budget)
      : acceptance_(acceptance),
        weights_(weights),
        ngrams_(ngrams),
        matches_(matches),
        tree_(tree),
        candidates_(kRoom, CountedAllocator<Candidate>(budget)),
        ngram_evidence_(ngrams == nullptr ? 0 : kRoom,
                        CountedAllocator<AcceptanceModel::NgramEvidence>(budget)) {}

  // Begins a draft from the matches as they are now. Gives the agreement of the root.
  Agreement begin(const ExpectedText& copy, const ExpectedText& prediction) noexcept;

  // Weighs the tokens that may follow a node. The node is `depth` tokens below the root; `last` is
  // its token, and `second` the one before that. For a chain, call this for its nodes in order:
  // each is the best candidate of the one before. With a table of n-grams, call `precede` before.
  Range expand(std::int32_t depth, const Agreement& agreement, Token last, Token second) {
    const std::size_t first = size_;
    node_token_ = last;
    if (weights_ != nullptr) before_ = TokenWeights::Before(last, second);
    if (depth < run_end_) {
      repeat(depth);
    } else {
      find(depth, agreement);
    }
    return {first, size_};
  }

  // The last tokens up to the node that is expanded next, from the last one backwards; -1: none.
  void precede(const std::array<Token, NgramTable::kOrders>& tokens) noexcept {
    before_ngrams_ = tokens;
  }

  // How many nodes from this depth on have one candidate that weighs what the last one does.
  std::int32_t alike(std::int32_t depth) const noexcept {
    if (size_ == 0 || candidates_[size_ - 1].named) return 0;
    return std::min(run_end_, weighed_until_) - depth;
  }
  // The candidate of the first of these nodes, as `expand` finds it.
  Range repeat_alike(std::int32_t depth) noexcept {
    Candidate* candidate = candidates_.data() + size_++;
    const Candidate& before = candidate[-1];
    // Field by field, and without the names: one wide load of fields that were stored just now
    // waits until their stores are done.
    candidate->token = run_[static_cast<std::size_t>(depth - run_begin_)];
    candidate->weight = before.weight;
    candidate->agreement = before.agreement;
    candidate->evidence = before.evidence;
    candidate->source = before.source;
    candidate->named = before.named;
    return {size_ - 1, size_};
  }

  // For a chain that goes on with a token that is not among these.
  void leave() noexcept { run_end_ = 0; }

  const Candidate& operator[](std::size_t i) const noexcept { return candidates_[i]; }
  const Candidate* data() const noexcept { return candidates_.data(); }

  // The table's evidence for a candidate; null: it was not asked.
  const AcceptanceModel::NgramEvidence* ngram_evidence(std::size_t i) const noexcept {
    if (ngrams_ == nullptr || ngram_evidence_[i].alone == 0) return nullptr;
    return &ngram_evidence_[i];
  }

  // Returns a candidate's weight by what has been learned since.
  float weight_now(std::size_t i) const noexcept {
    const Candidate& candidate = candidates_[i];
    float weight = acceptance_.weigh(candidate.evidence);
    if (candidate.named) weight += weights_->weigh(candidate.names);
    const AcceptanceModel::NgramEvidence* evidence = ngram_evidence(i);
    return evidence == nullptr ? weight : weight + acceptance_.weigh(*evidence);
  }

 private:
  static constexpr std::int32_t kLongestRun = 16;
  // Room that one node may need, with a run after it.
  static constexpr std::size_t kRoom = kMost + kLongestRun;
  static constexpr std::int32_t kNamedInCopies = 8;  // in tokens of a draft
  static constexpr int kLongCopy = AcceptanceModel::kLengths - 1;
  // A chain is never drafted from a match of at most this many tokens beside one of kStrong.
  static constexpr std::int32_t kWeak = 1;

  // A token that may follow the node, and the sources that expect it.
  struct Group {
    Token token;
    std::int32_t context_length, store_length;  // of the longest matches
    std::int32_t context_count, store_count;    // of the matches
    Agreement agreement;
    bool output_of_context, output_of_store;    // whether a model wrote it anywhere there
    Source source_of_context, source_of_store;  // of the longest matches, the first of equals

    std::int32_t length() const noexcept { return std::max(context_length, store_length); }
  };

  // Facts that the candidates of one node share.
  struct Node {
    std::int32_t depth;
    // The tokens that the sources expect; -1: none.
    Token copy;
    Token prediction;
    Token latest_of_context;  // by the latest of the longest matches
    Token latest_of_stores;
    int latest_values;  // of the feature kLatest where none of these two is the candidate
    int total;          // of the matches
  };

  void find(std::int32_t depth, const Agreement& agreement);
  void group_sources(const Agreement& agreement, Node& node) noexcept;
  void ask_ngrams(const Node& node) noexcept;
  const NgramTable::Guess* guess_of(Token token) const noexcept;
  NgramTable::Guess look_up(Token token) const noexcept;
  void weigh_ngrams(std::int32_t depth, std::size_t first) noexcept;
  Group& group_of(Token token) noexcept;
  void weigh(const Group& group, std::int32_t rival_length, const Node& node,
             Candidate& candidate) noexcept;
  void weigh_lengths(std::int32_t depth, const Group& group, std::int32_t rival_length,
                     Candidate& candidate) noexcept;
  void prefetch_next(std::int32_t depth) const noexcept;
  void prefetch_run(std::int32_t length) const noexcept;
  void begin_run(std::int32_t depth) noexcept;
  void weigh_again(std::int32_t depth, Candidate& candidate) noexcept;

  // The next token of a run is a candidate as the one before, with longer matches.
  void repeat(std::int32_t depth) noexcept {
    Candidate& candidate = candidates_[repeat_alike(depth).first];
    if (depth == weighed_until_) {
      weigh_again(depth, candidate);
    } else if (candidate.named) {
      name(depth, candidate);
    }
  }

  // Adds the weights that name the token to those of its evidence. Far down a long copy all tokens
  // weigh the same, which keeps long copies cheap.
  void name(std::int32_t depth, Candidate& candidate) const noexcept {
    candidate.named = weights_ != nullptr && (depth < kNamedInCopies || longest_ < kLongCopy);
    candidate.weight = evidence_weight_;
    if (!candidate.named) return;
    candidate.names = TokenWeights::indices(candidate.token, before_, longest_, rival_);
    candidate.weight += weights_->weigh(candidate.names);
  }

  const AcceptanceModel& acceptance_;
  const TokenWeights* const weights_;
  const NgramTable* const ngrams_;  // null: none
  MatchedTexts& matches_;
  const bool tree_;
  ExpectedText copy_;
  ExpectedText prediction_;
  // The first size_ are those of the draft.
  std::vector<Candidate, CountedAllocator<Candidate>> candidates_;
  std::size_t size_ = 0;
  // Beside candidates_; empty without a table.
  std::vector<AcceptanceModel::NgramEvidence, CountedAllocator<AcceptanceModel::NgramEvidence>>
      ngram_evidence_;
  std::array<Group, kMost> groups_;
  int num_groups_ = 0;

  Token node_token_ = -1;  // of the node that is expanded
  // See `precede`, and what the table has behind these tokens.
  std::array<Token, NgramTable::kOrders> before_ngrams_{};
  NgramTable::Behind ngrams_behind_;
  // The likeliest tokens by the table, all of them candidates.
  std::array<NgramTable::Guess, kNgrams> guesses_{};
  int num_guesses_ = 0;
  bool ngrams_asked_ = false;
  // State of the candidate that was weighed last.
  TokenWeights::Before before_;
  float evidence_weight_ = 0.0f;
  int longest_ = 0;
  int rival_ = 0;

  // While all sources agree on one token after another: those tokens, from the depth run_begin_ up
  // to run_end_.
  std::array<Token, kLongestRun> run_{};
  std::int32_t run_begin_ = 0;
  std::int32_t run_end_ = 0;
  std::int32_t grouped_at_ = 0;     // the depth of the lengths of groups_[0]
  std::int32_t weighed_until_ = 0;  // the next depth with other evidence
};

}  // namespace fastdraft

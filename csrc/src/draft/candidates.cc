#include "draft/candidates.h"

#include <algorithm>
#include <array>
#include <limits>

#include "index/bits.h"

namespace fastdraft {
namespace {

// The value of the feature kShare: [matches of any token][matches of the candidate]. It tells how
// many matches there are, in classes, and which part of them is the candidate's, in fifths.
constexpr auto kShareValues = [] {
  constexpr int kSizes = MatchedTexts::kMost + 1;
  std::array<std::array<std::uint8_t, kSizes>, kSizes> values{};
  for (int total = 1; total < kSizes; ++total) {
    const int of = total < 3 ? total : total < 6 ? 3 : total < 10 ? 4 : 5;
    for (int count = 0; count <= total; ++count) {
      values[static_cast<std::size_t>(total)][static_cast<std::size_t>(count)] =
          static_cast<std::uint8_t>(5 * count / total + AcceptanceModel::kShares * of);
    }
  }
  return values;
}();

}  // namespace

Agreement Candidates::begin(const ExpectedText& copy, const ExpectedText& prediction) noexcept {
  copy_ = copy;
  prediction_ = prediction;
  run_end_ = 0;
  size_ = 0;
  return {~MatchSet{0}, true, true};
}

// Finds and weighs the tokens that may follow, if the node is not in a run.
void Candidates::find(std::int32_t depth, const Agreement& agreement) {
  if (candidates_.size() < size_ + kRoom) {
    candidates_.resize(2 * size_ + kRoom);
    if (ngrams_ != nullptr) ngram_evidence_.resize(candidates_.size());
  }
  if (depth >= MatchedTexts::kCopiedAtFirst) matches_.reach(agreement.matches);
  Node node{depth,
            agreement.copy ? copy_.token(depth) : -1,
            agreement.prediction ? prediction_.token(depth) : -1,
            -1,
            -1,
            0,
            0};
  group_sources(agreement, node);
  const std::size_t first = size_;
  if (ngrams_ != nullptr) ask_ngrams(node);
  if (num_groups_ == 1) {
    weigh(groups_[0], 0, node, candidates_[size_++]);
    if (ngrams_ != nullptr) weigh_ngrams(depth, first);
    if (!tree_ && !ngrams_asked_) begin_run(depth);
    return;
  }
  if (weights_ != nullptr && num_groups_ > 0) prefetch_next(depth);
  // The longest match of all, and the longest of any other token.
  std::int32_t best = 0;
  std::int32_t second = 0;
  for (int i = 0; i < num_groups_; ++i) {
    const std::int32_t length = groups_[static_cast<std::size_t>(i)].length();
    second = std::max(second, std::min(best, length));
    best = std::max(best, length);
  }
  for (int i = 0; i < num_groups_; ++i) {
    const Group& group = groups_[static_cast<std::size_t>(i)];
    const bool dominated = best >= MatchedTexts::kStrong && group.length() <= kWeak;
    if (dominated && !tree_ && !group.agreement.copy && !group.agreement.prediction) continue;
    weigh(group, group.length() == best ? second : best, node, candidates_[size_++]);
  }
  if (ngrams_ != nullptr) weigh_ngrams(depth, first);
}

// Makes the likeliest tokens by the table candidates, unless a chain has a long match to follow.
void Candidates::ask_ngrams(const Node& node) noexcept {
  std::int32_t longest = 0;
  for (int i = 0; i < num_groups_; ++i) {
    longest = std::max(longest, groups_[static_cast<std::size_t>(i)].length());
  }
  if (node.copy >= 0) longest = std::max(longest, copy_.continuation.length + node.depth);
  if (node.prediction >= 0) {
    longest = std::max(longest, prediction_.continuation.length + node.depth);
  }
  ngrams_asked_ = tree_ || longest < MatchedTexts::kStrong;
  if (!ngrams_asked_) return;
  ngrams_behind_ = ngrams_->behind(before_ngrams_);
  num_guesses_ = ngrams_behind_.likeliest(guesses_.data(), tree_ ? kNgrams : kNgramsOfChain);
  for (int i = 0; i < num_guesses_; ++i) {
    const int before = num_groups_;
    Group& group = group_of(guesses_[static_cast<std::size_t>(i)].token);
    if (num_groups_ > before) group.source_of_context = Source::kNgrams;
  }
}

// The guess that made this token a candidate; null: there is none.
const NgramTable::Guess* Candidates::guess_of(Token token) const noexcept {
  for (int i = 0; i < num_guesses_; ++i) {
    const NgramTable::Guess& guess = guesses_[static_cast<std::size_t>(i)];
    if (guess.token == token) return &guess;
  }
  return nullptr;
}

// The probability of a token behind the longest context that it follows in the table.
NgramTable::Guess Candidates::look_up(Token token) const noexcept {
  for (int order = ngrams_behind_.orders; order > 0; --order) {
    const NgramTable::Successors& behind =
        ngrams_behind_.contexts[static_cast<std::size_t>(order) - 1];
    for (int i = 0; i < behind.size(); ++i) {
      if (behind.token(i) == token) return behind.guess(i, order);
    }
  }
  return {token, ngrams_behind_.orders, NgramTable::kHalfBits};
}

// Weighs what the table says of the node's candidates, from `first` on.
void Candidates::weigh_ngrams(std::int32_t depth, std::size_t first) noexcept {
  using A = AcceptanceModel;
  if (!ngrams_asked_) {
    // Nor for those of a run that follows.
    const auto end = std::min(size_ + kLongestRun, ngram_evidence_.size());
    std::fill(ngram_evidence_.data() + first, ngram_evidence_.data() + end, A::NgramEvidence{});
    return;
  }
  for (std::size_t c = first; c < size_; ++c) {
    Candidate& candidate = candidates_[c];
    const NgramTable::Guess* known = guess_of(candidate.token);
    const NgramTable::Guess guess = known != nullptr ? *known : look_up(candidate.token);
    const int lengths =
        candidate.evidence[A::kLengthAndRival] - A::weight_index(A::kLengthAndRival, 0);
    ngram_evidence_[c] =
        A::ngram_evidence(guess.order, guess.half_bits, lengths / A::kLengths, depth);
    candidate.weight += acceptance_.weigh(ngram_evidence_[c]);
  }
}

// Asks for the weights of what most likely follows the candidate with the longest match.
void Candidates::prefetch_next(std::int32_t depth) const noexcept {
  const Group* best = groups_.data();
  for (int i = 1; i < num_groups_; ++i) {
    const Group& group = groups_[static_cast<std::size_t>(i)];
    if (group.length() > best->length()) best = &group;
  }
  if (best->agreement.matches == 0) return;
  const Token next = matches_[lowest_bit(best->agreement.matches)].token(depth + 1);
  if (next < 0) return;
  const TokenWeights::Before before(best->token, node_token_);
  weights_->prefetch(before);
  weights_->prefetch(next, before);
}

// Groups the sources by the token that they expect.
// In branches: masks and conditional moves took 0.99 to 1.02 of the time on an AMD EPYC.
void Candidates::group_sources(const Agreement& agreement, Node& node) noexcept {
  num_groups_ = 0;
  std::int32_t longest_of_context = 0;
  std::int32_t longest_of_stores = 0;
  const Token* latest_of_context = nullptr;
  for (MatchSet left = agreement.matches & matches_.all(); left != 0; left &= left - 1) {
    const MatchedText& match = matches_[lowest_bit(left)];
    const Token token = match.token(node.depth);
    if (token < 0) continue;
    const std::int32_t length = std::min(match.length + node.depth, Datastore::kLongestMatch);
    Group& group = group_of(token);
    group.agreement.matches |= left & -left;
    ++node.total;
    if (match.stored()) {
      if (length > group.store_length) {
        group.store_length = length;
        group.source_of_store = match.source;
      }
      ++group.store_count;
      group.output_of_store |= match.output;
      // They come in this order: of the longest, each store's latest first.
      if (length > longest_of_stores) {
        longest_of_stores = length;
        node.latest_of_stores = token;
      }
    } else {
      if (length > group.context_length) {
        group.context_length = length;
        group.source_of_context = match.source;
      }
      ++group.context_count;
      group.output_of_context |= match.output;
      if (length > longest_of_context ||
          (length == longest_of_context && match.next > latest_of_context)) {
        longest_of_context = length;
        node.latest_of_context = token;
        latest_of_context = match.next;
      }
    }
  }
  node.latest_values = (node.latest_of_context < 0 ? 0 : 2) + (node.latest_of_stores < 0 ? 0 : 6);
  if (node.copy >= 0) group_of(node.copy).agreement.copy = true;
  if (node.prediction >= 0) group_of(node.prediction).agreement.prediction = true;
}

Candidates::Group& Candidates::group_of(Token token) noexcept {
  Group* group = groups_.data();
  const Group* const last = group + num_groups_;
  while (group != last && group->token != token) ++group;
  if (group == last) {
    ++num_groups_;
    *group = {token,           0, 0, 0, 0, {0, false, false}, false, false, Source::kContext,
              Source::kContext};
  }
  return *group;
}

// All sources agree on the only token at this depth. Finds for how long they go on to agree: in a
// long copy for all that is drafted.
void Candidates::begin_run(std::int32_t depth) noexcept {
  grouped_at_ = depth;
  run_begin_ = depth + 1;
  weighed_until_ = run_begin_;
  std::int32_t length = kLongestRun;
  bool first = true;
  // Cuts the run to what a source of `count` tokens expects. Where it has a period, it begins again
  // at its end.
  const auto follow = [&](const Token* next, std::int32_t count, bool period) {
    std::int32_t done = 0;
    while (done < length) {
      std::int32_t at = run_begin_ + done;
      if (at >= count) {
        if (!period) break;
        at %= count;
      }
      const std::int32_t part = std::min(length - done, count - at);
      Token* run = run_.data() + done;
      if (first) {
        std::copy_n(next + at, part, run);
        done += part;
      } else {
        const auto same = static_cast<std::int32_t>(common_prefix(next + at, run, part));
        done += same;
        if (same < part) break;
      }
    }
    first = false;
    length = done;
  };
  const Agreement& agreement = groups_[0].agreement;
  for (MatchSet left = agreement.matches; left != 0; left &= left - 1) {
    const MatchedText& match = matches_[lowest_bit(left)];
    follow(match.next, match.count, !match.stored());
  }
  if (agreement.copy) follow(copy_.next, copy_.count, false);
  if (agreement.prediction) follow(prediction_.next, prediction_.count, false);
  run_end_ = run_begin_ + length;
  if (weights_ != nullptr) prefetch_run(length);
}

// Asks for the weights of the tokens of a run that are named.
void Candidates::prefetch_run(std::int32_t length) const noexcept {
  Token second = node_token_;
  Token last = groups_[0].token;
  for (std::int32_t i = 0; i < std::min(length, kNamedInCopies - run_begin_); ++i) {
    const TokenWeights::Before before(last, second);
    const Token token = run_[static_cast<std::size_t>(i)];
    weights_->prefetch(before);
    weights_->prefetch(token, before);
    second = last;
    last = token;
  }
}

// Weighs a token of a run whose evidence differs from that of the token before in lengths.
void Candidates::weigh_again(std::int32_t depth, Candidate& candidate) noexcept {
  using A = AcceptanceModel;
  Group& group = groups_[0];
  weighed_until_ = std::numeric_limits<std::int32_t>::max();
  // For a source that matches `length` tokens.
  const auto until = [&](std::int32_t length) {
    weighed_until_ = std::min(weighed_until_, depth + A::alike_after(length));
  };
  const std::int32_t longer = depth - grouped_at_;
  grouped_at_ = depth;
  if (group.context_count > 0) {
    group.context_length = std::min(group.context_length + longer, Datastore::kLongestMatch);
    until(group.context_length);
  }
  if (group.store_count > 0) {
    group.store_length = std::min(group.store_length + longer, Datastore::kLongestMatch);
    until(group.store_length);
  }
  if (group.agreement.copy) {
    candidate.evidence[A::kCopy] = A::weight_index(A::kCopy, copy_.value(depth, true));
    until(copy_.continuation.length + depth);
  }
  if (group.agreement.prediction) {
    candidate.evidence[A::kPrediction] =
        A::weight_index(A::kPrediction, prediction_.value(depth, true));
    until(prediction_.continuation.length + depth);
  }
  weigh_lengths(depth, group, 0, candidate);
}

// Weighs a candidate whose other evidence is known.
void Candidates::weigh_lengths(std::int32_t depth, const Group& group, std::int32_t rival_length,
                               Candidate& candidate) noexcept {
  using A = AcceptanceModel;
  const int context = A::length_value(group.context_length);
  const int store = A::length_value(group.store_length);
  const int rival = A::length_value(rival_length);
  const int longest = std::max(context, store);
  const int written = 2 * group.output_of_context + group.output_of_store;
  A::Evidence& evidence = candidate.evidence;
  evidence[A::kContextLength] = A::weight_index(A::kContextLength, context);
  evidence[A::kStoreLength] = A::weight_index(A::kStoreLength, store);
  evidence[A::kRivalLength] = A::weight_index(A::kRivalLength, rival);
  evidence[A::kBothLengths] = A::weight_index(A::kBothLengths, context * A::kLengths + store);
  evidence[A::kLengthAndRival] = A::weight_index(A::kLengthAndRival, longest * A::kLengths + rival);
  evidence[A::kOutput] = A::weight_index(A::kOutput, written * A::kLengths + longest);
  evidence_weight_ = acceptance_.weigh(evidence);
  longest_ = longest;
  rival_ = rival;
  name(depth, candidate);
  candidate.source = group.agreement.prediction                  ? Source::kPrediction
                     : group.store_length > group.context_length ? group.source_of_store
                                                                 : group.source_of_context;
}

void Candidates::weigh(const Group& group, std::int32_t rival_length, const Node& node,
                       Candidate& candidate) noexcept {
  using A = AcceptanceModel;
  candidate.token = group.token;
  candidate.agreement = group.agreement;
  A::Evidence& evidence = candidate.evidence;
  evidence[A::kContextCount] =
      A::weight_index(A::kContextCount, A::count_value(group.context_count));
  evidence[A::kStoreCount] = A::weight_index(A::kStoreCount, A::count_value(group.store_count));
  evidence[A::kLatest] = A::weight_index(
      A::kLatest, node.latest_values - static_cast<int>(node.latest_of_context == group.token) -
                      3 * static_cast<int>(node.latest_of_stores == group.token));
  evidence[A::kCopy] =
      A::weight_index(A::kCopy, node.copy < 0 ? 0 : copy_.value(node.depth, group.agreement.copy));
  evidence[A::kPrediction] = A::weight_index(
      A::kPrediction,
      node.prediction < 0 ? 0 : prediction_.value(node.depth, group.agreement.prediction));
  const auto total = static_cast<std::size_t>(node.total);
  const auto count =
      static_cast<std::size_t>(group.context_count) + static_cast<std::size_t>(group.store_count);
  evidence[A::kShare] = A::weight_index(A::kShare, kShareValues[total][count]);
  weigh_lengths(node.depth, group, rival_length, candidate);
}

}  // namespace fastdraft

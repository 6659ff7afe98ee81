#include "candidates.h"

namespace fastdraft {

Agreement Candidates::begin(const ExpectedText& copy, const ExpectedText& prediction) noexcept {
  copy_ = copy;
  prediction_ = prediction;
  repeating_ = false;
  candidates_.clear();
  return {~MatchSet{0}, true, true};
}

Candidates::Range Candidates::expand(std::int32_t depth, const Agreement& agreement) {
  const std::size_t first = candidates_.size();
  Expected expected{agreement.copy ? copy_.token(depth) : -1,
                    agreement.prediction ? prediction_.token(depth) : -1, -1, -1};
  if (repeating_ && repeat(depth, expected)) return {first, candidates_.size()};
  num_groups_ = 0;
  int total = 0;
  std::int32_t longest_of_context = 0;
  std::int32_t longest_of_stores = 0;
  const Token* latest_of_context = nullptr;
  for (int i = 0; i < matches_.size(); ++i) {
    if ((agreement.matches >> i & 1) == 0) continue;
    const MatchedText& match = matches_[i];
    const Token token = match.token(depth);
    if (token < 0) continue;
    const std::int32_t length = std::min(match.length + depth, Datastore::kLongestMatch);
    Group& group = group_of(token);
    group.agreement.matches |= MatchSet{1} << i;
    ++total;
    if (match.stored) {
      group.store_length = std::max(group.store_length, length);
      ++group.store_count;
      group.output_of_store |= match.output;
      // They come in this order: of the longest, each store's latest first.
      if (length > longest_of_stores) {
        longest_of_stores = length;
        expected.latest_of_stores = token;
      }
    } else {
      group.context_length = std::max(group.context_length, length);
      ++group.context_count;
      group.output_of_context |= match.output;
      if (length > longest_of_context ||
          (length == longest_of_context && match.next > latest_of_context)) {
        longest_of_context = length;
        expected.latest_of_context = token;
        latest_of_context = match.next;
      }
    }
  }
  if (expected.copy >= 0) group_of(expected.copy).agreement.copy = true;
  if (expected.prediction >= 0) group_of(expected.prediction).agreement.prediction = true;

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
    weigh(group, depth, total, group.length() == best ? second : best, expected);
  }
  repeating_ = !tree_ && num_groups_ == 1;
  if (repeating_) begin_repeating();
  return {first, candidates_.size()};
}

Candidates::Group& Candidates::group_of(Token token) noexcept {
  for (int i = 0; i < num_groups_; ++i) {
    if (groups_[static_cast<std::size_t>(i)].token == token) {
      return groups_[static_cast<std::size_t>(i)];
    }
  }
  Group& group = groups_[static_cast<std::size_t>(num_groups_++)];
  group = {token, 0, 0, 0, 0, {0, false, false}, false, false};
  return group;
}

// From the next node on all sources of groups_[0] may agree.
void Candidates::begin_repeating() noexcept {
  repeated_values_ = {-1, -1, -1, -1};
  num_agreeing_ = 0;
  for (int i = 0; i < matches_.size(); ++i) {
    if ((groups_[0].agreement.matches >> i & 1) == 0) continue;
    agreeing_[static_cast<std::size_t>(num_agreeing_++)] = static_cast<std::uint8_t>(i);
  }
}

// If all sources agreed on the last token, they may agree on the next one too. It is then weighed
// as the last one was, with longer matches. Returns whether they agree; in a long copy they do
// for nearly every token.
bool Candidates::repeat(std::int32_t depth, Expected expected) {
  Group& group = groups_[0];
  Token token = std::max(expected.copy, expected.prediction);
  for (int i = 0; i < num_agreeing_; ++i) {
    const Token next = matches_[agreeing_[static_cast<std::size_t>(i)]].token(depth);
    if (next < 0) return false;
    token = next;
    if (next != matches_[agreeing_[0]].token(depth)) return false;
  }
  if (token < 0 || (expected.copy >= 0 && expected.copy != token) ||
      (expected.prediction >= 0 && expected.prediction != token)) {
    return false;
  }
  const auto values = [&] {
    return std::array<int, 4>{AcceptanceModel::length_value(group.context_length),
                              AcceptanceModel::length_value(group.store_length),
                              copy_.value(depth, expected.copy, token),
                              prediction_.value(depth, expected.prediction, token)};
  };
  group.token = token;
  group.agreement.copy = expected.copy >= 0;
  group.agreement.prediction = expected.prediction >= 0;
  if (group.context_count > 0) {
    group.context_length = std::min(group.context_length + 1, Datastore::kLongestMatch);
    expected.latest_of_context = token;
  }
  if (group.store_count > 0) {
    group.store_length = std::min(group.store_length + 1, Datastore::kLongestMatch);
    expected.latest_of_stores = token;
  }
  if (values() == repeated_values_) {
    Candidate again = candidates_.back();
    again.token = token;
    candidates_.push_back(again);
  } else {
    repeated_values_ = values();
    weigh(group, depth, group.context_count + group.store_count, 0, expected);
  }
  return true;
}

void Candidates::weigh(const Group& group, std::int32_t depth, int total, std::int32_t rival_length,
                       const Expected& expected) {
  const auto relation = [&](Token token) { return token < 0 ? 0 : token == group.token ? 1 : 2; };
  const int context = AcceptanceModel::length_value(group.context_length);
  const int store = AcceptanceModel::length_value(group.store_length);
  const int rival = AcceptanceModel::length_value(rival_length);
  const int fifths = 5 * (group.context_count + group.store_count);
  // fifths / total, and less than a division.
  const int share = total == 0 ? 0
                               : (fifths >= total) + (fifths >= 2 * total) + (fifths >= 3 * total) +
                                     (fifths >= 4 * total) + (fifths >= 5 * total);
  const int of = total < 3 ? total : total < 6 ? 3 : total < 10 ? 4 : 5;
  Candidate& candidate = candidates_.emplace_back();
  candidate.token = group.token;
  candidate.agreement = group.agreement;
  candidate.source = group.agreement.prediction                  ? Source::kPrediction
                     : group.store_length > group.context_length ? Source::kDatastore
                                                                 : Source::kContext;
  using A = AcceptanceModel;
  const int longest = std::max(context, store);
  const int written = 2 * group.output_of_context + group.output_of_store;
  candidate.evidence = {
      A::place(A::kContextLength, context),
      A::place(A::kStoreLength, store),
      A::place(A::kRivalLength, rival),
      A::place(A::kContextCount, A::count_value(group.context_count)),
      A::place(A::kStoreCount, A::count_value(group.store_count)),
      A::place(A::kLatest,
               relation(expected.latest_of_context) + 3 * relation(expected.latest_of_stores)),
      A::place(A::kCopy, copy_.value(depth, expected.copy, group.token)),
      A::place(A::kPrediction, prediction_.value(depth, expected.prediction, group.token)),
      A::place(A::kBothLengths, context * A::kLengths + store),
      A::place(A::kShare, share + A::kShares * of),
      A::place(A::kLengthAndRival, longest * A::kLengths + rival),
      A::place(A::kOutput, written * A::kLengths + longest)};
  candidate.weight = acceptance_.weigh(candidate.evidence);
}

}  // namespace fastdraft

#include "draft/matched_texts.h"

#include <algorithm>
#include <cstddef>
#include <optional>

#include "index/bits.h"
#include "store/running_texts.h"

namespace fastdraft {

MatchedTexts::MatchedTexts(const DrafterInputs& inputs, bool tree)
    : context_(inputs.context),
      templates_size_(inputs.templates_size),
      prompt_size_(inputs.context.size()),
      stores_(inputs.stores),
      num_entered_(inputs.num_entered),
      lookahead_(inputs.lookahead),
      tree_(tree),
      weights_(inputs.weights.get()),
      stored_tokens_(CountedAllocator<Token>(inputs.budget)) {
  if (!stores_.empty()) {
    stored_tokens_.resize(static_cast<std::size_t>(most_stored()) *
                          static_cast<std::size_t>(lookahead_));
  }
}

void MatchedTexts::find() {
  size_ = 0;
  num_stored_ = 0;
  const std::int32_t repeated = tree_ ? 0 : context_.repeated_suffix().length;
  // A chain needs no match shorter than the text's own repeated suffix. On the recorded requests
  // that, and leaving out the last token's other occurrences, costs a thousandth of the speed, and
  // saves a third of the time.
  const std::int32_t shortest = std::clamp(repeated, 1, Datastore::kOrders.front());
  const auto size = repeated < kClear ? stores_.size() : 0;
  // Memory that the first store will read arrives while the text itself is searched.
  std::optional<Datastore::Reader> first;
  Datastore::Lookup lookup(context_.text(), context_.size(), shortest);
  if (size > 0) first.emplace(*stores_[0]).begin(lookup);
  if (weights_ != nullptr && context_.size() > 1) {
    const Token* end = context_.text() + context_.size();
    before_ = TokenWeights::Before(end[-1], end[-2]);
    weights_->prefetch(before_);
  }
  find_suffixes();
  prefetch_weights(0);
  if (first) first->go_on(lookup);
  const int suffixes = size_;
  if (repeated < kStrong) find_last_token();
  prefetch_weights(suffixes);
  const int own = size_;
  if (first) add_stored(*first, lookup, source_of(0), stores_[0].get());
  first.reset();
  prefetch_weights(own);
  for (std::size_t i = 0; i < size; ++i) {
    if (i > 0) {
      const Datastore::Reader reader(*stores_[i]);
      reader.begin(lookup);
      reader.go_on(lookup);
      add_stored(reader, lookup, source_of(i), stores_[i].get());
    }
    const RunningTexts* running = stores_[i]->running();
    if (running != nullptr && !running->empty()) {
      const RunningTexts::Reader reader(*running, &context_);
      add_stored(reader, lookup, Source::kRunning, nullptr);
    }
  }
}

// Asks for the weights of the tokens that follow the matches from this one on.
void MatchedTexts::prefetch_weights(int first) const noexcept {
  if (weights_ == nullptr) return;
  Token before = -1;
  for (int i = first; i < size_; ++i) {
    const Token token = matches_[static_cast<std::size_t>(i)].next[0];
    if (token != before) weights_->prefetch(token, before_);
    before = token;
  }
}

bool MatchedTexts::approach(int step) noexcept {
  if (step < kSuffixes) {
    way_ = step == 0 ? context_.repeated_suffix() : context_.shorter(way_);
    if (way_.length > 0) context_.prefetch_ends(way_.state);
    return true;
  }
  if (step == kSuffixes) {
    if (!tree_ && context_.repeated_suffix().length >= kStrong) return false;
    position_ = static_cast<std::int32_t>(context_.size()) - 1;
  }
  if (position_ >= 0) position_ = context_.previous(position_);
  if (position_ >= 0) context_.prefetch_position(position_);
  return position_ >= 0 && step < kSuffixes + (tree_ ? kTokensOfTree : kTokens);
}

void MatchedTexts::add_of_context(std::int32_t position, std::int32_t length) noexcept {
  const Token* next = context_.text() + position;
  matches_[static_cast<std::size_t>(size_++)] = {
      next,
      static_cast<std::int32_t>(context_.size()) - position,
      std::min(length, Datastore::kLongestMatch),
      position < templates_size_ ? Source::kTemplate : Source::kContext,
      position >= prompt_size_,
      0};
}

// Returns whether one of the first `size` matches is at this position of the context.
bool MatchedTexts::found(std::int32_t position, int size) const noexcept {
  const Token* next = context_.text() + position;
  for (int i = 0; i < size; ++i) {
    if (matches_[static_cast<std::size_t>(i)].next == next) return true;
  }
  return false;
}

void MatchedTexts::find_suffixes() noexcept {
  Match match = context_.repeated_suffix();
  for (int i = 0; i < kSuffixes && match.length > 0; ++i) {
    for (const std::int32_t end :
         {context_.latest_end(match.state), context_.first_end(match.state)}) {
      if (!found(end + 1, size_)) add_of_context(end + 1, match.length);
    }
    match = context_.shorter(match);
  }
}

void MatchedTexts::find_last_token() noexcept {
  const auto last = static_cast<std::int32_t>(context_.size()) - 1;
  if (last < 0) return;
  const Token* text = context_.text();
  const int suffixes = size_;
  std::int32_t position = context_.previous(last);
  for (int i = tree_ ? kTokensOfTree : kTokens; i > 0 && position >= 0; --i) {
    if (!found(position + 1, suffixes)) {
      const std::int64_t length = common_suffix(text + position, text + last,
                                                std::min(Datastore::kLongestMatch - 1, position));
      add_of_context(position + 1, static_cast<std::int32_t>(length) + 1);
    }
    position = context_.previous(position);
  }
}

// No text enters a frozen store, and none runs there.
Source MatchedTexts::source_of(std::size_t store) const noexcept {
  const bool own = store < num_entered_ && stores_[store]->running() != nullptr;
  return own ? Source::kDatastore : Source::kReadOnly;
}

// Adds what a store holds, or, without `store`, what other running requests have written: text that
// may have moved once the reader is gone, so all of it is copied at once.
//
// All datastores share most_stored() slots, so that none hides what another one has.
template <typename Reader>
void MatchedTexts::add_stored(const Reader& reader, const Datastore::Lookup& lookup, Source source,
                              const Datastore* store) {
  const std::int32_t most = store == nullptr ? lookahead_ : std::min(lookahead_, kCopiedAtFirst);
  std::array<Occurrence, kStoredOfTree> found;
  const int count = reader.find(lookup, found.data(), most_stored(),
                                tree_ ? 2 * kStoredOfTree : Datastore::kLinks);
  std::int32_t rank = 0;
  for (int i = 0; i < count; ++i) {
    const Occurrence& occurrence = found[static_cast<std::size_t>(i)];
    const bool equal = i > 0 && found[static_cast<std::size_t>(i) - 1].length == occurrence.length;
    rank = equal ? rank + 1 : 0;
    const auto last = matches_.begin() + size_;
    auto at = last;
    for (; at != last - num_stored_; --at) {
      const MatchedText& kept = *(at - 1);
      const bool longer = kept.length > occurrence.length;
      if (longer || (kept.length == occurrence.length && kept.rank <= rank)) break;
    }
    const bool full = num_stored_ == most_stored();
    if (full && at == last) return;  // nor has the store any that is better
    // If all slots are taken, the worst match's gives way.
    const std::size_t slot = full ? slot_of(*(last - 1)) : static_cast<std::size_t>(num_stored_);
    Token* tokens = stored_tokens_.data() + slot * static_cast<std::size_t>(lookahead_);
    const auto copied = static_cast<std::int32_t>(reader.copy(occurrence.next, tokens, most));
    if (copied == 0) continue;
    rests_[slot] = {copied == most && most < lookahead_ ? store : nullptr,
                    occurrence.next + copied};
    if (!full) {
      ++num_stored_;
      ++size_;
    }
    std::copy_backward(at, full ? last - 1 : last, full ? last : last + 1);
    *at = {tokens, copied, occurrence.length, source, occurrence.output, rank};
  }
}

void MatchedTexts::reach(MatchSet matches) {
  for (MatchSet left = matches & all(); left != 0; left &= left - 1) {
    MatchedText& match = matches_[static_cast<std::size_t>(lowest_bit(left))];
    if (!match.stored()) continue;
    const std::size_t slot = slot_of(match);
    const auto [store, position] = rests_[slot];
    if (store == nullptr) continue;
    rests_[slot].store = nullptr;
    Token* tokens = stored_tokens_.data() + slot * static_cast<std::size_t>(lookahead_);
    const Datastore::Reader reader(*store);
    match.count += static_cast<std::int32_t>(
        reader.copy(position, tokens + match.count, lookahead_ - match.count));
  }
}

}  // namespace fastdraft

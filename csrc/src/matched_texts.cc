#include "matched_texts.h"

#include <algorithm>
#include <cstddef>

#include "running_texts.h"

namespace fastdraft {

MatchedTexts::MatchedTexts(const DrafterInputs& inputs, bool tree)
    : context_(inputs.context),
      templates_size_(inputs.templates_size),
      prompt_size_(inputs.context.size()),
      stores_(inputs.stores),
      num_entered_(inputs.num_entered),
      lookahead_(inputs.lookahead),
      tree_(tree) {
  if (!stores_.empty()) {
    stored_tokens_.resize(static_cast<std::size_t>(most_stored()) *
                          static_cast<std::size_t>(lookahead_));
  }
}

void MatchedTexts::find() {
  size_ = 0;
  num_stored_ = 0;
  find_suffixes();
  const std::int32_t repeated = tree_ ? 0 : context_.repeated_suffix().length;
  if (repeated < kStrong) find_last_token();
  if (repeated < kClear) {
    const std::int32_t shortest = std::clamp(repeated, 1, Datastore::kOrders.front());
    for (std::size_t i = 0; i < stores_.size(); ++i) {
      find_in(*stores_[i], i < num_entered_, shortest);
    }
  }
}

void MatchedTexts::add_of_context(std::int32_t position, std::int32_t length) noexcept {
  const Token* next = context_.text() + position;
  for (int i = 0; i < size_; ++i) {
    if (matches_[static_cast<std::size_t>(i)].next == next) return;
  }
  matches_[static_cast<std::size_t>(size_++)] = {
      next,
      static_cast<std::int32_t>(context_.size()) - position,
      std::min(length, Datastore::kLongestMatch),
      position < templates_size_ ? Source::kTemplate : Source::kContext,
      position >= prompt_size_,
      0};
}

void MatchedTexts::find_suffixes() noexcept {
  Match match = context_.repeated_suffix();
  for (int i = 0; i < kSuffixes && match.length > 0; ++i) {
    add_of_context(context_.latest_end(match.state) + 1, match.length);
    add_of_context(context_.first_end(match.state) + 1, match.length);
    match = context_.shorter(match);
  }
}

void MatchedTexts::find_last_token() noexcept {
  const auto last = static_cast<std::int32_t>(context_.size()) - 1;
  if (last < 0) return;
  const Token* text = context_.text();
  std::int32_t position = context_.previous(last);
  for (int i = tree_ ? kTokensOfTree : kTokens; i > 0 && position >= 0; --i) {
    const std::int64_t length = common_suffix(text + position, text + last,
                                              std::min(Datastore::kLongestMatch - 1, position));
    add_of_context(position + 1, static_cast<std::int32_t>(length) + 1);
    position = context_.previous(position);
  }
}

// Adds the matches of at least `shortest` tokens: a chain needs none shorter than the text's own
// repeated suffix. On the recorded requests that, and leaving out the last token's other
// occurrences, costs a thousandth of the speed, and saves a third of the time.
//
// All datastores share most_stored() places, so that none hides what another one has. A live one
// is searched twice: what it holds, and what other running requests have written.
void MatchedTexts::find_in(Datastore& store, bool entered, std::int32_t shortest) {
  // No text enters a frozen one, and none runs there.
  const RunningTexts* running = store.running();
  const bool own = entered && running != nullptr;
  find_in(Datastore::Reader(store), own ? Source::kDatastore : Source::kReadOnly, shortest);
  if (running != nullptr && running->has_others(&context_)) {
    find_in(RunningTexts::Reader(*running, &context_), Source::kRunning, shortest);
  }
}

template <typename Reader>
void MatchedTexts::find_in(const Reader& reader, Source source, std::int32_t shortest) {
  std::array<Occurrence, kStoredOfTree> found;
  const int count = reader.find(context_.text(), context_.size(), found.data(), most_stored(),
                                tree_ ? 2 * kStoredOfTree : Datastore::kLinks, shortest);
  std::int32_t rank = 0;
  for (int i = 0; i < count; ++i) {
    const Occurrence& place = found[static_cast<std::size_t>(i)];
    const bool equal = i > 0 && found[static_cast<std::size_t>(i) - 1].length == place.length;
    rank = equal ? rank + 1 : 0;
    const auto last = matches_.begin() + size_;
    auto at = last;
    for (; at != last - num_stored_; --at) {
      const MatchedText& kept = *(at - 1);
      if (kept.length > place.length || (kept.length == place.length && kept.rank <= rank)) break;
    }
    const bool full = num_stored_ == most_stored();
    if (full && at == last) return;  // nor has the store any that is better
    // Where all places are taken, the worst match's gives way.
    Token* tokens = stored_tokens_.data() + (full ? (last - 1)->next - stored_tokens_.data()
                                                  : std::ptrdiff_t{num_stored_} * lookahead_);
    const auto copied = static_cast<std::int32_t>(reader.copy(place.next, tokens, lookahead_));
    if (copied == 0) continue;
    if (!full) {
      ++num_stored_;
      ++size_;
    }
    std::copy_backward(at, full ? last - 1 : last, full ? last : last + 1);
    *at = {tokens, copied, place.length, source, place.output, rank};
  }
}

}  // namespace fastdraft

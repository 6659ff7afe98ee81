#include "draft/ngram_model.h"

namespace fastdraft {

NgramModel::NgramModel(const Token* text, std::int64_t size, std::int32_t order,
                       MemoryBudget& budget)
    : order_(order), ngrams_(budget), transitions_(budget) {
  ngrams_.reserve(1);
  ngrams_.push_back({-1, kNoState});
  Context context;
  for (std::int64_t i = 0; i < size; ++i) context = add(context, text[i]);
}

// Counts `token` after a context of the text and after all of its suffixes, and
// returns the context of both.
NgramModel::Context NgramModel::add(Context context, Token token) {
  StateId first = kNoState;
  StateId longer = kNoState;
  for (StateId at = context.ngram; at != kNoState; at = ngrams_[at].shorter) {
    ngrams_.reserve(ngrams_.size() + 1);
    const auto fresh = static_cast<StateId>(ngrams_.size());
    StateId ngram =
        transitions_.find_or_insert(ngrams_[at].longer, token, fresh, token_of()).target;
    if (ngram == kNoState) {
      ngram = fresh;
      ngrams_.push_back({token, 0});
    }
    if (longer == kNoState) {
      first = ngram;
    } else {
      ngrams_[longer].shorter = ngram;
    }
    longer = ngram;
    Ngram& context_ngram = ngrams_[at];
    ++ngrams_[ngram].count;
    ++context_ngram.followed;
    if (context_ngram.most_frequent == kNoState ||
        ngrams_[ngram].count >= ngrams_[context_ngram.most_frequent].count) {
      context_ngram.most_frequent = ngram;
    }
  }
  return grown(first, context.length + 1);
}

NgramModel::Context NgramModel::advance(Context context, Token token) const noexcept {
  for (;;) {
    const StateId next = transitions_.find(ngrams_[context.ngram].longer, token, token_of());
    if (next != kNoState) return grown(next, context.length + 1);
    if (context.length == 0) return {};
    context = shorten(context);
  }
}

NgramModel::Continuation NgramModel::continuation(Context context) const noexcept {
  while (ngrams_[context.ngram].followed == 0) context = shorten(context);
  const Ngram& ngram = ngrams_[context.ngram];
  const Ngram& next = ngrams_[ngram.most_frequent];
  return {next.token, static_cast<double>(next.count) / ngram.followed,
          grown(ngram.most_frequent, context.length + 1)};
}

}  // namespace fastdraft

// Counts which tokens follow the n-grams of a text.
#pragma once

#include <cstdint>

#include "fastdraft/config.h"
#include "fastdraft/token.h"
#include "index/memory.h"
#include "index/transition_table.h"

namespace fastdraft {

// An n-gram model of one text: how often each of its n-grams, of 1 to `order`
// tokens, goes on with which token. They form a trie, with a link from each
// n-gram to the one without its first token.
//
// Built in O(order) expected a token; at most `order` n-grams of 28 bytes a token
// and their edges, about 50 bytes a token of source code at order 4. Immutable
// afterwards: const calls may overlap.
class NgramModel {
 public:
  // Node numbers of the longest text fit 32 bits.
  static_assert(kMaxTextTokens * NgramConfig::kMaxOrder < (std::int64_t{1} << 31));

  // The longest suffix of some text that the model knows, shorter than its
  // order. As it comes: of an empty text.
  struct Context {
    StateId ngram = 0;
    std::int32_t length = 0;
  };

  // How a context most often goes on; of equally frequent tokens, with the one
  // that followed it last.
  struct Continuation {
    Token token;
    double probability;  // the token's share of all that followed the context
    Context context;     // that of the context and the token
  };

  // Memory is counted in `budget`, which must outlive the model. `order` is 1 to
  // NgramConfig::kMaxOrder. Throws MemoryLimitError.
  NgramModel(const Token* text, std::int64_t size, std::int32_t order, MemoryBudget& budget);

  // Returns whether the text is empty, so that nothing goes on.
  bool empty() const noexcept { return ngrams_.size() == 1; }

  // The context of a text with `token` after it, given its own. O(1) amortised.
  Context advance(Context context, Token token) const noexcept;

  // If nothing follows a context, what follows the longest suffix of it that
  // does go on, down to none: then it is the most frequent token. O(order).
  // The model must not be empty.
  Continuation continuation(Context context) const noexcept;

 private:
  struct Ngram {
    Token token;                       // the n-gram's last
    StateId shorter;                   // the n-gram without its first token
    std::int32_t count = 0;            // how often it occurs in the text,
    std::int32_t followed = 0;         // and how often with a token after it
    StateId most_frequent = kNoState;  // of the n-grams that are it and a token
    Edges longer{};
  };

  auto token_of() const noexcept {
    return [this](StateId ngram) { return ngrams_[ngram].token; };
  }
  Context add(Context context, Token token);
  Context shorten(Context context) const noexcept {
    return {ngrams_[context.ngram].shorter, context.length - 1};
  }
  Context grown(StateId ngram, std::int32_t length) const noexcept {
    return length < order_ ? Context{ngram, length} : shorten({ngram, length});
  }

  const std::int32_t order_;
  FlatArray<Ngram> ngrams_;
  TransitionTable transitions_;
};

}  // namespace fastdraft

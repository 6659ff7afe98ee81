// Finds where a request's last tokens occur earlier in its text and in datastores, and what
// followed them there.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "draft/drafter.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "index/memory.h"
#include "index/suffix_automaton.h"

namespace fastdraft {

// The text that followed an earlier occurrence of the request's last tokens.
struct MatchedText {
  const Token* next;
  // In the request's own text, after `count` tokens the copy starts over, as LZ77's
  // does: a period repeats. In a datastore, there are no more.
  std::int32_t count;
  std::int32_t
      length;  // how many of the request's last tokens precede it, Datastore::kLongestMatch at most
  Source source;
  bool output;  // whether a model wrote it
  // In a datastore: how many later matches of this length the datastore has.
  std::int32_t rank;

  // Returns whether it is in a datastore.
  bool stored() const noexcept { return is_stored(source); }
  // The token `depth` tokens on; -1: none.
  Token token(std::int32_t depth) const noexcept {
    if (depth < count) return next[depth];
    return stored() ? -1 : next[depth % count];
  }
};

// Which of the matches.
using MatchSet = std::uint64_t;

// The matches that one draft is made from. On the recorded requests more of any kind
// gained less than a thousandth, but for trees, which draft from what is rare too.
//
// Not thread-safe.
class MatchedTexts {
  static constexpr int kSuffixes = 3;  // repeated suffixes of the text, the longest ones
  static constexpr int kTokens = 8;    // earlier occurrences of its last token
  static constexpr int kTokensOfTree = 16;
  static constexpr int kStored = 8;  // occurrences in the datastores
  static constexpr int kStoredOfTree = 32;

 public:
  static constexpr int kMost = 2 * kSuffixes + kTokensOfTree + kStoredOfTree;
  // Beside a repeated suffix or another match of this many tokens, a chain is never drafted from
  // a match of one token.
  static constexpr std::int32_t kStrong = 4;

  MatchedTexts(const DrafterInputs& inputs, bool tree);

  // Asks for the memory that `find` reads of the context; see Drafter::approach.
  bool approach(int step) noexcept;

  // Finds the matches anew: first those in the context, then those in the datastores, the
  // longest first; of equally long ones each store's latest precedes its second latest.
  void find();

  // The number of tokens of a stored text that are copied at first; `reach` copies the others.
  static constexpr std::int32_t kCopiedAtFirst = 8;
  // Has all of these matches' texts, for a draft that agrees with them so far.
  void reach(MatchSet matches);

  MatchSet all() const noexcept { return (MatchSet{1} << size_) - 1; }
  const MatchedText& operator[](int i) const noexcept {
    return matches_[static_cast<std::size_t>(i)];
  }

 private:
  // If the text repeats this many of its last tokens, a chain is drafted from there.
  static constexpr std::int32_t kClear = 8;

  int most_stored() const noexcept { return tree_ ? kStoredOfTree : kStored; }
  bool found(std::int32_t position, int size) const noexcept;
  void add_of_context(std::int32_t position, std::int32_t length) noexcept;
  void find_suffixes() noexcept;
  void find_last_token() noexcept;
  Source source_of(std::size_t store) const noexcept;
  // Which of stored_tokens_' slots, of lookahead_ tokens each, has the text of a stored match.
  std::size_t slot_of(const MatchedText& match) const noexcept {
    return static_cast<std::size_t>(match.next - stored_tokens_.data()) /
           static_cast<std::size_t>(lookahead_);
  }
  void prefetch_weights(int first) const noexcept;
  template <typename Reader>
  void add_stored(const Reader& reader, const Datastore::Lookup& lookup, Source source,
                  const Datastore* store);

  const SuffixAutomaton& context_;
  const std::int64_t templates_size_;
  const std::int64_t prompt_size_;
  const Stores& stores_;
  const std::size_t num_entered_;  // the first n stores are those that the text enters
  const std::int32_t lookahead_;
  const bool tree_;
  const TokenWeights* const weights_;  // null: none
  TokenWeights::Before before_;        // the next token, for `prefetch_weights`
  // The state of `approach`: a repeated suffix, then an earlier occurrence of the last token.
  Match way_;
  std::int32_t position_ = -1;
  std::array<MatchedText, kMost> matches_;
  int size_ = 0;
  int num_stored_ = 0;
  // Copied, since the text may leave the datastore.
  std::vector<Token, CountedAllocator<Token>> stored_tokens_;
  // By the slot in stored_tokens_: where the text goes on; a null store: nowhere.
  struct Rest {
    const Datastore* store;
    std::int64_t position;
  };
  std::array<Rest, kStoredOfTree> rests_;
};

static_assert(MatchedTexts::kMost < 64);

}  // namespace fastdraft

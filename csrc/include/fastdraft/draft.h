// The drafts that an engine proposes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fastdraft/token.h"

namespace fastdraft {

// The source of a draft token. From kOffer on: in an offer, see source_of in offers.h.
enum class Source : std::uint8_t {
  kContext = 0,
  kPrediction = 1,
  kDatastore = 2,  // a datastore that the request's text enters
  kReadOnly = 3,   // one that it only reads
  kRunning = 4,    // what another running request has written
  kTemplate = 5,
  kNgrams = 6,  // the engine's table of n-grams
  kOffer = 7
};
inline constexpr std::size_t kNumSources = 8;

// Returns whether it is text of a datastore, or of a request that runs on one.
constexpr bool is_stored(Source source) noexcept {
  return source >= Source::kDatastore && source <= Source::kRunning;
}

// Counts of tokens by their source, those of all kinds of offers together.
using CountsBySource = std::array<std::int64_t, kNumSources>;

// The index of a source's counts.
constexpr std::size_t index_of(Source source) noexcept {
  const auto index = static_cast<std::size_t>(source);
  return index < kNumSources ? index : kNumSources - 1;
}

// The tokens guessed for one step, or those of a batch one row after another,
// as columns. A token's parent is its predecessor's index in the row, or -1 for
// the last token of the request's text, so the columns can hold a tree; a
// chain's parents are -1, 0, 1, ...
struct DraftColumns {
  Token* token_ids;
  std::int32_t* parents;
  // The probability that the target accepts the token and all before it on its path.
  float* probabilities;
  Source* sources;

  // The bytes that columns of `capacity` tokens take.
  static std::int64_t bytes(std::int64_t capacity) noexcept {
    return capacity * static_cast<std::int64_t>(3 * sizeof(std::int32_t) + sizeof(Source));
  }
  // Columns in `bytes(capacity)` bytes of memory that is aligned as Token is: in bytes, since no
  // other memory may hold both integers and floats.
  static DraftColumns in(std::byte* memory, std::int64_t capacity) noexcept {
    static_assert(sizeof(float) == sizeof(Token) && alignof(float) <= alignof(Token));
    std::byte* const parents = memory + capacity * std::int64_t{sizeof(Token)};
    std::byte* const probabilities = parents + capacity * std::int64_t{sizeof(std::int32_t)};
    std::byte* const sources = probabilities + capacity * std::int64_t{sizeof(float)};
    return {reinterpret_cast<Token*>(memory), reinterpret_cast<std::int32_t*>(parents),
            reinterpret_cast<float*>(probabilities), reinterpret_cast<Source*>(sources)};
  }
  // The same columns from token `offset` on.
  DraftColumns from(std::int64_t offset) const noexcept {
    return {token_ids + offset, parents + offset, probabilities + offset, sources + offset};
  }

  // Copies the first `count` tokens to columns that lie elsewhere or before.
  void copy_to(const DraftColumns& other, std::int64_t count) const noexcept {
    std::copy_n(token_ids, count, other.token_ids);
    std::copy_n(parents, count, other.parents);
    std::copy_n(probabilities, count, other.probabilities);
    std::copy_n(sources, count, other.sources);
  }

  // Writes a chain of `count` tokens of probability 1.
  void write_chain(const Token* tokens, std::int32_t count, Source source) const noexcept {
    std::copy_n(tokens, count, token_ids);
    for (std::int32_t i = 0; i < count; ++i) parents[i] = i - 1;
    std::fill_n(probabilities, count, 1.0f);
    std::fill_n(sources, count, source);
  }

  // The part of the first `drafted` tokens that the target accepts, by what it emitted:
  // the longest path from the root that the emitted tokens begin with. O(drafted).
  struct Accepted {
    std::int32_t tokens = 0;
    CountsBySource by_source{};
  };
  Accepted accepted(std::int32_t drafted, const Token* emitted, std::int64_t count) const noexcept {
    Accepted path;
    std::int32_t parent = -1;
    for (std::int32_t i = 0; i < drafted && path.tokens < count; ++i) {
      if (parents[i] != parent || token_ids[i] != emitted[path.tokens]) continue;
      parent = i;
      ++path.tokens;
      ++path.by_source[index_of(sources[i])];
    }
    return path;
  }
};

// Counts over a request's life. See fastdraft.DraftStats for their meaning.
struct DraftCounts {
  std::int64_t steps = 0;
  std::int64_t emitted = 0;
  std::int64_t drafts = 0;
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
  std::int64_t accepted_prediction = 0;
  std::int64_t rejected_prediction = 0;
  CountsBySource accepted_by_source{};

  // Counts a step that emitted `tokens`, but for the rejected ones of the prediction.
  void add(std::int64_t tokens, std::int64_t tokens_drafted,
           const DraftColumns::Accepted& path) noexcept {
    steps += 1;
    emitted += tokens;
    drafts += tokens_drafted > 0 ? 1 : 0;
    drafted += tokens_drafted;
    accepted += path.tokens;
    accepted_prediction += path.by_source[index_of(Source::kPrediction)];
    for (std::size_t i = 0; i < kNumSources; ++i) accepted_by_source[i] += path.by_source[i];
  }
};

// The drafts of a batch: row r's tokens are offsets[r] .. offsets[r + 1].
struct DraftBatch {
  std::unique_ptr<std::byte[]> memory;
  DraftColumns columns;
  std::vector<std::int32_t> offsets;
};

}  // namespace fastdraft

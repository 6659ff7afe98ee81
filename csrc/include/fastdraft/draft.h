// What an engine proposes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fastdraft/token.h"

namespace fastdraft {

// Where a draft token was found.
enum class Source : std::uint8_t { kContext = 0, kPrediction = 1 };

// The tokens guessed for one step, or those of a batch one row after another,
// as columns. A token's parent is its predecessor's index in the row, or -1 for
// the last token of the request's text, so the columns can hold a tree; a
// chain's parents are -1, 0, 1, ...
struct DraftColumns {
  Token* token_ids;
  std::int32_t* parents;
  // The chance that the target accepts the token and all before it on its path.
  float* probabilities;
  Source* sources;

  // The 32-bit words that columns of `capacity` tokens take.
  static std::int64_t words(std::int64_t capacity) noexcept {
    return capacity * 3 + (capacity + 3) / 4;
  }
  // Columns in `words(capacity)` words of memory.
  static DraftColumns in(std::int32_t* memory, std::int64_t capacity) noexcept {
    return {memory, memory + capacity, reinterpret_cast<float*>(memory + 2 * capacity),
            reinterpret_cast<Source*>(memory + 3 * capacity)};
  }
  // The same columns from token `offset` on.
  DraftColumns from(std::int64_t offset) const noexcept {
    return {token_ids + offset, parents + offset, probabilities + offset, sources + offset};
  }
};

// The drafts of a batch: row r's tokens are offsets[r] .. offsets[r + 1].
struct DraftBatch {
  std::unique_ptr<std::int32_t[]> memory;
  DraftColumns columns;
  std::vector<std::int32_t> offsets;
};

}  // namespace fastdraft

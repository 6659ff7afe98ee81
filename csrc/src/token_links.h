// Where each token of a text occurred before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fastdraft/token.h"
#include "memory.h"

namespace fastdraft {

// Links each position of a text that grows to the latest one before it that
// holds the same token.
//
// Not thread-safe; const calls may overlap.
class TokenLinks {
 public:
  // Memory is counted in `budget`, which must outlive the links.
  explicit TokenLinks(MemoryBudget& budget) : budget_(budget), previous_(budget) {}

  // Takes the text's next token. O(1) amortised and expected. Throws
  // MemoryLimitError and then leaves the links as they were.
  void append(Token token);

  // The latest position before `position` with the same token; -1: none.
  std::int32_t previous(std::int32_t position) const noexcept { return previous_[position]; }
  std::int64_t size() const noexcept { return previous_.size(); }

 private:
  // A token of the text, and where it occurs last; -1: a free place.
  struct Latest {
    Token token;
    std::int32_t position;
  };
  using Table = FlatArray<Latest>;  // of 2^n places, open addressing

  static Latest& place_of(Table& table, Token token) noexcept;
  void grow();

  MemoryBudget& budget_;
  FlatArray<std::int32_t> previous_;
  std::unique_ptr<Table> latest_;
  std::int64_t tokens_ = 0;  // how many different ones
};

}  // namespace fastdraft

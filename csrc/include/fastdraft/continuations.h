// Guesses that stay useful while the text goes on: trees, in arrays of the host's.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fastdraft/draft.h"
#include "fastdraft/token.h"

namespace fastdraft {

// A tree for each row, each computed from the row's text of base[r] tokens. A host that has emitted
// more tokens since walks down the tree by them and drafts what lies below. The arrays are the
// host's, such as pinned memory that a device copies from.
//
// Node i of row r stands at [r * nodes + i]: its token, its parent's index (-1: it follows the
// text; a parent stands before its children, and siblings have different tokens), and the
// probability that the target emits the whole path to it. Nodes stand in the order of falling
// probabilities.
struct Continuations {
  std::int64_t rows;
  std::int64_t nodes;  // the room for each row
  std::int32_t* base;
  std::int32_t* count;  // of nodes; 0: nothing is expected
  Token* token_ids;
  std::int32_t* parents;
  float* probabilities;

  // Writes a row of `size` nodes; what lies behind them stays as it was.
  void write(std::int64_t row, std::int64_t text, std::int32_t size,
             const DraftColumns& tree) const noexcept {
    base[row] = static_cast<std::int32_t>(text);
    count[row] = size;
    std::copy_n(tree.token_ids, size, token_ids + row * nodes);
    std::copy_n(tree.parents, size, parents + row * nodes);
    std::copy_n(tree.probabilities, size, probabilities + row * nodes);
  }
};

}  // namespace fastdraft

// Likely next tokens, remembered from the target's logits: a table of them, and trees from
// it.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "fastdraft/token.h"

namespace fastdraft {

// The likeliest next tokens at the positions that the target has seen lately, rejected draft tokens
// included. Where the text comes to such tokens again, they are offered as a tree: the successors
// of each context, and theirs (Token Recycling, Luo et al., 2024, arXiv:2408.08696). The text's
// next token but one is often a runner-up of the last position, so these are offered too
// (LogitSpec, Liu et al., 2025, arXiv:2507.01449).
//
// A context is the last two tokens; where it is unknown, the last one. The table has a fixed number
// of slots, and a context takes that of its hash: newer ones push out older ones.
//
// Thread-safe: calls take turns.
class Successors {
 public:
  // The most successors of a context.
  static constexpr std::int64_t kMost = 8;
  // The most tokens of a tree, and the longest path.
  static constexpr std::int32_t kNodes = 48;
  static constexpr std::int32_t kDepth = 6;
  // The least probability of a path, as a product of those in the table.
  static constexpr float kLeast = 0.004f;
  // How many of a text's last tokens decide what its tree holds.
  static constexpr std::int64_t kEnd = 3;

  // Holds 72 bytes for each slot, in whole powers of two: at least one slot. Throws
  // InvalidValueError.
  explicit Successors(std::int64_t slots);

  std::int64_t slots() const noexcept { return static_cast<std::int64_t>(slots_.size()); }
  // The memory of the slots.
  std::int64_t bytes() const noexcept { return static_cast<std::int64_t>(sizeof(Slot)) * slots(); }

  // Tables learn what may follow, in one call: tables[i] from rows offsets[i] to offsets[i + 1] - 1
  // of the arrays; offsets (size + 1) rise from 0. No table is null; one may come several times.
  // Row r of `contexts` (rows x 2) holds the last two tokens, -1 for one that does not exist;
  // `token_ids` and `probabilities` (rows x count, count at most kMost) the tokens that may follow
  // and how likely each is, from 0 to 1. A token below 0 ends its row. Of equal contexts the last
  // row counts. O(rows x count). Throws InvalidValueError, and then nothing was learned.
  static void learn(Successors* const* tables, std::int64_t size, const std::int64_t* offsets,
                    const Token* contexts, const Token* token_ids, const float* probabilities,
                    std::int64_t count);

  // Trees for the rows of a batch, with the arrays of Offers.
  struct Trees {
    std::vector<std::int64_t> offsets;
    std::vector<Token> token_ids;
    std::vector<std::int32_t> parents;
    std::vector<float> confidences;
  };

  // The trees that follow texts, from a table for each. Row r of `ends` (rows x kEnd) holds a
  // text's last tokens, -1 for those that do not exist; a row whose very last one is -1 gets no
  // tree. A row's tokens stand in the order of falling path probabilities; the first `nodes` of
  // them are kept, 1 to kNodes. No table is null; one may come several times. O(nodes^2 x kMost) a
  // row. Throws InvalidValueError.
  static Trees trees(const Successors* const* tables, const Token* ends, std::int64_t rows,
                     std::int32_t nodes = kNodes);

 private:
  struct Slot {
    Token before = -1;  // -1: the context is one token
    Token last = -1;    // -1: empty
    Token token_ids[kMost];
    float probabilities[kMost];
  };
  struct Waiting;

  std::size_t slot_of(Token before, Token last) const noexcept;
  const Slot* find(Token before, Token last) const noexcept;
  const Slot* successors_of(Token before, Token last) const noexcept;
  void ask_for(Token before, Token last) const noexcept;
  void enter(const Token* contexts, std::int64_t rows, const Token* token_ids,
             const float* probabilities, std::int64_t count) noexcept;
  void grow(const Token* end, std::size_t nodes, Trees& trees, std::vector<Waiting>& waiting) const;

  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
};

}  // namespace fastdraft

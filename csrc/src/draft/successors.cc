#include "draft/successors.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "fastdraft/error.h"
#include "index/bits.h"

namespace fastdraft {
namespace {

// How many rows before a context is learned its slots are asked for.
constexpr std::int64_t kSlotsAhead = 4;
constexpr std::int64_t kMostSlots = std::int64_t{1} << 24;

std::size_t slots_of(std::int64_t slots) {
  check_range("slots", slots, 1, kMostSlots);
  std::size_t size = 1;
  while (size < static_cast<std::size_t>(slots)) size *= 2;
  return size;
}

bool is_token_or_none(Token token) { return token >= -1; }

void check_learned(const Token* contexts, std::int64_t rows, const float* probabilities,
                   std::int64_t count) {
  check_range("successors of a context", count, 0, Successors::kMost);
  check_each("contexts must be -1 or greater", contexts, 2 * rows, is_token_or_none);
  check_each("probabilities must be from 0 to 1", probabilities, rows * count,
             [](float each) { return each >= 0.0f && each <= 1.0f; });
}

}  // namespace

// A token that may be offered next.
struct Successors::Waiting {
  float path;
  std::int32_t order;  // of equals the first comes first
  Token before;        // the token that it follows
  Token token;
  std::int32_t parent;
  std::int32_t depth;
  float confidence;

  bool operator<(const Waiting& other) const noexcept {
    return path != other.path ? path < other.path : order > other.order;
  }
};

Successors::Successors(std::int64_t slots) : slots_(slots_of(slots)) {}

std::size_t Successors::slot_of(Token before, Token last) const noexcept {
  const std::uint64_t key = static_cast<std::uint64_t>(static_cast<std::uint32_t>(before)) << 32 |
                            static_cast<std::uint32_t>(last);
  const std::uint64_t mixed = (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
  return static_cast<std::size_t>(mixed >> 32) & (slots_.size() - 1);
}

const Successors::Slot* Successors::find(Token before, Token last) const noexcept {
  const Slot& slot = slots_[slot_of(before, last)];
  return slot.last == last && slot.before == before && last >= 0 ? &slot : nullptr;
}

const Successors::Slot* Successors::successors_of(Token before, Token last) const noexcept {
  const Slot* slot = before >= 0 ? find(before, last) : nullptr;
  return slot != nullptr ? slot : find(-1, last);
}

void Successors::ask_for(Token before, Token last) const noexcept {
  for (const Token each : {Token{-1}, before}) {
    const Slot* const slot = &slots_[slot_of(each, last)];
    prefetch(slot);
    prefetch(&slot->probabilities[kMost - 1]);
  }
}

void Successors::enter(const Token* contexts, std::int64_t rows, const Token* token_ids,
                       const float* probabilities, std::int64_t count) noexcept {
  const auto ask_for_row = [&](std::int64_t row) {
    if (row < rows) ask_for(contexts[2 * row], contexts[2 * row + 1]);
  };
  for (std::int64_t row = 0; row < kSlotsAhead; ++row) ask_for_row(row);
  for (std::int64_t row = 0; row < rows; ++row) {
    ask_for_row(row + kSlotsAhead);
    const Token last = contexts[2 * row + 1];
    if (last < 0) continue;
    const auto enter_behind = [&](Token before) {
      Slot& slot = slots_[slot_of(before, last)];
      slot.before = before;
      slot.last = last;
      std::fill_n(slot.token_ids, kMost, -1);
      std::copy_n(token_ids + row * count, count, slot.token_ids);
      std::copy_n(probabilities + row * count, count, slot.probabilities);
    };
    enter_behind(-1);
    if (contexts[2 * row] >= 0) enter_behind(contexts[2 * row]);
  }
}

void Successors::learn(Successors* const* tables, std::int64_t size, const std::int64_t* offsets,
                       const Token* contexts, const Token* token_ids, const float* probabilities,
                       std::int64_t count) {
  for (std::int64_t i = 0; i <= size; ++i) {
    if (offsets[i] >= (i == 0 ? 0 : offsets[i - 1]) && (i > 0 || offsets[i] == 0)) continue;
    throw InvalidValueError("offsets must rise from 0, got " + std::to_string(offsets[i]) +
                            " at index " + std::to_string(i));
  }
  check_learned(contexts, offsets[size], probabilities, count);
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t first = offsets[i];
    const std::scoped_lock guard(tables[i]->mutex_);
    tables[i]->enter(contexts + 2 * first, offsets[i + 1] - first, token_ids + first * count,
                     probabilities + first * count, count);
  }
}

void Successors::grow(const Token* end, std::size_t nodes, Trees& trees,
                      std::vector<Waiting>& waiting) const {
  waiting.clear();
  std::int32_t order = 0;
  // The root's children: the successors of the text, and the last position's runners-up, whose
  // probabilities are those without the token that was emitted. Of a token in both the surer
  // counts.
  const auto expect = [&](Token token, float probability) {
    const auto same = std::find_if(waiting.begin(), waiting.end(),
                                   [token](const Waiting& each) { return each.token == token; });
    if (same == waiting.end()) {
      waiting.push_back({probability, order++, end[2], token, -1, 1, probability});
    } else if (probability > same->path) {
      same->path = same->confidence = probability;
    }
  };
  const Slot* slot = successors_of(end[1], end[2]);
  for (std::size_t i = 0; slot != nullptr && i < kMost && slot->token_ids[i] >= 0; ++i) {
    expect(slot->token_ids[i], slot->probabilities[i]);
  }
  slot = end[1] < 0 ? nullptr : successors_of(end[0], end[1]);
  float rest = 1.0f;
  for (std::size_t i = 0; slot != nullptr && i < kMost && slot->token_ids[i] >= 0; ++i) {
    if (slot->token_ids[i] == end[2]) rest -= slot->probabilities[i];
  }
  for (std::size_t i = 0; slot != nullptr && i < kMost && slot->token_ids[i] >= 0; ++i) {
    if (slot->token_ids[i] == end[2]) continue;
    expect(slot->token_ids[i], std::min(1.0f, slot->probabilities[i] / std::max(rest, 1e-6f)));
  }
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(),
                               [](const Waiting& each) { return !(each.path >= kLeast); }),
                waiting.end());
  // The likeliest last. A token that as many precede as there is room for is never taken.
  std::sort(waiting.begin(), waiting.end());
  const std::size_t first = trees.token_ids.size();
  for (std::size_t room = nodes; !waiting.empty() && room > 0; --room) {
    const Waiting next = waiting.back();
    waiting.pop_back();
    const auto node = static_cast<std::int32_t>(trees.token_ids.size() - first);
    trees.token_ids.push_back(next.token);
    trees.parents.push_back(next.parent);
    trees.confidences.push_back(next.confidence);
    if (next.depth == kDepth || room == 1) continue;
    slot = successors_of(next.before, next.token);
    for (std::size_t i = 0; slot != nullptr && i < kMost && slot->token_ids[i] >= 0; ++i) {
      const float path = next.path * slot->probabilities[i];
      if (path < kLeast) continue;
      const Waiting child{path,
                          order++,
                          next.token,
                          slot->token_ids[i],
                          node,
                          next.depth + 1,
                          slot->probabilities[i]};
      if (waiting.size() >= room - 1 && child < waiting[waiting.size() - (room - 1)]) continue;
      waiting.insert(std::lower_bound(waiting.begin(), waiting.end(), child), child);
      ask_for(child.before, child.token);
    }
  }
}

Successors::Trees Successors::trees(const Successors* const* tables, const Token* ends,
                                    std::int64_t rows, std::int32_t nodes) {
  check_each("ends must be -1 or greater", ends, kEnd * rows, is_token_or_none);
  check_range("nodes", nodes, 1, kNodes);
  Trees trees;
  trees.offsets.reserve(static_cast<std::size_t>(rows) + 1);
  trees.offsets.push_back(0);
  std::vector<Waiting> waiting;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (ends[kEnd * row + kEnd - 1] >= 0) {
      const Successors& table = *tables[row];
      const std::scoped_lock guard(table.mutex_);
      table.grow(ends + kEnd * row, static_cast<std::size_t>(nodes), trees, waiting);
    }
    trees.offsets.push_back(static_cast<std::int64_t>(trees.token_ids.size()));
  }
  return trees;
}

}  // namespace fastdraft

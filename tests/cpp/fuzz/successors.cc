// Any contexts and successors, wrong ones too. What comes back are trees whose paths'
// chances fall, of tokens that were learned; a table that learns with others in one call has the
// same.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "engine/successors.h"
#include "fastdraft/error.h"
#include "target.h"

namespace fastdraft::fuzz_successors {

FASTDRAFT_FUZZ(Successors, 300) {
  std::size_t at = 0;
  const auto next = [&]() -> int { return at < size ? data[at++] : 0; };
  const int slots = 1 + next();
  Successors successors(slots);
  Successors together(slots);
  Successors other(1);
  while (at < size) {
    const int rows = next() % 4;
    const int count = next() % 10;
    std::vector<Token> contexts;
    std::vector<Token> tokens;
    std::vector<float> chances;
    for (int i = 0; i < 2 * rows; ++i) contexts.push_back(next() % 9 - 2);
    for (int i = 0; i < rows * count; ++i) {
      tokens.push_back(next() % 9 - 2);
      chances.push_back(static_cast<float>(next()) / 250.0f);
    }
    try {
      Successors* const alone = &successors;
      const std::vector<std::int64_t> all = {0, rows};
      Successors::learn(&alone, 1, all.data(), contexts.data(), tokens.data(), chances.data(),
                        count);
    } catch (const InvalidValueError&) {
      continue;
    }
    const std::int64_t cut = rows == 0 ? 0 : next() % (rows + 1);
    const std::vector<Successors*> tables = {&together, &other, &together};
    const std::vector<std::int64_t> offsets = {0, cut, cut, rows};
    Successors::learn(tables.data(), 3, offsets.data(), contexts.data(), tokens.data(),
                      chances.data(), count);
    std::vector<Token> ends;
    for (int i = 0; i < 6; ++i) ends.push_back(next() % 8 - 1);
    const std::vector<const Successors*> whole = {&successors, &successors};
    const Successors::Trees trees = Successors::trees(whole.data(), ends.data(), 2);
    const auto nodes = 1 + next() % Successors::kNodes;
    const std::vector<const Successors*> of_rows = {&together, &together};
    const Successors::Trees cut_off = Successors::trees(of_rows.data(), ends.data(), 2, nodes);
    for (std::size_t row = 0; row < 2; ++row) {
      const auto first = static_cast<std::size_t>(trees.offsets[row]);
      const auto last = static_cast<std::size_t>(trees.offsets[row + 1]);
      if (last - first > Successors::kNodes) std::abort();
      const auto begin = static_cast<std::size_t>(cut_off.offsets[row]);
      const auto kept = static_cast<std::size_t>(cut_off.offsets[row + 1]) - begin;
      if (kept != std::min(last - first, static_cast<std::size_t>(nodes))) std::abort();
      for (std::size_t i = 0; i < kept; ++i) {
        if (cut_off.token_ids[begin + i] != trees.token_ids[first + i]) std::abort();
        if (cut_off.parents[begin + i] != trees.parents[first + i]) std::abort();
      }
      std::vector<float> paths;
      for (std::size_t i = first; i < last; ++i) {
        const std::int32_t parent = trees.parents[i];
        if (parent < -1 || parent >= static_cast<std::int32_t>(paths.size())) std::abort();
        if (trees.token_ids[i] < 0 || trees.token_ids[i] > 6) std::abort();
        const float before = parent < 0 ? 1.0f : paths[static_cast<std::size_t>(parent)];
        const float path = before * trees.confidences[i];
        if (!(path >= Successors::kLeast) || path > 1.0f) std::abort();
        if (!paths.empty() && path > paths.back()) std::abort();
        paths.push_back(path);
      }
    }
  }
  return 0;
}

}  // namespace fastdraft::fuzz_successors

// libFuzzer: any contexts and successors, wrong ones too. What comes back are trees whose paths'
// chances fall, of tokens that were learned.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "fastdraft/error.h"
#include "fastdraft/successors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fastdraft;  // NOLINT(google-build-using-namespace)
  std::size_t at = 0;
  const auto next = [&]() -> int { return at < size ? data[at++] : 0; };
  Successors successors(1 + next());
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
      successors.learn(contexts.data(), rows, tokens.data(), chances.data(), count);
    } catch (const InvalidValueError&) {
      continue;
    }
    std::vector<Token> ends;
    for (int i = 0; i < 6; ++i) ends.push_back(next() % 8 - 1);
    const Successors::Trees trees = successors.trees(ends.data(), 2);
    for (std::size_t row = 0; row < 2; ++row) {
      const auto first = static_cast<std::size_t>(trees.offsets[row]);
      const auto last = static_cast<std::size_t>(trees.offsets[row + 1]);
      if (last - first > Successors::kNodes) std::abort();
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

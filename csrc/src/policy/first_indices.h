// The index at which each feature's weights begin, in a model that keeps all in one array.
#pragma once

#include <array>
#include <cstddef>

namespace fastdraft {

// `values`: how many values each feature has.
template <std::size_t kFeatures>
constexpr std::array<int, kFeatures> first_indices(
    const std::array<int, kFeatures>& values) noexcept {
  std::array<int, kFeatures> first{};
  for (std::size_t i = 1; i < kFeatures; ++i) first[i] = first[i - 1] + values[i - 1];
  return first;
}

}  // namespace fastdraft

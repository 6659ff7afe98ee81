// Checks that calls on batches share.
#pragma once

#include <cstdint>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {

// `counts`, one a row, may be null. `must` says what is wrong with one below 0.
inline void check_counts(const char* must, const std::int32_t* counts, std::int64_t rows) {
  if (counts == nullptr) return;
  check_each(must, counts, rows, [](std::int32_t count) { return count >= 0; });
}

inline void check_offsets(const std::int64_t* offsets, std::int64_t rows) {
  for (std::int64_t row = 0; row < rows; ++row) {
    if (offsets[row] > offsets[row + 1]) {
      throw InvalidValueError("offsets must rise, got " + std::to_string(offsets[row]) +
                              " and then " + std::to_string(offsets[row + 1]) + " at index " +
                              std::to_string(row + 1));
    }
  }
}

}  // namespace fastdraft

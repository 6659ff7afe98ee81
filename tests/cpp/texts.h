// Texts that are hard on an index, and slow answers to hold it against.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "fastdraft/token.h"

namespace fastdraft::testing {

using Tokens = std::vector<Token>;

inline Tokens random_text(std::size_t size, Token vocabulary, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<Token> token(0, vocabulary - 1);
  Tokens text(size);
  std::generate(text.begin(), text.end(), [&] { return token(random); });
  return text;
}

inline Tokens repeated(std::size_t size) { return Tokens(size, 7); }

// a, ab, aba, abaab, ...: as many repetitions as a text can have.
inline Tokens fibonacci(std::size_t size) {
  Tokens before{0};
  Tokens text{0, 1};
  while (text.size() < size) {
    Tokens next = text;
    next.insert(next.end(), before.begin(), before.end());
    before = std::move(text);
    text = std::move(next);
  }
  text.resize(size);
  return text;
}

// 0, 01, 0110, ...: no part of it stands three times in a row.
inline Tokens thue_morse(std::size_t size) {
  Tokens text(size);
  for (std::size_t i = 0; i < size; ++i) {
    Token parity = 0;
    for (std::size_t bits = i; bits != 0; bits &= bits - 1) parity ^= 1;
    text[i] = parity;
  }
  return text;
}

// How many tokens before `end` and before `other`, both exclusive, are alike.
inline std::int32_t common_suffix(const Tokens& text, std::size_t end, std::size_t other) {
  std::int32_t length = 0;
  while (other > 0 && text[end - 1] == text[other - 1]) {
    ++length;
    --end;
    --other;
  }
  return length;
}

struct RepeatedSuffix {
  std::int32_t length = 0;     // of the longest suffix that also ends earlier
  std::int32_t first_end = 0;  // last token's position of its first occurrence
  std::int32_t latest_end = 0;
};

// By looking everywhere.
inline RepeatedSuffix find_repeated_suffix(const Tokens& text) {
  RepeatedSuffix found;
  for (std::size_t end = 1; end < text.size(); ++end) {
    const std::int32_t length = common_suffix(text, text.size(), end);
    if (length == 0 || length < found.length) continue;
    if (length > found.length) {
      found.length = length;
      found.first_end = static_cast<std::int32_t>(end) - 1;
    }
    found.latest_end = static_cast<std::int32_t>(end) - 1;
  }
  return found;
}

}  // namespace fastdraft::testing

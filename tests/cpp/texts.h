// Texts that are hard on an index.
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

}  // namespace fastdraft::testing

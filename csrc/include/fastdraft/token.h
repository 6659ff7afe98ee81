// Token ids, as every source and every host of fastdraft counts them.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "fastdraft/export.h"

namespace fastdraft {

// A token id: 0 .. 2^31 - 1. Negative values never reach an index; the
// bindings refuse them, so the core may use them as marks.
using Token = std::int32_t;

// Tokens that lie elsewhere; none by default.
struct TokenSpan {
  const Token* token_ids = nullptr;
  std::int64_t size = 0;
};

// A vocabulary that has every token id.
inline constexpr std::int64_t kAllTokens = std::int64_t{std::numeric_limits<Token>::max()} + 1;

// The longest text that one index takes. StateId numbers, edge counts and
// positions stay below 2^27 and so fit the 32-bit fields of a state.
inline constexpr std::int64_t kMaxTextTokens = (std::int64_t{1} << 26) - 2;

// How many of the tokens before `a` are those before `b`, counted from the last one
// back, `most` at most. Both must have as many before them.
inline std::int64_t common_suffix(const Token* a, const Token* b, std::int64_t most) noexcept {
  constexpr std::int64_t kStep = 4;  // compared at once
  std::int64_t length = 0;
  while (length + kStep <= most &&
         std::memcmp(a - length - kStep, b - length - kStep, kStep * sizeof(Token)) == 0) {
    length += kStep;
  }
  while (length < most && a[-1 - length] == b[-1 - length]) ++length;
  return length;
}

// How many of the tokens from `a` on are those from `b` on, `most` at most.
inline std::int64_t common_prefix(const Token* a, const Token* b, std::int64_t most) noexcept {
  constexpr std::int64_t kStep = 4;  // compared at once
  std::int64_t length = 0;
  while (length + kStep <= most &&
         std::memcmp(a + length, b + length, kStep * sizeof(Token)) == 0) {
    length += kStep;
  }
  while (length < most && a[length] == b[length]) ++length;
  return length;
}

// Returns whether all tokens are from 0 to below `vocabulary`, 1 to kAllTokens. All at once, since
// nearly always they are: the highest bit is set of a negative token, and of what a foreign one
// exceeds the vocabulary's last one by.
inline bool all_below(const Token* tokens, std::int64_t count, std::int64_t vocabulary) noexcept {
  const auto last = static_cast<std::uint32_t>(vocabulary - 1);
  std::uint32_t foreign = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto token = static_cast<std::uint32_t>(tokens[i]);
    foreign |= token | (last - token);
  }
  return foreign >> 31 == 0;
}

// Throws InvalidValueError for a negative token, or one that is not below
// `vocabulary`; `what` names the tokens.
FASTDRAFT_EXPORT void check_tokens(const Token* tokens, std::int64_t count, const char* what,
                                   std::int64_t vocabulary = kAllTokens);

}  // namespace fastdraft

// Token ids, as every source and every host of fastdraft counts them.
#pragma once

#include <cstdint>

namespace fastdraft {

// A token id: 0 .. 2^31 - 1. Negative values never reach an index; the
// bindings refuse them, so the core may use them as marks.
using Token = std::int32_t;

// The longest text that one index takes. State numbers, edge counts and
// positions stay below 2^27 and so fit the 32-bit fields of a state.
inline constexpr std::int64_t kMaxTextTokens = (std::int64_t{1} << 26) - 2;

// Throws InvalidValueError for a negative token; `what` names the tokens.
void check_tokens(const Token* tokens, std::int64_t count, const char* what);

}  // namespace fastdraft

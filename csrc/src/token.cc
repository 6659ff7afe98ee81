#include "fastdraft/token.h"

#include <algorithm>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {

void check_tokens(const Token* tokens, std::int64_t count, const char* what) {
  const Token* negative =
      std::find_if(tokens, tokens + count, [](Token token) { return token < 0; });
  if (negative != tokens + count) {
    throw InvalidValueError(std::string(what) + " must be 0 or greater, got " +
                            std::to_string(*negative) + " at index " +
                            std::to_string(negative - tokens));
  }
}

}  // namespace fastdraft

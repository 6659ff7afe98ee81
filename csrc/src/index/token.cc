#include "fastdraft/token.h"

#include <algorithm>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {

void check_tokens(const Token* tokens, std::int64_t count, const char* what,
                  std::int64_t vocabulary) {
  if (vocabulary > 0 && all_below(tokens, count, vocabulary)) return;
  const Token* wrong = std::find_if(tokens, tokens + count, [vocabulary](Token token) {
    return token < 0 || token >= vocabulary;
  });
  if (wrong != tokens + count) {
    const std::string range =
        *wrong < 0 ? " must be 0 or greater, got "
                   : " must be below the vocabulary's " + std::to_string(vocabulary) + ", got ";
    throw InvalidValueError(what + range + std::to_string(*wrong) + " at index " +
                            std::to_string(wrong - tokens));
  }
}

}  // namespace fastdraft

#include "draft/prediction.h"

namespace fastdraft {

Prediction::Prediction(const Token* tokens, std::int64_t size, MemoryBudget& budget)
    : index_(budget) {
  index_.append(tokens, size);
}

void Prediction::advance(const Token* text, std::int64_t size) noexcept {
  match_ = index_.advance(match_, text[size - 1]);
  CopyCursor::Continuation elsewhere;
  if (match_.length > 0) {
    elsewhere.position = index_.first_end(match_.state) + 1;
    elsewhere.length = match_.length;
  }
  cursor_.advance(index_.text(), static_cast<std::int32_t>(index_.size()), text, size, elsewhere);
}

}  // namespace fastdraft

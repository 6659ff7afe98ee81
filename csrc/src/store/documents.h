// The text of a datastore, some at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "fastdraft/datastore.h"

namespace fastdraft {

// Some of a log: tokens, and a mark before each document.
class LogPart {
 public:
  // The tokens from `position` on, or, where that has left, from where the store begins: `most` at
  // most. Text that is added waits while 4,096 tokens are copied; no more are at a time.
  LogPart(const Datastore& store, std::int64_t position, std::int64_t most) {
    const Datastore::Reader reader(store);
    largest_token_ = reader.largest_token();
    begin_ = std::max(position, reader.begin());
    tokens_.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(most, 0, kStep)));
    tokens_.resize(static_cast<std::size_t>(reader.read(begin_, tokens_.data(), size())));
    outputs_.resize(tokens_.size());
    for (std::int64_t i = 0; i < size(); ++i) {
      outputs_[static_cast<std::size_t>(i)] = reader.output(begin_ + i) ? '\1' : '\0';
    }
  }

  std::int64_t begin() const noexcept { return begin_; }
  std::int64_t end() const noexcept { return begin_ + size(); }
  std::int64_t size() const noexcept { return static_cast<std::int64_t>(tokens_.size()); }
  const Token* tokens() const noexcept { return tokens_.data(); }
  // A byte for each token: 1 where a model wrote it.
  const std::string& outputs() const noexcept { return outputs_; }

  // How many tokens of one document, all of them a model's output or none, stand from the i-th on.
  // 0: that ends a document, as a mark or, in a damaged file, as what is no token.
  std::int64_t run(std::int64_t i) const noexcept {
    const auto* at = tokens_.data() + i;
    const auto* end = std::find_if(at, tokens_.data() + size(), [this](Token token) {
      return token < 0 || token > largest_token_;
    });
    const auto first = outputs_.begin() + i;
    const auto written = std::find(first, first + (end - at), *first == '\1' ? '\0' : '\1');
    return written - first;
  }

 private:
  static constexpr std::int64_t kStep = 4096;

  Token largest_token_ = 0;
  std::int64_t begin_ = 0;
  std::vector<Token> tokens_;
  std::string outputs_;
};

}  // namespace fastdraft

// The errors of the core. Each message names the value that was refused and
// what was expected; the bindings turn them into fastdraft.errors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "fastdraft/export.h"

namespace fastdraft {

class FASTDRAFT_EXPORT Error : public std::runtime_error {
 public:
  // As the C interface numbers them.
  enum class Kind : std::uint8_t {
    kInvalidValue = 1,
    kUnknownRequest = 2,
    kRequestLimit = 3,
    kMemoryLimit = 4,
    kDatastore = 5,
    kDatastoreClosed = 6
  };

  Kind kind() const noexcept { return kind_; }

 protected:
  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}

 private:
  Kind kind_;
};

template <Error::Kind kKind>
class FASTDRAFT_EXPORT ErrorOf : public Error {
 public:
  explicit ErrorOf(const std::string& message) : Error(kKind, message) {}
};

// A value outside its range: a negative token, a lookahead of 0.
using InvalidValueError = ErrorOf<Error::Kind::kInvalidValue>;
// A request id that was never given out, or was finished or cancelled.
using UnknownRequestError = ErrorOf<Error::Kind::kUnknownRequest>;
// More tokens than one request may hold.
using RequestLimitError = ErrorOf<Error::Kind::kRequestLimit>;
// The engine's bytes are used up.
using MemoryLimitError = ErrorOf<Error::Kind::kMemoryLimit>;
// A file that is no datastore, or a damaged or foreign one, or cannot be written.
using DatastoreError = ErrorOf<Error::Kind::kDatastore>;
// A datastore that was closed.
using DatastoreClosedError = ErrorOf<Error::Kind::kDatastoreClosed>;

// Throws InvalidValueError that names the value, unless it is from `least` to `most`.
inline void check_range(const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
  if (value >= least && value <= most) return;
  const bool low = value < least;
  throw InvalidValueError(std::string(name) + " must be at " + (low ? "least " : "most ") +
                          std::to_string(low ? least : most) + ", got " + std::to_string(value));
}

// Throws InvalidValueError that names the first of the values that is not right. `must` says what
// they are and how they must be.
template <typename T, typename IsRight>
void check_each(const char* must, const T* values, std::int64_t count, IsRight is_right) {
  const T* wrong = std::find_if_not(values, values + count, is_right);
  if (wrong == values + count) return;
  throw InvalidValueError(std::string(must) + ", got " + std::to_string(*wrong) + " at index " +
                          std::to_string(wrong - values));
}

}  // namespace fastdraft

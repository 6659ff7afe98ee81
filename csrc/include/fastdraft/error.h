// The errors of the core. Each message names the value that was refused and
// what was expected; the bindings turn them into fastdraft.errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "fastdraft/export.h"

namespace fastdraft {

class FASTDRAFT_EXPORT Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A value outside its range: a negative token, a lookahead of 0.
class FASTDRAFT_EXPORT InvalidValueError : public Error {
 public:
  using Error::Error;
};

// Throws InvalidValueError that names the value, unless it is from `least` to `most`.
inline void check_range(const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
  if (value >= least && value <= most) return;
  const bool low = value < least;
  throw InvalidValueError(std::string(name) + " must be at " + (low ? "least " : "most ") +
                          std::to_string(low ? least : most) + ", got " + std::to_string(value));
}

// A request id that was never given out, or was finished or cancelled.
class FASTDRAFT_EXPORT UnknownRequestError : public Error {
 public:
  using Error::Error;
};

// More tokens than one request may hold.
class FASTDRAFT_EXPORT RequestLimitError : public Error {
 public:
  using Error::Error;
};

// The engine's bytes are used up.
class FASTDRAFT_EXPORT MemoryLimitError : public Error {
 public:
  using Error::Error;
};

// A file that is no datastore, or a damaged or foreign one, or cannot be written.
class FASTDRAFT_EXPORT DatastoreError : public Error {
 public:
  using Error::Error;
};

// A datastore that was closed.
class FASTDRAFT_EXPORT DatastoreClosedError : public Error {
 public:
  using Error::Error;
};

}  // namespace fastdraft

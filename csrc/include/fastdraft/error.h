// The errors of the core. Each message names the value that was refused and
// what was expected; the bindings turn them into fastdraft.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace fastdraft {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A value outside its range: a negative token, a lookahead of 0.
class InvalidValueError : public Error {
 public:
  using Error::Error;
};

// A request id that was never given out, or was finished or cancelled.
class UnknownRequestError : public Error {
 public:
  using Error::Error;
};

// More tokens than one request may hold.
class RequestLimitError : public Error {
 public:
  using Error::Error;
};

// The engine's bytes are used up.
class MemoryLimitError : public Error {
 public:
  using Error::Error;
};

// A file that is no datastore, or a damaged or foreign one, or cannot be written.
class DatastoreError : public Error {
 public:
  using Error::Error;
};

// A datastore that was closed.
class DatastoreClosedError : public Error {
 public:
  using Error::Error;
};

}  // namespace fastdraft

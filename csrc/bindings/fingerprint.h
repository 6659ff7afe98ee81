// Fingerprints of tokenizers as Python has them.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <string>

#include "fastdraft/datastore.h"
#include "fastdraft/error.h"

namespace fastdraft::bindings {

// Throws InvalidValueError for bytes of another number.
inline std::optional<Fingerprint> fingerprint_of(const std::optional<pybind11::bytes>& bytes) {
  if (!bytes) return std::nullopt;
  const std::string value(*bytes);
  Fingerprint fingerprint;
  if (value.size() != fingerprint.size()) {
    throw InvalidValueError("fingerprint must be " + std::to_string(fingerprint.size()) +
                            " bytes, got " + std::to_string(value.size()));
  }
  std::copy(value.begin(), value.end(), fingerprint.begin());
  return fingerprint;
}

inline std::optional<pybind11::bytes> bytes_of(const std::optional<Fingerprint>& fingerprint) {
  if (!fingerprint) return std::nullopt;
  return pybind11::bytes(reinterpret_cast<const char*>(fingerprint->data()), fingerprint->size());
}

}  // namespace fastdraft::bindings

// The Python object that carries one draft.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "fastdraft/draft.h"

namespace fastdraft::bindings {

// A plain CPython object with its columns inside: one small allocation, where
// a class of pybind11 takes four and a registration.
struct DraftObject {
  PyObject_VAR_HEAD  // the number of 32-bit words behind
      std::int32_t capacity;
  std::int32_t size;
  std::int32_t words[1];

  DraftColumns columns() noexcept { return DraftColumns::in(words, capacity); }
};

// A new reference to an empty draft with room for `capacity` tokens.
DraftObject* new_draft(std::int32_t capacity);

// What functions that return a draft declare, for the stubs.
class DraftHandle : public pybind11::object {
 public:
  explicit DraftHandle(DraftObject* draft)
      : pybind11::object(reinterpret_cast<PyObject*>(draft), stolen_t{}) {}
};

}  // namespace fastdraft::bindings

namespace pybind11::detail {
template <>
struct handle_type_name<fastdraft::bindings::DraftHandle> {
  static constexpr auto name = const_name("fastdraft._core.Draft");
};
}  // namespace pybind11::detail

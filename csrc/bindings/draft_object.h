// The Python object that carries one draft.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "fastdraft/draft.h"
#include "typed_object.h"

namespace fastdraft::bindings {

// A plain CPython object with its columns inside: one small allocation, where
// a class of pybind11 takes four and a registration.
struct DraftObject {
  PyObject_VAR_HEAD  // the number of bytes behind
      std::int32_t capacity;
  std::int32_t size;
  alignas(Token) std::byte memory[1];

  DraftColumns columns() noexcept { return DraftColumns::in(memory, capacity); }
};

// A new reference to an empty draft with room for `capacity` tokens.
DraftObject* new_draft(std::int32_t capacity);

// The return type that functions declare, for the stubs.
struct DraftType {
  static constexpr auto name = pybind11::detail::const_name("fastdraft._core.Draft");
};
using DraftHandle = TypedObject<DraftType>;

}  // namespace fastdraft::bindings

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <exception>
#include <new>

#include "fast_method.h"
#include "fastdraft/error.h"
#include "register.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

// The classes of fastdraft.errors, by the kinds of errors from 1 on.
constexpr std::array<const char*, 6> kNames = {"InvalidValueError", "UnknownRequestError",
                                               "RequestLimitError", "MemoryLimitError",
                                               "DatastoreError",    "DatastoreClosedError"};

// Throws on what is no error of the core, for pybind11 to translate.
void translate(const std::exception_ptr& pending) {
  try {
    std::rethrow_exception(pending);
  } catch (const Error& error) {
    const char* name = kNames[static_cast<std::size_t>(error.kind()) - 1];
    const py::object type = py::module_::import("fastdraft.errors").attr(name);
    // A path in it need not be UTF-8.
    const auto message = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(error.what()));
    if (message) PyErr_SetObject(type.ptr(), message.ptr());
  }
}

}  // namespace

void set_python_error(const std::exception_ptr& pending) noexcept {
  try {
    translate(pending);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

void register_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pending) {
    if (pending) translate(pending);
  });
}

}  // namespace fastdraft::bindings

#include <pybind11/pybind11.h>

#include <exception>
#include <new>

#include "fast_method.h"
#include "fastdraft/error.h"
#include "register.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

void raise(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("fastdraft.errors").attr(name);
  // A path in it need not be UTF-8.
  const auto message = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(error.what()));
  if (message) PyErr_SetObject(type.ptr(), message.ptr());
}

// Throws on what is no error of the core, for pybind11 to translate.
void translate(const std::exception_ptr& pending) {
  try {
    std::rethrow_exception(pending);
  } catch (const InvalidValueError& error) {
    raise("InvalidValueError", error);
  } catch (const UnknownRequestError& error) {
    raise("UnknownRequestError", error);
  } catch (const RequestLimitError& error) {
    raise("RequestLimitError", error);
  } catch (const MemoryLimitError& error) {
    raise("MemoryLimitError", error);
  } catch (const DatastoreError& error) {
    raise("DatastoreError", error);
  } catch (const DatastoreClosedError& error) {
    raise("DatastoreClosedError", error);
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

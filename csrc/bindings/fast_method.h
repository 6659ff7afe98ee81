// Methods that go past pybind11's argument matching, for calls so short that
// the matching would cost more than the work.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "signatures.h"

namespace fastdraft::bindings {

// Sets the Python error that `pending` stands for.
void set_python_error(const std::exception_ptr& pending) noexcept;

// Runs `body` and turns what it throws into a Python error and nullptr.
template <typename Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

// A method of T's class with a fast form for its commonest call, `Call` with
// exactly kPositional positional arguments, and pybind11's form, already
// defined, for every other one. `Call` has:
//   static constexpr Py_ssize_t kPositional;
//   static PyObject* run(T& self, PyObject* const* arguments);
template <typename T, typename Call>
class FastMethod {
 public:
  static void install(pybind11::class_<T>& type, const char* name) {
    namespace py = pybind11;
    general_ = py::object(type.attr(name)).release().ptr();
    doc_ = py::str(py::handle(general_).attr("__doc__")).cast<std::string>();
    doc_ = text_signature(name, doc_, "$self") + doc_;
    definition_ = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)),
                   METH_FASTCALL | METH_KEYWORDS, doc_.c_str()};
    type.attr(name) = py::reinterpret_steal<py::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition_));
  }

 private:
  static PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                        PyObject* keywords) {
    if (count == Call::kPositional && keywords == nullptr) {
      // If its class has a single base, pybind11 keeps the pointer in the instance itself.
      auto* instance = reinterpret_cast<pybind11::detail::instance*>(self);
      if (instance->simple_layout && instance->simple_holder_constructed) {
        auto* value = static_cast<T*>(instance->simple_value_holder[0]);
        return guarded([&] { return Call::run(*value, arguments); });
      }
    }
    return guarded([&] {
      const auto bound = pybind11::reinterpret_steal<pybind11::object>(
          PyObject_CallMethod(general_, "__get__", "O", self));
      if (!bound) throw pybind11::error_already_set();
      return PyObject_Vectorcall(bound.ptr(), arguments, static_cast<std::size_t>(count), keywords);
    });
  }

  inline static PyObject* general_ = nullptr;
  inline static std::string doc_;
  inline static PyMethodDef definition_{};
};

}  // namespace fastdraft::bindings

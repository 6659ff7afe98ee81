// Flat arrays across the boundary: token ids and other integers come in as
// lists or buffers, columns go out as numpy arrays that share the core's memory.
#pragma once

#include <pybind11/critical_section.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fastdraft/error.h"
#include "typed_object.h"

namespace fastdraft::bindings {

// An argument that IntegerArray takes.
struct IntegersType {
  static constexpr auto name = pybind11::detail::const_name("numpy.typing.ArrayLike");
};
using Integers = TypedObject<IntegersType>;

// A copy of the integers of a list, tuple or any buffer, as T: what was checked
// stays as it was while the GIL is released, whatever becomes of the argument.
// Throws InvalidValueError, naming `what` was given, for values that T cannot
// hold and for what is not a row of integers.
template <typename T>
class IntegerArray {
 public:
  IntegerArray(const Integers& values, const char* what) {
    if (!values) return;  // nothing was given: no integers
    if (PyList_CheckExact(values.ptr()) != 0) {
      from_list(values, what);
    } else if (!from_buffer(values)) {
      from_numpy(values, what);
    }
  }
  IntegerArray(const IntegerArray&) = delete;
  IntegerArray& operator=(const IntegerArray&) = delete;

  const T* data() const noexcept { return data_; }
  std::int64_t size() const noexcept { return size_; }

 private:
  // Clears the pending Python error, or throws it if it is none of these: what a caller's own
  // code raises, or a signal, is not ours to judge.
  static void clear_unless_raised_elsewhere(std::initializer_list<PyObject*> expected) {
    for (PyObject* type : expected) {
      if (PyErr_ExceptionMatches(type) == 0) continue;
      PyErr_Clear();
      return;
    }
    throw pybind11::error_already_set();
  }
  static T narrow(long long value, std::int64_t index, const char* what) {
    if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) {
      refuse(std::to_string(value), index, what);
    }
    return static_cast<T>(value);
  }
  [[noreturn]] static void refuse(const std::string& value, std::int64_t index, const char* what) {
    throw InvalidValueError(std::string(what) + " must be at most " +
                            std::to_string(std::numeric_limits<T>::max()) +
                            (std::numeric_limits<T>::min() < 0 ? " and not negative" : "") +
                            ", got " + value + " at index " + std::to_string(index));
  }

  T* own(std::int64_t size) {
    size_ = size;
    if (size <= kInline) {
      data_ = inline_;
      return inline_;
    }
    owned_.resize(static_cast<std::size_t>(size));
    data_ = owned_.data();
    return owned_.data();
  }

  void from_list(pybind11::handle values, const char* what) {
    // Without a GIL another thread may be changing the list.
    const pybind11::scoped_critical_section guard(values);
    const Py_ssize_t size = PyList_GET_SIZE(values.ptr());
    T* out = own(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      // An item's __index__ may run any code, which may change the list too.
      if (PyList_GET_SIZE(values.ptr()) != size) {
        throw InvalidValueError(std::string(what) + " changed while it was read");
      }
      const auto item =
          pybind11::reinterpret_borrow<pybind11::object>(PyList_GET_ITEM(values.ptr(), i));
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(item.ptr(), &overflow);
      if (overflow != 0) refuse(std::string(pybind11::str(item)), i, what);
      if (value == -1 && PyErr_Occurred() != nullptr) {
        clear_unless_raised_elsewhere({PyExc_TypeError});
        throw InvalidValueError(std::string(what) + " must be integers, got " +
                                std::string(pybind11::repr(item)) + " at index " +
                                std::to_string(i));
      }
      out[i] = narrow(value, i, what);
    }
  }

  // A contiguous buffer of T, without numpy's overhead.
  bool from_buffer(pybind11::handle values) {
    if (PyObject_CheckBuffer(values.ptr()) == 0) return false;
    Py_buffer view{};
    if (PyObject_GetBuffer(values.ptr(), &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      clear_unless_raised_elsewhere({PyExc_BufferError, PyExc_TypeError, PyExc_ValueError});
      return false;
    }
    const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> released(&view, PyBuffer_Release);
    const std::string_view format = view.format == nullptr ? "B" : view.format;
    const bool is_integer = format == "i" || format == "l" || format == "q";
    if (view.ndim != 1 || !is_integer || view.itemsize != sizeof(T)) return false;
    // Bytes, since a memoryview may begin anywhere.
    T* out = own(view.len / view.itemsize);
    if (view.len > 0) std::memcpy(out, view.buf, static_cast<std::size_t>(view.len));
    return true;
  }

  void from_numpy(pybind11::handle values, const char* what) {
    namespace py = pybind11;
    py::array array;
    try {
      array = py::array(py::reinterpret_borrow<py::object>(values));
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw;
      array = py::reinterpret_steal<py::array>(py::handle());
    }
    const char kind = array ? array.dtype().kind() : '?';
    const bool empty = array && array.size() == 0;
    if (!array || array.ndim() != 1 || (kind != 'i' && kind != 'u' && !empty)) {
      const std::string got = !array ? std::string(py::str(py::type::of(values)))
                                     : std::to_string(array.ndim()) + " dimensions of " +
                                           std::string(py::str(array.dtype()));
      throw InvalidValueError(std::string(what) + " must be one row of integers, got " + got);
    }
    if (kind == 'u' && array.dtype().itemsize() == 8) {
      from_list(array.attr("tolist")(), what);  // as int64 the greatest would be negative
      return;
    }
    const auto wide = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>(array);
    T* out = own(wide.size());
    for (std::int64_t i = 0; i < size_; ++i) out[i] = narrow(wide.data()[i], i, what);
  }

  static constexpr std::int64_t kInline = 64;

  const T* data_ = nullptr;
  std::int64_t size_ = 0;
  std::vector<T> owned_;
  T inline_[kInline];
};

// A read-only numpy array over `size` values that `owner` keeps alive.
template <typename T>
pybind11::array_t<T> view(const T* values, std::int64_t size, pybind11::handle owner) {
  pybind11::array_t<T> array(size, values, owner);
  pybind11::detail::array_proxy(array.ptr())->flags &=
      ~pybind11::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

}  // namespace fastdraft::bindings

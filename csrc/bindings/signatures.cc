#include "signatures.h"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

// The builtin function behind what a class holds, or null.
PyCFunctionObject* function_of(py::handle member) {
  auto function = py::reinterpret_borrow<py::object>(member);
  if (PyInstanceMethod_Check(member.ptr()) != 0) {
    function = py::reinterpret_borrow<py::object>(PyInstanceMethod_Function(member.ptr()));
  } else if (Py_TYPE(member.ptr()) == &PyStaticMethod_Type) {
    function = member.attr("__func__");
  }
  if (PyCFunction_Check(function.ptr()) == 0) return nullptr;
  return reinterpret_cast<PyCFunctionObject*>(function.ptr());  // the class holds it
}

// Gives a class the signature of its __init__, without self.
void sign_class(py::handle type, const std::string& init_doc) {
  const std::string name = py::str(type.attr("__name__"));
  const std::string signature = text_signature("__init__", init_doc, "");
  if (signature.empty()) return;
  const std::string doc = name + signature.substr(std::strlen("__init__"));
#if PY_VERSION_HEX >= 0x030D0000
  auto* copy = static_cast<char*>(PyMem_Malloc(doc.size() + 1));
#else
  auto* copy = static_cast<char*>(PyObject_Malloc(doc.size() + 1));
#endif
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, doc.c_str(), doc.size() + 1);
  // __doc__ was read from it when the class was made. The old one may be in use.
  reinterpret_cast<PyTypeObject*>(type.ptr())->tp_doc = copy;
}

}  // namespace

std::string text_signature(const std::string& name, const std::string& doc,
                           const std::string& self) {
  if (doc.compare(0, name.size() + 1, name + "(") != 0) return "";
  const bool is_static = doc.compare(name.size(), 5, "(self") != 0;
  std::string signature = name + (is_static ? "" : "(" + self);
  int depth = 0;
  bool skips = !is_static;     // what is not of the signature: self, and annotations
  bool is_first = !is_static;  // whether the parameter is self
  bool is_empty = !is_static && self.empty();
  for (std::size_t i = name.size(); i < doc.size() && doc[i] != '\n'; ++i) {
    const char letter = doc[i];
    if (letter == '(' || letter == '[') ++depth;
    if (letter == ')' || letter == ']') --depth;
    if (depth == 0) return signature + ")\n--\n\n";
    if (depth == 1 && letter == ',') {
      if (!is_empty) signature += ',';
      skips = is_first = is_empty = false;
      ++i;  // the space behind it
      if (signature.back() == ',') signature += ' ';
      continue;
    }
    if (depth == 1 && letter == ':') skips = true;
    if (depth == 1 && letter == '=' && !is_first) skips = false;
    if (!skips) signature += letter;
  }
  return "";
}

void add_signatures(py::module_& module) {
  for (const auto& [name, value] : py::dict(module.attr("__dict__"))) {
    if (PyType_Check(value.ptr()) == 0) continue;
    for (const auto& [key, member] : py::dict(value.attr("__dict__"))) {
      PyCFunctionObject* function = function_of(member);
      if (function == nullptr || function->m_ml->ml_doc == nullptr) continue;
      const std::string method = py::str(key);
      const std::string doc = function->m_ml->ml_doc;
      // pybind11's functions are bound by a method object, which takes self away itself.
      const std::string signature = text_signature(method, doc, "self");
      if (signature.empty()) continue;
      if (method == "__init__") sign_class(value, doc);
      // pybind11 frees it with the function.
      std::free(const_cast<char*>(function->m_ml->ml_doc));  // NOLINT
      function->m_ml->ml_doc = PYBIND11_COMPAT_STRDUP((signature + doc).c_str());
    }
  }
}

void def_described(const py::object& type, const char* method, const char* function,
                   void (*check)(const py::handle& self)) {
  const std::string name = function;
  type.attr(method) = py::cpp_function(
      [name, check](const py::object& self) {
        check(self);
        return py::str(py::module_::import("fastdraft._describe").attr(name.c_str())(self));
      },
      py::name(method), py::is_method(type));
}

}  // namespace fastdraft::bindings

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <string>
#include <utility>

#include "draft_object.h"
#include "fastdraft/draft.h"
#include "numpy.h"
#include "register.h"
#include "signatures.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

PyTypeObject* draft_type = nullptr;

using TokenList = py::typing::List<int>;

TokenList as_list(const Token* tokens, std::int64_t size) {
  TokenList list(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    PyList_SET_ITEM(list.ptr(), i, PyLong_FromLong(tokens[i]));
  }
  return list;
}

// The members are functions of Python, which take anything for self.
DraftObject& draft_of(py::handle self) {
  if (PyObject_TypeCheck(self.ptr(), draft_type) == 0) {
    throw py::type_error(std::string("self must be a Draft, got a ") +
                         Py_TYPE(self.ptr())->tp_name);
  }
  return *reinterpret_cast<DraftObject*>(self.ptr());
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

Py_ssize_t length(PyObject* self) { return reinterpret_cast<DraftObject*>(self)->size; }

py::object make_draft_type() {
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
      {Py_sq_length, reinterpret_cast<void*>(length)},
      {Py_tp_doc,
       const_cast<char*>("The tokens guessed for one step of a request, as read-only columns.")},
      {0, nullptr}};
  PyType_Spec spec{"fastdraft._core.Draft", static_cast<int>(offsetof(DraftObject, memory)), 1,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  return type;
}

// Defines a column as a property of `type`: `get` gives its first value and
// the number of them, from the object.
template <typename Get>
void def_column(const py::object& type, const char* name, Get get, const char* doc) {
  const auto property =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyProperty_Type));
  type.attr(name) = property(py::cpp_function(
                                 [get](const py::object& self) {
                                   const auto [values, size] = get(self);
                                   return view(values, size, self);
                                 },
                                 py::name(name), py::is_method(type)),
                             py::none(), py::none(), doc);
}

// Defines the columns that a draft and the drafts of a batch share. `find`
// gives the DraftColumns of an object, and their number of tokens.
template <typename Find>
void def_columns(const py::object& type, Find find) {
  const auto define = [&](const char* name, auto column, const char* doc) {
    def_column(
        type, name,
        [find, column](const py::object& self) {
          const auto [columns, size] = find(self);
          return std::pair{column(columns), size};
        },
        doc);
  };
  using Columns = DraftColumns;
  define(
      "token_ids", [](const Columns& all) -> const Token* { return all.token_ids; },
      "The drafted tokens, int32.");
  define(
      "parents", [](const Columns& all) -> const std::int32_t* { return all.parents; },
      "For each token the index of its parent in the request's draft, int32; -1 for the last "
      "token of the request's text. A chain is -1, 0, 1, ...");
  define(
      "probabilities", [](const Columns& all) -> const float* { return all.probabilities; },
      "The calibrated probability that the token and all before it on its path are accepted, "
      "float32; 1 where the drafter does not estimate it.");
  define(
      "sources",
      [](const Columns& all) { return reinterpret_cast<const std::uint8_t*>(all.sources); },
      "Where each token was found, a fastdraft.Source, uint8.");
}

}  // namespace

DraftObject* new_draft(std::int32_t capacity) {
  DraftObject* draft = PyObject_NewVar(DraftObject, draft_type,
                                       static_cast<Py_ssize_t>(DraftColumns::bytes(capacity)));
  if (draft == nullptr) throw py::error_already_set();
  draft->capacity = capacity;
  draft->size = 0;
  return draft;
}

void register_draft(py::module_& module) {
  const py::object draft = make_draft_type();
  draft_type = reinterpret_cast<PyTypeObject*>(draft.ptr());
  module.attr("Draft") = draft;
  def_columns(draft, [](const py::object& self) {
    return std::pair{draft_of(self).columns(), std::int64_t{draft_of(self).size}};
  });
  // Typed for the stubs; the slot itself stays the plain function.
  draft.attr("__len__") =
      py::cpp_function([](const py::object& self) { return draft_of(self).size; },
                       py::name("__len__"), py::is_method(draft));
  draft_type->tp_as_sequence->sq_length = length;
  draft.attr("tolist") = py::cpp_function(
      [](const py::object& self) {
        return as_list(draft_of(self).columns().token_ids, draft_of(self).size);
      },
      py::name("tolist"), py::is_method(draft), "The drafted tokens as a list.");

  def_described(draft, "__repr__", "draft", [](const py::handle& self) { draft_of(self); });

  py::class_<DraftBatch> batch(
      module, "DraftBatch",
      "The drafts of a batch, as flat read-only columns: row r's tokens are offsets[r] to "
      "offsets[r + 1].");
  def_columns(batch, [](const py::object& self) {
    const auto& drafts = self_as<DraftBatch>(self);
    return std::pair{drafts.columns, std::int64_t{drafts.offsets.back()}};
  });
  def_column(
      batch, "offsets",
      [](const py::object& self) {
        const auto& offsets = self_as<DraftBatch>(self).offsets;
        return std::pair{offsets.data(), static_cast<std::int64_t>(offsets.size())};
      },
      "Where each row begins, and the end of the last, int32, one more than rows.");
  batch.def("__len__", [](const DraftBatch& self) { return self.offsets.size() - 1; });
  batch.def(
      "tolist",
      [](const DraftBatch& self) {
        py::typing::List<TokenList> rows;
        for (std::size_t r = 0; r + 1 < self.offsets.size(); ++r) {
          rows.append(as_list(self.columns.token_ids + self.offsets[r],
                              self.offsets[r + 1] - self.offsets[r]));
        }
        return rows;
      },
      "The drafted tokens as a list for each row.");
  def_described(batch, "__repr__", "batch",
                [](const py::handle& self) { self_as<DraftBatch>(self); });
}

}  // namespace fastdraft::bindings

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "fastdraft/error.h"
#include "fastdraft/successors.h"
#include "initialised.h"
#include "numpy.h"
#include "register.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// The rows of an array of `columns` columns, given flat.
std::int64_t rows_of(std::int64_t size, std::int64_t columns, const char* what) {
  if (size % columns != 0) {
    throw InvalidValueError(std::string(what) + " must be rows of " + std::to_string(columns) +
                            " tokens, got " + std::to_string(size) + " in all");
  }
  return size / columns;
}

// What contexts are followed by, checked and copied.
struct Learned {
  Learned(const Integers& context_ids, const Integers& followers, const Floats& chances)
      : contexts(context_ids, "contexts"),
        token_ids(followers, "token_ids"),
        rows(rows_of(contexts.size(), 2, "contexts")),
        probabilities(chances.data(), chances.data() + chances.size()) {
    if (token_ids.size() != chances.size() ||
        (rows == 0 ? token_ids.size() : token_ids.size() % rows) != 0) {
      throw InvalidValueError("token_ids and probabilities must have a row for each of " +
                              std::to_string(rows) + " contexts, got " +
                              std::to_string(token_ids.size()) + " and " +
                              std::to_string(chances.size()) + " in all");
    }
    count = rows == 0 ? 0 : token_ids.size() / rows;
  }

  const IntegerArray<Token> contexts;
  const IntegerArray<Token> token_ids;
  const std::int64_t rows;
  const std::vector<float> probabilities;
  std::int64_t count = 0;
};

// The tables of a tuple, which keeps them alive.
std::vector<Successors*> tables_of(const py::tuple& tables) {
  std::vector<Successors*> found;
  found.reserve(tables.size());
  for (const py::handle table : tables) {
    if (!py::isinstance<Successors>(table)) {
      throw py::type_error("tables must be Successors, got " +
                           std::string(py::str(py::type::of(table))));
    }
    found.push_back(&py::cast<Successors&>(table));
  }
  return found;
}

void learn(Successors& successors, const Integers& contexts, const Integers& token_ids,
           const Floats& probabilities) {
  const Learned learned(contexts, token_ids, probabilities);
  const py::gil_scoped_release release;
  successors.learn(learned.contexts.data(), learned.rows, learned.token_ids.data(),
                   learned.probabilities.data(), learned.count);
}

void learn_each(const py::tuple& tables, const Integers& offsets, const Integers& contexts,
                const Integers& token_ids, const Floats& probabilities) {
  const std::vector<Successors*> found = tables_of(tables);
  const IntegerArray<std::int64_t> starts(offsets, "offsets");
  const Learned learned(contexts, token_ids, probabilities);
  const auto size = static_cast<std::int64_t>(found.size());
  if (starts.size() != size + 1 || starts.data()[size] != learned.rows) {
    throw InvalidValueError(
        "offsets must have one more than " + std::to_string(size) + " tables and end at " +
        std::to_string(learned.rows) + ", got " + std::to_string(starts.size()) +
        (starts.size() == 0 ? ""
                            : " that end at " + std::to_string(starts.data()[starts.size() - 1])));
  }
  const py::gil_scoped_release release;
  Successors::learn_each(found.data(), size, starts.data(), learned.contexts.data(),
                         learned.token_ids.data(), learned.probabilities.data(), learned.count);
}

py::tuple arrays_of(const Successors::Trees& trees) {
  const auto array = [](const auto& values) {
    return py::array(static_cast<py::ssize_t>(values.size()), values.data());
  };
  return py::make_tuple(array(trees.token_ids), array(trees.offsets), array(trees.parents),
                        array(trees.confidences));
}

py::tuple trees(const Successors& successors, const Integers& ends, std::int32_t nodes) {
  const IntegerArray<Token> tokens(ends, "ends");
  const std::int64_t rows = rows_of(tokens.size(), Successors::kEnd, "ends");
  Successors::Trees found;
  {
    const py::gil_scoped_release release;
    found = successors.trees(tokens.data(), rows, nodes);
  }
  return arrays_of(found);
}

py::tuple trees_each(const py::tuple& tables, const Integers& ends, std::int32_t nodes) {
  const std::vector<Successors*> of_rows = tables_of(tables);
  const IntegerArray<Token> tokens(ends, "ends");
  const std::int64_t rows = rows_of(tokens.size(), Successors::kEnd, "ends");
  if (rows != static_cast<std::int64_t>(of_rows.size())) {
    throw InvalidValueError("ends must have a row for each of " + std::to_string(of_rows.size()) +
                            " tables, got " + std::to_string(rows));
  }
  Successors::Trees found;
  {
    const py::gil_scoped_release release;
    found = Successors::trees_each(of_rows.data(), tokens.data(), rows, nodes);
  }
  return arrays_of(found);
}

}  // namespace

void register_successors(py::module_& module) {
  py::class_<Successors> successors(module, "Successors", "The core of fastdraft.Successors.");
  successors.def(py::init<std::int64_t>(), py::kw_only(), py::arg("slots"));
  successors.def_property_readonly("slots", &Successors::slots,
                                   "How many contexts the table has room for.");
  successors.def_property_readonly("num_bytes", &Successors::bytes, "The memory of the table.");
  successors.def("_learn", &learn, py::arg("contexts"), py::arg("token_ids"),
                 py::arg("probabilities"));
  successors.def_static("_learn_each", &learn_each, py::arg("tables"), py::arg("offsets"),
                        py::arg("contexts"), py::arg("token_ids"), py::arg("probabilities"));
  successors.def("_trees", &trees, py::arg("ends"), py::arg("nodes"));
  successors.def_static("_trees_each", &trees_each, py::arg("tables"), py::arg("ends"),
                        py::arg("nodes"));
}

}  // namespace fastdraft::bindings

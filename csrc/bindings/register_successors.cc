#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>

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

void learn(Successors& successors, const Integers& contexts, const Integers& token_ids,
           const Floats& probabilities) {
  const IntegerArray<Token> ends(contexts, "contexts");
  const IntegerArray<Token> tokens(token_ids, "token_ids");
  const std::int64_t rows = rows_of(ends.size(), 2, "contexts");
  if (tokens.size() != probabilities.size() ||
      (rows == 0 ? tokens.size() : tokens.size() % rows) != 0) {
    throw InvalidValueError("token_ids and probabilities must have a row for each of " +
                            std::to_string(rows) + " contexts, got " +
                            std::to_string(tokens.size()) + " and " +
                            std::to_string(probabilities.size()) + " in all");
  }
  const std::int64_t count = rows == 0 ? 0 : tokens.size() / rows;
  const std::vector<float> chances(probabilities.data(), probabilities.data() + tokens.size());
  const py::gil_scoped_release release;
  successors.learn(ends.data(), rows, tokens.data(), chances.data(), count);
}

py::tuple trees(const Successors& successors, const Integers& ends) {
  const IntegerArray<Token> tokens(ends, "ends");
  const std::int64_t rows = rows_of(tokens.size(), Successors::kEnd, "ends");
  Successors::Trees found;
  {
    const py::gil_scoped_release release;
    found = successors.trees(tokens.data(), rows);
  }
  const auto array = [](const auto& values) {
    return py::array(static_cast<py::ssize_t>(values.size()), values.data());
  };
  return py::make_tuple(array(found.token_ids), array(found.offsets), array(found.parents),
                        array(found.confidences));
}

}  // namespace

void register_successors(py::module_& module) {
  py::class_<Successors> successors(module, "Successors", "The core of fastdraft.Successors.");
  successors.def(py::init<std::int64_t>(), py::kw_only(), py::arg("slots"));
  successors.def_property_readonly("slots", &Successors::slots,
                                   "How many contexts the table has room for.");
  successors.def("_learn", &learn, py::arg("contexts"), py::arg("token_ids"),
                 py::arg("probabilities"));
  successors.def("_trees", &trees, py::arg("ends"));
}

}  // namespace fastdraft::bindings

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "draft/successors.h"
#include "fastdraft/error.h"
#include "initialised.h"
#include "numpy.h"
#include "offers_object.h"
#include "register.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

std::string shape_of(const py::array& array) { return py::str(array.attr("shape")); }

// Integers of two dimensions, checked and copied flat. `columns`: 0 for any number.
struct Rows {
  Rows(const Integers& given, const char* what, std::int64_t columns)
      : array(py::array::ensure(given)), values(flat(array, what, columns), what) {}

  static Integers flat(py::array& array, const char* what, std::int64_t columns) {
    if (!array) PyErr_Clear();
    if (array && array.ndim() == 2 && (columns == 0 || array.shape(1) == columns)) {
      return Integers(array.reshape({-1}));
    }
    const std::string of = columns == 0 ? "" : " of " + std::to_string(columns) + " tokens";
    throw InvalidValueError(std::string(what) + " must be rows" + of + ", got shape " +
                            (array ? shape_of(array) : "none"));
  }

  std::int64_t rows() const { return array.shape(0); }
  std::int64_t columns() const { return array.shape(1); }

  py::array array;
  const IntegerArray<Token> values;
};

// The tables of a call, which `kept` keeps alive.
struct Tables {
  explicit Tables(py::tuple tables) : kept(std::move(tables)) {
    for (const py::handle table : kept) {
      if (!py::isinstance<Successors>(table)) {
        throw py::type_error("tables must be Successors, got " +
                             std::string(py::str(py::type::of(table))));
      }
      found.push_back(&py::cast<Successors&>(table));
    }
  }
  std::int64_t size() const { return static_cast<std::int64_t>(found.size()); }

  const py::tuple kept;
  std::vector<Successors*> found;
};

using Iterable = py::typing::Iterable<Successors>;

void learn_rows(const Tables& tables, const std::int64_t* offsets, const Rows& contexts,
                const Integers& token_ids, const Integers& probabilities) {
  const Rows followers(token_ids, "token_ids", 0);
  const Floats given = Floats::ensure(probabilities);
  if (!given) throw py::error_already_set();
  if (followers.rows() != contexts.rows() || given.ndim() != 2 ||
      given.shape(0) != followers.rows() || given.shape(1) != followers.columns()) {
    throw InvalidValueError(
        "token_ids and probabilities must have one shape, with a row for each of " +
        std::to_string(contexts.rows()) + " contexts, got " + shape_of(followers.array) + " and " +
        shape_of(given));
  }
  const std::vector<float> copied(given.data(), given.data() + given.size());
  const py::gil_scoped_release release;
  Successors::learn(tables.found.data(), tables.size(), offsets, contexts.values.data(),
                    followers.values.data(), copied.data(), followers.columns());
}

void learn_each(const Iterable& tables, const Integers& offsets, const Integers& contexts,
                const Integers& token_ids, const Integers& probabilities) {
  const Tables of(py::tuple{tables});
  const Rows known(contexts, "contexts", 2);
  const IntegerArray<std::int64_t> starts(offsets, "offsets");
  const std::int64_t given = starts.size();
  if (given != of.size() + 1 || starts.data()[of.size()] != known.rows()) {
    throw InvalidValueError(
        "offsets must have one more than " + std::to_string(of.size()) + " tables and end at " +
        std::to_string(known.rows()) + ", got " + std::to_string(given) +
        (given > 0 ? " that end at " + std::to_string(starts.data()[given - 1]) : ""));
  }
  learn_rows(of, starts.data(), known, token_ids, probabilities);
}

void learn(const py::object& self, const Integers& contexts, const Integers& token_ids,
           const Integers& probabilities) {
  const Tables of(py::make_tuple(self));
  const Rows known(contexts, "contexts", 2);
  const std::array<std::int64_t, 2> offsets = {0, known.rows()};
  learn_rows(of, offsets.data(), known, token_ids, probabilities);
}

OffersObject offers_of(const py::tuple& tables, const Rows& ends, std::int32_t nodes,
                       std::string kind) {
  const Tables of(tables);
  if (ends.rows() != of.size()) {
    throw InvalidValueError("ends must have a row for each of " + std::to_string(of.size()) +
                            " tables, got " + std::to_string(ends.rows()));
  }
  const py::gil_scoped_release release;
  Successors::Trees trees =
      Successors::trees(of.found.data(), ends.values.data(), of.size(), nodes);
  return {std::move(kind), std::move(trees.token_ids), std::move(trees.offsets),
          std::move(trees.parents), std::move(trees.confidences)};
}

OffersObject offers_each(const Iterable& tables, const Integers& ends, std::int32_t nodes,
                         std::string kind) {
  return offers_of(py::tuple{tables}, Rows(ends, "ends", Successors::kEnd), nodes, std::move(kind));
}

OffersObject offers(const py::object& self, const Integers& ends, std::int32_t nodes,
                    std::string kind) {
  self_as<Successors>(self);
  const Rows read(ends, "ends", Successors::kEnd);
  py::tuple tables(read.rows());
  for (py::ssize_t row = 0; row < static_cast<py::ssize_t>(tables.size()); ++row) {
    PyTuple_SET_ITEM(tables.ptr(), row, self.inc_ref().ptr());
  }
  return offers_of(tables, read, nodes, std::move(kind));
}

}  // namespace

void register_successors(py::module_& module) {
  py::class_<Successors> successors(
      module, "Successors",
      R"(The likeliest next tokens at the positions that the target has seen lately.

A verification computes logits for each token of a draft, rejected ones too. `learn` keeps the
likeliest tokens of each; where a text comes to such tokens again, `offers` makes a tree of them for
`Engine.propose_batch`, together with the runners-up of the text's last position. Useful for drafts
that are trees, where a draft token costs little.

After Token Recycling (Luo et al., 2024, arXiv:2408.08696) and LogitSpec (Liu et al., 2025,
arXiv:2507.01449).

Requests share what they learn from: give requests that must not see each other one each. Calls from
several threads take turns.)");
  successors.def(py::init<std::int64_t>(), py::kw_only(), py::arg("slots") = 32768,
                 R"(Makes an empty table.

slots: contexts that the table has room for, rounded up to a power of two; each takes 72 bytes.
    Newer contexts push out older ones.

Raises InvalidValueError where `slots` is below 1 or above 2**24.)");
  successors.def_property_readonly("slots", &Successors::slots,
                                   "How many contexts the table has room for.");
  successors.def_property_readonly("num_bytes", &Successors::bytes, "The memory of the table.");
  successors.def("learn", &learn, py::arg("contexts"), py::arg("token_ids"),
                 py::arg("probabilities"),
                 R"(Learns what may follow. Of equal contexts the last row counts.

contexts: (rows, 2) integers, the last two tokens at a position; -1 for one that does not exist.
token_ids: (rows, n) integers, n at most 8: tokens that may follow, different ones in each row; a
    negative one ends its row.
probabilities: (rows, n), how likely each is, from 0 to 1.

Raises InvalidValueError for a wrong shape, id or probability. Nothing is learned then.)");
  successors.def_static("learn_each", &learn_each, py::arg("tables"), py::arg("offsets"),
                        py::arg("contexts"), py::arg("token_ids"), py::arg("probabilities"),
                        R"(The same for several tables in one call, without the GIL.

tables: one for each request, for example.
offsets: table i learns rows offsets[i] to offsets[i + 1] - 1 of the arrays: integers, one more than
    tables, that rise from 0 to the number of rows.)");
  successors.def("offers", &offers, py::arg("ends"), py::kw_only(),
                 py::arg("nodes") = Successors::kNodes, py::arg("kind") = "successors",
                 R"(What may follow texts, a tree for each: about 10 us.

ends: (rows, 3) integers, the last three tokens of each text; -1 for one that does not exist. A row
    whose last one is -1 gets no tree.
nodes: the most tokens of a tree, 1 to 48: the first ones on the most probable paths.
kind: of the offers.

Raises InvalidValueError: `ends` has another shape or ids below -1, or `nodes` is out of range.)");
  successors.def_static("offers_each", &offers_each, py::arg("tables"), py::arg("ends"),
                        py::kw_only(), py::arg("nodes") = Successors::kNodes,
                        py::arg("kind") = "successors",
                        R"(The same from a table for each row, in one call without the GIL.

Raises InvalidValueError as `offers`, or where there is not one table for each row.)");
}

}  // namespace fastdraft::bindings

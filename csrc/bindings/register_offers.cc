#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fastdraft/error.h"
#include "numpy.h"
#include "offers_object.h"
#include "register.h"
#include "signatures.h"

namespace fastdraft::bindings {

namespace py = pybind11;

void OffersObject::check() const {
  const auto check = [&](std::size_t size, const char* what) {
    if (size == token_ids.size()) return;
    throw InvalidValueError(std::string(what) + " of offers must have one entry for each of " +
                            std::to_string(token_ids.size()) + " token_ids, got " +
                            std::to_string(size));
  };
  if (parents) check(parents->size(), "parents");
  if (confidences) check(confidences->size(), "confidences");
}

Offers OffersObject::columns(OfferKind number) const noexcept {
  return {number,
          offsets.data(),
          token_ids.data(),
          parents ? parents->data() : nullptr,
          confidences ? confidences->data() : nullptr,
          time,
          drawn};
}

namespace {

template <typename T>
void append(std::vector<T>& values, const Integers& given, const char* what) {
  const IntegerArray<T> read(given, what);
  values.insert(values.end(), read.data(), read.data() + read.size());
}

void append(std::vector<float>& values, const py::handle& given) {
  const Floats read = Floats::ensure(given);
  if (!read || read.ndim() != 1) {
    PyErr_Clear();
    throw InvalidValueError("confidences of offers must be one row of numbers, got " +
                            std::string(py::repr(given)));
  }
  values.insert(values.end(), read.data(), read.data() + read.size());
}

OffersObject make(std::string kind, const Integers& token_ids,
                  const std::optional<Integers>& offsets, const std::optional<Integers>& parents,
                  const std::optional<Integers>& confidences, double time, bool drawn) {
  OffersObject made{std::move(kind), {}, {}, {}, {}, time, drawn};
  append(made.token_ids, token_ids, "token_ids of offers");
  if (offsets) {
    append(made.offsets, *offsets, "offsets of offers");
  } else {
    made.offsets = {0, static_cast<std::int64_t>(made.token_ids.size())};
  }
  if (parents) append(made.parents.emplace(), *parents, "parents of offers");
  if (confidences) append(made.confidences.emplace(), *confidences);
  made.check();
  return made;
}

using IntegerRows = py::typing::Iterable<Integers>;

OffersObject of_rows(std::string kind, const IntegerRows& rows,
                     const std::optional<IntegerRows>& parents,
                     const std::optional<IntegerRows>& confidences, double time, bool drawn) {
  OffersObject made{std::move(kind), {}, {0}, {}, {}, time, drawn};
  for (const py::handle row : rows) {
    append(made.token_ids, py::reinterpret_borrow<Integers>(row), "token_ids of offers");
    made.offsets.push_back(static_cast<std::int64_t>(made.token_ids.size()));
  }
  if (parents) {
    made.parents.emplace();
    for (const py::handle row : *parents) {
      append(*made.parents, py::reinterpret_borrow<Integers>(row), "parents of offers");
    }
  }
  if (confidences) {
    made.confidences.emplace();
    for (const py::handle row : *confidences) append(*made.confidences, row);
  }
  made.check();
  return made;
}

template <typename T>
py::array_t<T> column(const std::vector<T>& values, const py::object& self) {
  return view(values.data(), static_cast<std::int64_t>(values.size()), self);
}

template <typename T>
std::optional<py::array_t<T>> column(const std::optional<std::vector<T>>& values,
                                     const py::object& self) {
  return values ? std::optional(column(*values, self)) : std::nullopt;
}

// Defines a read-only column as a property.
template <typename Member>
void def_column(py::class_<OffersObject>& type, const char* name, Member member, const char* doc) {
  type.def_property_readonly(
      name,
      [member](const py::object& self) {
        return column(self_as<OffersObject>(self).*member, self);
      },
      doc);
}

}  // namespace

void register_offers(py::module_& module) {
  py::class_<OffersObject> offers(
      module, "Offers",
      R"(What a drafter of one kind guesses for the next step of each row of a batch.

Row r's tokens are token_ids[offsets[r]:offsets[r + 1]], a chain or a tree, 1,024 at most. A row
without tokens has no offer. The engine weighs them with its own evidence: how much more likely a
token becomes that is offered, and how much less another one, is learned for each kind from what
the target emits.)");
  offers.def(py::init(&make), py::arg("kind"), py::arg("token_ids"),
             py::arg("offsets") = py::none(), py::arg("parents") = py::none(),
             py::arg("confidences") = py::none(), py::arg("time") = 0.0, py::arg("drawn") = false,
             R"(Copies what a drafter guesses.

kind: the drafter's name, such as "eagle".
token_ids: the tokens of all rows, one row after another.
offsets: where each row begins, and the end of the last: one more than rows. By default all tokens
    are one row.
parents: for each token the index of its parent in the row, before its own; -1 for the last token
    of the request's text. By default each row is a chain.
confidences: how sure the drafter is of each token where those before it are right, from 0 to 1,
    such as its probability. They need not be calibrated. By default it does not say.
time: what making the offers took, for all rows together: in the unit of the cost curve, or with a
    constant token cost as a fraction of a step without drafts.
drawn: whether each token was drawn at random from the drafter's distribution, to be verified
    against it by `verify_rejection`. A row with such an offer, a chain, drafts just that: to choose
    among drawn tokens, or to cut them by what they are, would bias the output. So ask `wants` first.

Raises InvalidValueError for columns of different lengths.)");
  offers.def_static("of_rows", &of_rows, py::arg("kind"), py::arg("rows"), py::kw_only(),
                    py::arg("parents") = py::none(), py::arg("confidences") = py::none(),
                    py::arg("time") = 0.0, py::arg("drawn") = false,
                    "The same from a list for each row.");
  offers.def_readonly("kind", &OffersObject::kind, "The drafter's name.");
  def_column(offers, "token_ids", &OffersObject::token_ids, "The tokens of all rows, int32.");
  def_column(offers, "offsets", &OffersObject::offsets,
             "Where each row begins, and the end, int64.");
  def_column(offers, "parents", &OffersObject::parents,
             "Each token's parent in its row, int32; None where rows are chains.");
  def_column(offers, "confidences", &OffersObject::confidences,
             "How sure the drafter is of each token, float32; None where it does not say.");
  offers.def_readonly("time", &OffersObject::time, "What making the offers took.");
  offers.def_readonly("drawn", &OffersObject::drawn, "Whether the tokens were drawn at random.");
  def_described(offers, "__repr__", "offers",
                [](const py::handle& self) { self_as<OffersObject>(self); });
}

}  // namespace fastdraft::bindings

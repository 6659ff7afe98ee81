#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fastdraft/error.h"
#include "fastdraft/ngram_table.h"
#include "fingerprint.h"
#include "numpy.h"
#include "register.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

constexpr int kMostGuesses = NgramTable::kOrders * NgramTable::kSuccessors;

std::vector<std::tuple<Token, int, double>> guess(const NgramTable& table,
                                                  const Integers& token_ids, int most) {
  check_range("most", most, 1, kMostGuesses);
  const IntegerArray<Token> text(token_ids, "token_ids");
  std::vector<NgramTable::Guess> found(static_cast<std::size_t>(most));
  const int count = table.guess(text.data(), text.size(), found.data(), most);
  std::vector<std::tuple<Token, int, double>> guesses;
  for (int i = 0; i < count; ++i) {
    const NgramTable::Guess& each = found[static_cast<std::size_t>(i)];
    guesses.emplace_back(each.token, each.order, std::exp2(-0.5 * each.half_bits));
  }
  return guesses;
}

std::int64_t count_known(const NgramTable& table, const Integers& token_ids, int most) {
  check_range("most", most, 1, kMostGuesses);
  const IntegerArray<Token> text(token_ids, "token_ids");
  return table.count_known(text.data(), text.size(), most);
}

void add_text(NgramTableWriter& writer, const Integers& token_ids, std::int64_t group) {
  const IntegerArray<Token> text(token_ids, "token_ids");
  writer.add(text.data(), text.size(), group);
}

}  // namespace

void register_ngram_table(py::module_& module) {
  py::class_<NgramTable, std::shared_ptr<NgramTable>> table(module, "NgramTable",
                                                            "The core of fastdraft.NgramTable.");
  table.def(py::init([](const py::bytes& name, const std::optional<py::bytes>& fingerprint) {
              const std::string path = name;
              const std::optional<Fingerprint> expected = fingerprint_of(fingerprint);
              const py::gil_scoped_release release;
              return std::const_pointer_cast<NgramTable>(NgramTable::open(path, expected));
            }),
            py::kw_only(), py::arg("path"), py::arg("fingerprint"));
  table.def("_guess", &guess, py::arg("token_ids"), py::arg("most"));
  table.def("count_known", &count_known, py::arg("token_ids"), py::kw_only(), py::arg("most") = 2,
            R"(How many tokens of a text, its first one left out, are among the likeliest there.

token_ids: a list or a row of integers.
most: how many of the likeliest count, 1 to 24.)");
  table.def_property_readonly("num_contexts", &NgramTable::num_contexts,
                              "The contexts of one, two or three tokens.");
  table.def_property_readonly("num_entries", &NgramTable::num_successors,
                              "The n-grams: the tokens that follow a context, for all of them.");
  table.def_property_readonly("largest_token", &NgramTable::largest_token,
                              "The largest token of the text that was counted; -1: none.");
  table.def_property_readonly("_bytes", &NgramTable::bytes);
  table.def_property_readonly(
      "fingerprint", [](const NgramTable& self) { return bytes_of(self.fingerprint()); },
      "The fingerprint of the tokenizer that its tokens are of, 32 bytes, or None.");

  py::class_<NgramTableWriter> writer(
      module, "NgramTableWriter", "Counts the n-grams of texts: fastdraft.memory.ngrams.build.");
  writer.def(py::init([](const py::bytes& path, const std::optional<py::bytes>& fingerprint) {
               return std::make_unique<NgramTableWriter>(path, fingerprint_of(fingerprint));
             }),
             py::kw_only(), py::arg("path"), py::arg("fingerprint"));
  writer.def("add", &add_text, py::arg("token_ids"), py::kw_only(), py::arg("group"));
  writer.def("finish", &NgramTableWriter::finish, py::call_guard<py::gil_scoped_release>());
  writer.def_property_readonly("num_tokens", &NgramTableWriter::num_tokens,
                               "The tokens counted so far.");
}

}  // namespace fastdraft::bindings

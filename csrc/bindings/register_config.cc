#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "fastdraft/config.h"
#include "fastdraft/error.h"
#include "fastdraft/ngram_table.h"
#include "register.h"
#include "typed_object.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

[[noreturn]] void refuse(const char* name, const char* expected, py::handle value) {
  throw InvalidValueError(std::string(name) + " must be " + expected + ", got " +
                          std::string(py::repr(value)));
}

// Integers beyond T's range become its nearest value, which no limit admits.
template <typename T>
T integer(const char* name, py::handle value) {
  if (PyBool_Check(value.ptr()) || PyLong_Check(value.ptr()) == 0) {
    refuse(name, "an integer", value);
  }
  int overflow = 0;
  const long long wide = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  using Limits = std::numeric_limits<T>;
  if (overflow != 0) return overflow > 0 ? Limits::max() : Limits::min();
  return static_cast<T>(std::clamp<long long>(wide, Limits::min(), Limits::max()));
}

double number(const char* name, py::handle value, const char* expected) {
  const bool is_integer = PyLong_Check(value.ptr()) != 0 && !PyBool_Check(value.ptr());
  if (!is_integer && PyFloat_Check(value.ptr()) == 0) refuse(name, expected, value);
  return value.cast<double>();
}

CalibratedConfig read_calibrated(py::handle tree_budget, py::handle ngrams, bool last) {
  CalibratedConfig calibrated;
  if (!tree_budget.is_none()) {
    calibrated.tree_budget = integer<std::int32_t>("tree_budget", tree_budget);
  }
  if (last) calibrated.objective = Objective::kLast;
  if (ngrams.is_none()) return calibrated;
  if (!py::isinstance<NgramTable>(ngrams)) {
    refuse("ngrams", "a table of n-grams or the path of one", ngrams);
  }
  calibrated.ngrams = ngrams.cast<std::shared_ptr<NgramTable>>();
  return calibrated;
}

DrafterConfig read_drafter(py::handle config) {
  const py::object drafter = config.attr("drafter");
  const py::object tree_budget = config.attr("tree_budget");
  const py::object ngrams = config.attr("ngrams");
  const py::object objective = config.attr("objective");
  const bool last = objective.equal(py::str("last"));
  if (!last && !objective.equal(py::str("tokens"))) {
    refuse("objective", "'tokens' or 'last'", objective);
  }
  if (drafter.is_none()) return read_calibrated(tree_budget, ngrams, last);
  for (const auto& [name, value] :
       {std::pair{"tree_budget", tree_budget}, std::pair{"ngrams", ngrams},
        std::pair{"objective", last ? objective : py::object(py::none())}}) {
    if (value.is_none()) continue;
    throw InvalidValueError(std::string(name) + " is for the default drafter, got " +
                            std::string(py::repr(value)) + " with " +
                            std::string(py::repr(drafter)));
  }
  const auto module = py::module_::import("fastdraft.config");
  const auto is = [&](const char* type) { return py::isinstance(drafter, module.attr(type)); };
  if (is("PromptLookup")) {
    return PromptLookupConfig{integer<std::int32_t>("max_ngram", drafter.attr("max_ngram"))};
  }
  if (is("NgramAutocomplete")) {
    return NgramConfig{
        integer<std::int32_t>("order", drafter.attr("order")),
        number("min_probability", drafter.attr("min_probability"), "a number from 0 to 1")};
  }
  if (is("PredictedOutputs")) {
    return PredictedOutputsConfig{integer<std::int32_t>("recovery", drafter.attr("recovery"))};
  }
  refuse("drafter", "None, PromptLookup, NgramAutocomplete or PredictedOutputs", drafter);
}

}  // namespace

EngineConfig read_config(const ConfigObject& config) {
  const auto limit = [&](const char* name, std::int64_t unlimited) {
    const py::object value = config.attr(name);
    return value.is_none() ? unlimited : integer<std::int64_t>(name, value);
  };
  EngineConfig read;
  read.lookahead = integer<std::int32_t>("lookahead", config.attr("lookahead"));
  read.drafter = read_drafter(config);
  read.token_cost =
      number("token_cost", config.attr("token_cost"), "a finite number of at least 0");
  read.max_request_tokens =
      integer<std::int64_t>("max_request_tokens", config.attr("max_request_tokens"));
  read.max_bytes = limit("max_bytes", EngineConfig::kUnlimitedBytes);
  read.vocabulary = limit("vocabulary", kAllTokens);
  read.threads = integer<std::int32_t>("threads", config.attr("threads"));
  read.check();
  return read;
}

void register_config(py::module_& module) {
  module.def(
      "check_config", [](const ConfigObject& config) { read_config(config); }, py::arg("config"),
      "Raises InvalidValueError that names the first field of a DraftConfig that is out of range.");
  module.attr("MAX_REQUEST_TOKENS") = kMaxTextTokens;
}

}  // namespace fastdraft::bindings

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "initialised.h"
#include "numpy.h"
#include "policy/back_off.h"
#include "policy/depth_acceptance.h"
#include "policy/step_latency.h"
#include "register.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

std::unique_ptr<StepLatency> make_latency(const std::string& device_type, const Integers& sizes,
                                          bool a_row) {
  const IntegerArray<std::int64_t> given(sizes, "sizes");
  const auto device =
      device_type == "cpu" ? StepLatency::Device::kCpu : StepLatency::Device::kAccelerator;
  return std::make_unique<StepLatency>(
      device, std::vector<std::int64_t>(given.data(), given.data() + given.size()), a_row);
}

template <typename T>
py::array_t<T> array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::typing::Tuple<py::array_t<double>, py::array_t<std::int64_t>> best_widths(StepLatency& latency,
                                                                              std::int64_t rows,
                                                                              std::int64_t widest) {
  const StepLatency::Widths found = latency.best_widths(rows, widest);
  return py::make_tuple(array(found.seconds), array(found.widths));
}

void observe_depths(DepthAcceptance& self, const Integers& accepted, const Integers& judged) {
  const IntegerArray<std::int64_t> of_accepted(accepted, "accepted");
  const IntegerArray<std::int64_t> of_judged(judged, "judged");
  if (of_accepted.size() != of_judged.size()) {
    throw InvalidValueError("accepted and judged must be of equal length, got " +
                            std::to_string(of_accepted.size()) + " and " +
                            std::to_string(of_judged.size()));
  }
  self.observe(of_accepted.data(), of_judged.data(), of_accepted.size());
}

}  // namespace

void register_policy(py::module_& module) {
  py::class_<BackOff>(module, "BackOff", R"(When to try again what does not seem to pay.

It is tried after `first` steps, and after twice as many each time that it still does not pay, `last`
at most.)")
      .def(py::init<std::int32_t, std::int32_t>(), py::arg("first"), py::arg("last"))
      .def("asks", &BackOff::asks, py::arg("pays"),
           "Whether to do it in this step, where it seems to pay or not. To be asked once a step.");
  py::class_<DepthAcceptance>(module, "DepthAcceptance",
                              R"(How likely draft tokens are to be accepted, by their depth alone.

At each depth an outcome counts half after `half_life` further ones. It belongs to one thread.)")
      .def(py::init<std::int64_t, double>(), py::arg("longest"), py::kw_only(),
           py::arg("half_life"))
      .def("observe", &observe_depths, py::arg("accepted"), py::arg("judged"),
           R"(Learns from drafts.

accepted: how many of each draft's tokens were right.
judged: how many of each were compared with the target's own tokens.

Both are integers of shape (drafts,). Raises InvalidValueError.)")
      .def("forget", &DepthAcceptance::forget, py::arg("part"),
           R"(Forgets a part, 0 to 1, of what was counted: that share of the requests is new.

Raises InvalidValueError.)")
      .def(
          "probabilities", [](const DepthAcceptance& self) { return array(self.probabilities()); },
          R"(By depth, the probability that a token is accepted where those before it were.

float64 of shape (longest,).)")
      .def(
          "expected_tokens",
          [](const DepthAcceptance& self) { return array(self.expected_tokens()); },
          R"(By the length of a draft, from 0 to the longest: the tokens that a step is expected to emit.

float64 of shape (longest + 1,).)");
  py::class_<StepLatency> latency(module, "StepLatency", "The core of fastdraft.StepLatency.");
  latency.def(py::init(&make_latency), py::arg("device_type"), py::arg("sizes") = py::tuple(),
              py::kw_only(), py::arg("a_row") = false);
  latency.def("wants_plain_step", &StepLatency::wants_plain_step, py::arg("rows"),
              R"(Whether the next step should go without drafts, to learn what that costs.

To be asked once a step. One that is not measured then is wanted again some steps later. Raises
InvalidValueError.)");
  latency.def("observe", &StepLatency::observe, py::arg("rows"), py::arg("width"),
              py::arg("seconds"), py::kw_only(), py::arg("prompt_tokens") = 0.0,
              py::arg("one_graph") = false,
              R"(Learns from a step of `rows` rows of `width` tokens that took `seconds`.

Where the rows differ in length, `width` is their mean. A step that took no time teaches nothing. A
forward that reads prompts too teaches what its tokens take, if not as exactly: `prompt_tokens` says
how many of all its tokens are theirs. `one_graph` says that the forward ran in one graph as a
whole. O(1). Raises InvalidValueError.)");
  latency.def("best_widths", &best_widths, py::arg("rows"),
              py::arg("widest") = StepLatency::kLongest,
              R"(What to pay for drafts when a forward may be padded to a width that is cheaper.

rows: the rows of the forward.
widest: the most tokens a row; no more than the largest of the sizes where these are of each row.

Returns the seconds of a step that has room for 1 .. `widest` tokens a row, float64, and the width
to give its forward, int64; both of shape (widest,). O(widest). Raises InvalidValueError.)");
  latency.def(
      "seconds_by_tokens",
      [](StepLatency& self, std::int64_t rows, std::int64_t widest, bool optimistic) {
        return array(self.seconds_by_tokens(rows, widest, optimistic));
      },
      py::arg("rows"), py::arg("widest") = StepLatency::kLongest, py::kw_only(),
      py::arg("optimistic") = false,
      R"(What a step takes by the tokens of all its rows, for batches whose rows differ in length.

optimistic: less where little is known, so that it will be tried.

Returns seconds, float64 of shape (rows * widest,): entry n - 1 for a forward over n tokens, which
takes at least what one token a row takes. It is what `propose_batch` takes as its `cost`.
O(rows * widest). Raises InvalidValueError.)");
  latency.def("seconds_in_one_graph", &StepLatency::seconds_in_one_graph, py::arg("rows"),
              py::arg("width"),
              R"(What a step takes where each row has `width` tokens and all run in one graph.

Raises InvalidValueError.)");
}

}  // namespace fastdraft::bindings

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "draft_object.h"
#include "fast_method.h"
#include "fastdraft/engine.h"
#include "fastdraft/error.h"
#include "numpy.h"
#include "offers_object.h"
#include "policy/acceptance_model.h"
#include "policy/offer_model.h"
#include "register.h"
#include "signatures.h"
#include "typed_object.h"

namespace fastdraft::bindings {

namespace py = pybind11;

namespace {

// The engine of C++, with the configuration that Python made it from.
struct PythonEngine : Engine {
  PythonEngine(const ConfigObject& config, const Stores& datastores)
      : Engine(read_config(config), datastores), config_object(config) {}

  const py::object config_object;
};

}  // namespace
}  // namespace fastdraft::bindings

namespace pybind11::detail {
template <>
class type_caster<fastdraft::bindings::PythonEngine>
    : public InitialisedCaster<fastdraft::bindings::PythonEngine> {};
}  // namespace pybind11::detail

namespace fastdraft::bindings {
namespace {

// Below this many tokens an index is faster built than the GIL released and
// taken back beside a busy thread.
constexpr std::int64_t kShortPrompt = 256;

// A name of a Python module.
py::object from_python(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

using Curve = py::array_t<double, py::array::c_style | py::array::forcecast>;

// The cost that a call gives. The curve must outlive what is returned.
std::optional<StepCost> step_cost(const std::optional<double>& token_cost,
                                  const std::optional<Curve>& cost) {
  if (token_cost && cost) {
    throw InvalidValueError("give either token_cost or cost, not both");
  }
  if (token_cost) return StepCost::constant(*token_cost);
  if (!cost) return std::nullopt;
  if (cost->ndim() != 1 || cost->size() == 0) {
    throw InvalidValueError(
        "cost must be one row of times, the first that of a forward over one token, got " +
        std::to_string(cost->size()) + " values in " + std::to_string(cost->ndim()) +
        " dimensions");
  }
  return StepCost::curve(cost->data(), cost->size());
}

template <typename Offsets>
void check_offsets(const Offsets& offsets, std::int64_t rows, std::int64_t tokens,
                   const char* what = "offsets", const char* of = "emitted_ids") {
  if (static_cast<std::int64_t>(offsets.size()) != rows + 1) {
    throw InvalidValueError(std::string(what) + " must have one more entry than the " +
                            std::to_string(rows) + " requests, got " +
                            std::to_string(offsets.size()));
  }
  const std::int64_t* at = offsets.data();
  if (at[0] != 0 || at[rows] != tokens) {
    throw InvalidValueError(std::string(what) + " must rise from 0 to the number of " + of + ", " +
                            std::to_string(tokens) + ", got " + std::to_string(at[0]) + " .. " +
                            std::to_string(at[rows]));
  }
}

// The stores of a list. Throws TypeError, which says what to write, for anything else.
Stores stores_of(const py::object& given) {
  const auto refuse = [](const std::string& got, const std::string& write) {
    throw py::type_error("datastores must be a list of Datastores, got " + got + write);
  };
  if (py::isinstance<Datastore>(given)) refuse("one Datastore", ": write datastores=[store]");
  const auto is_path = [](const py::handle& value) {
    return py::isinstance<py::str>(value) || py::hasattr(value, "__fspath__");
  };
  const auto open = [](const py::handle& path) {
    return "Datastore.open(" + std::string(py::repr(py::str(path))) + ")";
  };
  if (is_path(given)) refuse("a path", ": write datastores=[" + open(given) + "]");
  if (PySequence_Check(given.ptr()) == 0) refuse(py::repr(given), "");
  Stores stores;
  for (const py::handle& item : given) {
    if (is_path(item)) refuse("a path", ": write " + open(item));
    if (!py::isinstance<Datastore>(item)) refuse(py::repr(item), " in it");
    stores.push_back(item.cast<std::shared_ptr<Datastore>>());
  }
  return stores;
}

std::int64_t add_request(PythonEngine& engine, const Integers& prompt_ids,
                         const std::optional<Integers>& prediction,
                         const std::optional<StoresObject>& datastores,
                         const std::optional<Integers>& templates,
                         const std::optional<StoresObject>& read_only) {
  NewRequest asked;
  if (datastores) asked.stores = stores_of(*datastores);
  if (read_only) asked.read_only = stores_of(*read_only);
  const IntegerArray<Token> prompt(prompt_ids, "prompt_ids");
  const IntegerArray<Token> expected(prediction.value_or(Integers()), "prediction");
  const IntegerArray<Token> forms(templates.value_or(Integers()), "templates");
  asked.prompt = {prompt.data(), prompt.size()};
  asked.prediction = {expected.data(), expected.size()};
  asked.templates = {forms.data(), forms.size()};
  if (prompt.size() + expected.size() + forms.size() <= kShortPrompt) {
    return engine.add_request(asked);
  }
  const py::gil_scoped_release release;
  return engine.add_request(asked);
}

// One draft, written straight into the Python object that carries it.
DraftHandle propose(PythonEngine& engine, RequestId request, const ProposeOptions& options) {
  DraftObject* draft = new_draft(engine.most_drafted());
  auto handle = py::reinterpret_steal<DraftHandle>(reinterpret_cast<PyObject*>(draft));
  draft->size = engine.propose(request, options, draft->columns());
  return handle;
}

// The offers of a call. They are kept, and so are their arrays.
class OffersOfCall {
 public:
  // Throws TypeError for anything but Offers or several, and InvalidValueError for those of another
  // number of rows.
  OffersOfCall(PythonEngine& engine, const std::optional<OffersArgument>& given,
               std::int64_t rows) {
    if (!given) return;
    if (py::isinstance<OffersObject>(*given) || PySequence_Check(given->ptr()) == 0) {
      add(engine, *given, rows);
      return;
    }
    for (const py::handle each : *given) add(engine, each, rows);
  }

  void put_into(ProposeOptions& options) const noexcept {
    options.offers = offers_.data();
    options.num_offers = static_cast<std::int64_t>(offers_.size());
  }

 private:
  void add(PythonEngine& engine, py::handle given, std::int64_t rows) {
    if (!py::isinstance<OffersObject>(given)) {
      throw py::type_error("offers must be Offers or a list of them, got " +
                           std::string(py::repr(given)));
    }
    kept_.push_back(py::reinterpret_borrow<py::object>(given));
    const auto& offers = given.cast<const OffersObject&>();
    check_offsets(offers.offsets, rows, static_cast<std::int64_t>(offers.token_ids.size()),
                  "offsets of offers", "their token_ids");
    offers_.push_back(offers.columns(engine.offer_kind(offers.kind)));
  }

  std::vector<py::object> kept_;
  std::vector<Offers> offers_;
};

DraftHandle propose_with(PythonEngine& engine, RequestId request, std::optional<std::int64_t> limit,
                         const std::optional<double>& token_cost, const std::optional<Curve>& cost,
                         const std::optional<OffersArgument>& offers) {
  ProposeOptions options;
  options.cost = step_cost(token_cost, cost);
  const OffersOfCall offered(engine, offers, 1);
  offered.put_into(options);
  std::int32_t most = 0;
  if (limit) {
    if (*limit < 0) {
      throw InvalidValueError("limit must be 0 or greater, got " + std::to_string(*limit));
    }
    most = static_cast<std::int32_t>(std::min<std::int64_t>(*limit, engine.most_drafted()));
    options.limits = &most;
  }
  return propose(engine, request, options);
}

void check_rows(std::int64_t given, std::int64_t rows, const char* what) {
  if (given != rows) {
    throw InvalidValueError(std::string(what) + " must have one entry for each of the " +
                            std::to_string(rows) + " requests, got " + std::to_string(given));
  }
}

std::vector<float> numbers_of_rows(const Curve& given, std::int64_t rows, const char* what) {
  if (given.ndim() != 1) {
    throw InvalidValueError(std::string(what) + " must be one row of numbers, got " +
                            std::to_string(given.ndim()) + " dimensions");
  }
  check_rows(given.size(), rows, what);
  return {given.data(), given.data() + given.size()};
}

// The options of a batch, with their arrays.
struct BatchOptions {
  BatchOptions(const std::optional<Integers>& limits, const std::optional<double>& token_cost,
               const std::optional<Curve>& cost, bool padded, std::int64_t rows)
      : most(limits.value_or(Integers()), "limits") {
    options.cost = step_cost(token_cost, cost);
    options.padded = padded;
    if (limits) {
      check_rows(most.size(), rows, "limits");
      options.limits = most.data();
    }
  }

  IntegerArray<std::int32_t> most;
  ProposeOptions options;
};

DraftBatch propose_batch(PythonEngine& engine, const Integers& requests,
                         const std::optional<Integers>& limits,
                         const std::optional<double>& token_cost, const std::optional<Curve>& cost,
                         bool padded, const std::optional<OffersArgument>& offers) {
  const IntegerArray<RequestId> ids(requests, "requests");
  BatchOptions known(limits, token_cost, cost, padded, ids.size());
  const OffersOfCall offered(engine, offers, ids.size());
  offered.put_into(known.options);
  const py::gil_scoped_release release;
  return engine.propose_batch(ids.data(), ids.size(), known.options);
}

py::array_t<bool> wants(PythonEngine& engine, const std::string& kind, const Integers& requests,
                        double time, const std::optional<Integers>& limits,
                        const std::optional<double>& token_cost, const std::optional<Curve>& cost,
                        bool padded, const std::optional<Curve>& expected) {
  const IntegerArray<RequestId> ids(requests, "requests");
  const BatchOptions known(limits, token_cost, cost, padded, ids.size());
  const std::vector<float> promised =
      expected ? numbers_of_rows(*expected, ids.size(), "expected") : std::vector<float>();
  const OfferKind number = engine.offer_kind(kind);
  py::array_t<bool> wanted(static_cast<py::ssize_t>(ids.size()));
  bool* out = wanted.mutable_data();
  const py::gil_scoped_release release;
  engine.wants(number, ids.data(), ids.size(), known.options, time, out,
               expected ? promised.data() : nullptr);
  return wanted;
}

void observe(PythonEngine& engine, RequestId request, const Integers& emitted_ids) {
  const IntegerArray<Token> emitted(emitted_ids, "emitted_ids");
  engine.observe(request, emitted.data(), emitted.size());
}

RequestId request_id(PyObject* value) {
  const RequestId id = PyLong_AsLongLong(value);
  if (id == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return id;
}

// propose(request) and observe(request, emitted_ids), as a serving loop calls them.
struct FastPropose {
  static constexpr Py_ssize_t kPositional = 1;
  static PyObject* run(PythonEngine& engine, PyObject* const* arguments) {
    return propose(engine, request_id(arguments[0]), {}).release().ptr();
  }
};

struct FastObserve {
  static constexpr Py_ssize_t kPositional = 2;
  static PyObject* run(PythonEngine& engine, PyObject* const* arguments) {
    observe(engine, request_id(arguments[0]), py::reinterpret_borrow<Integers>(arguments[1]));
    Py_RETURN_NONE;
  }
};

py::error_already_set as_python_error(const std::exception_ptr& error) {
  set_python_error(error);
  return {};
}

// Raises the first row's error, with the errors of all rows in its attribute `rows`.
[[noreturn]] void raise_rows(const std::vector<RowError>& failed) {
  py::dict rows;
  for (const RowError& row : failed) {
    rows[py::int_(row.row)] = as_python_error(row.error).value();
  }
  const py::error_already_set first = as_python_error(failed.front().error);
  py::setattr(first.value(), "rows", rows);
  throw py::error_already_set(first);
}

// The tokens that the rows of a batch emitted in a step, with their arrays.
struct EmittedRows {
  EmittedRows(const Integers& requests, const Integers& emitted_ids, const Integers& starts,
              const std::optional<Integers>& drafted)
      : ids(requests, "requests"),
        emitted(emitted_ids, "emitted_ids"),
        offsets(starts, "offsets"),
        known(drafted.value_or(Integers()), "drafted"),
        verified(drafted ? known.data() : nullptr) {
    check_offsets(offsets, ids.size(), emitted.size());
    if (drafted) check_rows(known.size(), ids.size(), "drafted");
  }

  const IntegerArray<RequestId> ids;
  const IntegerArray<Token> emitted;
  const IntegerArray<std::int64_t> offsets;
  const IntegerArray<std::int32_t> known;
  const std::int32_t* const verified;  // null: it was not said
};

void observe_batch(PythonEngine& engine, const Integers& requests, const Integers& emitted_ids,
                   const Integers& offsets, const std::optional<Integers>& drafted) {
  const EmittedRows step(requests, emitted_ids, offsets, drafted);
  const std::vector<RowError> failed = [&] {
    const py::gil_scoped_release release;
    return engine.observe_batch(step.ids.data(), step.ids.size(), step.emitted.data(),
                                step.offsets.data(), step.verified);
  }();
  if (!failed.empty()) raise_rows(failed);
}

// A column of a fastdraft.Continuations, written where it lies.
template <typename T>
T* writable_column(const ContinuationsObject& out, const char* name, std::int64_t rows,
                   std::int64_t nodes) {
  const py::object column = out.attr(name);
  const bool is_row = nodes < 0;
  if (py::isinstance<py::array_t<T>>(column)) {
    auto array = py::reinterpret_borrow<py::array_t<T>>(column);
    const bool fits = array.ndim() == (is_row ? 1 : 2) && array.shape(0) == rows &&
                      (is_row || array.shape(1) == nodes);
    if (fits && array.writeable() && (array.flags() & py::array::c_style) != 0) {
      return array.mutable_data();
    }
  }
  throw InvalidValueError(std::string(name) + " of the continuations must be a C-contiguous " +
                          "writable array of " + std::string(py::str(py::dtype::of<T>())) + ", (" +
                          std::to_string(rows) +
                          (is_row ? ",)" : ", " + std::to_string(nodes) + ")") + ", got " +
                          std::string(py::repr(py::type::of(column))));
}

Continuations read_continuations(const ContinuationsObject& out) {
  const py::object token_ids = out.attr("token_ids");
  const py::array shaped = py::array::ensure(token_ids);
  if (!shaped || shaped.ndim() != 2) {
    throw InvalidValueError("token_ids of the continuations must have two dimensions, got " +
                            std::string(py::repr(token_ids)));
  }
  const std::int64_t rows = shaped.shape(0);
  const std::int64_t nodes = shaped.shape(1);
  return {rows,
          nodes,
          writable_column<std::int32_t>(out, "base", rows, -1),
          writable_column<std::int32_t>(out, "count", rows, -1),
          writable_column<Token>(out, "token_ids", rows, nodes),
          writable_column<std::int32_t>(out, "parents", rows, nodes),
          writable_column<float>(out, "probabilities", rows, nodes)};
}

void continue_batch(PythonEngine& engine, const Integers& requests, const Integers& emitted_ids,
                    const Integers& offsets, const ContinuationsObject& out,
                    const std::optional<Integers>& drafted, const std::optional<Integers>& slots) {
  const EmittedRows step(requests, emitted_ids, offsets, drafted);
  const IntegerArray<std::int64_t> rows(slots.value_or(Integers()), "slots");
  if (slots) check_rows(rows.size(), step.ids.size(), "slots");
  const Continuations columns = read_continuations(out);
  const std::vector<RowError> failed = [&] {
    const py::gil_scoped_release release;
    return engine.continue_batch(step.ids.data(), step.ids.size(), step.emitted.data(),
                                 step.offsets.data(), step.verified, slots ? rows.data() : nullptr,
                                 columns);
  }();
  if (!failed.empty()) raise_rows(failed);
}

py::tuple as_tuple(const CountsBySource& counts) {
  py::tuple values(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) values[i] = counts[i];
  return values;
}

StatsObject as_stats(const DraftCounts& counts) {
  // Looked up once: an import by name costs as much as half of a `finish`.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> type;
  type.call_once_and_store_result([] { return from_python("fastdraft.stats", "DraftStats"); });
  return type.get_stored()(counts.steps, counts.emitted, counts.drafts, counts.drafted,
                           counts.accepted, counts.accepted_prediction, counts.rejected_prediction,
                           as_tuple(counts.accepted_by_source));
}

StatsObject finish(PythonEngine& engine, RequestId request) {
  const DraftCounts counts = [&] {
    const py::gil_scoped_release release;
    return engine.finish(request);
  }();
  return as_stats(counts);
}

std::unique_ptr<PythonEngine> make_engine(const std::optional<ConfigObject>& config,
                                          const StoresObject& datastores,
                                          const std::optional<CalibrationObject>& calibration) {
  const py::object type = from_python("fastdraft.config", "DraftConfig");
  const ConfigObject chosen = config ? *config : ConfigObject(type());
  if (!py::isinstance(chosen, type)) {
    throw py::type_error("config must be a DraftConfig, got " + std::string(py::repr(chosen)));
  }
  auto engine = std::make_unique<PythonEngine>(chosen, stores_of(datastores));
  if (calibration) {
    Calibration learned{calibration->attr("_flat")().cast<std::vector<float>>(),
                        {},
                        {},
                        calibration->attr("plain_steps").cast<std::vector<float>>()};
    for (const auto& [kind, values] : py::dict(calibration->attr("offers"))) {
      learned.offers.push_back({kind.cast<std::string>(), values.cast<std::vector<float>>()});
    }
    engine->set_calibration(learned);
  }
  return engine;
}

CalibrationObject calibration_of(const PythonEngine& engine) {
  const std::optional<Calibration> learned = engine.calibration();
  if (!learned) {
    throw InvalidValueError("only the default drafter is calibrated, got an engine of another");
  }
  py::list buckets;
  for (const ReliabilityBucket& bucket : learned->reliability) {
    buckets.append(py::make_tuple(bucket.predicted, bucket.accepted, bucket.count));
  }
  const py::array_t<float> weights(static_cast<py::ssize_t>(learned->weights.size()),
                                   learned->weights.data());
  py::dict offers;
  for (const OfferCalibration& each : learned->offers) {
    offers[py::str(each.kind)] = py::cast(each.values);
  }
  return from_python("fastdraft.calibration", "Calibration")
      .attr("_from_flat")(weights, buckets, offers, py::cast(learned->plain_steps));
}

}  // namespace

void register_engine(py::module_& module) {
  py::class_<PythonEngine> engine(
      module, "Engine", py::dynamic_attr(),
      R"(Drafts for any number of requests, and learns from them what to draft.

One engine serves a process. Calls on different requests may come from several threads at
once; calls on one request wait for each other. `add_request`, `propose_batch`,
`observe_batch`, `continue_batch` and `finish` release the GIL; `propose` and `observe` are too short for that.

>>> engine = Engine()
>>> request = engine.add_request([1, 2, 3, 4, 1, 2])
>>> engine.propose(request, token_cost=0.0, limit=3).tolist()
[3, 4, 1]
>>> engine.observe(request, [3, 4, 9])
>>> engine.finish(request).mean_accepted_tokens
3.0)");
  engine.def(py::init(&make_engine), py::arg("config") = py::none(), py::kw_only(),
             py::arg("datastores") = py::tuple(), py::arg("calibration") = py::none(),
             R"(Makes an engine.

config: how it drafts, by default DraftConfig().
datastores: what requests are drafted from besides their own text, where they are given no
    datastores of their own. A finished request's text enters the live ones. Other engines may share
    them. Only the default drafter draws on them.
calibration: what an earlier engine learned, to begin with instead of the prior.

Raises InvalidValueError for datastores of two tokenizers, or a calibration for a drafter that
learns nothing, and DatastoreClosedError.)");
  engine.def_property_readonly(
      "config", [](const PythonEngine& self) { return ConfigObject(self.config_object); },
      "The configuration that the engine was made with.");
  engine.def("add_request", &add_request, py::arg("prompt_ids"), py::kw_only(),
             py::arg("prediction") = py::none(), py::arg("datastores") = py::none(),
             py::arg("templates") = py::none(), py::arg("read_only") = py::none(),
             R"(Starts a request and returns its id.

prompt_ids: the prompt's tokens, a list or a row of integers (numpy, array, ...), 0 or greater;
    may be empty. Copied.
prediction: text that the caller expects in the output, in the same form; it is drafted from
    without being part of the prompt. Its tokens must be below the config's `vocabulary`.
datastores: the Datastores that the request may be drafted from, and whose live ones it enters when
    it is finished; by default the engine's. It sees no others.
templates: text that parts of the output may look like, one after another: see `fastdraft.templates`
    for those of tool calls. It is drafted from as the prompt is, by this request alone, and only by
    the default drafter. Its tokens must be below the config's `vocabulary`.
read_only: further Datastores that the request may be drafted from, and does not enter.

O(tokens). Raises InvalidValueError (datastores of two tokenizers too), DatastoreClosedError,
RequestLimitError or MemoryLimitError, and then nothing was added.)");
  engine.def(
      "session",
      [](const py::object& self) {
        self_as<PythonEngine>(self);
        return SessionObject(from_python("fastdraft.engine", "Session")(self));
      },
      R"(A `Session` of this engine: it cancels those of its requests that have not ended when it
closes, whatever is raised.

>>> with engine.session() as session:
...     request = session.add_request([1, 2, 3, 1, 2])
>>> engine.num_requests
0)");
  engine.def("propose", &propose_with, py::arg("request"), py::kw_only(),
             py::arg("limit") = py::none(), py::arg("token_cost") = py::none(),
             py::arg("cost") = py::none(), py::arg("offers") = py::none(),
             R"(The draft for the request's next step.

It is empty where nothing matches or nothing pays. It changes nothing that later drafts depend on,
but `observe` compares the emitted tokens with the latest draft, so propose once a step.

limit: the most tokens to draft, besides the config's lookahead or tree_budget; 0 drafts nothing. A host that
    has room for fewer tokens passes a limit and does not cut the draft itself.
token_cost: what a further token in a forward costs, as a fraction of a forward over one token; by
    default the config's.
cost: instead of it, the step cost as a row of times: cost[n - 1] is the time of a target forward
    over n tokens, in any unit. It goes on past its end with its last slope.
offers: what others guess, of one row: `Offers`, or several of different kinds. Only the default
    drafter takes them.

O(lookahead). Raises UnknownRequestError or InvalidValueError.)");
  engine.def("propose_batch", &propose_batch, py::arg("requests"), py::kw_only(),
             py::arg("limits") = py::none(), py::arg("token_cost") = py::none(),
             py::arg("cost") = py::none(), py::arg("padded") = false,
             py::arg("offers") = py::none(),
             R"(The drafts for the next step of a batch, chosen together.

The tokens most likely to be accepted anywhere in the batch are drafted, as many as pay.

requests: ids, a list or a row of integers.
limits: for each request the most tokens to draft, or None.
token_cost, cost: as in `propose`; the forward runs over all rows, len(requests) tokens without
    drafts.
padded: whether the forward pads every row to the longest draft, so that each row pays for it.
offers: what others guess: `Offers` with a row for each request, or several of different kinds, 4
    at most. Only the default drafter takes them. A row's wrong offer is left out and counted by
    `num_refused_offers`.

A request that is not running, as one that another thread has just ended, gets an empty draft.

O(requests * lookahead), with a sort of the candidates for a cost curve. Raises InvalidValueError.)");
  engine.def(
      "wants", &wants, py::arg("kind"), py::arg("requests"), py::kw_only(), py::arg("time") = 0.0,
      py::arg("limits") = py::none(), py::arg("token_cost") = py::none(),
      py::arg("cost") = py::none(), py::arg("padded") = false, py::arg("expected") = py::none(),
      R"(Whether it pays to make an offer for the next step, for each request; bool (requests,).

Ask before a drafter of your own runs, once a step. Offers pay where the tokens that they add to the
engine's own drafts are worth the time that making and verifying them takes. That is learned from
the steps that had offers. Now and then the answer is yes to learn whether it still holds. The last
drafts of the requests are forgotten; a request that is not running gets no.

kind: of the offers, as in `Offers`.
time: what making them takes, for all rows together, as in `Offers`.
limits, token_cost, cost, padded: as in `propose_batch`.
expected: for each request how many tokens the drafter expects to be accepted of its offer; they
    need not be calibrated. By default it does not say.

O(requests * lookahead). Releases the GIL. Raises InvalidValueError.)");
  engine.def("observe", &observe, py::arg("request"), py::arg("emitted_ids"),
             R"(Takes the tokens that the target emitted in a step.

They are the accepted draft tokens and the recovered or bonus token, never a count: the engine
compares them with its latest draft itself. No tokens mean that the step was given up: the draft is
forgotten and nothing is counted.

O(1) amortised a token. Raises UnknownRequestError, InvalidValueError or RequestLimitError before
any change. On MemoryLimitError the request holds, and has counted, the tokens that still fitted;
the message says how many.)");
  engine.def("observe_batch", &observe_batch, py::arg("requests"), py::arg("emitted_ids"),
             py::arg("offsets"), py::kw_only(), py::arg("drafted") = py::none(),
             R"(`observe` for a batch: row r emitted emitted_ids[offsets[r]:offsets[r + 1]].

drafted: for each row how many of its draft tokens the target verified, for a host that has cut
    drafts; by default all.

A row that fails costs that row alone. All others are observed; then the error of the first row
that failed is raised, what `observe` raises, with the errors of all such rows in `error.rows`, by
their index. Where the arguments are wrong as a whole, as offsets that fall, InvalidValueError is
raised before any change, and its `rows` is empty.

A request that has several rows takes them in their order, as it would from several calls.)");
  engine.def(
      "continue_batch", &continue_batch, py::arg("requests"), py::arg("emitted_ids"),
      py::arg("offsets"), py::arg("out"), py::kw_only(), py::arg("drafted") = py::none(),
      py::arg("slots") = py::none(),
      R"(`observe_batch`, and then what each row may go on with, for a host that does not wait for drafts.

Row r emitted emitted_ids[offsets[r]:offsets[r + 1]]. Its continuations, a tree of the tokens most
likely to follow, are written to row slots[r] of `out`, row r by default. They hold for
the text up to these tokens: by the time they arrive the host may have emitted more, walks down the
tree by those, and drafts what lies below. The config's `tree_budget` and `lookahead` bound the
tree's nodes and depth, as `out` does; no cost cuts it.

out: the arrays, of any memory. Nobody else may touch them during the call.
drafted: for each row how many draft tokens the target verified in this step, for `stats`, since
    the host makes its drafts of earlier continuations; by default none. The engine learns from
    the emitted tokens and its own last guess, whatever was verified.
slots: which rows of `out` to write.

A row that fails costs that row alone, as in `observe_batch`: it gets no continuations, all others
are served, and then the first error is raised with all of them in `error.rows`. Where the arguments
are wrong as a whole InvalidValueError is raised before any change.

O(nodes) a row. Releases the GIL.)");
  engine.def("num_tokens", &Engine::num_tokens, py::arg("request"),
             "The tokens of a running request, prompt and output. Raises UnknownRequestError.");
  engine.def(
      "stats", [](PythonEngine& self, RequestId request) { return as_stats(self.counts(request)); },
      py::arg("request"), "The counts of a running request. Raises UnknownRequestError.");
  engine.def("finish", &finish, py::arg("request"),
             R"(Ends a request, frees its memory, and returns its counts.

Its prompt and output enter the live datastores that it was given, but for the read-only ones; one
that was closed meanwhile is left out. Raises UnknownRequestError for an id that is not running, so for a second `finish` too.)");
  engine.def(
      "cancel",
      [](PythonEngine& self, RequestId request) {
        const py::gil_scoped_release release;
        self.cancel(request);
      },
      py::arg("request"), R"(Ends a request whose output nobody wants, and frees its memory.

Nothing of it enters a datastore. Raises UnknownRequestError for an id that is not running.)");
  engine.def("calibration", &calibration_of,
             R"(What the engine has learned so far, from all its requests.

Raises InvalidValueError where the drafter learns nothing: all but the default one.)");
  py::typing::List<py::typing::Tuple<py::str, int>> features;
  for (std::size_t i = 0; i < AcceptanceModel::kNames.size(); ++i) {
    features.append(py::make_tuple(AcceptanceModel::kNames[i], AcceptanceModel::kValues[i]));
  }
  module.attr("FEATURES") = features;
  module.attr("MOST_WEIGHT") = AcceptanceModel::kMostWeight;
  using Ranges = py::typing::List<py::typing::Tuple<float, float>>;
  const auto ranges = [](std::size_t size, SavedRange (*range)(std::size_t)) {
    Ranges all;
    for (std::size_t i = 0; i < size; ++i) all.append(py::cast(range(i)));
    return all;
  };
  module.attr("OFFER_RANGES") = ranges(OfferModel::kSaved, OfferModel::range);
  module.attr("STEP_RANGES") = ranges(StepPromises::kSaved, StepPromises::range);
  Ranges confidences;
  for (int i = 1; i < OfferModel::kConfidences; ++i) {
    const auto edge = static_cast<std::size_t>(i - 1);
    const bool is_last = edge == OfferModel::kConfidenceEdges.size();
    confidences.append(py::make_tuple(is_last ? 1.0f : OfferModel::kConfidenceEdges[edge],
                                      OfferModel::first_probability(i)));
  }
  module.attr("CONFIDENCE_CLASSES") = confidences;
  FastMethod<PythonEngine, FastPropose>::install(engine, "propose");
  FastMethod<PythonEngine, FastObserve>::install(engine, "observe");
  def_described(engine, "__repr__", "engine",
                [](const py::handle& self) { self_as<PythonEngine>(self); });
  // Copies of a model hold what drafts for it too, and go on with it as its original does.
  engine.def(
      "__deepcopy__", [](const py::object& self, const py::dict&) { return self; }, py::arg("memo"),
      "The engine itself: it is shared, as a lock is.");
  engine.def(
      "__reduce__",
      [](const py::object&) -> py::object {
        throw py::type_error(
            "an Engine cannot be pickled: make one in each process, and pass what it has learned "
            "as calibration=engine.calibration()");
      },
      "Raises TypeError: an engine belongs to its process.");
  engine.def_property_readonly("num_requests", &Engine::num_requests,
                               "How many requests are running.");
  engine.def_property_readonly("num_bytes", &Engine::bytes,
                               "The bytes that the indexes of all running requests hold.");
  engine.def_property_readonly(
      "offer_kinds",
      [](const PythonEngine& self) { return py::tuple(py::cast(self.offer_kinds())); },
      "The kinds of offers that the engine has met, in order: a draft token of kind i has the "
      "source Source.OFFER + i.");
  engine.def_property_readonly("num_refused_offers", &Engine::num_refused_offers,
                               "How many rows' offers were left out of batches since they were "
                               "wrong: too long, foreign ids, bad parents or confidences.");
  engine.def_property_readonly(
      "num_foreign", &Engine::num_foreign,
      "How many tokens of datastores were left out of drafts since they are not below the config's "
      "`vocabulary`. More than 0: a datastore of another tokenizer, or one with ids that stand for "
      "images.");
}

}  // namespace fastdraft::bindings

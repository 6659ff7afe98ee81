#include "fastdraft/engine.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <variant>

#include "draft/drafter.h"
#include "engine/batch_threads.h"
#include "engine/request_table.h"
#include "fastdraft/error.h"
#include "fastdraft/ngram_table.h"
#include "index/fork.h"
#include "index/memory.h"
#include "policy/acceptance_model.h"
#include "policy/offer_kinds.h"
#include "policy/output_lengths.h"

namespace fastdraft {
namespace {

// The rate of an engine that has seen nothing: between ordinary chat, 1.2
// tokens a step, and summaries, 2.
constexpr double kInitialRate = 1.5;

// Returns `config` if the engine can keep to it.
EngineConfig checked(const EngineConfig& config) {
  config.check();
  return config;
}

// Token ids of two tokenizers have nothing to do with each other.
void check_stores(const Stores& stores, const EngineConfig& config) {
  std::optional<Fingerprint> marked;
  const auto* calibrated = std::get_if<CalibratedConfig>(&config.drafter);
  const bool with_ngrams = calibrated != nullptr && calibrated->ngrams != nullptr;
  if (with_ngrams) marked = calibrated->ngrams->fingerprint();
  for (std::size_t i = 0; i < stores.size(); ++i) {
    if (stores[i] == nullptr) throw InvalidValueError("datastores must be Datastores, got None");
    if (std::find(stores.begin(), stores.begin() + static_cast<std::ptrdiff_t>(i), stores[i]) !=
        stores.begin() + static_cast<std::ptrdiff_t>(i)) {
      throw InvalidValueError("datastores must differ, got one twice, at index " +
                              std::to_string(i));
    }
    if (stores[i]->closed()) {
      throw DatastoreClosedError("the datastore at index " + std::to_string(i) + " is closed");
    }
    const std::optional<Fingerprint>& fingerprint = stores[i]->fingerprint();
    if (!fingerprint) continue;
    if (marked && *marked != *fingerprint) {
      throw InvalidValueError(std::string("datastores ") + (with_ngrams ? "and ngrams " : "") +
                              "must be of one tokenizer, got the fingerprints " + to_hex(*marked) +
                              " and " + to_hex(*fingerprint));
    }
    marked = fingerprint;
  }
}

// Returns whether the last request of a batch is to end as early as can be.
bool ends_early(const EngineConfig& config) noexcept {
  const auto* calibrated = std::get_if<CalibratedConfig>(&config.drafter);
  return calibrated != nullptr && calibrated->objective == Objective::kLast;
}

// Returns the token weights of the first live store that the text enters, which begin with what was
// saved with a frozen one; null: none.
std::shared_ptr<TokenWeights> weights_of(const Stores& stores, std::size_t entered) {
  std::shared_ptr<const TokenWeights> saved;
  for (std::size_t i = 0; i < stores.size() && saved == nullptr; ++i) {
    if (stores[i]->frozen()) saved = stores[i]->learned_weights();
  }
  std::shared_ptr<TokenWeights> weights;
  for (std::size_t i = 0; i < entered && weights == nullptr; ++i) {
    weights = stores[i]->token_weights(saved.get());
  }
  return weights;
}

}  // namespace

Engine::Engine(const EngineConfig& config, Stores stores)
    : config_(checked(config)),
      most_drafted_(config.most_drafted()),
      stores_(std::move(stores)),
      budget_(std::make_unique<MemoryBudget>(config.max_bytes)),
      acceptance_(config.calibrated() ? std::make_unique<AcceptanceModel>() : nullptr),
      kinds_(std::make_unique<OfferKinds>()),
      lengths_(ends_early(config) ? std::make_unique<OutputLengths>() : nullptr),
      requests_(std::make_unique<RequestTable>()),
      threads_(std::make_unique<BatchThreads>(config.threads)),
      rate_mutex_(std::make_unique<Mutex>()),
      rate_(std::make_unique<EmissionRate>(kInitialRate)) {
  check_stores(stores_, config_);
}

Engine::~Engine() = default;

RequestId Engine::add_request(const NewRequest& asked) {
  const auto& [prompt, prediction, templates, own_stores, read_only] = asked;
  check_tokens(prompt.token_ids, prompt.size, "prompt_ids");
  check_tokens(prediction.token_ids, prediction.size, "prediction", config_.vocabulary);
  check_tokens(templates.token_ids, templates.size, "templates", config_.vocabulary);
  Stores seen = own_stores.value_or(stores_);
  const std::size_t entered = seen.size();
  seen.insert(seen.end(), read_only.begin(), read_only.end());
  if (own_stores || !read_only.empty()) check_stores(seen, config_);
  if (templates.size > 0 && !config_.calibrated()) {
    throw InvalidValueError("templates must be left out: only the default drafter takes them");
  }
  for (const auto& [what, size] :
       {std::pair{"prompt_ids", prompt.size}, std::pair{"prediction", prediction.size},
        std::pair{"templates", templates.size}}) {
    if (size > config_.max_request_tokens) {
      throw RequestLimitError("max_request_tokens is " +
                              std::to_string(config_.max_request_tokens) + ": " + what + " has " +
                              std::to_string(size) + " tokens");
    }
  }
  if (prompt.size > config_.max_request_tokens - templates.size) {
    throw RequestLimitError("max_request_tokens is " + std::to_string(config_.max_request_tokens) +
                            ": prompt_ids and templates have " +
                            std::to_string(prompt.size + templates.size) + " tokens");
  }
  const double rate = [this] {
    const std::scoped_lock guard(*rate_mutex_);
    return rate_->value();
  }();
  auto request = std::make_unique<Request>(most_drafted_, rate, *budget_);
  request->context.append(templates.token_ids, templates.size);
  request->context.append(prompt.token_ids, prompt.size);
  request->templates_size = templates.size;
  request->prompt_size = prompt.size;
  if (lengths_ != nullptr) {
    request->prompt_key = OutputLengths::key_of(prompt.token_ids, prompt.size);
  }
  request->stores = std::move(seen);
  request->num_entered = entered;
  for (std::size_t i = 0; i < entered; ++i) {
    RunningTexts* running = request->stores[i]->running();
    if (running == nullptr) continue;
    request->running.push_back(std::make_unique<RunningTexts::Text>(*running, &request->context));
  }
  const std::shared_ptr<TokenWeights> weights =
      config_.calibrated() ? weights_of(request->stores, entered) : nullptr;
  const DrafterInputs inputs{request->context,  prediction.token_ids,
                             prediction.size,   request->stores,
                             config_.lookahead, acceptance_.get(),
                             *budget_,          entered,
                             templates.size,    weights};
  request->drafter =
      std::visit([&](const auto& config) { return make_drafter(config, inputs); }, config_.drafter);
  return requests_->add(std::move(request));
}

OfferKind Engine::offer_kind(std::string_view name) {
  if (!config_.calibrated()) {
    throw InvalidValueError("offers must be left out: only the default drafter takes them");
  }
  return kinds_->add(name);
}

std::vector<std::string> Engine::offer_kinds() const { return kinds_->names(); }

DraftCounts Engine::counts(RequestId id) { return requests_->lock(id)->counts; }

std::int64_t Engine::num_tokens(RequestId id) { return requests_->lock(id)->size(); }

DraftCounts Engine::finish(RequestId id) {
  const std::unique_ptr<Request> request = remove(id);
  // Taken out before it enters, lest others find it twice.
  request->running.clear();
  if (lengths_ != nullptr) {
    lengths_->add(request->prompt_key, request->size() - request->prompt_size);
  }
  for (std::size_t i = 0; i < request->num_entered; ++i) {
    const auto& store = request->stores[i];
    if (store->frozen()) continue;
    try {
      store->add(request->text(), request->size(), request->prompt_size);
    } catch (const DatastoreClosedError&) {
      continue;
    } catch (const MemoryLimitError&) {
      continue;
    }
  }
  return request->counts;
}

DraftCounts Engine::cancel(RequestId id) { return remove(id)->counts; }

std::unique_ptr<Request> Engine::remove(RequestId id) {
  std::unique_ptr<Request> request = requests_->remove(id);
  if (request->time > 0.0) {
    const std::scoped_lock guard(*rate_mutex_);
    rate_->add(request->paced / request->time, 1.0);
  }
  return request;
}

std::optional<Calibration> Engine::calibration() const {
  if (acceptance_ == nullptr) return std::nullopt;
  const auto weights = acceptance_->weights();
  const auto reliability = acceptance_->reliability();
  Calibration learned{
      {weights.begin(), weights.end()}, {reliability.begin(), reliability.end()}, {}, {}};
  for (const std::string& kind : kinds_->names()) {
    std::vector<float> values(OfferModel::kSaved);
    kinds_->model(static_cast<OfferKind>(learned.offers.size())).write(values.data());
    learned.offers.push_back({kind, std::move(values)});
  }
  learned.plain_steps.resize(StepPromises::kSaved);
  kinds_->plain_steps().write(learned.plain_steps.data());
  return learned;
}

void Engine::set_calibration(const Calibration& learned) {
  if (acceptance_ == nullptr) {
    throw InvalidValueError("only the default drafter takes a calibration");
  }
  const auto check = [](const char* what, const std::vector<float>& values, std::size_t size,
                        SavedRange (*range)(std::size_t)) {
    if (values.size() != size) {
      throw InvalidValueError("there must be " + std::to_string(size) + " " + what + ", got " +
                              std::to_string(values.size()));
    }
    for (std::size_t i = 0; i < size; ++i) {
      const auto [least, most] = range(i);
      if (values[i] >= static_cast<float>(least) && values[i] <= static_cast<float>(most)) continue;
      throw InvalidValueError(std::string(what) + " must be from " + std::to_string(least) +
                              " to " + std::to_string(most) + ", got " + std::to_string(values[i]) +
                              " at index " + std::to_string(i));
    }
  };
  check("weights", learned.weights, AcceptanceModel::kWeights, [](std::size_t) {
    return SavedRange{-AcceptanceModel::kMostWeight, AcceptanceModel::kMostWeight};
  });
  for (const OfferCalibration& each : learned.offers) {
    check("numbers of offers", each.values, OfferModel::kSaved, OfferModel::range);
  }
  const bool knows_steps = !learned.plain_steps.empty();
  if (knows_steps) {
    check("numbers of steps", learned.plain_steps, StepPromises::kSaved, StepPromises::range);
  }
  acceptance_->set_weights(learned.weights.data());
  for (const OfferCalibration& each : learned.offers) {
    kinds_->model(offer_kind(each.kind)).read(each.values.data());
  }
  if (knows_steps) kinds_->plain_steps().read(learned.plain_steps.data());
}

std::int64_t Engine::num_requests() const noexcept { return requests_->size(); }

std::int64_t Engine::bytes() const noexcept { return budget_->used(); }

}  // namespace fastdraft

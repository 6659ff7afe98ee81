#include "fastdraft/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>

#include "draft/drafter.h"
#include "draft/row_offers.h"
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

void check_expected(const float* expected, std::int64_t rows) {
  if (expected == nullptr) return;
  const std::string must = "expected must be from 0 to " + std::to_string(kMostOffered) + " tokens";
  check_each(must.c_str(), expected, rows, [](float tokens) {
    return tokens >= 0.0f && tokens <= static_cast<float>(kMostOffered);  // no NaN
  });
}

void check_time(double time) {
  if (!(time >= 0.0) || std::isinf(time)) {
    throw InvalidValueError("the time of offers must be a finite number of at least 0, got " +
                            std::to_string(time));
  }
}

void sort_by_row(std::vector<RowError>& errors) {
  std::sort(errors.begin(), errors.end(),
            [](const RowError& a, const RowError& b) { return a.row < b.row; });
}

// Prefetching short contexts gains nothing: they are in cache already. With 64 rows of 100,000
// tokens, prefetching takes 0.9 of the time of a batch on an AMD EPYC; with 1,000 tokens it gained
// nothing.
bool is_far(const Request& request) noexcept { return request.context.size() >= 8192; }

// Threads share batches of at least this many rows. With two of them a guess for 256 rows of 4,000
// tokens beside a million stored ones takes two thirds of the time; observing rows that lie in
// another core's cache gives a quarter of the gain back. With 64 rows nothing is left of it.
constexpr std::int64_t kRowsToShare = 128;

bool approach_guess(std::int64_t /*row*/, Request& request, int step) {
  return is_far(request) && request.drafter->approach(step);
}

// Returns what is wrong with one row's offer; empty: nothing.
std::string fault_of(const RowOffer& offer, std::int64_t vocabulary) {
  for (std::int32_t i = 0; i < offer.count; ++i) {
    const std::string at = " at index " + std::to_string(i);
    const Token token = offer.token_ids[i];
    if (token < 0 || token >= vocabulary) {
      return "token ids must be from 0 to below " + std::to_string(vocabulary) + ", got " +
             std::to_string(token) + at;
    }
    if (offer.parents != nullptr && (offer.parents[i] < -1 || offer.parents[i] >= i)) {
      return "parents must be -1 or an index before their child's, got " +
             std::to_string(offer.parents[i]) + at;
    }
    if (offer.drawn && offer.parent(i) != i - 1) {
      return "drawn tokens must be a chain, got the parent " + std::to_string(offer.parent(i)) + at;
    }
    if (offer.confidences != nullptr &&
        !(offer.confidences[i] >= 0.0f && offer.confidences[i] <= 1.0f)) {
      return "confidences must be from 0 to 1, got " + std::to_string(offer.confidences[i]) + at;
    }
  }
  return {};
}

bool is_count(std::int32_t value) { return value >= 0; }

void check_limits(const ProposeOptions& options, std::int64_t rows) {
  if (options.limits == nullptr) return;
  check_each("limits must be 0 or greater", options.limits, rows, is_count);
}

void check_offsets(const std::int64_t* offsets, std::int64_t rows) {
  for (std::int64_t row = 0; row < rows; ++row) {
    if (offsets[row] > offsets[row + 1]) {
      throw InvalidValueError("offsets must rise, got " + std::to_string(offsets[row]) +
                              " and then " + std::to_string(offsets[row + 1]) + " at index " +
                              std::to_string(row + 1));
    }
  }
}

// Checks how many draft tokens the host says that it verified.
void check_drafted(const std::int32_t* drafted, std::int64_t rows) {
  if (drafted != nullptr) check_each("drafted must be 0 or greater", drafted, rows, is_count);
}

// Time to make the offers, in steps without drafts.
double time_of_offers(const StepCost& cost, std::int64_t rows, const ProposeOptions& options) {
  double time = 0.0;
  for (std::int64_t k = 0; k < options.num_offers; ++k) {
    time += cost.part_of_step(rows, options.offers[k].time);
  }
  return time;
}

// The first counts[r] numbers of each row r, which lie a stride apart, times its weight.
std::vector<float> weigh(const float* numbers, std::int64_t stride,
                         const std::vector<std::int32_t>& counts,
                         const std::vector<float>& weights) {
  std::vector<float> weighed(weights.size() * static_cast<std::size_t>(stride));
  for (std::size_t r = 0; r < weights.size(); ++r) {
    const auto begin = static_cast<std::int64_t>(r) * stride;
    std::transform(numbers + begin, numbers + begin + counts[r], weighed.begin() + begin,
                   [&](float each) { return each * weights[r]; });
  }
  return weighed;
}

// Returns whether one of the offers has to be drafted as it is.
bool is_drawn(const RowOffers* offers) noexcept {
  return offers != nullptr && offers->drawn() < offers->size;
}

// Returns whether no request has several rows.
bool all_differ(const RequestId* ids, std::int64_t rows) {
  std::vector<RequestId> sorted(ids, ids + rows);
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

std::string of_request(RequestId id) { return "request " + std::to_string(id) + ": "; }

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

void Engine::check_room(const Request& request, RequestId id, std::int64_t count) const {
  if (count > config_.max_request_tokens - request.context.size()) {
    throw RequestLimitError(of_request(id) + "max_request_tokens is " +
                            std::to_string(config_.max_request_tokens) + ": it holds " +
                            std::to_string(request.context.size()) + " tokens and " +
                            std::to_string(count) + " more were observed");
  }
}

std::int32_t Engine::limit_of(const ProposeOptions& options, std::int64_t row) const noexcept {
  return options.limits == nullptr ? most_drafted_ : std::min(most_drafted_, options.limits[row]);
}

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

// Leaves out the tokens that are not of the vocabulary, with all that follow them,
// and returns how many stay.
std::int32_t Engine::leave_out_foreign(const DraftColumns& draft, std::int32_t count) {
  if (all_below(draft.token_ids, count, config_.vocabulary)) return count;
  constexpr std::int32_t kLeftOut = -2;
  std::vector<std::int32_t> indices(static_cast<std::size_t>(count), kLeftOut);
  std::int32_t kept = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t parent =
        draft.parents[i] < 0 ? -1 : indices[static_cast<std::size_t>(draft.parents[i])];
    if (draft.token_ids[i] < 0 || draft.token_ids[i] >= config_.vocabulary) {
      if (is_stored(draft.sources[i])) {
        num_foreign_.fetch_add(1, std::memory_order_relaxed);
      }
    } else if (parent != kLeftOut) {
      indices[static_cast<std::size_t>(i)] = kept;
      draft.from(i).copy_to(draft.from(kept), 1);
      draft.parents[kept++] = parent;
    }
  }
  return kept;
}

// The drafter's guess, in the request's draft, with what read_offers found. If the drafter throws,
// there is no proposal. One that gets no memory guesses nothing.
std::int32_t Engine::guess(Request& request, std::int32_t limit, float least,
                           const RowOffers* offers) {
  const std::optional<Proposal> kept = std::exchange(request.kept, std::nullopt);
  request.proposal.reset();
  if (offers == nullptr && request.offers != nullptr) request.offers->given = 0;
  if (offers == nullptr && kept && kept->limit == limit && kept->least == least) {
    request.proposal = Proposal{kept->guessed, 0, 1.0, limit, least};
    return kept->guessed;
  }
  std::int32_t count = 0;
  try {
    count = request.drafter->guess(limit, least, offers, request.draft);
  } catch (const MemoryLimitError&) {
    return 0;
  }
  count = leave_out_foreign(request.draft, count);
  request.proposal = Proposal{count, 0, 1.0, offers == nullptr ? limit : -1, least};
  return count;
}

// RequestTable::visit of rows that are guessed for. A guess changes nothing that another one reads,
// so threads share the rows where these are many and take long.
template <typename Visit>
void Engine::visit_guesses(const RequestId* ids, std::int64_t rows, Visit visit) {
  constexpr std::int64_t kRows = RequestTable::kTogether;
  if (rows < kRowsToShare || threads_->count() == 1 || !all_differ(ids, rows)) {
    return requests_->visit(ids, rows, approach_guess, visit);
  }
  threads_->run((rows + kRows - 1) / kRows, [&](std::int64_t part) {
    const std::int64_t first = part * kRows;
    const auto visit_row = [&](std::int64_t row, std::optional<RequestTable::Locked>& request) {
      visit(first + row, request);
    };
    requests_->visit(ids + first, std::min(kRows, rows - first), approach_guess, visit_row);
  });
}

OfferKind Engine::offer_kind(std::string_view name) {
  if (!config_.calibrated()) {
    throw InvalidValueError("offers must be left out: only the default drafter takes them");
  }
  return kinds_->add(name);
}

std::vector<std::string> Engine::offer_kinds() const { return kinds_->names(); }

void Engine::check_kind(OfferKind kind) const {
  if (kind < 0 || kind >= kinds_->size()) {
    throw InvalidValueError("the kind of offers must be one of the engine's " +
                            std::to_string(kinds_->size()) + ", got " + std::to_string(kind));
  }
}

void Engine::check_offers(const ProposeOptions& options, std::int64_t rows) const {
  if (options.num_offers > kMostOffers) {
    throw InvalidValueError("a call takes at most " + std::to_string(kMostOffers) +
                            " offers, got " + std::to_string(options.num_offers));
  }
  std::uint32_t given = 0;
  for (std::int64_t k = 0; k < options.num_offers; ++k) {
    const Offers& offers = options.offers[k];
    check_kind(offers.kind);
    const std::uint32_t bit = std::uint32_t{1} << static_cast<std::uint32_t>(offers.kind);
    if ((given & bit) != 0) {
      throw InvalidValueError("offers must be of different kinds, got two of \"" +
                              kinds_->names()[static_cast<std::size_t>(offers.kind)] + "\"");
    }
    given |= bit;
    check_time(offers.time);
    check_offsets(offers.offsets, rows);
  }
}

// Reads what is offered for a row. Returns `read`, or null where that is nothing. A wrong offer is
// refused, with an error, or left out.
const RowOffers* Engine::read_offers(Request& request, const ProposeOptions& options,
                                     std::int64_t row, bool refuse, RowOffers& read) {
  read.size = 0;
  std::uint32_t given = 0;
  for (std::int64_t k = 0; k < options.num_offers; ++k) {
    const Offers& all = options.offers[k];
    const std::int64_t first = all.offsets[row];
    const std::int64_t count = all.offsets[row + 1] - first;
    if (count == 0) continue;
    const auto kind = static_cast<std::size_t>(all.kind);
    OfferState::OfKind& known = request.known_offers().kinds[kind];
    known.spent = all.time;
    RowOffer& offer = read.offers[static_cast<std::size_t>(read.size)];
    offer = {all.kind,
             &kinds_->model(all.kind),
             &known.offers,
             static_cast<std::int32_t>(std::min(count, kMostOffered)),
             all.token_ids + first,
             all.parents == nullptr ? nullptr : all.parents + first,
             all.confidences == nullptr ? nullptr : all.confidences + first,
             all.drawn};
    const std::string fault = count > kMostOffered
                                  ? "there may be at most " + std::to_string(kMostOffered) +
                                        " tokens, got " + std::to_string(count)
                                  : fault_of(offer, config_.vocabulary);
    if (fault.empty()) {
      ++read.size;
      given |= std::uint32_t{1} << kind;
    } else if (refuse) {
      throw InvalidValueError("the offer \"" + kinds_->names()[kind] + "\": " + fault);
    } else {
      num_refused_offers_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (request.offers != nullptr) request.offers->given = given;
  return read.size > 0 ? &read : nullptr;
}

void Engine::wants(OfferKind kind, const RequestId* ids, std::int64_t rows,
                   const ProposeOptions& options, double time, bool* wanted,
                   const float* expected) {
  check_time(time);
  check_expected(expected, rows);
  check_kind(kind);
  ProposeOptions plain = options;
  plain.num_offers = 0;
  const DraftBatch own = propose_batch(ids, rows, plain);
  OfferValue value(*kinds_, kind, time);
  std::vector<bool> may(static_cast<std::size_t>(rows), false);  // get an offer
  std::fill_n(wanted, rows, false);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::optional<RequestTable::Locked> request = requests_->find(ids[row]);
    if (!request) continue;
    const auto r = static_cast<std::size_t>(row);
    const std::int32_t limit = limit_of(options, row);
    may[r] = limit > 0;
    (*request)->kept = std::exchange((*request)->proposal, std::nullopt);
    wanted[row] = value.add((*request)->known_offers(), own.columns.probabilities + own.offsets[r],
                            own.offsets[r + 1] - own.offsets[r], limit,
                            expected == nullptr ? 0.0f : expected[row]);
  }
  if (rows == 0) return;
  const bool pays = value.pays(options.cost.value_or(StepCost::constant(config_.token_cost)), rows,
                               options.padded);
  const bool asks = kinds_->back_off(kind).asks(pays);
  if (!asks) std::fill_n(wanted, rows, false);
  if (asks && !pays) std::copy(may.begin(), may.end(), wanted);
}

std::int32_t Engine::propose(RequestId id, const ProposeOptions& options,
                             const DraftColumns& draft) {
  check_limits(options, 1);
  const bool offered = options.num_offers > 0;
  if (offered) check_offers(options, 1);
  const StepCost cost = options.cost.value_or(StepCost::constant(config_.token_cost));
  const RequestTable::Locked request = requests_->lock(id);
  const double rate = cost.price_of_time(1, request->rate.value(), most_drafted_);
  const auto least = static_cast<float>(cost.least_of_batch(1, rate, false, most_drafted_));
  RowOffers memory;
  const RowOffers* offers = offered ? read_offers(*request, options, 0, true, memory) : nullptr;
  std::int32_t count = guess(*request, limit_of(options, 0), least, offers);
  if (config_.calibrated() && !is_drawn(offers)) {
    keep_what_pays(cost, rate, false, request->draft.probabilities, 1, count, &count);
  }
  if (request->proposal) {
    request->proposal->drafted = count;
    request->proposal->step_time = cost.relative(1, count) + time_of_offers(cost, 1, options);
  }
  request->draft.copy_to(draft, count);
  return count;
}

// Returns the tokens that the rows emit in the time of a step, and what a token of each weighs;
// empty: all weigh the same.
Engine::Pace Engine::pace_of(const RequestId* ids, std::int64_t rows) const {
  Pace pace;
  std::vector<OutputLengths::Running> running(lengths_ == nullptr ? 0
                                                                  : static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::optional<RequestTable::Locked> found = requests_->find(ids[row]);
    if (!found) continue;
    const Request& request = **found;
    pace.rate += request.rate.value();
    if (lengths_ == nullptr) continue;
    running[static_cast<std::size_t>(row)] = {
        request.prompt_key, request.size() - request.prompt_size, request.rate.value()};
  }
  if (lengths_ == nullptr) return pace;
  pace.weights = lengths_->weights(running);
  pace.rate = 0.0;
  for (std::size_t r = 0; r < running.size(); ++r) {
    pace.rate += double{pace.weights[r]} * running[r].rate;
  }
  return pace;
}

DraftBatch Engine::propose_batch(const RequestId* ids, std::int64_t rows,
                                 const ProposeOptions& options) {
  check_limits(options, rows);
  const bool offered = options.num_offers > 0;
  if (offered) check_offers(options, rows);
  const StepCost cost = options.cost.value_or(StepCost::constant(config_.token_cost));
  const std::int64_t stride = most_drafted_;
  // Every row's whole guess, a stride apart; what is kept then moves together.
  std::unique_ptr<std::byte[]> memory(
      new std::byte[static_cast<std::size_t>(DraftColumns::bytes(rows * stride))]);
  const DraftColumns all = DraftColumns::in(memory.get(), rows * stride);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(rows));
  const auto [emitted, weights] = pace_of(ids, rows);
  const double rate = cost.price_of_time(rows, emitted, stride);
  const auto least = static_cast<float>(cost.least_of_batch(rows, rate, options.padded, stride));
  std::vector<std::int32_t> drawn(offered ? counts.size() : 0, -1);  // -1: nothing
  const auto guess_row = [&, &weights = weights](std::int64_t row,
                                                 const std::optional<RequestTable::Locked>& found) {
    if (!found) return;
    const auto r = static_cast<std::size_t>(row);
    Request& request = **found;
    RowOffers memory_of_offers;
    const RowOffers* offers =
        offered ? read_offers(request, options, row, false, memory_of_offers) : nullptr;
    const float least_of_row = weights.empty() ? least : least / weights[r];
    counts[r] = guess(request, limit_of(options, row), least_of_row, offers);
    request.draft.copy_to(all.from(row * stride), counts[r]);
    if (is_drawn(offers)) drawn[r] = counts[r];
  };
  visit_guesses(ids, rows, guess_row);
  if (rows > 0 && config_.calibrated()) {
    const std::vector<float> weighed = weigh(all.probabilities, stride, counts, weights);
    keep_what_pays(cost, rate, options.padded, weighed.empty() ? all.probabilities : weighed.data(),
                   rows, stride, counts.data());
    for (std::size_t r = 0; r < drawn.size(); ++r) {
      if (drawn[r] >= 0) counts[r] = drawn[r];
    }
  }

  std::vector<std::int32_t> offsets(static_cast<std::size_t>(rows) + 1);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  const std::int32_t longest = rows > 0 ? *std::max_element(counts.begin(), counts.end()) : 0;
  const std::int64_t wide = std::max<std::int64_t>(rows, 1);
  const double step_time = cost.relative(wide, options.padded ? rows * longest : offsets.back()) +
                           time_of_offers(cost, wide, options);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto r = static_cast<std::size_t>(row);
    all.from(row * stride).copy_to(all.from(offsets[r]), counts[r]);
    const std::optional<RequestTable::Locked> request = requests_->find(ids[row]);
    // A call from elsewhere may have ended or observed the request since.
    if (!request || !(*request)->proposal) continue;
    Proposal& proposal = *(*request)->proposal;
    proposal.drafted = std::min(counts[r], proposal.guessed);
    proposal.step_time = step_time;
  }
  return {std::move(memory), all, std::move(offsets)};
}

// For a step that verified the first `drafted` tokens of the proposal.
Engine::Outcome Engine::outcome_of_draft(const DraftColumns& draft, std::int32_t drafted,
                                         TokenSpan emitted) noexcept {
  Outcome outcome{drafted, draft.accepted(drafted, emitted.token_ids, emitted.size)};
  const auto of_prediction =
      std::count(draft.sources, draft.sources + drafted, Source::kPrediction);
  outcome.rejected_prediction =
      of_prediction - outcome.accepted.by_source[index_of(Source::kPrediction)];
  return outcome;
}

// For a step that verified `drafted` tokens of the host's choice: the target accepted all that it
// emitted but the last. Which of them the prediction expected is read from the last guess: of the
// accepted tokens exactly, of the rejected ones along the prediction's own path. The host drafted
// from an older guess, so the most probable path of this one may be another.
Engine::Outcome Engine::outcome_of_guess(const DraftColumns& guess, std::int32_t guessed,
                                         TokenSpan emitted, std::int32_t drafted) noexcept {
  Outcome outcome;
  outcome.drafted = drafted;
  std::int32_t& accepted = outcome.accepted.tokens;
  accepted = static_cast<std::int32_t>(std::min<std::int64_t>(drafted, emitted.size - 1));
  std::int32_t parent = -1;
  std::int32_t depth = 0;
  for (std::int32_t i = 0; i < guessed && depth < drafted; ++i) {
    const bool follows = depth < accepted ? guess.token_ids[i] == emitted.token_ids[depth]
                                          : guess.sources[i] == Source::kPrediction;
    if (guess.parents[i] != parent || !follows) continue;
    if (depth < accepted) {
      ++outcome.accepted.by_source[index_of(guess.sources[i])];
    } else {
      ++outcome.rejected_prediction;
    }
    parent = i;
    ++depth;
  }
  return outcome;
}

void Engine::observe(RequestId id, const Token* emitted, std::int64_t count) {
  check_tokens(emitted, count, "emitted_ids");
  const RequestTable::Locked request = requests_->lock(id);
  take(*request, id, {{emitted, count}, {emitted, count}});
}

std::int64_t Request::grow(TokenSpan emitted, std::optional<MemoryLimitError>& refused) {
  std::int64_t taken = 0;
  try {
    while (taken < emitted.size) {
      context.append(emitted.token_ids[taken]);
      ++taken;
      drafter->advance();
    }
  } catch (const MemoryLimitError& error) {
    refused = error;
  }
  // The next guess reads these first.
  if (const Match suffix = context.repeated_suffix(); suffix.length > 0) {
    context.prefetch_ends(suffix.state);
  }
  for (const auto& each : running) each->grow(text(), size(), prompt_size);
  return taken;
}

void Engine::take(Request& request, RequestId id, const Step& step) {
  check_room(request, id, step.emitted.size);
  request.kept.reset();
  const std::optional<Proposal> proposal = std::exchange(request.proposal, std::nullopt);
  if (step.emitted.size > 0) request.context.prefetch_append(step.emitted.token_ids[0]);
  if (proposal) request.drafter->learn(step.observed.token_ids, step.observed.size);
  std::optional<MemoryLimitError> refused;
  const TokenSpan emitted{step.emitted.token_ids, request.grow(step.emitted, refused)};
  const std::int64_t taken = emitted.size;
  const Proposal known = proposal.value_or(Proposal());
  if (taken > 0) {
    const Outcome outcome =
        step.verified
            ? outcome_of_guess(request.draft, known.guessed, emitted, *step.verified)
            : outcome_of_draft(request.draft, std::min(known.drafted, step.most), emitted);
    request.counts.add(taken, outcome.drafted, outcome.accepted);
    request.counts.rejected_prediction += outcome.rejected_prediction;
    if (request.offers != nullptr) {
      request.offers->learn(*kinds_, {outcome.accepted.tokens, outcome.drafted,
                                      request.drafter->accepted_without_offers()});
    }
    // Without a proposal a step of the target emits one token: more are text from elsewhere, as a
    // resumed request's, and say nothing about the target's pace.
    if (proposal || taken == 1) {
      request.add_step(static_cast<double>(std::min<std::int64_t>(taken, most_drafted_ + 1)),
                       known.step_time);
    }
  } else if (request.offers != nullptr) {
    request.offers->forget();
  }
  if (refused) {
    throw MemoryLimitError(of_request(id) + refused->what() + "; " + std::to_string(taken) +
                           " of " + std::to_string(step.emitted.size) +
                           " observed tokens were taken");
  }
}

// Takes the steps of rows, to which `complete(row, step)` adds what else is known of them, and
// gives the errors of those that failed, in order.
template <typename Complete>
std::vector<RowError> Engine::take_rows(const RequestId* ids, std::int64_t rows,
                                        const Token* emitted, const std::int64_t* offsets,
                                        Complete complete) {
  std::vector<RowError> failed;
  const auto approach = [&](std::int64_t row, Request& request, int step) {
    // No other token was checked yet, and one that is refused has no way.
    const bool any = offsets[row] < offsets[row + 1] && emitted[offsets[row]] >= 0;
    return any && is_far(request) &&
           request.context.approach(request.approach, emitted[offsets[row]], step);
  };
  const auto take_row = [&](std::int64_t row, std::optional<RequestTable::Locked>& request) {
    const Token* tokens = emitted + offsets[row];
    const std::int64_t count = offsets[row + 1] - offsets[row];
    try {
      check_tokens(tokens, count, "emitted_ids");
      if (!request) RequestTable::throw_unknown(ids[row]);
      Step step{{tokens, count}, {tokens, count}};
      complete(row, step);
      take(**request, ids[row], step);
    } catch (const std::exception&) {
      failed.push_back({row, std::current_exception()});
    }
  };
  requests_->visit(ids, rows, approach, take_row);
  sort_by_row(failed);
  return failed;
}

std::vector<RowError> Engine::observe_batch(const RequestId* ids, std::int64_t rows,
                                            const Token* emitted, const std::int64_t* offsets,
                                            const std::int32_t* drafted) {
  check_offsets(offsets, rows);
  check_drafted(drafted, rows);
  return take_rows(ids, rows, emitted, offsets, [&](std::int64_t row, Step& step) {
    if (drafted != nullptr) step.most = drafted[row];
  });
}

namespace {

// Returns what each request with several rows emitted in all of them. Its guess was made before the
// first, which uses it up; so the first has to learn from the tokens of all.
std::unordered_map<RequestId, std::vector<Token>> tokens_of_several_rows(
    const RequestId* ids, std::int64_t rows, const Token* emitted, const std::int64_t* offsets) {
  std::unordered_map<RequestId, std::vector<Token>> tokens;
  std::vector<RequestId> sorted(ids, ids + rows);
  std::sort(sorted.begin(), sorted.end());
  auto same = std::adjacent_find(sorted.begin(), sorted.end());
  for (; same != sorted.end(); same = std::adjacent_find(same + 1, sorted.end())) tokens[*same];
  if (tokens.empty()) return tokens;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto found = tokens.find(ids[row]);
    if (found == tokens.end()) continue;
    found->second.insert(found->second.end(), emitted + offsets[row], emitted + offsets[row + 1]);
  }
  return tokens;
}

}  // namespace

std::vector<RowError> Engine::continue_batch(const RequestId* ids, std::int64_t rows,
                                             const Token* emitted, const std::int64_t* offsets,
                                             const std::int32_t* drafted, const std::int64_t* slots,
                                             const Continuations& out) {
  check_offsets(offsets, rows);
  const auto slot_of = [&](std::int64_t row) { return slots == nullptr ? row : slots[row]; };
  for (std::int64_t row = 0; row < rows; ++row) {
    if (slot_of(row) < 0 || slot_of(row) >= out.rows) {
      throw InvalidValueError("slots must be below the " + std::to_string(out.rows) +
                              " rows of the continuations, got " + std::to_string(slot_of(row)) +
                              " at index " + std::to_string(row));
    }
  }
  check_drafted(drafted, rows);
  // First all rows learn, then all guess by what was learned.
  const auto several = tokens_of_several_rows(ids, rows, emitted, offsets);
  std::vector<RowError> failed =
      take_rows(ids, rows, emitted, offsets, [&](std::int64_t row, Step& step) {
        step.verified = drafted == nullptr ? 0 : drafted[row];
        if (const auto all = several.find(ids[row]); all != several.end()) {
          step.observed = {all->second.data(), static_cast<std::int64_t>(all->second.size())};
        }
      });
  const auto limit = static_cast<std::int32_t>(std::min<std::int64_t>(most_drafted_, out.nodes));
  // If several rows go to one slot, the last one stays.
  std::vector<std::int64_t> last(static_cast<std::size_t>(out.rows), -1);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t slot = slot_of(row);
    last[static_cast<std::size_t>(slot)] = row;
    out.base[slot] = 0;
    out.count[slot] = 0;
  }
  for (const RowError& error : failed) {
    std::int64_t& row = last[static_cast<std::size_t>(slot_of(error.row))];
    if (row == error.row) row = -1;
  }
  std::mutex failed_mutex;
  const auto guess_row = [&](std::int64_t row, std::optional<RequestTable::Locked>& request) {
    const std::int64_t slot = slot_of(row);
    if (last[static_cast<std::size_t>(slot)] != row) return;
    try {
      if (!request) RequestTable::throw_unknown(ids[row]);
      const std::int32_t count = guess(**request, limit, 0.0f, nullptr);
      out.write(slot, (*request)->size(), count, (*request)->draft);
    } catch (const std::exception&) {
      const std::scoped_lock guard(failed_mutex);
      failed.push_back({row, std::current_exception()});
    }
  };
  visit_guesses(ids, rows, guess_row);
  sort_by_row(failed);
  return failed;
}

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

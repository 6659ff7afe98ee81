// The calls of an engine that draft.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "draft/row_offers.h"
#include "engine/batch_threads.h"
#include "engine/checks.h"
#include "engine/request_table.h"
#include "fastdraft/engine.h"
#include "fastdraft/error.h"
#include "policy/offer_kinds.h"

namespace fastdraft {
namespace {

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

constexpr const char* kLimits = "limits must be 0 or greater";

// Threads share batches of at least this many rows. With two of them a guess for 256 rows of 4,000
// tokens beside a million stored ones takes two thirds of the time; observing rows that lie in
// another core's cache gives a quarter of the gain back. With 64 rows nothing is left of it.
constexpr std::int64_t kRowsToShare = 128;

bool approach_guess(std::int64_t /*row*/, Request& request, int step) {
  return request.is_far() && request.drafter->approach(step);
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
  std::vector<RequestId> sorted;
  sorted.assign(ids, ids + rows);  // the constructor makes GCC 12 warn of a wrong free
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

}  // namespace

std::int32_t Engine::limit_of(const ProposeOptions& options, std::int64_t row) const noexcept {
  return options.limits == nullptr ? most_drafted_ : std::min(most_drafted_, options.limits[row]);
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
void Engine::visit_guesses(const RequestId* ids, std::int64_t rows, const VisitRow& visit) {
  constexpr std::int64_t kRows = RequestTable::kTogether;
  const auto visit_part = [&](std::int64_t first, std::int64_t count) {
    requests_->visit(ids + first, count, approach_guess,
                     [&](std::int64_t row, const std::optional<RequestTable::Locked>& request) {
                       visit(first + row, request ? &**request : nullptr);
                     });
  };
  if (rows < kRowsToShare || threads_->count() == 1 || !all_differ(ids, rows)) {
    return visit_part(0, rows);
  }
  threads_->run((rows + kRows - 1) / kRows, [&](std::int64_t part) {
    visit_part(part * kRows, std::min(kRows, rows - part * kRows));
  });
}

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
    OfferState::OfKind& known = request.known_offers(*kinds_).kinds[kind];
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
    wanted[row] = value.add(
        (*request)->known_offers(*kinds_), own.columns.probabilities + own.offsets[r],
        own.offsets[r + 1] - own.offsets[r], limit, expected == nullptr ? 0.0f : expected[row]);
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
  check_counts(kLimits, options.limits, 1);
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
  check_counts(kLimits, options.limits, rows);
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
  const auto guess_row = [&, &weights = weights](std::int64_t row, Request* found) {
    if (found == nullptr) return;
    const auto r = static_cast<std::size_t>(row);
    Request& request = *found;
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

}  // namespace fastdraft

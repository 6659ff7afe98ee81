// The calls of an engine that take what the target emitted.
#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/checks.h"
#include "engine/request_table.h"
#include "fastdraft/engine.h"
#include "fastdraft/error.h"

namespace fastdraft {
namespace {

constexpr const char* kDrafted = "drafted must be 0 or greater";

void sort_by_row(std::vector<RowError>& errors) {
  std::sort(errors.begin(), errors.end(),
            [](const RowError& a, const RowError& b) { return a.row < b.row; });
}

std::string of_request(RequestId id) { return "request " + std::to_string(id) + ": "; }

// Returns the tokens that each request with several rows emitted, those of all its rows joined. It
// has one guess for them all. Its first row uses the guess up, and so learns from all tokens.
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

void Engine::observe(RequestId id, const Token* emitted, std::int64_t count) {
  check_tokens(emitted, count, "emitted_ids");
  const RequestTable::Locked request = requests_->lock(id);
  take(*request, id, {{emitted, count}, {emitted, count}});
}

void Engine::take(Request& request, RequestId id, Step step) {
  if (step.emitted.size > config_.max_request_tokens - request.context.size()) {
    throw RequestLimitError(of_request(id) + "max_request_tokens is " +
                            std::to_string(config_.max_request_tokens) + ": it holds " +
                            std::to_string(request.context.size()) + " tokens and " +
                            std::to_string(step.emitted.size) + " more were observed");
  }
  request.kept.reset();
  step.proposal = std::exchange(request.proposal, std::nullopt);
  step.offers = request.offers.get();
  const Outcome outcome = request.drafter->observe(step, request.draft);
  for (const auto& each : request.running) {
    each->grow(request.text(), request.size(), request.prompt_size);
  }
  const std::int64_t taken = outcome.taken;
  if (taken > 0) request.counts.add(taken, outcome.drafted, outcome.accepted);
  request.counts.rejected_prediction += outcome.rejected_prediction;
  // Without a proposal a step of the target emits one token: more are text from elsewhere, as a
  // resumed request's, and say nothing about the target's pace.
  if (taken == 1 || (taken > 0 && step.proposal)) {
    const auto tokens = static_cast<double>(std::min<std::int64_t>(taken, most_drafted_ + 1));
    const double time = step.proposal.value_or(Proposal()).step_time;
    request.rate.add(tokens, time);
    request.paced += tokens;
    request.time += time;
  }
  if (outcome.refused) {
    throw MemoryLimitError(of_request(id) + outcome.refused->what() + "; " + std::to_string(taken) +
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
    // Rows are checked later, one by one, so a negative token can still stand here: skip it.
    const bool any = offsets[row] < offsets[row + 1] && emitted[offsets[row]] >= 0;
    return any && request.is_far() &&
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
  check_counts(kDrafted, drafted, rows);
  return take_rows(ids, rows, emitted, offsets, [&](std::int64_t row, Step& step) {
    if (drafted != nullptr) step.most = drafted[row];
  });
}

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
  check_counts(kDrafted, drafted, rows);
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
  const auto guess_row = [&](std::int64_t row, Request* request) {
    const std::int64_t slot = slot_of(row);
    if (last[static_cast<std::size_t>(slot)] != row) return;
    try {
      if (request == nullptr) RequestTable::throw_unknown(ids[row]);
      const std::int32_t count = guess(*request, limit, 0.0f, nullptr);
      out.write(slot, request->size(), count, request->draft);
    } catch (const std::exception&) {
      const std::scoped_lock guard(failed_mutex);
      failed.push_back({row, std::current_exception()});
    }
  };
  visit_guesses(ids, rows, guess_row);
  sort_by_row(failed);
  return failed;
}

}  // namespace fastdraft

// The C interface: checks what the caller passes, calls the core, and turns exceptions into
// statuses.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "fastdraft/c.h"
#include "fastdraft/config.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/engine.h"
#include "fastdraft/error.h"
#include "fastdraft/ngram_table.h"
#include "fastdraft/step_cost.h"
#include "fastdraft/version.h"

// NOLINTBEGIN(readability-identifier-naming): C names.
struct fastdraft_datastore {
  std::shared_ptr<fastdraft::Datastore> store;
};

struct fastdraft_ngrams {
  std::shared_ptr<const fastdraft::NgramTable> table;
};

struct fastdraft_engine {
  fastdraft::Engine engine;
};
// NOLINTEND(readability-identifier-naming)

namespace {

using fastdraft::DraftBatch;
using fastdraft::DraftColumns;
using fastdraft::DraftCounts;
using fastdraft::EngineConfig;
using fastdraft::Fingerprint;
using fastdraft::InvalidValueError;
using fastdraft::ProposeOptions;
using fastdraft::RowError;
using fastdraft::Source;
using fastdraft::StepCost;
using fastdraft::Stores;

// Its size is fixed, so that an error can be noted where there is no memory.
constexpr std::size_t kMessageBytes = 1024;
thread_local char error_message[kMessageBytes] = "";

fastdraft_status note(fastdraft_status status, const char* message) noexcept {
  std::snprintf(error_message, kMessageBytes, "%s", message);
  return status;
}

fastdraft_status note(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const fastdraft::Error& thrown) {
    return note(static_cast<fastdraft_status>(thrown.kind()), thrown.what());
  } catch (const std::bad_alloc&) {
    return note(FASTDRAFT_MEMORY_LIMIT, "the system has no memory");
  } catch (const std::exception& thrown) {
    return note(FASTDRAFT_INTERNAL_ERROR, thrown.what());
  } catch (...) {
    return note(FASTDRAFT_INTERNAL_ERROR, "unknown exception");
  }
}

template <typename Body>
fastdraft_status guarded(Body body) noexcept {
  try {
    body();
    return FASTDRAFT_OK;
  } catch (...) {
    return note(std::current_exception());
  }
}

template <typename T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) throw InvalidValueError(std::string(name) + " must not be NULL");
  return *pointer;
}

template <typename T>
void check_array(const T* values, std::int64_t size, const char* name) {
  if (size < 0) {
    throw InvalidValueError("the length of " + std::string(name) + " must be 0 or greater, got " +
                            std::to_string(size));
  }
  if (size > 0) required(values, name);
}

// The sizes of the structs in the first version of this header, with their last members: no
// caller's struct is smaller, however many members are added. Each new struct is added here.
static_assert(sizeof(void*) == 8);
template <typename T>
constexpr std::size_t kFirstSize = 0;
#define FASTDRAFT_FIRST(type, bytes, last)                              \
  template <>                                                           \
  constexpr std::size_t kFirstSize<type> = bytes;                       \
  static_assert(offsetof(type, last) + sizeof(type::last) <= (bytes) && \
                offsetof(type, last) + sizeof(type::last) + 8 > (bytes))
FASTDRAFT_FIRST(fastdraft_datastore_stats, 48, closed);
FASTDRAFT_FIRST(fastdraft_config, 72, vocabulary);
FASTDRAFT_FIRST(fastdraft_engine_stats, 40, most_drafted);
FASTDRAFT_FIRST(fastdraft_request_options, 40, num_datastores);
FASTDRAFT_FIRST(fastdraft_propose_options, 40, padded);
FASTDRAFT_FIRST(fastdraft_draft, 56, sources);
FASTDRAFT_FIRST(fastdraft_stats, 64, rejected_prediction);
#undef FASTDRAFT_FIRST

template <typename T>
void check_size(const T* given, const char* name) {
  static_assert(kFirstSize<T> > 0);
  const std::size_t size = required(given, name).size;
  if (size >= kFirstSize<T>) return;
  throw InvalidValueError(std::string(name) + ".size must be the size of the struct, at least " +
                          std::to_string(kFirstSize<T>) + ", got " + std::to_string(size));
}

// The caller's struct in the form of this library's version. Members that only the library knows
// are 0; those that only the caller knows must be.
template <typename T>
T read(const T* given, const char* name) {
  check_size(given, name);
  T known{};
  std::memcpy(&known, given, std::min(given->size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < given->size; ++i) {
    if (bytes[i] == 0) continue;
    throw InvalidValueError(std::string(name) +
                            " sets a member that fastdraft " FASTDRAFT_VERSION
                            " does not have, or its size is wrong: got " +
                            std::to_string(given->size) + ", have " + std::to_string(sizeof(T)));
  }
  return known;
}

template <typename T>
T read_optional(const T* given, const char* name) {
  return given == nullptr ? T{} : read(given, name);
}

// Writes as much as the caller's struct has room for, and 0 to the members that only the caller
// knows. Its size was checked.
template <typename T>
void write(const T& known, T* out) noexcept {
  const std::size_t size = out->size;
  const std::size_t common = std::min(size, sizeof(T));
  auto* bytes = reinterpret_cast<unsigned char*>(out);
  std::memcpy(bytes, &known, common);
  std::memset(bytes + common, 0, size - common);
  out->size = size;
}

std::optional<Fingerprint> read_fingerprint(const std::uint8_t* bytes) {
  if (bytes == nullptr) return std::nullopt;
  Fingerprint fingerprint;
  static_assert(fingerprint.size() == FASTDRAFT_FINGERPRINT_BYTES);
  std::memcpy(fingerprint.data(), bytes, fingerprint.size());
  return fingerprint;
}

Stores read_stores(fastdraft_datastore* const* datastores, std::int64_t count) {
  check_array(datastores, count, "datastores");
  Stores stores;
  for (std::int64_t i = 0; i < count; ++i) {
    stores.push_back(required(datastores[i], "each of datastores").store);
  }
  return stores;
}

fastdraft::DrafterConfig read_drafter(const fastdraft_config& config) {
  switch (config.drafter) {
    case FASTDRAFT_CALIBRATED: {
      fastdraft::CalibratedConfig calibrated;
      if (config.tree_budget != 0) calibrated.tree_budget = config.tree_budget;
      if (config.ngrams != nullptr) calibrated.ngrams = config.ngrams->table;
      return calibrated;
    }
    case FASTDRAFT_PROMPT_LOOKUP:
      return fastdraft::PromptLookupConfig{config.max_ngram};
    case FASTDRAFT_NGRAM:
      return fastdraft::NgramConfig{config.ngram_order, config.min_probability};
    case FASTDRAFT_PREDICTED_OUTPUTS:
      return fastdraft::PredictedOutputsConfig{config.recovery};
    default:
      throw InvalidValueError("config.drafter must be 0 to 3, got " +
                              std::to_string(config.drafter));
  }
}

// Between the C struct and the core's, in either direction.
template <typename From, typename To>
void copy_limits(const From& from, To* to) noexcept {
  to->lookahead = from.lookahead;
  to->token_cost = from.token_cost;
  to->max_request_tokens = from.max_request_tokens;
  to->max_bytes = from.max_bytes;
  to->vocabulary = from.vocabulary;
  to->threads = from.threads;
}

EngineConfig read_config(const fastdraft_config* given) {
  EngineConfig config;
  if (given == nullptr) return config;
  const fastdraft_config known = read(given, "config");
  config.drafter = read_drafter(known);
  copy_limits(known, &config);
  return config;
}

// The arrays stay the caller's.
ProposeOptions read_options(const fastdraft_propose_options* given) {
  const fastdraft_propose_options known = read_optional(given, "options");
  check_array(known.cost, known.cost_size, "options.cost");
  ProposeOptions options;
  options.limits = known.limits;
  options.padded = known.padded != 0;
  if (known.cost_size > 0) options.cost = StepCost::curve(known.cost, known.cost_size);
  return options;
}

// Checks that the caller's arrays have room for what `rows` requests can get.
void check_room(const fastdraft_draft* draft, const fastdraft_engine& engine, std::int64_t rows,
                const ProposeOptions& options) {
  static_cast<void>(read(draft, "draft"));
  const std::int64_t most = engine.engine.most_drafted();
  constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
  if (rows > kMostTokens / most) {
    throw InvalidValueError("a batch must have at most " + std::to_string(kMostTokens / most) +
                            " requests, got " + std::to_string(rows));
  }
  std::int64_t needed = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    // The engine refuses a negative limit.
    needed += options.limits == nullptr
                  ? most
                  : std::max<std::int64_t>(0, std::min<std::int64_t>(most, options.limits[row]));
  }
  if (draft->capacity < needed) {
    throw InvalidValueError("draft.capacity must be at least " + std::to_string(needed) +
                            " for these requests and limits, got " +
                            std::to_string(draft->capacity));
  }
  check_array(draft->token_ids, needed, "draft.token_ids");
}

// Copies the columns that the caller wants.
void write_draft(const DraftColumns& columns, std::int64_t count, fastdraft_draft* out) noexcept {
  std::copy_n(columns.token_ids, count, out->token_ids);
  if (out->parents != nullptr) std::copy_n(columns.parents, count, out->parents);
  if (out->probabilities != nullptr) std::copy_n(columns.probabilities, count, out->probabilities);
  if (out->sources != nullptr) {
    std::transform(columns.sources, columns.sources + count, out->sources,
                   [](Source source) { return static_cast<std::uint8_t>(source); });
  }
  out->count = count;
}

}  // namespace

const char* fastdraft_error_message() { return error_message; }

const char* fastdraft_version() { return FASTDRAFT_VERSION; }

fastdraft_status fastdraft_datastore_live(int64_t max_bytes, const uint8_t* fingerprint,
                                          fastdraft_datastore** datastore) {
  return guarded([&] {
    fastdraft_datastore*& handle = required(datastore, "datastore");
    handle = new fastdraft_datastore{
        fastdraft::Datastore::live(max_bytes, read_fingerprint(fingerprint))};
  });
}

fastdraft_status fastdraft_datastore_open(const char* path, const uint8_t* fingerprint,
                                          fastdraft_datastore** datastore) {
  return guarded([&] {
    required(path, "path");
    fastdraft_datastore*& handle = required(datastore, "datastore");
    handle =
        new fastdraft_datastore{fastdraft::Datastore::open(path, read_fingerprint(fingerprint))};
  });
}

fastdraft_status fastdraft_datastore_add(fastdraft_datastore* datastore, const int32_t* token_ids,
                                         int64_t count, int64_t prompt_size) {
  return guarded([&] {
    fastdraft::Datastore& store = *required(datastore, "datastore").store;
    check_array(token_ids, count, "token_ids");
    store.add(token_ids, count, prompt_size);
  });
}

fastdraft_status fastdraft_datastore_save(const fastdraft_datastore* datastore, const char* path) {
  return guarded([&] {
    required(path, "path");
    required(datastore, "datastore").store->save(path);
  });
}

fastdraft_status fastdraft_datastore_close(fastdraft_datastore* datastore) {
  return guarded([&] { required(datastore, "datastore").store->close(); });
}

fastdraft_status fastdraft_datastore_get_stats(const fastdraft_datastore* datastore,
                                               fastdraft_datastore_stats* stats) {
  return guarded([&] {
    const fastdraft::Datastore& store = *required(datastore, "datastore").store;
    check_size(stats, "stats");
    fastdraft_datastore_stats known{};
    known.num_tokens = store.num_tokens();
    known.num_documents = store.num_documents();
    known.num_bytes = store.bytes();
    known.max_bytes = store.max_bytes();
    known.frozen = store.frozen() ? 1 : 0;
    known.closed = store.closed() ? 1 : 0;
    write(known, stats);
  });
}

void fastdraft_datastore_destroy(fastdraft_datastore* datastore) { delete datastore; }

fastdraft_status fastdraft_ngrams_open(const char* path, const uint8_t* fingerprint,
                                       fastdraft_ngrams** ngrams) {
  return guarded([&] {
    required(path, "path");
    fastdraft_ngrams*& out = required(ngrams, "ngrams");
    out = new fastdraft_ngrams{fastdraft::NgramTable::open(path, read_fingerprint(fingerprint))};
  });
}

void fastdraft_ngrams_destroy(fastdraft_ngrams* ngrams) { delete ngrams; }

fastdraft_status fastdraft_config_init(fastdraft_config* config) {
  return guarded([&] {
    check_size(config, "config");
    fastdraft_config known{};
    copy_limits(EngineConfig(), &known);
    known.max_ngram = fastdraft::PromptLookupConfig().max_ngram;
    known.ngram_order = fastdraft::NgramConfig().order;
    known.min_probability = fastdraft::NgramConfig().min_probability;
    known.recovery = fastdraft::PredictedOutputsConfig().recovery;
    write(known, config);
  });
}

fastdraft_status fastdraft_engine_create(const fastdraft_config* config,
                                         fastdraft_datastore* const* datastores,
                                         int64_t num_datastores, fastdraft_engine** engine) {
  return guarded([&] {
    fastdraft_engine*& handle = required(engine, "engine");
    handle = new fastdraft_engine{
        fastdraft::Engine(read_config(config), read_stores(datastores, num_datastores))};
  });
}

void fastdraft_engine_destroy(fastdraft_engine* engine) { delete engine; }

fastdraft_status fastdraft_engine_get_stats(const fastdraft_engine* engine,
                                            fastdraft_engine_stats* stats) {
  return guarded([&] {
    const fastdraft::Engine& core = required(engine, "engine").engine;
    check_size(stats, "stats");
    fastdraft_engine_stats known{};
    known.num_requests = core.num_requests();
    known.num_bytes = core.bytes();
    known.num_foreign = core.num_foreign();
    known.most_drafted = core.most_drafted();
    write(known, stats);
  });
}

fastdraft_status fastdraft_add_request(fastdraft_engine* engine, const int32_t* prompt,
                                       int64_t prompt_size,
                                       const fastdraft_request_options* options,
                                       fastdraft_request* request) {
  return guarded([&] {
    fastdraft::Engine& core = required(engine, "engine").engine;
    fastdraft_request& id = required(request, "request");
    check_array(prompt, prompt_size, "prompt");
    const fastdraft_request_options known = read_optional(options, "options");
    check_array(known.prediction, known.prediction_size, "options.prediction");
    fastdraft::NewRequest asked{{prompt, prompt_size}, {known.prediction, known.prediction_size}};
    const Stores stores = read_stores(known.datastores, known.num_datastores);
    if (known.datastores != nullptr) asked.stores = stores;
    id = core.add_request(asked);
  });
}

fastdraft_status fastdraft_propose(fastdraft_engine* engine, fastdraft_request request,
                                   const fastdraft_propose_options* options,
                                   fastdraft_draft* draft) {
  return guarded([&] {
    fastdraft::Engine& core = required(engine, "engine").engine;
    const ProposeOptions known = read_options(options);
    check_room(draft, *engine, 1, known);
    const std::int32_t most = core.most_drafted();
    const std::unique_ptr<std::byte[]> memory(
        new std::byte[static_cast<std::size_t>(DraftColumns::bytes(most))]);
    const DraftColumns columns = DraftColumns::in(memory.get(), most);
    write_draft(columns, core.propose(request, known, columns), draft);
  });
}

fastdraft_status fastdraft_propose_batch(fastdraft_engine* engine,
                                         const fastdraft_request* requests, int64_t rows,
                                         const fastdraft_propose_options* options,
                                         fastdraft_draft* draft, int64_t* offsets) {
  return guarded([&] {
    fastdraft::Engine& core = required(engine, "engine").engine;
    check_array(requests, rows, "requests");
    required(offsets, "offsets");
    const ProposeOptions known = read_options(options);
    check_room(draft, *engine, rows, known);
    const DraftBatch drafts = core.propose_batch(requests, rows, known);
    std::copy(drafts.offsets.begin(), drafts.offsets.end(), offsets);
    write_draft(drafts.columns, drafts.offsets.back(), draft);
  });
}

fastdraft_status fastdraft_observe(fastdraft_engine* engine, fastdraft_request request,
                                   const int32_t* emitted, int64_t count) {
  return guarded([&] {
    fastdraft::Engine& core = required(engine, "engine").engine;
    check_array(emitted, count, "emitted");
    core.observe(request, emitted, count);
  });
}

fastdraft_status fastdraft_observe_batch(fastdraft_engine* engine,
                                         const fastdraft_request* requests, int64_t rows,
                                         const int32_t* emitted, int64_t count,
                                         const int64_t* offsets, fastdraft_status* statuses) {
  fastdraft_status first = FASTDRAFT_OK;
  const fastdraft_status status = guarded([&] {
    fastdraft::Engine& core = required(engine, "engine").engine;
    check_array(requests, rows, "requests");
    check_array(emitted, count, "emitted");
    required(offsets, "offsets");
    if (offsets[0] != 0 || offsets[rows] != count) {
      throw InvalidValueError("offsets must rise from 0 to the number of emitted tokens, " +
                              std::to_string(count) + ", got " + std::to_string(offsets[0]) +
                              " .. " + std::to_string(offsets[rows]));
    }
    const std::vector<RowError> failed = core.observe_batch(requests, rows, emitted, offsets);
    if (statuses != nullptr) std::fill_n(statuses, rows, FASTDRAFT_OK);
    // From the last to the first, so that the message is that of the first.
    for (auto row = failed.rbegin(); row != failed.rend(); ++row) {
      first = note(row->error);
      if (statuses != nullptr) statuses[row->row] = first;
    }
  });
  return status == FASTDRAFT_OK ? first : status;
}

fastdraft_status fastdraft_finish(fastdraft_engine* engine, fastdraft_request request,
                                  fastdraft_stats* stats) {
  return guarded([&] {
    fastdraft::Engine& core = required(engine, "engine").engine;
    if (stats != nullptr) check_size(stats, "stats");
    const DraftCounts counts = core.finish(request);
    if (stats == nullptr) return;
    fastdraft_stats known{};
    known.steps = counts.steps;
    known.emitted = counts.emitted;
    known.drafts = counts.drafts;
    known.drafted = counts.drafted;
    known.accepted = counts.accepted;
    known.accepted_prediction = counts.accepted_prediction;
    known.rejected_prediction = counts.rejected_prediction;
    write(known, stats);
  });
}

fastdraft_status fastdraft_cancel(fastdraft_engine* engine, fastdraft_request request) {
  return guarded([&] { required(engine, "engine").engine.cancel(request); });
}

// The C interface: what it does with a caller's structs, arrays and handles. What the engine
// drafts is tested elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fastdraft/c.h"
#include "fastdraft/ngram_table.h"
#include "fastdraft/version.h"

namespace {

using Tokens = std::vector<std::int32_t>;

struct Destroy {
  void operator()(fastdraft_engine* engine) const { fastdraft_engine_destroy(engine); }
  void operator()(fastdraft_datastore* store) const { fastdraft_datastore_destroy(store); }
  void operator()(fastdraft_ngrams* ngrams) const { fastdraft_ngrams_destroy(ngrams); }
};
using Engine = std::unique_ptr<fastdraft_engine, Destroy>;
using Store = std::unique_ptr<fastdraft_datastore, Destroy>;

template <typename T>
T sized() {
  T value{};
  value.size = sizeof(T);
  return value;
}

fastdraft_config default_config() {
  auto config = sized<fastdraft_config>();
  EXPECT_EQ(fastdraft_config_init(&config), FASTDRAFT_OK);
  return config;
}

Engine make_engine(const fastdraft_config* config = nullptr,
                   const std::vector<fastdraft_datastore*>& stores = {}) {
  fastdraft_engine* engine = nullptr;
  EXPECT_EQ(fastdraft_engine_create(config, stores.data(), static_cast<std::int64_t>(stores.size()),
                                    &engine),
            FASTDRAFT_OK)
      << fastdraft_error_message();
  return Engine(engine);
}

Store make_store(const std::uint8_t* fingerprint = nullptr) {
  fastdraft_datastore* store = nullptr;
  EXPECT_EQ(fastdraft_datastore_live(1 << 20, fingerprint, &store), FASTDRAFT_OK);
  return Store(store);
}

Tokens periodic(int count, int period = 50) {
  Tokens text;
  for (int i = 0; i < count; ++i) text.push_back(i % period);
  return text;
}

fastdraft_request add(const Engine& engine, const Tokens& prompt,
                      const fastdraft_request_options* options = nullptr) {
  fastdraft_request request = -1;
  EXPECT_EQ(fastdraft_add_request(engine.get(), prompt.data(),
                                  static_cast<std::int64_t>(prompt.size()), options, &request),
            FASTDRAFT_OK)
      << fastdraft_error_message();
  return request;
}

// Columns of a caller's, and the struct that names them.
struct Draft {
  explicit Draft(std::int64_t capacity)
      : token_ids(static_cast<std::size_t>(capacity)),
        parents(token_ids.size()),
        probabilities(token_ids.size()),
        sources(token_ids.size()) {
    c.capacity = capacity;
    c.token_ids = token_ids.data();
    c.parents = parents.data();
    c.probabilities = probabilities.data();
    c.sources = sources.data();
  }
  Tokens tokens() const { return {token_ids.begin(), token_ids.begin() + c.count}; }

  Tokens token_ids;
  Tokens parents;
  std::vector<float> probabilities;
  std::vector<std::uint8_t> sources;
  fastdraft_draft c = sized<fastdraft_draft>();
};

void expect_error(fastdraft_status status, fastdraft_status expected, const std::string& part) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(fastdraft_error_message()).find(part), std::string::npos)
      << "got the message: " << fastdraft_error_message();
}

void expect_invalid(fastdraft_status status, const std::string& part) {
  expect_error(status, FASTDRAFT_INVALID_VALUE, part);
}

TEST(CApiTest, DraftsWhatARepeatingTextGoesOnWith) {
  const Engine engine = make_engine();
  const Tokens text = periodic(200);
  const fastdraft_request request = add(engine, Tokens(text.begin(), text.begin() + 100));
  Draft draft(64);
  ASSERT_EQ(fastdraft_propose(engine.get(), request, nullptr, &draft.c), FASTDRAFT_OK);
  ASSERT_GT(draft.c.count, 0);
  for (std::int64_t i = 0; i < draft.c.count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    EXPECT_EQ(draft.token_ids[at], text[100 + at]);
    EXPECT_EQ(draft.parents[at], i - 1);
    EXPECT_GT(draft.probabilities[at], 0.0f);
    EXPECT_LE(draft.probabilities[at], 1.0f);
    EXPECT_EQ(draft.sources[at], FASTDRAFT_SOURCE_CONTEXT);
  }

  ASSERT_EQ(fastdraft_observe(engine.get(), request, text.data() + 100, draft.c.count + 1),
            FASTDRAFT_OK);
  auto stats = sized<fastdraft_stats>();
  ASSERT_EQ(fastdraft_finish(engine.get(), request, &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.accepted, draft.c.count);
  EXPECT_EQ(stats.emitted, draft.c.count + 1);
}

TEST(CApiTest, DraftsFromAPredictionUpToALimit) {
  const Engine engine = make_engine();
  const Tokens prediction = {7, 8, 9, 10, 11};
  auto options = sized<fastdraft_request_options>();
  options.prediction = prediction.data();
  options.prediction_size = 5;
  const fastdraft_request request = add(engine, {1, 2, 3}, &options);
  const std::int32_t limit = 3;
  auto how = sized<fastdraft_propose_options>();
  how.limits = &limit;
  const std::vector<double> flat(64, 1.0);
  how.cost = flat.data();
  how.cost_size = 64;
  Draft draft(limit);
  // A column whose pointer is NULL is left out.
  draft.c.parents = nullptr;
  draft.c.probabilities = nullptr;
  ASSERT_EQ(fastdraft_propose(engine.get(), request, &how, &draft.c), FASTDRAFT_OK);
  EXPECT_EQ(draft.tokens(), (Tokens{7, 8, 9}));
  EXPECT_EQ(draft.sources[0], FASTDRAFT_SOURCE_PREDICTION);

  // A draft token that costs 100 forwards never pays.
  const std::vector<double> steep = {1.0, 101.0};
  how.cost = steep.data();
  how.cost_size = 2;
  ASSERT_EQ(fastdraft_propose(engine.get(), request, &how, &draft.c), FASTDRAFT_OK);
  EXPECT_EQ(draft.c.count, 0);
}

TEST(CApiTest, ProposesAndObservesBatches) {
  const Engine engine = make_engine();
  const Tokens text = periodic(200);
  const fastdraft_request first = add(engine, Tokens(text.begin(), text.begin() + 100));
  const fastdraft_request second = add(engine, Tokens(text.begin(), text.begin() + 120));
  const std::vector<fastdraft_request> requests = {first, 12345, second};
  std::vector<std::int64_t> offsets(4);
  Draft draft(192);
  ASSERT_EQ(
      fastdraft_propose_batch(engine.get(), requests.data(), 3, nullptr, &draft.c, offsets.data()),
      FASTDRAFT_OK);
  EXPECT_EQ(offsets[0], 0);
  EXPECT_GT(offsets[1], 0);
  EXPECT_EQ(offsets[1], offsets[2]);
  EXPECT_EQ(offsets[3], draft.c.count);
  EXPECT_EQ(draft.token_ids[0], text[100]);
  EXPECT_EQ(draft.token_ids[static_cast<std::size_t>(offsets[2])], text[120]);

  // The unknown request and the negative token fail, the other row does not.
  const std::vector<fastdraft_request> observed = {first, 12345, second};
  const Tokens emitted = {0, 1, 2, -3};
  const std::vector<std::int64_t> at = {0, 2, 3, 4};
  std::vector<fastdraft_status> statuses(3, -1);
  expect_error(fastdraft_observe_batch(engine.get(), observed.data(), 3, emitted.data(), 4,
                                       at.data(), statuses.data()),
               FASTDRAFT_UNKNOWN_REQUEST, "unknown request 12345");
  EXPECT_EQ(statuses, (std::vector<fastdraft_status>{FASTDRAFT_OK, FASTDRAFT_UNKNOWN_REQUEST,
                                                     FASTDRAFT_INVALID_VALUE}));
  auto stats = sized<fastdraft_stats>();
  ASSERT_EQ(fastdraft_finish(engine.get(), first, &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.emitted, 2);

  EXPECT_EQ(fastdraft_propose_batch(engine.get(), nullptr, 0, nullptr, &draft.c, offsets.data()),
            FASTDRAFT_OK);
  EXPECT_EQ(draft.c.count, 0);
  EXPECT_EQ(fastdraft_observe_batch(engine.get(), nullptr, 0, nullptr, 0, at.data(), nullptr),
            FASTDRAFT_OK);
}

TEST(CApiTest, DraftsFromATableOfNgrams) {
  const std::string path = testing::TempDir() + "c_api_test.fdn";
  {
    fastdraft::NgramTableWriter writer(path);
    const Tokens text{1, 2, 3, 4};
    for (std::int64_t group = 0; group < 20; ++group) writer.add(text.data(), 4, group);
    writer.finish();
  }
  fastdraft_ngrams* opened = nullptr;
  ASSERT_EQ(fastdraft_ngrams_open(path.c_str(), nullptr, &opened), FASTDRAFT_OK);
  std::unique_ptr<fastdraft_ngrams, Destroy> table(opened);
  fastdraft_config config = default_config();
  config.ngrams = opened;
  config.token_cost = 0.0;
  const Engine engine = make_engine(&config);
  table.reset();  // the engine keeps it
  Draft draft(64);
  ASSERT_EQ(fastdraft_propose(engine.get(), add(engine, {9, 1, 2}), nullptr, &draft.c),
            FASTDRAFT_OK);
  ASSERT_EQ(draft.c.count, 2);
  EXPECT_EQ(draft.token_ids[0], 3);
  EXPECT_EQ(draft.sources[0], FASTDRAFT_SOURCE_NGRAMS);

  const std::vector<std::uint8_t> fingerprint(FASTDRAFT_FINGERPRINT_BYTES, 7);
  expect_error(fastdraft_ngrams_open(path.c_str(), fingerprint.data(), &opened),
               FASTDRAFT_DATASTORE_ERROR, "of another tokenizer");
  expect_error(fastdraft_ngrams_open("none.fdn", nullptr, &opened), FASTDRAFT_DATASTORE_ERROR,
               "cannot open");
  expect_error(fastdraft_ngrams_open(nullptr, nullptr, &opened), FASTDRAFT_INVALID_VALUE, "path");
  expect_error(fastdraft_ngrams_open(path.c_str(), nullptr, nullptr), FASTDRAFT_INVALID_VALUE,
               "ngrams");
  fastdraft_ngrams_destroy(nullptr);
}

TEST(CApiTest, SharesDatastoresAndWritesThemToFiles) {
  const std::string path = testing::TempDir() + "c_api_test.fds";
  std::vector<std::uint8_t> fingerprint(FASTDRAFT_FINGERPRINT_BYTES, 7);
  const Store live = make_store(fingerprint.data());
  const Tokens document = periodic(60, 60);
  ASSERT_EQ(fastdraft_datastore_add(live.get(), document.data(), 60, 10), FASTDRAFT_OK);
  ASSERT_EQ(fastdraft_datastore_save(live.get(), path.c_str()), FASTDRAFT_OK);

  fastdraft_datastore* opened = nullptr;
  ASSERT_EQ(fastdraft_datastore_open(path.c_str(), fingerprint.data(), &opened), FASTDRAFT_OK);
  const Store frozen(opened);
  auto stats = sized<fastdraft_datastore_stats>();
  ASSERT_EQ(fastdraft_datastore_get_stats(frozen.get(), &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_tokens, 60);
  EXPECT_EQ(stats.num_documents, 1);
  EXPECT_EQ(stats.frozen, 1);
  EXPECT_EQ(stats.num_bytes, stats.max_bytes);
  expect_error(fastdraft_datastore_add(frozen.get(), document.data(), 1, 0),
               FASTDRAFT_DATASTORE_ERROR, "frozen");
  fingerprint[0] = 8;
  expect_error(fastdraft_datastore_open(path.c_str(), fingerprint.data(), &opened),
               FASTDRAFT_DATASTORE_ERROR, "fingerprint");

  // A request drafts from the stores of its own, and only from these.
  const Engine engine = make_engine(nullptr, {frozen.get()});
  const Tokens prompt = periodic(30, 60);
  Draft draft(64);
  ASSERT_EQ(fastdraft_propose(engine.get(), add(engine, prompt), nullptr, &draft.c), FASTDRAFT_OK);
  ASSERT_GT(draft.c.count, 0);
  EXPECT_EQ(draft.token_ids[0], 30);
  EXPECT_EQ(draft.sources[0], FASTDRAFT_SOURCE_READ_ONLY);
  fastdraft_datastore* handle = nullptr;
  auto options = sized<fastdraft_request_options>();
  options.datastores = &handle;
  ASSERT_EQ(fastdraft_propose(engine.get(), add(engine, prompt, &options), nullptr, &draft.c),
            FASTDRAFT_OK);
  EXPECT_EQ(draft.c.count, 0);

  // A finished request's text enters its live store, a cancelled one's does not.
  handle = live.get();
  options.num_datastores = 1;
  const fastdraft_request finished = add(engine, periodic(90, 90), &options);
  const fastdraft_request cancelled = add(engine, {500, 501, 502, 503}, &options);
  ASSERT_EQ(fastdraft_finish(engine.get(), finished, nullptr), FASTDRAFT_OK);
  ASSERT_EQ(fastdraft_cancel(engine.get(), cancelled), FASTDRAFT_OK);
  ASSERT_EQ(fastdraft_datastore_get_stats(live.get(), &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_documents, 2);

  ASSERT_EQ(fastdraft_datastore_close(live.get()), FASTDRAFT_OK);
  expect_error(fastdraft_datastore_add(live.get(), document.data(), 60, 0),
               FASTDRAFT_DATASTORE_CLOSED, "closed");
  fastdraft_request request = -1;
  expect_error(fastdraft_add_request(engine.get(), nullptr, 0, &options, &request),
               FASTDRAFT_DATASTORE_CLOSED, "closed");
  EXPECT_EQ(std::remove(path.c_str()), 0);
  expect_error(fastdraft_datastore_open(path.c_str(), nullptr, &opened), FASTDRAFT_DATASTORE_ERROR,
               path);
}

TEST(CApiTest, AStoreOutlivesItsHandleWhileAnEngineUsesIt) {
  Store store = make_store();
  const Engine engine = make_engine(nullptr, {store.get()});
  store.reset();
  ASSERT_EQ(fastdraft_finish(engine.get(), add(engine, periodic(60, 60)), nullptr), FASTDRAFT_OK);
  Draft draft(64);
  ASSERT_EQ(fastdraft_propose(engine.get(), add(engine, periodic(30, 60)), nullptr, &draft.c),
            FASTDRAFT_OK);
  EXPECT_GT(draft.c.count, 0);
}

TEST(CApiTest, ConfiguresTheEngine) {
  EXPECT_STREQ(fastdraft_version(), FASTDRAFT_VERSION);
  auto config = default_config();
  config.lookahead = 5;
  config.tree_budget = 9;
  auto stats = sized<fastdraft_engine_stats>();
  const Engine engine = make_engine(&config);
  add(engine, periodic(10));
  ASSERT_EQ(fastdraft_engine_get_stats(engine.get(), &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.most_drafted, 9);
  EXPECT_EQ(stats.num_requests, 1);
  EXPECT_GT(stats.num_bytes, 0);
  EXPECT_EQ(stats.num_foreign, 0);

  auto limited = default_config();
  limited.max_request_tokens = 10;
  limited.max_bytes = 1 << 20;
  const Engine small = make_engine(&limited);
  fastdraft_request request = -1;
  const Tokens prompt = periodic(11);
  expect_error(fastdraft_add_request(small.get(), prompt.data(), 11, nullptr, &request),
               FASTDRAFT_REQUEST_LIMIT, "max_request_tokens is 10");
  EXPECT_EQ(request, -1);
  limited.max_bytes = 1;
  expect_error(
      fastdraft_add_request(make_engine(&limited).get(), prompt.data(), 10, nullptr, &request),
      FASTDRAFT_MEMORY_LIMIT, "max_bytes");
}

TEST(CApiTest, DraftsByEachDrafter) {
  const Tokens text = periodic(100);
  Draft draft(64);
  for (const fastdraft_drafter drafter : {FASTDRAFT_CALIBRATED, FASTDRAFT_PROMPT_LOOKUP,
                                          FASTDRAFT_NGRAM, FASTDRAFT_PREDICTED_OUTPUTS}) {
    auto config = default_config();
    config.drafter = drafter;
    const Engine engine = make_engine(&config);
    auto options = sized<fastdraft_request_options>();
    options.prediction = text.data();
    options.prediction_size = 100;
    const fastdraft_request request = add(engine, text, &options);
    ASSERT_EQ(fastdraft_propose(engine.get(), request, nullptr, &draft.c), FASTDRAFT_OK);
    ASSERT_GT(draft.c.count, 0) << "drafter " << drafter;
    EXPECT_EQ(draft.token_ids[0], 0);
  }
}

TEST(CApiTest, RefusesBadConfigs) {
  fastdraft_engine* engine = nullptr;
  const auto refused = [&](auto change, const char* part) {
    auto config = default_config();
    change(config);
    expect_invalid(fastdraft_engine_create(&config, nullptr, 0, &engine), part);
    EXPECT_EQ(engine, nullptr);
  };
  refused([](auto& config) { config.lookahead = 0; }, "lookahead must be at least 1, got 0");
  refused([](auto& config) { config.tree_budget = -1; }, "tree_budget");
  refused([](auto& config) { config.token_cost = -0.5; }, "token_cost");
  refused([](auto& config) { config.token_cost = std::nan(""); }, "token_cost");
  refused(
      [](auto& config) {
        config.drafter = FASTDRAFT_NGRAM;
        config.min_probability = 1.5;
      },
      "min_probability");
  refused([](auto& config) { config.drafter = 4; }, "config.drafter must be 0 to 3, got 4");
  refused([](auto& config) { config.max_bytes = 0; }, "max_bytes");
  refused([](auto& config) { config.vocabulary = std::int64_t{1} << 32; }, "vocabulary");
  refused([](auto& config) { config.threads = 65; }, "threads must be at most 64, got 65");
  refused([](auto& config) { config.size = 0; }, "config.size");
  expect_invalid(fastdraft_engine_create(nullptr, nullptr, 1, &engine),
                 "datastores must not be NULL");
  expect_invalid(fastdraft_engine_create(nullptr, nullptr, -1, &engine),
                 "length of datastores must be 0 or greater, got -1");
  expect_invalid(fastdraft_engine_create(nullptr, nullptr, 0, nullptr), "engine");
  fastdraft_datastore* missing = nullptr;
  expect_invalid(fastdraft_engine_create(nullptr, &missing, 1, &engine), "each of datastores");
}

// A struct of a later version of the header, with a member that this library does not have.
template <typename T>
struct Later {
  explicit Later(const T& value) : known(value) { known.size = sizeof(Later); }
  T known;
  std::int64_t added = 0;
};

TEST(CApiTest, TakesStructsOfLaterVersionsThatSetNothingNew) {
  Later<fastdraft_config> config({});
  config.added = 99;
  ASSERT_EQ(fastdraft_config_init(&config.known), FASTDRAFT_OK);
  EXPECT_EQ(config.known.size, sizeof config);
  EXPECT_EQ(config.known.lookahead, 64);
  EXPECT_EQ(config.added, 0);
  const Engine engine = make_engine(&config.known);
  const fastdraft_request request = add(engine, periodic(100));
  Later<fastdraft_propose_options> options({});
  Draft draft(64);
  Later<fastdraft_draft> later(draft.c);
  ASSERT_EQ(fastdraft_propose(engine.get(), request, &options.known, &later.known), FASTDRAFT_OK);
  EXPECT_GT(later.known.count, 0);

  const std::string part = "sets a member that fastdraft";
  fastdraft_engine* refused = nullptr;
  config.added = options.added = later.added = 1;
  expect_invalid(fastdraft_engine_create(&config.known, nullptr, 0, &refused), part);
  expect_invalid(fastdraft_propose(engine.get(), request, &options.known, &draft.c), part);
  expect_invalid(fastdraft_propose(engine.get(), request, nullptr, &later.known), part);
  Later<fastdraft_stats> stats({});
  stats.added = 99;
  ASSERT_EQ(fastdraft_finish(engine.get(), request, &stats.known), FASTDRAFT_OK);
  EXPECT_EQ(stats.known.size, sizeof stats);
  EXPECT_EQ(stats.added, 0);
}

TEST(CApiTest, WritesNoMoreThanAStructOfTheFirstVersionHas) {
  const Engine engine = make_engine();
  struct {
    fastdraft_engine_stats known = sized<fastdraft_engine_stats>();
    std::int64_t behind = 99;
  } stats;
  stats.known.size = 40;
  ASSERT_EQ(fastdraft_engine_get_stats(engine.get(), &stats.known), FASTDRAFT_OK);
  EXPECT_EQ(stats.known.most_drafted, 64);
  EXPECT_EQ(stats.behind, 99);
  stats.known.size = 39;
  expect_invalid(fastdraft_engine_get_stats(engine.get(), &stats.known), "at least 40, got 39");
}

TEST(CApiTest, RefusesStructsThatAreTooSmallAndThenChangesNothing) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, periodic(100));
  auto stats = sized<fastdraft_stats>();
  stats.size -= 8;
  expect_invalid(fastdraft_finish(engine.get(), request, &stats),
                 "stats.size must be the size of the struct");

  Draft draft(64);
  fastdraft_propose_options options{};
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "options.size");
  draft.c.size = 8;
  expect_invalid(fastdraft_propose(engine.get(), request, nullptr, &draft.c), "draft.size");
  fastdraft_request_options request_options{};
  fastdraft_request other = -1;
  expect_invalid(fastdraft_add_request(engine.get(), nullptr, 0, &request_options, &other),
                 "options.size");
  fastdraft_engine_stats engine_stats{};
  expect_invalid(fastdraft_engine_get_stats(engine.get(), &engine_stats), "stats.size");
  fastdraft_datastore_stats store_stats{};
  expect_invalid(fastdraft_datastore_get_stats(make_store().get(), &store_stats), "stats.size");
  fastdraft_config config{};
  expect_invalid(fastdraft_config_init(&config), "config.size");
  stats.size = sizeof stats;
  EXPECT_EQ(fastdraft_finish(engine.get(), request, &stats), FASTDRAFT_OK);
}

TEST(CApiTest, RefusesNullHandlesAndResults) {
  auto engine_stats = sized<fastdraft_engine_stats>();
  auto store_stats = sized<fastdraft_datastore_stats>();
  auto stats = sized<fastdraft_stats>();
  fastdraft_request request = -1;
  const std::int64_t zero = 0;
  std::int64_t offset = 0;
  Draft draft(64);
  const std::string part = "engine must not be NULL";
  expect_invalid(fastdraft_engine_get_stats(nullptr, &engine_stats), part);
  expect_invalid(fastdraft_add_request(nullptr, nullptr, 0, nullptr, &request), part);
  expect_invalid(fastdraft_propose(nullptr, 0, nullptr, &draft.c), part);
  expect_invalid(fastdraft_propose_batch(nullptr, nullptr, 0, nullptr, &draft.c, &offset), part);
  expect_invalid(fastdraft_observe(nullptr, 0, nullptr, 0), part);
  expect_invalid(fastdraft_observe_batch(nullptr, nullptr, 0, nullptr, 0, &zero, nullptr), part);
  expect_invalid(fastdraft_finish(nullptr, 0, &stats), part);
  expect_invalid(fastdraft_cancel(nullptr, 0), part);
  fastdraft_engine_destroy(nullptr);

  const std::string store_part = "datastore must not be NULL";
  expect_invalid(fastdraft_datastore_add(nullptr, nullptr, 0, 0), store_part);
  expect_invalid(fastdraft_datastore_save(nullptr, "x"), store_part);
  expect_invalid(fastdraft_datastore_close(nullptr), store_part);
  expect_invalid(fastdraft_datastore_get_stats(nullptr, &store_stats), store_part);
  expect_invalid(fastdraft_datastore_live(1 << 20, nullptr, nullptr), store_part);
  expect_invalid(fastdraft_datastore_open("x", nullptr, nullptr), store_part);
  fastdraft_datastore* store = nullptr;
  expect_invalid(fastdraft_datastore_open(nullptr, nullptr, &store), "path");
  expect_invalid(fastdraft_datastore_save(make_store().get(), nullptr), "path");
  expect_invalid(fastdraft_datastore_live(1, nullptr, &store), "max_bytes");
  EXPECT_EQ(store, nullptr);
  fastdraft_datastore_destroy(nullptr);

  const Engine engine = make_engine();
  request = add(engine, periodic(10));
  expect_invalid(fastdraft_add_request(engine.get(), nullptr, 0, nullptr, nullptr), "request");
  expect_invalid(fastdraft_propose(engine.get(), request, nullptr, nullptr), "draft");
  expect_invalid(fastdraft_propose_batch(engine.get(), &request, 1, nullptr, &draft.c, nullptr),
                 "offsets");
  expect_invalid(fastdraft_observe_batch(engine.get(), nullptr, 0, nullptr, 0, nullptr, nullptr),
                 "offsets");
  expect_invalid(fastdraft_config_init(nullptr), "config");
}

TEST(CApiTest, RefusesBadArrays) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, periodic(10));
  fastdraft_request other = -1;
  const Tokens negative = {1, -2};
  expect_invalid(fastdraft_add_request(engine.get(), nullptr, 3, nullptr, &other), "prompt");
  expect_invalid(fastdraft_add_request(engine.get(), negative.data(), -1, nullptr, &other),
                 "length of prompt must be 0 or greater, got -1");
  expect_invalid(fastdraft_add_request(engine.get(), negative.data(), 2, nullptr, &other), "-2");
  auto options = sized<fastdraft_request_options>();
  options.prediction_size = 4;
  expect_invalid(fastdraft_add_request(engine.get(), nullptr, 0, &options, &other),
                 "options.prediction");
  expect_invalid(fastdraft_observe(engine.get(), request, nullptr, 1), "emitted");
  expect_invalid(fastdraft_observe(engine.get(), request, negative.data(), 2), "-2");
  const Store store = make_store();
  expect_invalid(fastdraft_datastore_add(store.get(), nullptr, 2, 0), "token_ids");
  expect_invalid(fastdraft_datastore_add(store.get(), negative.data(), 2, 0), "-2");
  expect_invalid(fastdraft_datastore_add(store.get(), negative.data(), 1, 2), "prompt_size");

  const Tokens emitted = {1, 2};
  const std::vector<fastdraft_request> rows = {request, request};
  const auto observe = [&](std::vector<std::int64_t> offsets) {
    return fastdraft_observe_batch(engine.get(), rows.data(), 2, emitted.data(), 2, offsets.data(),
                                   nullptr);
  };
  expect_invalid(observe({0, 1, 3}), "offsets must rise from 0");
  expect_invalid(observe({1, 1, 2}), "offsets must rise from 0");
  expect_invalid(observe({0, 5, 2}), "offsets must rise, got 5 and then 2");
  expect_invalid(
      fastdraft_observe_batch(engine.get(), nullptr, 2, emitted.data(), 2, nullptr, nullptr),
      "requests");
  auto stats = sized<fastdraft_stats>();
  ASSERT_EQ(fastdraft_finish(engine.get(), request, &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.emitted, 0);
}

TEST(CApiTest, RefusesBadProposals) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, periodic(100));
  Draft draft(15);
  expect_invalid(fastdraft_propose(engine.get(), request, nullptr, &draft.c),
                 "draft.capacity must be at least 64");
  auto options = sized<fastdraft_propose_options>();
  std::int32_t limit = 15;
  options.limits = &limit;
  EXPECT_EQ(fastdraft_propose(engine.get(), request, &options, &draft.c), FASTDRAFT_OK);
  limit = -1;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "got -1");
  limit = 0;
  draft.c.token_ids = nullptr;
  EXPECT_EQ(fastdraft_propose(engine.get(), request, &options, &draft.c), FASTDRAFT_OK);
  EXPECT_EQ(draft.c.count, 0);
  limit = 1;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "draft.token_ids");
  draft.c.token_ids = draft.token_ids.data();

  const std::vector<double> cost = {1.0, std::numeric_limits<double>::quiet_NaN()};
  options.cost_size = 2;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "options.cost");
  options.cost = cost.data();
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "cost");

  std::int64_t offset = 0;
  expect_invalid(fastdraft_propose_batch(engine.get(), &request, std::int64_t{1} << 40, nullptr,
                                         &draft.c, &offset),
                 "a batch must have at most");
  expect_invalid(fastdraft_propose_batch(engine.get(), &request, -1, nullptr, &draft.c, &offset),
                 "requests");
}

TEST(CApiTest, RefusesUnknownRequests) {
  const Engine engine = make_engine();
  const fastdraft_request ended = add(engine, periodic(10));
  ASSERT_EQ(fastdraft_cancel(engine.get(), ended), FASTDRAFT_OK);
  Draft draft(64);
  for (const fastdraft_request request :
       {ended, ended + 1, fastdraft_request{-1}, std::numeric_limits<fastdraft_request>::max()}) {
    const std::string part = "unknown request " + std::to_string(request);
    const auto refused = [&](fastdraft_status status) {
      expect_error(status, FASTDRAFT_UNKNOWN_REQUEST, part);
    };
    refused(fastdraft_propose(engine.get(), request, nullptr, &draft.c));
    refused(fastdraft_observe(engine.get(), request, nullptr, 0));
    refused(fastdraft_finish(engine.get(), request, nullptr));
    refused(fastdraft_cancel(engine.get(), request));
  }
}

TEST(CApiTest, KeepsAnErrorMessageForEachThread) {
  expect_invalid(fastdraft_cancel(nullptr, 0), "engine");
  std::string before = "unset";
  std::thread([&] {
    before = fastdraft_error_message();
    fastdraft_config_init(nullptr);
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_STREQ(fastdraft_error_message(), "engine must not be NULL");

  // A message that is too long is cut.
  fastdraft_datastore* store = nullptr;
  EXPECT_EQ(fastdraft_datastore_open(std::string(5000, 'x').c_str(), nullptr, &store),
            FASTDRAFT_DATASTORE_ERROR);
  EXPECT_EQ(std::strlen(fastdraft_error_message()), 1023u);
}

}  // namespace

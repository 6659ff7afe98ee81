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
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "fastdraft/c.h"

namespace {

using Tokens = std::vector<std::int32_t>;

struct Destroy {
  void operator()(fastdraft_engine* engine) const { fastdraft_engine_destroy(engine); }
  void operator()(fastdraft_datastore* store) const { fastdraft_datastore_destroy(store); }
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
  ASSERT_EQ(fastdraft_get_stats(engine.get(), request, &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_tokens, 100 + draft.c.count + 1);
  EXPECT_EQ(stats.accepted, draft.c.count);
  ASSERT_EQ(fastdraft_finish(engine.get(), request, &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.emitted, draft.c.count + 1);
  EXPECT_EQ(stats.num_tokens, 0);
}

TEST(CApiTest, DraftsWhatOthersOffer) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, {1, 2, 3});
  std::int32_t kind = -1;
  ASSERT_EQ(fastdraft_engine_offer_kind(engine.get(), "eagle", &kind), FASTDRAFT_OK);
  EXPECT_EQ(kind, 0);
  std::uint8_t wanted = 7;
  ASSERT_EQ(fastdraft_wants(engine.get(), kind, &request, 1, nullptr, 0.1, nullptr, &wanted),
            FASTDRAFT_OK);
  EXPECT_LE(wanted, 1);
  const Tokens tokens = {7, 8};
  std::vector<std::int64_t> offsets = {0, 2};
  std::vector<float> confidences = {0.95f, 0.9f};
  auto offers = sized<fastdraft_offers>();
  offers.kind = kind;
  offers.token_ids = tokens.data();
  offers.count = 2;
  offers.offsets = offsets.data();
  offers.confidences = confidences.data();
  auto options = sized<fastdraft_propose_options>();
  options.offers = &offers;
  options.num_offers = 1;
  Draft draft(64);
  ASSERT_EQ(fastdraft_propose(engine.get(), request, &options, &draft.c), FASTDRAFT_OK);
  EXPECT_EQ(draft.tokens(), tokens);
  EXPECT_EQ(draft.sources[0], FASTDRAFT_SOURCE_OFFER);
  confidences[1] = 1.5f;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "got 1.5");
  offsets[1] = 1;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "got 0 .. 1");
  offers.offsets = nullptr;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "must not be NULL");
  expect_invalid(fastdraft_engine_offer_kind(engine.get(), "", &kind), "1 to 64 bytes");
}

TEST(CApiTest, AsksADrafterByWhatItExpects) {
  const auto answer = [](const std::vector<float>& expected) {
    const Engine engine = make_engine();
    const std::vector<fastdraft_request> requests = {add(engine, {1, 2, 3}), add(engine, {4, 5})};
    std::int32_t kind = -1;
    EXPECT_EQ(fastdraft_engine_offer_kind(engine.get(), "eagle", &kind), FASTDRAFT_OK);
    std::vector<std::uint8_t> wanted = {7, 7};
    EXPECT_EQ(fastdraft_wants(engine.get(), kind, requests.data(), 2, nullptr, 2.5,
                              expected.empty() ? nullptr : expected.data(), wanted.data()),
              FASTDRAFT_OK);
    return wanted;
  };
  // 2.5 steps are too much for the usual offer, and not for 9 tokens.
  EXPECT_EQ(answer({}), (std::vector<std::uint8_t>{0, 0}));
  EXPECT_EQ(answer({0.0f, 0.0f}), (std::vector<std::uint8_t>{0, 0}));
  EXPECT_EQ(answer({9.0f, 9.0f}), (std::vector<std::uint8_t>{1, 1}));

  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, {1, 2, 3});
  std::int32_t kind = -1;
  ASSERT_EQ(fastdraft_engine_offer_kind(engine.get(), "eagle", &kind), FASTDRAFT_OK);
  std::uint8_t wanted = 7;
  for (const float wrong : {-1.0f, 1025.0f, std::nanf("")}) {
    expect_invalid(fastdraft_wants(engine.get(), kind, &request, 1, nullptr, 0.1, &wrong, &wanted),
                   "expected must be from 0 to 1024");
  }
  EXPECT_EQ(wanted, 7);
}

TEST(CApiTest, CountsTheOffersThatABatchLeavesOut) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, {1, 2, 3});
  std::int32_t kind = -1;
  ASSERT_EQ(fastdraft_engine_offer_kind(engine.get(), "eagle", &kind), FASTDRAFT_OK);
  const std::int32_t wrong = -4;
  const std::vector<std::int64_t> offsets = {0, 1};
  auto offers = sized<fastdraft_offers>();
  offers.kind = kind;
  offers.token_ids = &wrong;
  offers.count = 1;
  offers.offsets = offsets.data();
  auto options = sized<fastdraft_propose_options>();
  options.offers = &offers;
  options.num_offers = 1;
  Draft draft(64);
  std::vector<std::int64_t> bounds(2);
  ASSERT_EQ(fastdraft_propose_batch(engine.get(), &request, 1, &options, &draft.c, bounds.data()),
            FASTDRAFT_OK);
  auto stats = sized<fastdraft_engine_stats>();
  ASSERT_EQ(fastdraft_engine_get_stats(engine.get(), &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_refused_offers, 1);
}

// Only four are read of however many are told.
TEST(CApiTest, RefusesTooManyOffersBeforeItReadsThem) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, {1, 2, 3});
  const std::vector<std::int64_t> offsets = {0, 0};
  std::vector<fastdraft_offers> offers(4, sized<fastdraft_offers>());
  for (fastdraft_offers& each : offers) each.offsets = offsets.data();
  auto options = sized<fastdraft_propose_options>();
  options.offers = offers.data();
  options.num_offers = 1 << 20;
  Draft draft(64);
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "at most 4 offers");
}

// Callers that were compiled with the first version of the header tell these sizes.
TEST(CApiTest, TakesTheStructsOfTheFirstVersion) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, periodic(100));
  auto stats = sized<fastdraft_stats>();
  stats.size = 72;
  EXPECT_EQ(fastdraft_get_stats(engine.get(), request, &stats), FASTDRAFT_OK);
  stats.size = 64;
  expect_invalid(fastdraft_get_stats(engine.get(), request, &stats), "at least 72, got 64");
  fastdraft_config config;
  config.size = 72;
  EXPECT_EQ(fastdraft_config_init(&config), FASTDRAFT_OK);
  auto of_engine = sized<fastdraft_engine_stats>();
  of_engine.size = 48;
  EXPECT_EQ(fastdraft_engine_get_stats(engine.get(), &of_engine), FASTDRAFT_OK);
}

TEST(CApiTest, WritesOnlyTheColumnsThatAreGiven) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, periodic(100));
  Draft draft(64);
  draft.c.parents = nullptr;
  draft.c.probabilities = nullptr;
  draft.c.sources = nullptr;
  ASSERT_EQ(fastdraft_propose(engine.get(), request, nullptr, &draft.c), FASTDRAFT_OK);
  EXPECT_GT(draft.c.count, 0);
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
  how.has_token_cost = 1;
  Draft draft(limit);
  ASSERT_EQ(fastdraft_propose(engine.get(), request, &how, &draft.c), FASTDRAFT_OK);
  EXPECT_EQ(draft.tokens(), (Tokens{7, 8, 9}));
  EXPECT_EQ(draft.sources[0], FASTDRAFT_SOURCE_PREDICTION);

  // A draft token that costs 100 forwards never pays.
  how.token_cost = 100.0;
  ASSERT_EQ(fastdraft_propose(engine.get(), request, &how, &draft.c), FASTDRAFT_OK);
  EXPECT_EQ(draft.c.count, 0);
  const std::vector<double> flat(64, 1.0);
  how.has_token_cost = 0;
  how.cost = flat.data();
  how.cost_size = 64;
  ASSERT_EQ(fastdraft_propose(engine.get(), request, &how, &draft.c), FASTDRAFT_OK);
  EXPECT_EQ(draft.c.count, 3);
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
  ASSERT_EQ(fastdraft_get_stats(engine.get(), first, &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_tokens, 102);

  EXPECT_EQ(fastdraft_propose_batch(engine.get(), nullptr, 0, nullptr, &draft.c, offsets.data()),
            FASTDRAFT_OK);
  EXPECT_EQ(draft.c.count, 0);
  EXPECT_EQ(fastdraft_observe_batch(engine.get(), nullptr, 0, nullptr, 0, at.data(), nullptr),
            FASTDRAFT_OK);
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

TEST(CApiTest, ReadOnlyStoresAreDraftedFromAndKeepTheirText) {
  const Store shared = make_store();
  const Store own = make_store();
  const Engine engine = make_engine();
  const Tokens document = periodic(60, 60);
  ASSERT_EQ(fastdraft_datastore_add(shared.get(), document.data(), 60, 10), FASTDRAFT_OK);
  fastdraft_datastore* const datastores[] = {own.get()};
  fastdraft_datastore* const read_only[] = {shared.get()};
  auto options = sized<fastdraft_request_options>();
  options.datastores = datastores;
  options.num_datastores = 1;
  options.read_only = read_only;
  options.num_read_only = 1;
  const fastdraft_request request =
      add(engine, Tokens(document.begin(), document.begin() + 9), &options);
  Draft draft(64);
  ASSERT_EQ(fastdraft_propose(engine.get(), request, nullptr, &draft.c), FASTDRAFT_OK);
  ASSERT_GT(draft.c.count, 0);
  EXPECT_EQ(draft.token_ids[0], document[9]);
  ASSERT_EQ(fastdraft_finish(engine.get(), request, nullptr), FASTDRAFT_OK);
  auto stats = sized<fastdraft_datastore_stats>();
  ASSERT_EQ(fastdraft_datastore_get_stats(shared.get(), &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_documents, 1);
  ASSERT_EQ(fastdraft_datastore_get_stats(own.get(), &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_documents, 1);

  fastdraft_request refused = -1;
  options.read_only = nullptr;
  expect_invalid(fastdraft_add_request(engine.get(), nullptr, 0, &options, &refused),
                 "read_only must not be NULL");
}

TEST(CApiTest, AStoreTakesALimit) {
  const Store to = make_store();
  Tokens text(20'000);
  std::iota(text.begin(), text.end(), 0);
  const auto size = static_cast<std::int64_t>(text.size());
  auto stats = sized<fastdraft_datastore_stats>();

  std::int64_t limit = -1;
  ASSERT_EQ(fastdraft_datastore_limit(to.get(), 300'000, &limit), FASTDRAFT_OK);
  EXPECT_EQ(limit, 300'000);
  ASSERT_EQ(fastdraft_datastore_add(to.get(), text.data(), size, 0), FASTDRAFT_OK);
  ASSERT_EQ(fastdraft_datastore_limit(to.get(), 0, nullptr), FASTDRAFT_OK);
  ASSERT_EQ(fastdraft_datastore_get_stats(to.get(), &stats), FASTDRAFT_OK);
  EXPECT_LE(stats.num_bytes, 300'000);
  EXPECT_LT(stats.num_tokens, size);
  EXPECT_GT(stats.num_tokens, 0);
  expect_invalid(fastdraft_datastore_limit(to.get(), -1, nullptr), "max_bytes");
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
  refused([](auto& config) { config.size = 0; }, "config.size");
  expect_invalid(fastdraft_engine_create(nullptr, nullptr, 1, &engine),
                 "datastores must not be NULL");
  expect_invalid(fastdraft_engine_create(nullptr, nullptr, -1, &engine),
                 "length of datastores must be 0 or greater, got -1");
  expect_invalid(fastdraft_engine_create(nullptr, nullptr, 0, nullptr), "engine");
  fastdraft_datastore* missing = nullptr;
  expect_invalid(fastdraft_engine_create(nullptr, &missing, 1, &engine), "each of datastores");
}

// A struct of a later version of the header, which has one more member.
template <typename T>
struct Later {
  T known{};
  std::int64_t added = 0;
};

TEST(CApiTest, TakesStructsOfLaterVersionsThatSetNothingNew) {
  Later<fastdraft_config> config;
  config.known.size = sizeof config;
  config.added = 99;
  ASSERT_EQ(fastdraft_config_init(&config.known), FASTDRAFT_OK);
  EXPECT_EQ(config.known.size, sizeof config);
  EXPECT_EQ(config.known.lookahead, 64);
  EXPECT_EQ(config.added, 0);
  const Engine engine = make_engine(&config.known);
  fastdraft_engine* refused = nullptr;
  config.added = 1;
  expect_invalid(fastdraft_engine_create(&config.known, nullptr, 0, &refused),
                 "sets a member that fastdraft");

  Later<fastdraft_stats> stats;
  stats.known.size = sizeof stats;
  stats.added = 99;
  const fastdraft_request request = add(engine, periodic(10));
  ASSERT_EQ(fastdraft_get_stats(engine.get(), request, &stats.known), FASTDRAFT_OK);
  EXPECT_EQ(stats.known.num_tokens, 10);
  EXPECT_EQ(stats.known.size, sizeof stats);
  EXPECT_EQ(stats.added, 0);
}

TEST(CApiTest, RefusesStructsThatAreTooSmallAndThenChangesNothing) {
  const Engine engine = make_engine();
  const fastdraft_request request = add(engine, periodic(100));
  auto stats = sized<fastdraft_stats>();
  stats.size = sizeof stats - 1;
  expect_invalid(fastdraft_finish(engine.get(), request, &stats), "stats.size");
  expect_invalid(fastdraft_get_stats(engine.get(), request, &stats), "stats.size");
  stats.size = sizeof stats;
  EXPECT_EQ(fastdraft_get_stats(engine.get(), request, &stats), FASTDRAFT_OK);

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
  expect_invalid(fastdraft_get_stats(nullptr, 0, &stats), part);
  expect_invalid(fastdraft_finish(nullptr, 0, &stats), part);
  expect_invalid(fastdraft_cancel(nullptr, 0), part);
  fastdraft_engine_destroy(nullptr);

  const std::string store_part = "datastore must not be NULL";
  expect_invalid(fastdraft_datastore_add(nullptr, nullptr, 0, 0), store_part);
  expect_invalid(fastdraft_datastore_save(nullptr, "x"), store_part);
  expect_invalid(fastdraft_datastore_close(nullptr), store_part);
  expect_invalid(fastdraft_datastore_limit(nullptr, 0, nullptr), store_part);
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
  expect_invalid(fastdraft_get_stats(engine.get(), request, nullptr), "stats");
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
  options.prediction_size = 0;
  options.templates_size = 4;
  expect_invalid(fastdraft_add_request(engine.get(), nullptr, 0, &options, &other),
                 "options.templates");
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
  ASSERT_EQ(fastdraft_get_stats(engine.get(), request, &stats), FASTDRAFT_OK);
  EXPECT_EQ(stats.num_tokens, 10);
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
  options.has_token_cost = 1;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "not both");
  options.cost_size = 0;
  options.token_cost = -1.0;
  expect_invalid(fastdraft_propose(engine.get(), request, &options, &draft.c), "token_cost");

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
  auto stats = sized<fastdraft_stats>();
  for (const fastdraft_request request :
       {ended, ended + 1, fastdraft_request{-1}, std::numeric_limits<fastdraft_request>::max()}) {
    const std::string part = "unknown request " + std::to_string(request);
    const auto refused = [&](fastdraft_status status) {
      expect_error(status, FASTDRAFT_UNKNOWN_REQUEST, part);
    };
    refused(fastdraft_propose(engine.get(), request, nullptr, &draft.c));
    refused(fastdraft_observe(engine.get(), request, nullptr, 0));
    refused(fastdraft_get_stats(engine.get(), request, &stats));
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

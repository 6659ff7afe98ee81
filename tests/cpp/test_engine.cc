// Limits, memory, ids and batches. What is drafted is compared with oracles in tests/core.
#include "fastdraft/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/request_table.h"
#include "fastdraft/datastore.h"
#include "fastdraft/error.h"
#include "stores.h"
#include "texts.h"

namespace fastdraft {

// Lets a test use a slot as often as nothing else could, and look into requests.
struct EngineTestAccess {
  static constexpr RequestId kIndex = (RequestId{1} << 32) - 1;
  static RequestId with_generation(Engine& engine, RequestId id, std::int64_t generation) {
    engine.requests_->slot(id & kIndex)->generation = generation;
    return (generation << 32) | (id & kIndex);
  }
  static const Request& request(const Engine& engine, RequestId id) {
    return *engine.requests_->slot(id & kIndex)->request;
  }
  static std::vector<float> weights(const Engine& engine, const std::vector<RequestId>& ids) {
    return engine.pace_of(ids.data(), static_cast<std::int64_t>(ids.size())).weights;
  }
};

namespace {

using testing::Tokens;

constexpr std::int64_t kStoreBytes = std::int64_t{1} << 20;
// A text of this length is far: a batch asks for its memory ahead.
constexpr std::size_t kFar = 9000;

RequestId add(Engine& engine, const Tokens& prompt, const Tokens& prediction = {}) {
  return engine.add_request({{prompt.data(), static_cast<std::int64_t>(prompt.size())},
                             {prediction.data(), static_cast<std::int64_t>(prediction.size())}});
}

void observe(Engine& engine, RequestId id, const Tokens& emitted) {
  engine.observe(id, emitted.data(), static_cast<std::int64_t>(emitted.size()));
}

struct Draft {
  Tokens tokens;
  std::vector<std::int32_t> parents;
  std::vector<float> probabilities;
  std::vector<Source> sources;

  Draft() = default;
  Draft(const DraftColumns& columns, std::int32_t size)
      : tokens(columns.token_ids, columns.token_ids + size),
        parents(columns.parents, columns.parents + size),
        probabilities(columns.probabilities, columns.probabilities + size),
        sources(columns.sources, columns.sources + size) {}

  // The tokens from the text's end to the one at `index`.
  Tokens path_to(std::int32_t index) const {
    Tokens path;
    for (; index >= 0; index = parents[static_cast<std::size_t>(index)]) {
      path.insert(path.begin(), tokens[static_cast<std::size_t>(index)]);
    }
    return path;
  }
};

Draft propose_draft(Engine& engine, RequestId id, const ProposeOptions& options = {}) {
  const std::int32_t capacity = engine.most_drafted();
  std::vector<std::byte> memory(static_cast<std::size_t>(DraftColumns::bytes(capacity)));
  const DraftColumns columns = DraftColumns::in(memory.data(), capacity);
  return {columns, engine.propose(id, options, columns)};
}

Tokens propose(Engine& engine, RequestId id, const ProposeOptions& options = {}) {
  const Draft draft = propose_draft(engine, id, options);
  for (std::size_t i = 0; i < draft.tokens.size(); ++i) {
    EXPECT_EQ(draft.parents[i], static_cast<std::int32_t>(i) - 1);
  }
  return draft.tokens;
}

EngineConfig drafting_all() {
  EngineConfig config;
  config.lookahead = 16;
  config.token_cost = 0.0;
  return config;
}

template <typename Thrown, typename Body>
void expect_error(const std::string& part, Body body) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown; expected: " << part;
  } catch (const Thrown& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// Instead of a tree's budget: chains by which the last request is to end early.
constexpr std::int32_t kLastOfChains = -1;

// Text over few tokens, which occurs everywhere, and what speaks for it.
class EngineDrafts : public ::testing::TestWithParam<std::int32_t> {
 protected:
  EngineDrafts() {
    if (GetParam() > 0) config_.drafter = CalibratedConfig{GetParam()};
    if (GetParam() == kLastOfChains) {
      config_.drafter = CalibratedConfig{std::nullopt, nullptr, Objective::kLast};
    }
    config_.lookahead = 6;
  }

  // Engines that are to draft the same need one each, as requests share what they write.
  static std::shared_ptr<Datastore> make_store() {
    auto store = Datastore::live(kStoreBytes);
    for (std::uint32_t seed = 0; seed < 5; ++seed) {
      testing::add_text(*store, testing::random_text(60, 4, seed + 90));
    }
    return store;
  }

  // The text of this seed's row is so long that a batch asks for its memory ahead.
  static constexpr std::uint32_t kFarSeed = 26;
  static RequestId add_row(Engine& engine, std::uint32_t seed) {
    const std::size_t size = seed < kFarSeed ? std::size_t{seed} * 10 : kFar;
    return add(engine, testing::random_text(size, 4, seed),
               testing::random_text(std::size_t{seed} % 3 * 20, 4, seed));
  }

  EngineConfig config_;
};

INSTANTIATE_TEST_SUITE_P(ChainsAndTrees, EngineDrafts, ::testing::Values(0, 1, 24, kLastOfChains));

// The same drafts as of whole guesses, cut afterwards.
TEST_P(EngineDrafts, NoMoreIsGuessedThanCanPay) {
  Engine engine(config_, {make_store()});
  std::mt19937 random(5);
  std::vector<RequestId> ids;
  for (std::uint32_t seed = 0; seed < 12; ++seed) ids.push_back(add_row(engine, seed));
  ids.push_back(add_row(engine, kFarSeed));
  std::int64_t kept = 0;
  std::int64_t cut = 0;
  std::int64_t guessed = 0;
  for (int step = 0; step < 300; ++step) {
    std::shuffle(ids.begin(), ids.end(), random);
    const std::int64_t rows = 1 + static_cast<std::int64_t>(random() % ids.size());
    std::vector<std::int32_t> limits;
    for (std::int64_t row = 0; row < rows; ++row) {
      limits.push_back(static_cast<std::int32_t>(random() % 30));
    }
    // A constant cost, a rising curve, or one of ups and downs.
    std::vector<double> times{1.0};
    const auto kind = random() % 3;
    while (times.size() < 60) {
      const double more = static_cast<double>(random() % 100) / 1000.0;
      times.push_back(kind == 1 ? times.back() + more : 1.0 + 20 * more);
    }
    const StepCost cost = kind == 0 ? StepCost::constant(static_cast<double>(random() % 60) / 200.0)
                                    : StepCost::curve(times.data(), 60);
    const bool padded = random() % 3 == 0;
    const DraftBatch whole =
        engine.propose_batch(ids.data(), rows, {StepCost::constant(0.0), limits.data(), false});
    std::vector<float> weights =
        EngineTestAccess::weights(engine, {ids.begin(), ids.begin() + rows});
    weights.resize(static_cast<std::size_t>(rows), 1.0f);
    double rate = 0.0;
    for (std::size_t row = 0; row < weights.size(); ++row) {
      rate += double{weights[row]} * EngineTestAccess::request(engine, ids[row]).rate.value();
    }
    const std::int64_t stride = engine.most_drafted();
    rate = cost.price_of_time(rows, rate, stride);
    std::vector<float> probabilities(static_cast<std::size_t>(rows * stride));
    std::vector<std::int32_t> counts;
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto r = static_cast<std::size_t>(row);
      counts.push_back(whole.offsets[r + 1] - whole.offsets[r]);
      const float* first = whole.columns.probabilities + whole.offsets[r];
      std::transform(first, first + counts.back(),
                     probabilities.begin() + static_cast<std::ptrdiff_t>(row * stride),
                     [&](float each) { return each * weights[r]; });
    }
    keep_what_pays(cost, rate, padded, probabilities.data(), rows, stride, counts.data());

    if (rows == 1) {
      ASSERT_EQ(propose_draft(engine, ids[0], {cost, limits.data(), false}).tokens.size(),
                static_cast<std::size_t>(counts[0]));
    }
    const DraftBatch batch = engine.propose_batch(ids.data(), rows, {cost, limits.data(), padded});
    Tokens emitted;
    std::vector<std::int64_t> offsets{0};
    for (std::size_t row = 0; row < counts.size(); ++row) {
      const std::int32_t size = batch.offsets[row + 1] - batch.offsets[row];
      ASSERT_EQ(size, counts[row]) << kind << padded;
      const Draft draft(batch.columns.from(batch.offsets[row]), size);
      const Draft expected(whole.columns.from(whole.offsets[row]), size);
      ASSERT_EQ(draft.tokens, expected.tokens);
      ASSERT_EQ(draft.parents, expected.parents);
      ASSERT_EQ(draft.probabilities, expected.probabilities);
      const auto& proposal = EngineTestAccess::request(engine, ids[row]).proposal;
      guessed += proposal ? proposal->guessed : 0;
      kept += size;
      cut += whole.offsets[row + 1] - whole.offsets[row] - size;
      const Tokens path = draft.path_to(size - 1);
      if (random() % 2 == 0) emitted.insert(emitted.end(), path.begin(), path.end());
      emitted.push_back(static_cast<Token>(random() % 4));
      offsets.push_back(static_cast<std::int64_t>(emitted.size()));
    }
    ASSERT_TRUE(engine.observe_batch(ids.data(), rows, emitted.data(), offsets.data()).empty());
  }
  EXPECT_GT(kept, 500);
  EXPECT_GT(cut, 100);
  EXPECT_LT(guessed, kept + cut);
}

// The draft is the one that would be made without a vocabulary, but for its foreign tokens and all
// that follow them.
TEST_P(EngineDrafts, NothingThatTheTargetDoesNotKnow) {
  config_.token_cost = 0.0;
  Engine free(config_, {make_store()});
  config_.vocabulary = 3;  // of four tokens
  Engine engine(config_, {make_store()});
  std::int64_t foreign = 0;
  std::int64_t drafted = 0;
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    const Tokens prompt = testing::random_text(std::size_t{seed} * 10, 4, seed);
    const Tokens prediction = testing::random_text(std::size_t{seed} % 3 * 20, 3, seed);
    const RequestId id = add(free, prompt, prediction);
    ASSERT_EQ(add(engine, prompt, prediction), id);
    for (std::uint32_t step = 0; step < 20; ++step) {
      const Draft all = propose_draft(free, id);
      Draft expected;
      std::vector<std::int32_t> indices;
      for (std::size_t i = 0; i < all.tokens.size(); ++i) {
        const Tokens path = all.path_to(static_cast<std::int32_t>(i));
        const bool known =
            std::all_of(path.begin(), path.end(), [](Token token) { return token < 3; });
        indices.push_back(known ? static_cast<std::int32_t>(expected.tokens.size()) : -1);
        foreign += all.tokens[i] == 3 && is_stored(all.sources[i]) ? 1 : 0;
        if (!known) continue;
        const std::int32_t parent = all.parents[i];
        expected.tokens.push_back(all.tokens[i]);
        expected.parents.push_back(parent < 0 ? -1 : indices[static_cast<std::size_t>(parent)]);
        expected.probabilities.push_back(all.probabilities[i]);
        expected.sources.push_back(all.sources[i]);
      }
      Draft draft = propose_draft(engine, id);
      if (step % 2 == 1) {
        const DraftBatch batch = engine.propose_batch(&id, 1, {});
        draft = Draft(batch.columns, batch.offsets[1]);
        for (std::size_t i = 0; i < all.tokens.size(); ++i) {
          foreign += all.tokens[i] == 3 && is_stored(all.sources[i]) ? 1 : 0;
        }
      }
      ASSERT_EQ(draft.tokens, expected.tokens);
      ASSERT_EQ(draft.parents, expected.parents);
      ASSERT_EQ(draft.probabilities, expected.probabilities);
      ASSERT_EQ(draft.sources, expected.sources);
      ASSERT_EQ(engine.num_foreign(), foreign);
      drafted += static_cast<std::int64_t>(draft.tokens.size());
      Tokens emitted = draft.path_to(static_cast<std::int32_t>(draft.tokens.size()) / 2 - 1);
      emitted.push_back(static_cast<Token>(step % 3));
      observe(free, id, emitted);
      observe(engine, id, emitted);
    }
  }
  EXPECT_GT(drafted, 100);
  EXPECT_GT(foreign, 5);
  EXPECT_EQ(free.num_foreign(), 0);
}

// The time that it may take yet; one in the mean.
TEST(Engine, WeighsARowMoreTheLongerItMayTakeYet) {
  EngineConfig config;
  config.drafter = CalibratedConfig{std::nullopt, nullptr, Objective::kLast};
  Engine engine(config);
  const Tokens text(100, 7);
  for (const auto& [prompt, length] : {std::pair{1, 16}, std::pair{2, 64}}) {
    const RequestId ended = add(engine, {prompt});
    engine.observe(ended, text.data(), length);
    engine.finish(ended);
  }
  const RequestId cancelled = add(engine, {1});
  engine.observe(cancelled, text.data(), 100);
  engine.cancel(cancelled);
  const std::vector<RequestId> ids{add(engine, {1}), add(engine, {2})};
  const std::vector<float> weights = EngineTestAccess::weights(engine, ids);
  // Outputs were 40 long in the mean: 16 and 40, and 64 and 40.
  EXPECT_NEAR(weights[0], 2.0 * 28.0 / (28.0 + 52.0), 1e-6);
  EXPECT_NEAR(weights[1], 2.0 * 52.0 / (28.0 + 52.0), 1e-6);
  EXPECT_TRUE(EngineTestAccess::weights(Engine(EngineConfig()), {}).empty());
}

// Memory made as numbers of one type may not be used as another's.
TEST(DraftColumns, LieInBytesAlone) {
  using In = decltype(&DraftColumns::in);
  EXPECT_TRUE((std::is_invocable_v<In, std::byte*, std::int64_t>));
  EXPECT_FALSE((std::is_invocable_v<In, std::int32_t*, std::int64_t>));
  EXPECT_FALSE((std::is_invocable_v<In, float*, std::int64_t>));
}

TEST(Engine, RefusesWeightsWhoseSumIsNoNumber) {
  Engine engine(EngineConfig{});
  const auto weights_now = [&] {
    const auto calibration = engine.calibration();
    return calibration ? calibration->weights : std::vector<float>{};
  };
  const std::vector<float> before = weights_now();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float wrong : {2e38f, -2e38f, kInfinity, std::nanf(""), 1000.1f}) {
    std::vector<float> weights = before;
    weights.back() = wrong;
    expect_error<InvalidValueError>("weights must be from -1000 to 1000, got",
                                    [&] { engine.set_calibration({weights, {}, {}, {}}); });
  }
  expect_error<InvalidValueError>("weights, got 3",
                                  [&] { engine.set_calibration({{1, 2, 3}, {}, {}, {}}); });
  expect_error<InvalidValueError>("numbers of offers, got 1",
                                  [&] { engine.set_calibration({before, {}, {{"a", {1}}}, {}}); });
  const auto learned = engine.calibration();
  ASSERT_TRUE(learned.has_value());
  std::vector<float> steps(learned->plain_steps.size(), -1.0f);
  expect_error<InvalidValueError>("numbers of steps must be from 0", [&] {
    engine.set_calibration({std::vector<float>(before.size()), {}, {}, steps});
  });
  EXPECT_EQ(weights_now(), before);
  EngineConfig config;
  config.drafter = NgramConfig{};
  Engine other(config);
  EXPECT_FALSE(other.calibration().has_value());
  expect_error<InvalidValueError>("only the default drafter takes a calibration",
                                  [&] { other.set_calibration({before, {}, {}, {}}); });
}

// Wherever memory ends, in the text's index, in the links or in the prediction's:
// what was taken is whole, and with memory again the request goes on as any other.
TEST(Engine, RefusesWhatOnlyCppCanPass) {
  const Stores stores{nullptr};
  const std::string part = "datastores must be Datastores, got None";
  expect_error<InvalidValueError>(part, [&] { Engine({}, stores); });
  Engine engine({});
  const Token prompt = 1;
  expect_error<InvalidValueError>(part,
                                  [&] { engine.add_request({{&prompt, 1}, {}, {}, stores}); });
  EXPECT_EQ(engine.num_requests(), 0);
  expect_error<InvalidValueError>("at least 1 time, got 0", [] { StepCost::curve(nullptr, 0); });
}

TEST(Engine, StaysWholeWhereverMemoryEnds) {
  const Tokens prompt = testing::random_text(40, 30, 1);
  const Tokens prediction = testing::random_text(50, 30, 2);
  Tokens output = testing::random_text(160, 200, 3);
  std::copy(prediction.begin() + 10, prediction.begin() + 40, output.begin() + 60);
  int refused_requests = 0;
  int refused_tokens = 0;
  bool refused = true;
  for (std::int64_t room = 0; refused; room += 97) {
    // Empty requests hold memory that the other one is short of until they are finished.
    constexpr std::int64_t kHeld = 200'000;
    EngineConfig config = drafting_all();
    config.max_bytes = kHeld + room;
    Engine engine(config);
    std::vector<RequestId> holding{add(engine, {})};
    const std::int64_t each = engine.bytes();
    while (engine.bytes() + each <= kHeld) holding.push_back(add(engine, {}));
    RequestId id = -1;
    try {
      id = add(engine, prompt, prediction);
    } catch (const MemoryLimitError&) {
      ++refused_requests;
      ASSERT_EQ(engine.bytes(), static_cast<std::int64_t>(holding.size()) * each);
      continue;
    }
    Engine whole(drafting_all());
    const RequestId same = add(whole, prompt, prediction);
    std::size_t taken = 0;
    refused = false;
    while (taken < output.size()) {
      const Tokens step(output.begin() + static_cast<std::ptrdiff_t>(taken),
                        output.begin() + static_cast<std::ptrdiff_t>(
                                             std::min(taken + 1 + taken % 7, output.size())));
      const auto before = static_cast<std::size_t>(engine.num_tokens(id));
      ASSERT_EQ(before, prompt.size() + taken);
      std::size_t fitted = step.size();
      try {
        observe(engine, id, step);
      } catch (const MemoryLimitError& error) {
        fitted = static_cast<std::size_t>(engine.num_tokens(id)) - before;
        ASSERT_LE(fitted, step.size());
        const std::string expected = "; " + std::to_string(fitted) + " of " +
                                     std::to_string(step.size()) + " observed tokens were taken";
        EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
        ASSERT_LE(engine.bytes(), config.max_bytes);
        propose_draft(engine, id);
        observe(engine, id, {});
        for (const RequestId other : std::exchange(holding, {})) engine.finish(other);
        refused = true;
        ++refused_tokens;
      }
      observe(whole, same,
              Tokens(step.begin(), step.begin() + static_cast<std::ptrdiff_t>(fitted)));
      taken += fitted;
    }
    // A long draft takes more memory than a request begins with.
    for (const RequestId other : std::exchange(holding, {})) engine.finish(other);
    const Draft draft = propose_draft(engine, id);
    const Draft expected = propose_draft(whole, same);
    EXPECT_EQ(draft.tokens, expected.tokens);
    EXPECT_EQ(draft.probabilities, expected.probabilities);
    EXPECT_EQ(engine.num_tokens(id), whole.num_tokens(same));
    EXPECT_EQ(engine.counts(id).emitted, whole.counts(same).emitted);
    EXPECT_EQ(engine.counts(id).steps, whole.counts(same).steps);
  }
  EXPECT_GT(refused_requests, 5);
  EXPECT_GT(refused_tokens, 20);
}

TEST(Engine, GivesOutNoIdTwiceHoweverOftenASlotIsUsed) {
  Engine engine({});
  constexpr std::int64_t kLast = (std::int64_t{1} << 31) - 1;
  const RequestId before = EngineTestAccess::with_generation(engine, add(engine, {1}), kLast - 1);
  engine.finish(before);
  const RequestId last = add(engine, {1, 2});
  EXPECT_GT(last, before);
  EXPECT_EQ(last >> 32, kLast);
  EXPECT_EQ(engine.num_tokens(last), 2);
  engine.finish(last);
  std::set<RequestId> ids{before, last};
  for (int i = 0; i < 100; ++i) {
    const RequestId id = add(engine, {1});
    EXPECT_GE(id, 0);
    EXPECT_TRUE(ids.insert(id).second);
    engine.cancel(id);
  }
  expect_error<UnknownRequestError>("unknown request", [&] { engine.finish(last); });
}

TEST(Engine, ObservesTheRowsWithRoomWhenOthersHaveNone) {
  EngineConfig config;
  config.max_bytes = 150'000;
  Engine engine(config);
  const std::vector<RequestId> ids{add(engine, {1}), add(engine, {2})};
  Tokens emitted = testing::random_text(20'000, 1000, 1);
  emitted.push_back(3);
  const std::vector<std::int64_t> offsets{0, 20'000, 20'001};
  const std::vector<RowError> failed =
      engine.observe_batch(ids.data(), 2, emitted.data(), offsets.data());
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].row, 0);
  expect_error<MemoryLimitError>("request " + std::to_string(ids[0]),
                                 [&] { std::rethrow_exception(failed[0].error); });
  EXPECT_EQ(engine.num_tokens(ids[1]), 2);
}

TEST(Engine, ARequestWithTwoRowsKeepsItsLimit) {
  EngineConfig config = drafting_all();
  config.max_request_tokens = 20;
  Engine engine(config);
  const RequestId id = add(engine, testing::repeated(15));
  const std::vector<RequestId> ids{id, id, id};
  const std::vector<std::int32_t> limits{4, 0, 2};
  ProposeOptions options;
  options.limits = limits.data();
  const DraftBatch batch = engine.propose_batch(ids.data(), 3, options);
  EXPECT_EQ(batch.offsets, (std::vector<std::int32_t>{0, 4, 4, 6}));
  const Tokens emitted = testing::random_text(9, 5, 1);
  const std::vector<std::int64_t> offsets{0, 3, 6, 9};
  const std::vector<RowError> failed =
      engine.observe_batch(ids.data(), 3, emitted.data(), offsets.data());
  ASSERT_EQ(failed.size(), 2U);
  expect_error<RequestLimitError>("it holds 18 tokens and 3 more were observed",
                                  [&] { std::rethrow_exception(failed[0].error); });
  EXPECT_EQ(engine.num_tokens(id), 18);
  EXPECT_EQ(engine.counts(id).drafted, 2);  // the last row's
}

// However a batch's requests are locked together.
TEST(Engine, TakesTheRowsOfARequestInTheirOrder) {
  Engine engine({});
  std::vector<RequestId> ids;
  Tokens emitted;
  std::vector<std::int64_t> offsets{0};
  constexpr std::int64_t kRows = 50;
  const std::vector<RequestId> requests{add(engine, {1}), add(engine, testing::repeated(kFar)),
                                        add(engine, {})};
  std::vector<Tokens> expected(requests.size());
  for (std::int64_t row = 0; row < kRows; ++row) {
    const auto which = static_cast<std::size_t>(row * row % 7 % 3);
    ids.push_back(requests[which]);
    expected[which].push_back(static_cast<Token>(row));
    emitted.push_back(static_cast<Token>(row));
    offsets.push_back(row + 1);
  }
  ASSERT_TRUE(engine.observe_batch(ids.data(), kRows, emitted.data(), offsets.data()).empty());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Request& request = EngineTestAccess::request(engine, requests[i]);
    const Token* end = request.text() + request.size();
    EXPECT_EQ(Tokens(end - expected[i].size(), end), expected[i]) << i;
  }
}

TEST(Engine, RefusesTokensOfLongTextsInABatch) {
  Engine engine({});
  // Different tokens: the first state's edges are hashed.
  Tokens text(kFar);
  std::iota(text.begin(), text.end(), 0);
  const std::vector<RequestId> ids{add(engine, text), add(engine, text)};
  const Tokens emitted{1, -1};
  const std::vector<std::int64_t> offsets{0, 1, 2};
  const std::vector<RowError> failed =
      engine.observe_batch(ids.data(), 2, emitted.data(), offsets.data());
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].row, 1);
  EXPECT_EQ(engine.num_tokens(ids[0]), static_cast<std::int64_t>(kFar) + 1);
  EXPECT_EQ(engine.num_tokens(ids[1]), static_cast<std::int64_t>(kFar));
}

TEST(Engine, CountsOfADraftWhatItTook) {
  // As little memory as ends within the draft's tokens.
  for (std::int64_t bytes = 4000; bytes < 200'000; bytes += 100) {
    EngineConfig config = drafting_all();
    config.max_bytes = bytes;
    Engine engine(config);
    Tokens prediction(60);
    std::iota(prediction.begin(), prediction.end(), 100);
    RequestId id = -1;
    try {
      id = add(engine, {1}, prediction);
    } catch (const MemoryLimitError&) {
      continue;
    }
    for (std::size_t taken = 0; taken < prediction.size(); taken += 15) {
      const DraftCounts before = engine.counts(id);
      ASSERT_EQ(propose(engine, id).size(), taken < 45 ? 16U : 15U);
      const auto begin = prediction.begin() + static_cast<std::ptrdiff_t>(taken);
      const std::int64_t held = engine.num_tokens(id);
      try {
        observe(engine, id, Tokens(begin, begin + 15));
      } catch (const MemoryLimitError&) {
        const std::int64_t fitted = engine.num_tokens(id) - held;
        const DraftCounts after = engine.counts(id);
        EXPECT_EQ(after.emitted - before.emitted, fitted);
        EXPECT_EQ(after.accepted - before.accepted, fitted);
        EXPECT_EQ(after.accepted_prediction - before.accepted_prediction, fitted);
        EXPECT_EQ(after.steps - before.steps, fitted > 0 ? 1 : 0);
        if (fitted > 0 && fitted < 15) return;
        break;
      }
    }
  }
  ADD_FAILURE() << "memory never ended within a draft";
}

// A resumed request's text, or a chunk of a prompt, comes without a step of the target.
TEST(Engine, LaterRequestsDraftAsIfNoTextHadComeAtOnce) {
  Engine engine({});
  Engine undisturbed({});
  const RequestId resumed = add(engine, {1, 2});
  observe(engine, resumed, testing::random_text(3000, 500, 1));
  engine.finish(resumed);
  std::size_t drafted = 0;
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const Tokens prompt = testing::random_text(300, 5, seed);
    const RequestId id = add(engine, prompt);
    const RequestId same = add(undisturbed, prompt);
    for (Token step = 0; step < 20; ++step) {
      Tokens draft = propose(engine, id);
      ASSERT_EQ(draft, propose(undisturbed, same));
      drafted += draft.size();
      draft.resize(draft.size() / 2);
      draft.push_back(step % 5);
      observe(engine, id, draft);
      observe(undisturbed, same, draft);
    }
    engine.finish(id);
    undisturbed.finish(same);
  }
  EXPECT_GT(drafted, 100U);
}

TEST(Engine, DraftsOnAfterTextThatArrivedAtOnce) {
  Engine engine({});
  const RequestId id = add(engine, testing::repeated(50));
  const std::size_t before = propose(engine, id).size();
  EXPECT_GT(before, 10U);
  observe(engine, id, {});
  observe(engine, id, testing::repeated(3000));
  EXPECT_EQ(propose(engine, id).size(), before);
  observe(engine, id, testing::repeated(3000));  // after a proposal: more than a step can emit
  EXPECT_FALSE(propose(engine, id).empty());
}

TEST(Engine, ServesThousandsOfRequestsAtOnce) {
  Engine engine({});
  std::vector<RequestId> ids;
  for (int i = 0; i < 5000; ++i) ids.push_back(add(engine, {i, i + 1, i}));
  for (int i = 0; i < 5000; ++i) {
    EXPECT_EQ(engine.num_tokens(ids[static_cast<std::size_t>(i)]), 3);
  }
  for (int i = 0; i < 5000; i += 2) engine.finish(ids[static_cast<std::size_t>(i)]);
  EXPECT_EQ(engine.num_requests(), 2500);
  for (int i = 1; i < 5000; i += 2) engine.finish(ids[static_cast<std::size_t>(i)]);
  EXPECT_EQ(engine.bytes(), 0);
}

}  // namespace
}  // namespace fastdraft

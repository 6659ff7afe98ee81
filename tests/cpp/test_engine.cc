#include "fastdraft/engine.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fastdraft/error.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Text;

RequestId add(Engine& engine, const Text& prompt, const Text& prediction = {}) {
  return engine.add_request(prompt.data(), static_cast<std::int64_t>(prompt.size()),
                            prediction.data(), static_cast<std::int64_t>(prediction.size()));
}

void observe(Engine& engine, RequestId id, const Text& emitted) {
  engine.observe(id, emitted.data(), static_cast<std::int64_t>(emitted.size()));
}

Text propose(Engine& engine, RequestId id, const ProposeOptions& options = {}) {
  const std::int32_t capacity = engine.config().lookahead;
  std::vector<std::int32_t> memory(static_cast<std::size_t>(DraftColumns::words(capacity)));
  const DraftColumns draft = DraftColumns::in(memory.data(), capacity);
  const std::int32_t size = engine.propose(id, options, draft);
  for (std::int32_t i = 0; i < size; ++i) EXPECT_EQ(draft.parents[i], i - 1);
  return {draft.token_ids, draft.token_ids + size};
}

EngineConfig drafting_all() {
  EngineConfig config;
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

TEST(Engine, CopiesOnPeriodically) {
  Engine engine(drafting_all());
  const RequestId id = add(engine, {1, 2, 3, 1, 2});
  const ProposeOptions options;
  const Text draft = propose(engine, id, options);
  ASSERT_EQ(draft.size(), 16U);
  for (std::size_t i = 0; i < draft.size(); ++i) EXPECT_EQ(draft[i], Token(1 + (i + 2) % 3));
}

TEST(Engine, CountsWhatTheTargetMadeOfItsDrafts) {
  EngineConfig config = drafting_all();
  config.lookahead = 5;
  Engine engine(config);
  const RequestId id = add(engine, {50}, {1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(propose(engine, id), (Text{1, 2, 3, 4, 5}));
  observe(engine, id, {1, 2, 3, 9});
  DraftCounts counts = engine.counts(id);
  EXPECT_EQ(counts.steps, 1);
  EXPECT_EQ(counts.emitted, 4);
  EXPECT_EQ(counts.drafted, 5);
  EXPECT_EQ(counts.accepted, 3);
  EXPECT_EQ(counts.accepted_prediction, 3);
  EXPECT_EQ(counts.rejected_prediction, 2);
  EXPECT_EQ(propose(engine, id), (Text{5, 6, 7, 8}));  // 9 replaced 4
  observe(engine, id, {5, 6, 7, 8, 30});
  observe(engine, id, {31});  // without a proposal: a step without a draft
  observe(engine, id, {});    // a step given up
  counts = engine.finish(id);
  EXPECT_EQ(counts.steps, 3);
  EXPECT_EQ(counts.drafts, 2);
  EXPECT_EQ(counts.emitted, 10);
  EXPECT_EQ(counts.accepted, 7);
  EXPECT_EQ(engine.num_requests(), 0);
  EXPECT_EQ(engine.bytes(), 0);
}

TEST(Engine, StopsDraftingWhatTheTargetKeepsRefusing) {
  Engine engine({});
  const RequestId id = add(engine, testing::repeated(50));
  ASSERT_FALSE(propose(engine, id).empty());
  // The text repeats and repeats, but the target never does.
  Token fresh = 1000;
  for (int i = 0; i < 200; ++i) {
    propose(engine, id);
    observe(engine, id, {++fresh, 7, 7, 7});
  }
  EXPECT_TRUE(propose(engine, id).empty());
}

TEST(Engine, ObservesTheLimitsOfACall) {
  Engine engine(drafting_all());
  const RequestId id = add(engine, testing::repeated(50));
  const std::int32_t limit = 3;
  ProposeOptions options;
  options.limits = &limit;
  EXPECT_EQ(propose(engine, id, options).size(), 3U);
  options.cost = StepCost::constant(5.0);
  EXPECT_TRUE(propose(engine, id, options).empty());
}

TEST(Engine, DraftsABatchAsItDraftsItsRows) {
  EngineConfig config;
  config.token_cost = 0.05;
  Engine singly(config);
  Engine together(config);
  std::vector<RequestId> ids;
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    const Text prompt = testing::random_text(std::size_t{seed} * 10, 4, seed);
    const Text prediction = testing::random_text(std::size_t{seed} % 3 * 20, 4, seed);
    ids.push_back(add(singly, prompt, prediction));
    ASSERT_EQ(add(together, prompt, prediction), ids.back());
  }
  for (int step = 0; step < 20; ++step) {
    // At one rate for all, what pays in the batch is what pays alone.
    const DraftBatch batch = together.propose_batch(ids.data(), 30, {});
    ASSERT_EQ(batch.offsets.size(), 31U);
    Text emitted;
    std::vector<std::int64_t> offsets{0};
    for (std::size_t row = 0; row < ids.size(); ++row) {
      const DraftColumns columns = batch.columns.from(batch.offsets[row]);
      const Text draft(columns.token_ids,
                       columns.token_ids + (batch.offsets[row + 1] - batch.offsets[row]));
      const Text alone = propose(singly, ids[row], {StepCost::constant(0.0), nullptr, false});
      ASSERT_LE(draft.size(), alone.size());
      ASSERT_TRUE(std::equal(draft.begin(), draft.end(), alone.begin()));
      const Text next = testing::random_text(1 + row % 3, 4, static_cast<std::uint32_t>(step));
      emitted.insert(emitted.end(), next.begin(), next.end());
      offsets.push_back(static_cast<std::int64_t>(emitted.size()));
      observe(singly, ids[row], next);
    }
    together.observe_batch(ids.data(), 30, emitted.data(), offsets.data());
  }
  for (const RequestId id : ids) {
    EXPECT_EQ(together.counts(id).emitted, singly.counts(id).emitted);
    EXPECT_EQ(together.num_tokens(id), singly.num_tokens(id));
  }
}

TEST(Engine, PadsWhereTheForwardDoes) {
  EngineConfig config;
  config.max_ngram = 0;
  Engine engine(config);
  std::vector<RequestId> ids{add(engine, testing::repeated(40)), add(engine, {1, 2, 3})};
  ProposeOptions options;
  options.cost = StepCost::constant(0.1);
  const DraftBatch ragged = engine.propose_batch(ids.data(), 2, options);
  options.padded = true;  // the second row pays for the first row's draft
  const DraftBatch padded = engine.propose_batch(ids.data(), 2, options);
  EXPECT_LT(padded.offsets.back(), ragged.offsets.back());
}

TEST(Engine, TakesAnEmptyBatch) {
  Engine engine({});
  EXPECT_EQ(engine.propose_batch(nullptr, 0, {}).offsets, std::vector<std::int32_t>{0});
  const std::int64_t offset = 0;
  engine.observe_batch(nullptr, 0, nullptr, &offset);
}

TEST(Engine, NamesUnknownRequests) {
  Engine engine({});
  const RequestId id = add(engine, {1});
  engine.finish(id);
  for (const RequestId unknown : {id, RequestId{-1}, RequestId{5}, RequestId{1} << 60,
                                  std::numeric_limits<RequestId>::max()}) {
    const std::string text = "unknown request " + std::to_string(unknown);
    expect_error<UnknownRequestError>(text, [&] { propose(engine, unknown); });
    expect_error<UnknownRequestError>(text, [&] { observe(engine, unknown, {1}); });
    expect_error<UnknownRequestError>(text, [&] { engine.finish(unknown); });
    expect_error<UnknownRequestError>(text, [&] { engine.propose_batch(&unknown, 1, {}); });
  }
  const RequestId next = add(engine, {1});
  EXPECT_NE(next, id);  // the place is used again, the id is not
}

TEST(Engine, RefusesNegativeTokensBeforeAnyChange) {
  Engine engine({});
  expect_error<InvalidValueError>("prompt_ids must be 0 or greater, got -7 at index 1",
                                  [&] { add(engine, {1, -7}); });
  expect_error<InvalidValueError>("prediction must be 0 or greater, got -1 at index 0",
                                  [&] { add(engine, {1}, {-1}); });
  EXPECT_EQ(engine.num_requests(), 0);
  const RequestId id = add(engine, {1, 2});
  expect_error<InvalidValueError>("emitted_ids", [&] { observe(engine, id, {5, -2}); });
  EXPECT_EQ(engine.num_tokens(id), 2);
  EXPECT_EQ(engine.counts(id).steps, 0);
}

TEST(Engine, HoldsToItsLimitOfTokens) {
  EngineConfig config;
  config.max_request_tokens = 5;
  Engine engine(config);
  expect_error<RequestLimitError>("prompt_ids has 6 tokens", [&] { add(engine, Text(6, 1)); });
  expect_error<RequestLimitError>("prediction has 7 tokens", [&] { add(engine, {1}, Text(7, 1)); });
  const RequestId id = add(engine, {1, 2, 3});
  expect_error<RequestLimitError>("it holds 3 tokens and 3 more were observed",
                                  [&] { observe(engine, id, {1, 1, 1}); });
  EXPECT_EQ(engine.num_tokens(id), 3);
  observe(engine, id, {1, 1});
  EXPECT_EQ(engine.num_tokens(id), 5);
  EXPECT_FALSE(propose(engine, id).empty());
}

TEST(Engine, HoldsToItsLimitOfBytes) {
  EngineConfig config;
  config.max_bytes = 200'000;
  Engine engine(config);
  const RequestId id = add(engine, testing::random_text(1000, 50, 1));
  expect_error<MemoryLimitError>("max_bytes is 200000",
                                 [&] { add(engine, testing::random_text(5000, 50, 2)); });
  EXPECT_EQ(engine.num_requests(), 1);
  const RequestId other = add(engine, testing::random_text(500, 50, 3));
  const Text text = testing::random_text(4000, 50, 4);
  expect_error<MemoryLimitError>("observed tokens were taken", [&] { observe(engine, id, text); });
  EXPECT_LE(engine.bytes(), config.max_bytes);
  const std::int64_t held = engine.num_tokens(id);
  EXPECT_GT(held, 1000);
  engine.finish(other);
  // There is room again: the request goes on where it stopped.
  observe(engine, id, {text[static_cast<std::size_t>(held - 1000)]});
  EXPECT_EQ(engine.num_tokens(id), held + 1);
  engine.finish(id);
  EXPECT_EQ(engine.bytes(), 0);
}

TEST(Engine, ObservesTheRowsWithRoomWhenOthersHaveNone) {
  EngineConfig config;
  config.max_bytes = 150'000;
  Engine engine(config);
  const std::vector<RequestId> ids{add(engine, {1}), add(engine, {2})};
  Text emitted = testing::random_text(20'000, 1000, 1);
  emitted.push_back(3);
  const std::vector<std::int64_t> offsets{0, 20'000, 20'001};
  expect_error<MemoryLimitError>("request " + std::to_string(ids[0]), [&] {
    engine.observe_batch(ids.data(), 2, emitted.data(), offsets.data());
  });
  EXPECT_EQ(engine.num_tokens(ids[1]), 2);
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

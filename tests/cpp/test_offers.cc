// Offers through the C++ interface. tests/core/test_offers.py compares drafts with an oracle.
#include "fastdraft/offers.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "fastdraft/engine.h"
#include "fastdraft/error.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

RequestId begin(Engine& engine, const Tokens& prompt) {
  return engine.add_request(prompt.data(), static_cast<std::int64_t>(prompt.size()), nullptr, 0);
}

EngineConfig config(double token_cost) {
  EngineConfig config;
  config.token_cost = token_cost;
  config.vocabulary = 1000;
  return config;
}

TEST(Offers, FillWhatTheEngineDoesNotKnow) {
  Engine engine(config(0.02));
  const std::array<RequestId, 2> ids = {begin(engine, {1, 2, 3}), begin(engine, {4, 5, 6})};
  const Tokens tokens = {7, 8, 9};
  const std::vector<std::int64_t> offsets = {0, 2, 3};
  const std::vector<float> confidences = {0.95f, 0.9f, 0.01f};
  Offers offers;
  offers.kind = engine.offer_kind("eagle");
  offers.token_ids = tokens.data();
  offers.offsets = offsets.data();
  offers.confidences = confidences.data();
  ProposeOptions options;
  options.offers = &offers;
  options.num_offers = 1;
  const DraftBatch drafts = engine.propose_batch(ids.data(), 2, options);
  ASSERT_GE(drafts.offsets[1], 2);
  EXPECT_EQ(drafts.columns.token_ids[0], 7);
  EXPECT_EQ(drafts.columns.token_ids[1], 8);
  EXPECT_EQ(drafts.columns.sources[0], source_of(offers.kind));
  EXPECT_GT(drafts.columns.probabilities[0], 0.8f);
  const Tokens emitted = {7, 8, 1, 6};
  const std::vector<std::int64_t> at = {0, 3, 4};
  EXPECT_TRUE(engine.observe_batch(ids.data(), 2, emitted.data(), at.data()).empty());
  EXPECT_EQ(engine.counts(ids[0]).accepted, 2);
}

TEST(Offers, WrongOnesAreLeftOutOfABatchAndRefusedAlone) {
  Engine engine(config(0.0));
  const RequestId id = begin(engine, {1, 2, 3});
  const Tokens tokens = {7, 8};
  const std::vector<std::int64_t> offsets = {0, 2};
  Offers offers;
  offers.kind = engine.offer_kind("eagle");
  offers.token_ids = tokens.data();
  offers.offsets = offsets.data();
  ProposeOptions options;
  options.offers = &offers;
  options.num_offers = 1;
  const auto refused = [&] {
    const std::int64_t before = engine.num_refused_offers();
    const DraftBatch drafts = engine.propose_batch(&id, 1, options);
    EXPECT_EQ(drafts.offsets.back(), 0);
    EXPECT_EQ(engine.num_refused_offers(), before + 1);
    const DraftBatch room = engine.propose_batch(&id, 1, {});
    EXPECT_THROW(engine.propose(id, options, room.columns), InvalidValueError);
  };
  const std::vector<std::int32_t> parents = {0, -1};
  offers.parents = parents.data();
  refused();
  offers.parents = nullptr;
  const std::vector<float> confidences = {0.5f, std::numeric_limits<float>::quiet_NaN()};
  offers.confidences = confidences.data();
  refused();
  offers.confidences = nullptr;
  const Tokens foreign = {7, 1000};
  offers.token_ids = foreign.data();
  refused();
  offers.kind = 5;
  EXPECT_THROW(engine.propose_batch(&id, 1, options), InvalidValueError);
}

TEST(Offers, ThreadsNameKindsAndOfferAtOnce) {
  Engine engine(config(0.01));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&engine, t] {
      const RequestId id = begin(engine, {1, 2, 3, t});
      const Tokens tokens = {1, 2, 3};
      const std::vector<std::int64_t> offsets = {0, 3};
      for (int step = 0; step < 200; ++step) {
        Offers offers;
        offers.kind = engine.offer_kind("kind " + std::to_string((t + step) % 8));
        offers.token_ids = tokens.data();
        offers.offsets = offsets.data();
        ProposeOptions options;
        options.offers = &offers;
        options.num_offers = 1;
        bool wanted = false;
        engine.wants(offers.kind, &id, 1, {}, 0.1, &wanted);
        (void)engine.propose_batch(&id, 1, options);
        const Token emitted = 1 + step % 3;
        engine.observe(id, &emitted, 1);
      }
      engine.finish(id);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(engine.offer_kinds().size(), 8U);
}

}  // namespace
}  // namespace fastdraft

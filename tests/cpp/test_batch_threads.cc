#include "engine/batch_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fastdraft/engine.h"
#include "stores.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

constexpr std::int64_t kSharedRows = 150;  // threads share as many

TEST(BatchThreads, WorkOnEachPartOnce) {
  BatchThreads threads(4);
  EXPECT_EQ(threads.count(), 4);
  for (std::int64_t parts = 0; parts < 200; ++parts) {
    std::vector<std::atomic<int>> times(static_cast<std::size_t>(parts));
    threads.run(parts, [&](std::int64_t part) { ++times[static_cast<std::size_t>(part)]; });
    EXPECT_TRUE(std::all_of(times.begin(), times.end(), [](const auto& n) { return n == 1; }));
  }
}

TEST(BatchThreads, ServeOneCallerAtATime) {
  BatchThreads threads(3);
  std::atomic<std::int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        threads.run(10, [&](std::int64_t part) {
          // A part that has parts itself works on these alone.
          threads.run(part, [&](std::int64_t) { ++sum; });
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 100 * 45);
}

TEST(BatchThreads, GiveTheErrorOfAPartAfterAllParts) {
  BatchThreads threads(4);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> ended{0};
    const auto work = [&](std::int64_t part) {
      ++ended;
      if (part % 7 == 3) throw std::runtime_error("a part");
    };
    EXPECT_THROW(threads.run(20, work), std::runtime_error);
    EXPECT_EQ(ended, 20);
  }
}

// One decoding batch after another. All that the engine gave, in order.
std::vector<double> decode(std::int32_t threads, std::optional<std::int32_t> tree_budget) {
  EngineConfig config;
  config.threads = threads;
  config.drafter = CalibratedConfig{tree_budget};
  config.token_cost = 0.001;
  const auto store = Datastore::live(1 << 22);
  for (std::uint32_t i = 0; i < 20; ++i) testing::add_text(*store, testing::random_text(300, 9, i));
  Engine engine(config, {store});
  std::vector<RequestId> ids;
  for (std::uint32_t row = 0; row < kSharedRows; ++row) {
    const Tokens prompt = testing::random_text(row % 20 == 0 ? 9000 : 60, 9, 1000 + row);
    ids.push_back(engine.add_request({{prompt.data(), static_cast<std::int64_t>(prompt.size())}}));
  }
  engine.finish(ids[7]);
  std::vector<std::int64_t> offsets(kSharedRows + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  std::vector<double> given;
  for (std::uint32_t step = 0; step < 12; ++step) {
    if (step == 6) ids[9] = ids[140];  // a request that has two rows from now on
    const DraftBatch batch = engine.propose_batch(ids.data(), kSharedRows, {});
    const auto& [tokens, parents, probabilities, sources] = batch.columns;
    const std::int32_t total = batch.offsets.back();
    given.insert(given.end(), batch.offsets.begin(), batch.offsets.end());
    given.insert(given.end(), tokens, tokens + total);
    given.insert(given.end(), parents, parents + total);
    given.insert(given.end(), probabilities, probabilities + total);
    Tokens next = testing::random_text(kSharedRows, 9, step);
    for (std::size_t row = 0; row < kSharedRows; ++row) {
      if (batch.offsets[row] < batch.offsets[row + 1]) next[row] = tokens[batch.offsets[row]];
    }
    const auto failed = engine.observe_batch(ids.data(), kSharedRows, next.data(), offsets.data());
    given.push_back(static_cast<double>(failed.size()));
  }
  return given;
}

TEST(BatchThreads, DraftWhatOneThreadDrafts) {
  EXPECT_EQ(decode(4, std::nullopt), decode(1, std::nullopt));
  EXPECT_EQ(decode(3, 16), decode(1, 16));
}

// Rows that fail are given in order, whoever met them.
TEST(BatchThreads, ContinueWhatOneThreadContinues) {
  constexpr std::int64_t kNodes = 8;
  const auto go_on = [](std::int32_t threads) {
    EngineConfig config;
    config.threads = threads;
    Engine engine(config);
    std::vector<RequestId> ids;
    const Tokens prompt = testing::random_text(100, 4, 1);
    for (std::int64_t row = 0; row < kSharedRows; ++row) {
      ids.push_back(engine.add_request({{prompt.data(), 100}}));
    }
    for (const std::size_t ended : {3u, 77u, 140u}) engine.finish(ids[ended]);
    std::vector<std::int32_t> numbers(kSharedRows * (2 + 2 * kNodes));
    std::vector<float> probabilities(kSharedRows * kNodes);
    std::int32_t* const nodes = numbers.data() + 2 * kSharedRows;
    const Continuations out{kSharedRows,
                            kNodes,
                            numbers.data(),
                            numbers.data() + kSharedRows,
                            nodes,
                            nodes + kSharedRows * kNodes,
                            probabilities.data()};
    const std::vector<std::int64_t> offsets(kSharedRows + 1, 0);
    const auto failed = engine.continue_batch(ids.data(), kSharedRows, prompt.data(),
                                              offsets.data(), nullptr, nullptr, out);
    std::vector<double> given(probabilities.begin(), probabilities.end());
    given.insert(given.end(), numbers.begin(), numbers.end());
    for (const RowError& error : failed) given.push_back(static_cast<double>(error.row));
    return given;
  };
  EXPECT_EQ(go_on(4), go_on(1));
}

}  // namespace
}  // namespace fastdraft

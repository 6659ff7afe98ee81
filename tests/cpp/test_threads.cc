// For ThreadSanitizer: what the engine's comment allows, from many threads.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "draft/successors.h"
#include "fastdraft/datastore.h"
#include "fastdraft/engine.h"
#include "fastdraft/error.h"
#include "fastdraft/offers.h"
#include "folder.h"
#include "policy/step_latency.h"
#include "stores.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::add_text;
using testing::Folder;
using testing::Tokens;

RequestId add_predicted(Engine& engine, const Tokens& prompt) {
  const TokenSpan text{prompt.data(), static_cast<std::int64_t>(prompt.size())};
  return engine.add_request({text, text});
}

void run_threads(int count, const std::function<void(std::uint32_t)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, static_cast<std::uint32_t>(i));
  for (std::thread& thread : threads) thread.join();
}

TEST(Threads, BatchesGoOnAtOnce) {
  constexpr std::int64_t kNodes = 12;
  EngineConfig config;
  config.drafter = CalibratedConfig{kNodes};
  const auto store = Datastore::live(1 << 20);
  Engine engine(config, {store});
  run_threads(4, [&](std::uint32_t thread) {
    for (std::uint32_t round = 0; round < 10; ++round) {
      const Tokens text = testing::random_text(100, 5, thread * 100 + round);
      const std::vector<RequestId> ids{add_predicted(engine, text), add_predicted(engine, text)};
      std::vector<std::int32_t> base(2);
      std::vector<std::int32_t> count(2);
      std::vector<std::int32_t> nodes(4 * kNodes);
      std::vector<float> probabilities(2 * kNodes);
      const Continuations out{2,
                              kNodes,
                              base.data(),
                              count.data(),
                              nodes.data(),
                              nodes.data() + 2 * kNodes,
                              probabilities.data()};
      const std::vector<std::int64_t> offsets{0, 1, 2};
      const std::vector<std::int64_t> positions{1, 0};
      for (std::uint32_t step = 0; step < 20; ++step) {
        const Tokens next = testing::random_text(2, 5, step);
        EXPECT_TRUE(engine
                        .continue_batch(ids.data(), 2, next.data(), offsets.data(), nullptr,
                                        positions.data(), out)
                        .empty());
        EXPECT_EQ(base[0], 101 + static_cast<std::int32_t>(step));
        EXPECT_LE(count[1], kNodes);
      }
      for (const RequestId id : ids) engine.finish(id);
    }
  });
  EXPECT_EQ(engine.num_requests(), 0);
}

// Whatever the order of their rows.
TEST(Threads, BatchesOfTheSameRequestsGoOnAtOnce) {
  constexpr std::int64_t kRows = 40;
  constexpr int kThreads = 4;
  constexpr int kSteps = 100;
  Engine engine({});
  std::vector<RequestId> ids;
  for (std::uint32_t row = 0; row < kRows; ++row) {
    ids.push_back(add_predicted(engine, testing::random_text(row % 8 == 0 ? 9000 : 50, 5, row)));
  }
  run_threads(kThreads, [&](std::uint32_t thread) {
    std::vector<RequestId> mine = ids;
    std::rotate(mine.begin(), mine.begin() + 7 * thread, mine.end());
    if (thread % 2 == 1) std::reverse(mine.begin(), mine.end());
    std::vector<std::int64_t> offsets(kRows + 1);
    std::iota(offsets.begin(), offsets.end(), 0);
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      EXPECT_EQ(engine.propose_batch(mine.data(), kRows, {}).offsets.size(), offsets.size());
      const Tokens next = testing::random_text(kRows, 5, step);
      EXPECT_TRUE(engine.observe_batch(mine.data(), kRows, next.data(), offsets.data()).empty());
    }
  });
  for (std::uint32_t row = 0; row < kRows; ++row) {
    EXPECT_EQ(engine.finish(ids[row]).emitted, kThreads * kSteps);
  }
}

// Nothing is promised about the order of calls on one request, only that each
// is whole: also when it is finished under the others' hands.
TEST(Threads, CallsOnOneRequestTakeTurns) {
  for (std::uint32_t round = 0; round < 20; ++round) {
    Engine engine({});
    const std::vector<RequestId> ids{
        add_predicted(engine, testing::random_text(100, 3, round)),
        add_predicted(engine, testing::random_text(100, 3, round + 1))};
    run_threads(4, [&](std::uint32_t thread) {
      const Tokens next = testing::random_text(3, 3, thread);
      const std::int32_t most = engine.config().lookahead;
      std::vector<std::byte> memory(static_cast<std::size_t>(DraftColumns::bytes(most)));
      try {
        for (int step = 0; step < 50; ++step) {
          engine.observe(ids[0], next.data(), 3);
          engine.propose(ids[0], {}, DraftColumns::in(memory.data(), most));
          const DraftBatch batch = engine.propose_batch(ids.data(), 2, {});
          for (std::int32_t i = 0; i < batch.offsets.back(); ++i) {
            EXPECT_LT(static_cast<std::uint32_t>(batch.columns.token_ids[i]), 3U);
          }
          if (thread == 3 && step == 25) engine.finish(ids[1]);
        }
      } catch (const UnknownRequestError&) {
        EXPECT_EQ(engine.num_requests(), 1);
      }
    });
    engine.finish(ids[0]);
    EXPECT_EQ(engine.bytes(), 0);
  }
}

// A request that one thread cancels costs the other threads' batches that row alone.
TEST(Threads, ABatchKeepsTheRowsThatOthersDoNotCancel) {
  EngineConfig config;
  config.token_cost = 0.0;
  Engine engine(config);
  constexpr std::int64_t kRows = 32;
  for (std::uint32_t round = 0; round < 20; ++round) {
    std::vector<RequestId> ids;
    for (std::int64_t row = 0; row < kRows; ++row) {
      ids.push_back(add_predicted(engine, testing::repeated(40)));
    }
    const Tokens next(static_cast<std::size_t>(kRows), 3);
    std::vector<std::int64_t> offsets;
    for (std::int64_t row = 0; row <= kRows; ++row) offsets.push_back(row);
    std::atomic<bool> cancelled{false};
    int steps = 0;
    int missed = 0;
    run_threads(2, [&](std::uint32_t thread) {
      if (thread == 1) {
        for (std::size_t row = 1; row < ids.size(); row += 2) engine.cancel(ids[row]);
        cancelled = true;
        return;
      }
      for (bool last = false; !last; ++steps) {
        last = cancelled;
        const DraftBatch batch = engine.propose_batch(ids.data(), kRows, {});
        for (std::size_t row = 0; row < ids.size(); row += 2) {
          EXPECT_GT(batch.offsets[row + 1] - batch.offsets[row], 0);
        }
        for (const RowError& failed :
             engine.observe_batch(ids.data(), kRows, next.data(), offsets.data())) {
          EXPECT_EQ(failed.row % 2, 1);
          EXPECT_THROW(std::rethrow_exception(failed.error), UnknownRequestError);
          ++missed;
        }
      }
    });
    for (std::size_t row = 0; row < ids.size(); row += 2) {
      EXPECT_EQ(engine.finish(ids[row]).steps, steps);
    }
    EXPECT_GE(missed, kRows / 2);
  }
  EXPECT_EQ(engine.bytes(), 0);
}

// Requests read stores while others that finish add to them, and somebody closes one.
TEST(Threads, EnginesShareLiveStores) {
  const std::vector<std::shared_ptr<Datastore>> stores{Datastore::live(1 << 20),
                                                       Datastore::live(1 << 20)};
  const Stores reversed{stores[1], stores[0]};
  EngineConfig trees;
  trees.drafter = CalibratedConfig{12};
  Engine first(EngineConfig{}, stores);
  Engine second(trees, reversed);
  std::atomic<std::int64_t> accepted{0};
  std::atomic<int> finished{0};
  run_threads(4, [&](std::uint32_t thread) {
    Engine& engine = thread % 2 == 0 ? first : second;
    const std::int32_t capacity = engine.most_drafted();
    std::vector<std::byte> memory(static_cast<std::size_t>(DraftColumns::bytes(capacity)));
    const DraftColumns columns = DraftColumns::in(memory.data(), capacity);
    for (std::uint32_t round = 0; round < 25; ++round) {
      // Eight texts that all threads generate, each in its own order: enough for TokenWeights.
      const Tokens text = testing::random_text(300, 50, (thread + round) % 8);
      const RequestId id = engine.add_request({{text.data(), 20}});
      std::size_t said = 20;
      while (said < text.size()) {
        const std::int32_t size = engine.propose(id, {}, columns);
        for (std::int32_t i = 0; i < size; ++i) {
          EXPECT_LT(static_cast<std::uint32_t>(columns.token_ids[i]), 50U);
        }
        const auto left = static_cast<std::int64_t>(text.size() - said);
        const std::int32_t kept = columns.accepted(size, text.data() + said, left).tokens;
        const std::int64_t count = std::min<std::int64_t>(kept + 1, left);
        engine.observe(id, text.data() + said, count);
        said += static_cast<std::size_t>(count);
      }
      accepted += engine.finish(id).accepted;
      if (++finished == 80) stores[0]->close();
    }
  });
  EXPECT_GT(accepted, 1000);
  EXPECT_TRUE(stores[0]->closed());
  EXPECT_GT(stores[1]->num_documents(), 0);
  EXPECT_EQ(first.bytes() + second.bytes(), 0);
}

// A store's readers and those who add to it take turns: neither waits for more than a turn of the
// other. Bounded by what the readers look up meanwhile, not by time.
TEST(Threads, ReadersDoNotKeepTextOutOfAStore) {
  constexpr std::uint32_t kReaders = 8;
  constexpr int kDocuments = 20;
  constexpr int kLookups = 5'000'000;
  const auto store = Datastore::live(1 << 20);
  const Tokens text = testing::random_text(300, 40, 0);
  add_text(*store, text);
  std::atomic<std::uint32_t> reading{0};
  std::atomic<int> added{0};
  std::atomic<std::int64_t> looked_up{0};
  run_threads(kReaders + 1, [&](std::uint32_t thread) {
    if (thread == kReaders) {
      while (reading < kReaders) std::this_thread::yield();
      for (std::uint32_t i = 1; added < kDocuments; ++i) {
        add_text(*store, testing::random_text(300, 40, i));
        if (reading < kReaders) return;
        ++added;
      }
      return;
    }
    ++reading;
    int lookups = 0;
    for (; lookups < kLookups && added < kDocuments; ++lookups) {
      const Datastore::Reader reader(*store);
      Occurrence found[4];
      EXPECT_GT(reader.find(text.data(), 8 + lookups % 200, found, 4), 0);
    }
    if (lookups == kLookups) --reading;
    looked_up += lookups;
  });
  EXPECT_EQ(added, kDocuments);
  EXPECT_GT(looked_up, 0);
}

TEST(Threads, TheBudgetHoldsUnderContention) {
  EngineConfig config;
  config.max_bytes = 400'000;
  Engine engine(config);
  std::atomic<int> refused{0};
  run_threads(4, [&](std::uint32_t thread) {
    for (std::uint32_t round = 0; round < 50; ++round) {
      try {
        const RequestId id =
            add_predicted(engine, testing::random_text(1500, 100, thread * 100 + round));
        EXPECT_LE(engine.bytes(), config.max_bytes * 3 / 2);  // a refused try counts briefly
        engine.finish(id);
      } catch (const MemoryLimitError&) {
        ++refused;
      }
    }
  });
  EXPECT_EQ(engine.bytes(), 0);
}

TEST(Threads, ShareALiveStore) {
  for (int round = 0; round < 4; ++round) {
    const auto store = Datastore::live(160 << 10);
    add_text(*store,
             testing::random_text(700, 3, 99));  // so that the first to read finds something
    const Folder folder;
    std::atomic<std::int64_t> found{0};
    std::vector<std::thread> threads;
    for (std::uint32_t seed = 0; seed < 2; ++seed) {
      threads.emplace_back([&, seed] {
        try {
          for (std::uint32_t i = 0; i < 40; ++i) {
            add_text(*store, testing::random_text(700, 3, seed * 100 + i));
          }
        } catch (const DatastoreClosedError&) {
          EXPECT_EQ(round % 2, 1);
        }
      });
      threads.emplace_back([&] {
        const Tokens text = testing::random_text(300, 3, 17);
        for (std::int64_t size = 3; size < 300; ++size) {
          const Datastore::Reader reader(*store);
          Occurrence out[4];
          const int count = reader.find(text.data(), size, out, 4);
          for (int i = 0; i < count; ++i) {
            Token next[8];
            found += reader.copy(out[i].next, next, 8);
            EXPECT_EQ(reader.at(out[i].next - 1), text[static_cast<std::size_t>(size) - 1]);
          }
        }
      });
    }
    threads.emplace_back([&] {
      for (int i = 0; i < 40 && !store->closed(); ++i) {
        try {
          store->limit((80 + 5 * i) << 10);
        } catch (const DatastoreClosedError&) {
          EXPECT_EQ(round % 2, 1);
        }
      }
    });
    threads.emplace_back([&] {
      if (round % 2 == 1) return store->close();
      store->save(folder.file("copy.fds"));
      EXPECT_LE(Datastore::open(folder.file("copy.fds"))->num_tokens(), 2 * 40 * 700);
    });
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(found, round % 2 == 0 ? 1 : 0);
  }
}

TEST(Threads, NameKindsOfOffersAndOfferAtOnce) {
  EngineConfig config;
  config.token_cost = 0.01;
  Engine engine(config);
  run_threads(4, [&](std::uint32_t thread) {
    const Tokens prompt{1, 2, 3, static_cast<Token>(thread)};
    const RequestId id = engine.add_request({{prompt.data(), 4}});
    const std::vector<std::int64_t> offsets = {0, 3};
    for (std::uint32_t step = 0; step < 200; ++step) {
      Offers offers;
      offers.kind = engine.offer_kind("kind " + std::to_string((thread + step) % 8));
      offers.token_ids = prompt.data();
      offers.offsets = offsets.data();
      ProposeOptions options;
      options.offers = &offers;
      options.num_offers = 1;
      bool wanted = false;
      engine.wants(offers.kind, &id, 1, {}, 0.1, &wanted);
      static_cast<void>(engine.propose_batch(&id, 1, options));
      engine.observe(id, prompt.data() + step % 3, 1);
    }
    engine.finish(id);
  });
  EXPECT_EQ(engine.offer_kinds().size(), 8U);
}

TEST(Threads, ShareSuccessorsAndStepLatencies) {
  Successors successors(8);
  StepLatency latency(StepLatency::Device::kCpu);
  run_threads(4, [&](std::uint32_t thread) {
    const Tokens tokens = {1, 2, 3};
    const std::vector<float> probabilities = {0.5f, 0.25f};
    const auto rows = std::int64_t{1} + thread;
    for (int i = 0; i < 500; ++i) {
      Successors* table = &successors;
      const std::vector<std::int64_t> offsets = {0, 1};
      Successors::learn(&table, 1, offsets.data(), tokens.data(), tokens.data() + 1,
                        probabilities.data(), 2);
      Successors::trees(&table, tokens.data(), 1);
      latency.observe(rows, 1.0 + i % 5, 0.01);
      static_cast<void>(latency.best_widths(rows, 9));
    }
  });
  EXPECT_NEAR(latency.seconds_by_tokens(1, 1)[0], 0.01, 0.001);
}

}  // namespace
}  // namespace fastdraft

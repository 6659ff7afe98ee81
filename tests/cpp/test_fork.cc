#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "engine/batch_threads.h"
#include "engine/request.h"
#include "engine/request_table.h"
#include "fastdraft/datastore.h"
#include "index/memory.h"
#include "store/phase_fair_mutex.h"
#include "texts.h"

namespace fastdraft {
namespace {

// Runs `body` in the child of a fork. Returns whether it was true there. One that hangs is killed.
template <typename Body>
bool in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Calls `body` in another thread, which is at the point where it calls what it is given when
// `at_that_point` runs.
template <typename Body, typename Then>
void while_another_is_inside(Body body, Then at_that_point) {
  std::promise<void> inside;
  std::promise<void> over;
  std::thread other([&] {
    body([&] {
      inside.set_value();
      over.get_future().wait();
    });
  });
  inside.get_future().wait();
  at_that_point();
  over.set_value();
  other.join();
}

TEST(Fork, AStoreThatAnotherThreadReads) {
  const auto store = Datastore::live(1 << 20);
  while_another_is_inside(
      [&](const auto& wait) {
        const Datastore::Reader reader(*store);
        wait();
      },
      [&] {
        EXPECT_TRUE(in_child([&] {
          store->close();
          return store->closed();
        }));
      });
}

TEST(Fork, AStoreThatAnotherThreadAddsTo) {
  const auto store = Datastore::live(100 << 10);
  const auto text = testing::random_text(5000, 1000, 1);
  while_another_is_inside(
      [&](const auto& wait) {
        bool first = true;
        store->add(text.data(), static_cast<std::int64_t>(text.size()), 0, [&] {
          if (first) wait();
          first = false;
        });
      },
      [&] {
        EXPECT_TRUE(in_child([&] {
          const Token added[] = {2001, 2002, 2003, 2004, 2005};
          store->add(added, 5, 5);
          Occurrence found{};
          const Datastore::Reader reader(*store);
          return reader.find(added, 4, &found, 1) == 1 && reader.at(found.next) == 2005;
        }));
      });
}

TEST(Fork, ThreadsThatShareBatches) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer lets no child of a process with threads start any";
#endif
  BatchThreads threads(2);
  const auto works = [&] {
    std::atomic<int> parts{0};
    threads.run(50, [&](std::int64_t) { ++parts; });
    return parts == 50;
  };
  EXPECT_TRUE(works());
  EXPECT_TRUE(in_child(works));
  // The child has no thread to wait for.
  while_another_is_inside(
      [&](const auto& wait) {
        threads.run(2, [&](std::int64_t part) {
          if (part == 0) wait();
        });
      },
      [&] { EXPECT_TRUE(in_child(works)); });
  EXPECT_TRUE(works());
}

TEST(Fork, ARequestThatAnotherThreadHasLocked) {
  MemoryBudget budget(1 << 20);
  RequestTable table;
  const RequestId locked = table.add(std::make_unique<Request>(16, 1.0, budget));
  const RequestId other = table.add(std::make_unique<Request>(16, 1.0, budget));
  while_another_is_inside(
      [&](const auto& wait) {
        const RequestTable::Locked request = table.lock(locked);
        wait();
      },
      [&] {
        EXPECT_TRUE(in_child([&] {
          const bool gone = !table.find(locked) && table.find(other) && table.size() == 1;
          const RequestId next = table.add(std::make_unique<Request>(16, 1.0, budget));
          return gone && next != locked && table.find(next);
        }));
        EXPECT_EQ(table.size(), 2);
      });
  EXPECT_TRUE(table.find(locked));
}

}  // namespace
}  // namespace fastdraft

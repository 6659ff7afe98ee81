#include "store/phase_fair_mutex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace fastdraft {
namespace {

TEST(PhaseFairMutex, WritersAreAloneAndReadersAreNot) {
  constexpr int kRounds = 2000;
  PhaseFairMutex mutex;
  int first = 0;  // always the same but while a writer is inside
  int second = 0;
  std::atomic<int> inside{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        const std::unique_lock<PhaseFairMutex> lock(mutex);
        ++first;
        EXPECT_EQ(inside, 0);
        ++second;
        mutex.pass();
        ++second;
        EXPECT_EQ(inside, 0);
        ++first;
      }
    });
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        const std::shared_lock<PhaseFairMutex> lock(mutex);
        ++inside;
        EXPECT_EQ(first, second);
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(first, 2 * 3 * kRounds);
  EXPECT_EQ(second, first);

  // Two readers at once: each leaves only after the other one has entered.
  std::atomic<int> entered{0};
  const auto read = [&] {
    const std::shared_lock<PhaseFairMutex> lock(mutex);
    ++entered;
    while (entered < 2) std::this_thread::yield();
  };
  std::thread other(read);
  read();
  other.join();
}

// A reader that waits enters at the latest when the writer lets others pass, and another writer
// before the first one comes again, however soon that is.
TEST(PhaseFairMutex, AWriterThatGoesOnAndOnKeepsNobodyOut) {
  PhaseFairMutex mutex;
  std::atomic<int> entered{0};
  mutex.lock();
  std::thread reader([&] {
    const std::shared_lock<PhaseFairMutex> lock(mutex);
    ++entered;
  });
  std::thread writer([&] {
    const std::unique_lock<PhaseFairMutex> lock(mutex);
    ++entered;
  });
  while (entered < 2) mutex.pass();
  mutex.unlock();
  reader.join();
  writer.join();
  EXPECT_EQ(entered, 2);
}

}  // namespace
}  // namespace fastdraft

// tests/core/test_successors.py compares trees with an oracle.
#include "engine/successors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "texts.h"

namespace fastdraft {
namespace {

using testing::Tokens;

TEST(Successors, ServeThreadsInTurns) {
  Successors successors(8);
  const auto work = [&] {
    const Tokens tokens = {1, 2, 3};
    const std::vector<float> chances = {0.5f, 0.25f};
    for (int i = 0; i < 1000; ++i) {
      Successors* table = &successors;
      const std::vector<std::int64_t> offsets = {0, 1};
      Successors::learn(&table, 1, offsets.data(), tokens.data(), tokens.data() + 1, chances.data(),
                        2);
      Successors::trees(&table, tokens.data(), 1);
    }
  };
  std::thread other(work);
  work();
  other.join();
}

}  // namespace
}  // namespace fastdraft

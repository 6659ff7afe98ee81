#include "store/samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>

namespace fastdraft {
namespace {

// Samples of few and of many prompts enter and leave; beside a list.
TEST(Samples, CountsAsAListDoes) {
  for (const std::uint32_t prompts : {3U, 40U, 100'000U}) {
    Samples samples;
    std::deque<Samples::Sample> list;
    std::uint32_t random = 1;
    std::int64_t position = 0;
    std::size_t most = 0;
    for (int round = 0; round < 3000; ++round) {
      random = random * 1664525 + 1013904223;
      // Prompts that meet in the table.
      const Samples::Prompt prompt = 1 + (random >> 8) % prompts * 64;
      if (samples.wanted_bytes() > 0) samples.grow();
      EXPECT_EQ(samples.wanted_bytes(), 0);
      list.push_back({position, 9, prompt});
      samples.add(list.back());
      position += 10;
      if (round % 1000 > 500) {
        const std::int64_t begin = position - 10 * (round % 300);
        samples.drop_before(begin);
        while (!list.empty() && list.front().start < begin) list.pop_front();
      }
      most = std::max(most, list.size());
      ASSERT_EQ(samples.empty(), list.empty());
      if (!list.empty()) {
        EXPECT_EQ(samples.oldest().start, list.front().start);
      }
      for (const Samples::Prompt asked : {prompt, prompt + 64, Samples::kNone}) {
        EXPECT_EQ(samples.count(asked),
                  std::count_if(list.begin(), list.end(), [&](const Samples::Sample& sample) {
                    return sample.prompt == asked;
                  }));
      }
    }
    EXPECT_LE(samples.bytes(), static_cast<std::int64_t>(2 * 16 * most + 8 * 8 * most / 3 + 512));
    samples.close();
    EXPECT_TRUE(samples.empty());
    EXPECT_EQ(samples.bytes(), 0);
  }
}

}  // namespace
}  // namespace fastdraft

// What it computes is compared with a reference in tests/core/test_step_latency.py.
#include "engine/step_latency.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

TEST(StepLatency, LearnsWhatAStepTakes) {
  StepLatency latency(StepLatency::Device::kAccelerator);
  EXPECT_TRUE(latency.wants_plain_step(1));
  for (int i = 0; i < 50; ++i) {
    latency.observe(1, 1.0, 0.010);
    latency.observe(1, 8.0, 0.020);
  }
  EXPECT_FALSE(latency.wants_plain_step(1));
  const std::vector<double> seconds = latency.seconds_by_tokens(1, 8);
  ASSERT_EQ(seconds.size(), 8U);
  EXPECT_NEAR(seconds[0], 0.010, 0.0005);
  EXPECT_NEAR(seconds[7], 0.020, 0.001);
}

TEST(StepLatency, TokensUpToTheNextSizeAreFree) {
  StepLatency latency(StepLatency::Device::kAccelerator, {8, 4, 1});
  latency.observe(1, 1.0, 0.010);
  const std::vector<double> seconds = latency.seconds_by_tokens(1, 8);
  EXPECT_EQ(seconds[1], seconds[3]);
  EXPECT_LT(seconds[3], seconds[4]);
  EXPECT_EQ(seconds[4], seconds[7]);
}

TEST(StepLatency, RefusesWrongValues) {
  EXPECT_THROW(StepLatency(StepLatency::Device::kCpu, {0}), InvalidValueError);
  StepLatency latency(StepLatency::Device::kCpu);
  EXPECT_THROW(latency.observe(0, 1.0, 1.0), InvalidValueError);
  EXPECT_THROW(latency.observe(1, 0.0, 1.0), InvalidValueError);
  EXPECT_THROW(latency.observe(1, 1.0, std::numeric_limits<double>::quiet_NaN()),
               InvalidValueError);
  EXPECT_THROW(latency.best_widths(1, 0), InvalidValueError);
}

TEST(StepLatency, ThreadsMayShareIt) {
  StepLatency latency(StepLatency::Device::kCpu);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&latency, thread] {
      for (int i = 0; i < 500; ++i) {
        latency.observe(1 + thread, 1.0 + i % 5, 0.01);
        static_cast<void>(latency.best_widths(1 + thread, 9));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NEAR(latency.seconds_by_tokens(1, 1)[0], 0.01, 0.001);
}

}  // namespace
}  // namespace fastdraft

// A function that takes any bytes, and aborts if something is wrong. libFuzzer looks for such
// bytes; fastdraft_tests, which every compiler builds, gives it random ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#ifdef FASTDRAFT_LIBFUZZER
#define FASTDRAFT_FUZZ(name, inputs)                                                 \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size); \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size)
#else
#include <gtest/gtest.h>

#define FASTDRAFT_FUZZ(name, inputs)                                       \
  static int try_##name(const std::uint8_t* data, std::size_t size);       \
  TEST(Fuzz, name) {                                                       \
    for (unsigned seed = 0; seed < (inputs); ++seed) {                     \
      std::mt19937 random(seed);                                           \
      std::vector<std::uint8_t> bytes(random() % (8U << seed % 7));        \
      for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random()); \
      try_##name(bytes.data(), bytes.size());                              \
    }                                                                      \
  }                                                                        \
  static int try_##name(const std::uint8_t* data, std::size_t size)
#endif

// Bits and cache lines: what compilers offer under different names.
#pragma once

#include <cstdint>

namespace fastdraft {

// Asks for memory that is read soon.
inline void prefetch([[maybe_unused]] const void* memory) noexcept {
#if defined(__GNUC__)
  __builtin_prefetch(memory);
  // GCC leaves out calls of functions that do nothing but this: it takes them for pure.
  asm volatile("");
#endif
}

// The place of the lowest bit that is set; there must be one.
inline int lowest_bit(std::uint64_t bits) noexcept {
#if defined(__GNUC__)
  return __builtin_ctzll(bits);
#else
  int place = 0;
  while ((bits >> place & 1) == 0) ++place;
  return place;
#endif
}

}  // namespace fastdraft

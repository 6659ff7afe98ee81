// Bits and cache lines, by what GCC and Clang have for them.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastdraft {

// Asks for memory that is read soon.
inline void prefetch(const void* memory) noexcept {
  __builtin_prefetch(memory);
  // GCC leaves out calls of functions that do nothing but this: it takes them for pure.
  asm volatile("");
}

// Numbers in 4 and 8 bytes, the lowest first. By `memcpy`: GCC does not always see that four bytes
// are one number.
inline std::uint32_t load_32(const std::uint8_t* bytes) noexcept {
  std::uint32_t number = 0;
  std::memcpy(&number, bytes, sizeof(number));
  return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? __builtin_bswap32(number) : number;
}
inline std::uint64_t load_64(const std::uint8_t* bytes) noexcept {
  return load_32(bytes) | static_cast<std::uint64_t>(load_32(bytes + 4)) << 32;
}

// The index of the lowest bit that is set; there must be one.
inline int lowest_bit(std::uint64_t bits) noexcept { return __builtin_ctzll(bits); }

}  // namespace fastdraft

// Shared by live and frozen datastores: n-gram hashes, buckets of a hash table,
// and the walk along the occurrences of an n-gram.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fastdraft/datastore.h"
#include "fastdraft/token.h"
#include "index/bits.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fastdraft {

inline constexpr std::size_t kNumOrders = Datastore::kOrders.size();

// How many tokens of context a document's later part is given, and the most that its mark may
// tell: an occurrence is compared over half as many, so blocks of 32 can be checked over both
// themselves and earlier text.
inline constexpr std::int64_t kContextTokens = 2 * Datastore::kLongestMatch;

// A document is not begun in a segment with less room, hardly more than its context: this much
// shorter than it may be is any segment but the last at most.
inline constexpr std::int64_t kLeastRoom = 2 * kContextTokens;

// The hash of `count` tokens: 64 bits, all of them good.
inline std::uint64_t hash_tokens(const Token* tokens, std::int64_t count,
                                 std::uint64_t seed) noexcept {
  std::uint64_t hash = seed + static_cast<std::uint64_t>(count);
  const auto mix = [&](std::uint64_t two) {
    hash = (hash ^ two) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  };
  const auto bits = [&](std::int64_t i) -> std::uint64_t {
    return static_cast<std::uint32_t>(tokens[i]);
  };
  // The lengths of n-grams without a loop.
  switch (count) {
    case 4:
      mix(bits(0) | bits(1) << 32);
      mix(bits(2) | bits(3) << 32);
      break;
    case 2:
      mix(bits(0) | bits(1) << 32);
      break;
    case 1:
      mix(bits(0));
      break;
    default:
      std::int64_t i = 0;
      for (; i + 2 <= count; i += 2) mix(bits(i) | bits(i + 1) << 32);
      if (i < count) mix(bits(i));
  }
  // The finaliser of MurmurHash3 (A. Appleby, public domain).
  hash *= 0xC4CEB9FE1A85EC53u;
  return hash ^ (hash >> 33);
}

// For the hashes of a live store: whoever writes texts that collide does not know it.
std::uint64_t random_seed();

// Part of a hash table: a cache line of entries, each the low 32 bits of a position
// and eight bits of the hash. Buckets that follow take what a full one cannot.
struct alignas(64) Bucket {
  static constexpr int kEntries = 12;
  // A search of a file looks at a bounded number of buckets and n-grams, lest damage
  // make it long. In a whole table, four fifths full, not one n-gram in 10^14 lies farther from
  // its home.
  static constexpr std::int64_t kMostLooked = 128;
  static constexpr int kMostCompared = 64;

  std::uint8_t tags[kEntries];  // 0: free; the used ones come first
  // A bit for each entry, in live stores only: whether its position is the address of a list of
  // positions, and whether the token at its position was a model's output. 0 in files.
  std::uint16_t lists;
  std::uint16_t outputs;
  std::uint32_t positions[kEntries];

  bool full() const noexcept { return tags[kEntries - 1] != 0; }
  // A bit for each entry with this tag, the lowest for the first.
  std::uint32_t with_tag(std::uint8_t tag) const noexcept {
#if defined(__SSE2__)
    const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
    // Read as four bytes at once: a byte that the compiler keeps in memory would be read as four,
    // which waits until all that was written before has reached the cache.
    const std::uint32_t four = std::uint32_t{tag} * 0x01010101u;
    const __m128i same = _mm_cmpeq_epi8(all, _mm_set1_epi32(static_cast<int>(four)));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(same)) & ((1u << kEntries) - 1);
#else
    std::uint32_t found = 0;
    for (int i = 0; i < kEntries; ++i) found |= (tags[i] == tag ? 1u : 0u) << i;
    return found;
#endif
  }
  // Into a bucket that is not full.
  void enter(std::uint64_t hash, std::int64_t position) noexcept {
    int i = 0;
    while (tags[i] != 0) ++i;
    tags[i] = tag(hash);
    positions[i] = static_cast<std::uint32_t>(position);
  }

  static std::uint8_t tag(std::uint64_t hash) noexcept {
    const auto bits = static_cast<std::uint8_t>(hash >> 32);
    return bits == 0 ? std::uint8_t{1} : bits;
  }
  // Which of `buckets` (fewer than 2^32) is the first to look at. The tag and what
  // else is above the hash's low half is independent of it.
  static std::int64_t home(std::uint64_t hash, std::int64_t buckets) noexcept {
    return static_cast<std::int64_t>(((hash & 0xFFFFFFFFu) * static_cast<std::uint64_t>(buckets)) >>
                                     32);
  }
};
static_assert(sizeof(Bucket) == 64);

// The best occurrences so far, in the caller's memory: the longest first, of
// equally long ones those that were offered first.
class BestOccurrences {
 public:
  BestOccurrences(Occurrence* out, int most) noexcept : out_(out), most_(most) {}

  void offer(const Occurrence& found) noexcept {
    int slot = count_;
    while (slot > 0 && found.length > out_[slot - 1].length) --slot;
    if (slot == most_) return;
    count_ = std::min(count_ + 1, most_);
    std::copy_backward(out_ + slot, out_ + count_ - 1, out_ + count_);
    out_[slot] = found;
  }

  int count() const noexcept { return count_; }
  bool full() const noexcept { return count_ == most_; }
  // Returns whether none that is offered later can be better.
  bool settled() const noexcept {
    return full() && out_[most_ - 1].length == Datastore::kLongestMatch;
  }

 private:
  Occurrence* out_;
  int most_;
  int count_ = 0;
};

// Offers the occurrences of the n-gram of order kOrders[order] that ends the text to `best`, the
// latest first, `*links` at most, and counts `*links` down.
// Occurrences: `valid()`, and `take()`, the Occurrence at this position, whose length is
// kLongestMatch at most; it moves on to the one before.
template <typename Occurrences>
void walk(Occurrences occurrences, std::size_t order, int* links, BestOccurrences* best) {
  // Longer ones have been met: the latest occurrences of the longer n-gram are
  // among those, and no others of the latest of this one are as long.
  const std::int32_t longer =
      order == 0 ? Datastore::kLongestMatch + 1 : Datastore::kOrders[order - 1];
  for (; occurrences.valid() && *links > 0 && !best->settled(); --*links) {
    const Occurrence occurrence = occurrences.take();
    // Damage in a file; elsewhere all occurrences are one n-gram's.
    if (occurrence.length < Datastore::kOrders[order]) return;
    if (occurrence.length < longer) best->offer(occurrence);
  }
}

}  // namespace fastdraft

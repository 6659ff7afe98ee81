// How likely a draft token is to be accepted.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "fastdraft/copy_cursor.h"

namespace fastdraft {

// Do the first and the latest earlier occurrence of a match go on alike?
enum class Agreement : std::uint8_t { kSingle, kAgree, kDisagree };

// Calibrated acceptance: the chance that a draft token is accepted, given that
// all before it in its draft were. It is counted by how the guess was found and
// by how long a match stands before the token, the accepted draft tokens
// included: so a token deep in a draft is judged as the first token of a later
// draft would be, and every step teaches, with a draft or without. The counts
// start from a prior and are halved now and then, so that they follow the
// traffic.
//
// Thread-safe without locks. Two threads that learn at once may lose a count,
// which is nothing among thousands.
class Acceptance {
 public:
  // What speaks for a guess.
  struct Evidence {
    std::uint8_t row = 0;     // how it was found
    std::int32_t length = 0;  // of the match before its first token
  };

  // For the latest occurrence of the longest repeated suffix, of `length` tokens.
  static Evidence repetition(std::int32_t length, Agreement agreement) noexcept;
  // For a copy of the request's own text that goes on, and of its prediction.
  static Evidence copy(const CopyCursor::Place& place) noexcept;
  static Evidence prediction(const CopyCursor::Place& place) noexcept;

  Acceptance();

  // The chance that the token at `depth`, from 0, is accepted if its parent is.
  float chance(Evidence evidence, std::int32_t depth) const noexcept {
    return cells_[evidence.row][bucket_of(evidence.length + depth)].chance.load(
        std::memory_order_relaxed);
  }

  // The target agreed with the first `accepted` tokens of a guess, and, where
  // `mismatch`, not with the next.
  void learn(Evidence evidence, std::int32_t accepted, bool mismatch) noexcept;

 private:
  // Buckets of match length: fine where a token more tells much, coarse where
  // it tells little; the last is for 32 and more.
  static constexpr std::size_t kBuckets = 10;
  static constexpr std::array<std::uint8_t, 32> kBucketOf = {0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7,
                                                             7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8,
                                                             8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
  static constexpr std::size_t kRows = 9;

  using Prior = std::array<std::array<float, kBuckets>, kRows>;
  static const Prior kPrior;

  struct Cell {
    std::atomic<float> chance{0};
    std::atomic<float> accepted{0};
    std::atomic<float> tried{0};
  };

  static std::size_t bucket_of(std::int32_t length) noexcept {
    const auto index = static_cast<std::size_t>(length);
    return index < kBucketOf.size() ? kBucketOf[index] : kBuckets - 1;
  }
  void count(Evidence evidence, std::int32_t depth, bool accepted) noexcept;

  std::array<std::array<Cell, kBuckets>, kRows> cells_;
};

}  // namespace fastdraft

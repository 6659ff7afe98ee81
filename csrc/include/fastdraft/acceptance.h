// How likely a draft token is to be accepted.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "fastdraft/copy_cursor.h"

namespace fastdraft {

// Do the first and the latest earlier occurrence of a match go on alike?
enum class Agreement : std::uint8_t { kSingle, kAgree, kDisagree };

// Calibrated acceptance: the chance that a draft token is accepted, given that
// all before it in its draft were. It is counted by the evidence for the draft
// (its kind, how long a match stood behind it, how sure its place was) and
// by depth, from a prior on, and halved now and then so that it follows the
// traffic.
//
// Thread-safe: reads are lock-free, learning takes a lock.
class Acceptance {
 public:
  // A number for each kind of evidence.
  using Evidence = std::uint16_t;

  // For the latest occurrence of the longest repeated suffix, of `length` tokens.
  static Evidence repetition(std::int32_t length, Agreement agreement) noexcept;
  // For a copy of the request's own text that goes on, and of its prediction.
  static Evidence copy(const CopyCursor::Place& place) noexcept;
  static Evidence prediction(const CopyCursor::Place& place) noexcept;

  Acceptance();

  // The chance that the token at `depth`, from 0, is accepted if its parent is.
  float hazard(Evidence evidence, std::int32_t depth) const noexcept {
    return cells_[evidence][bucket_of_depth(depth)].chance.load(std::memory_order_relaxed);
  }

  // The target agreed with the first `accepted` tokens of a guess, and, where
  // `mismatch`, not with the next.
  void learn(Evidence evidence, std::int32_t accepted, bool mismatch);

 private:
  enum class Kind : std::uint8_t { kRepetition, kCopy, kPrediction };
  static constexpr int kKinds = 3;
  static constexpr int kLengths = 10;
  static constexpr int kCertainties = 3;  // an Agreement or a Footing
  static constexpr int kDepths = 6;
  static constexpr int kNumEvidence = kKinds * kLengths * kCertainties;

  struct Cell {
    std::atomic<float> chance{0};
    float prior = 0;
    float accepted = 0;
    float tried = 0;
  };

  static Evidence number(Kind kind, std::int32_t length, int certainty) noexcept;
  static float prior(Kind kind, int length_bucket, int depth) noexcept;
  static std::size_t bucket_of_depth(std::int32_t depth) noexcept {
    return static_cast<std::size_t>(depth < kDepths ? depth : kDepths - 1);
  }
  static void count(Cell& cell, bool accepted) noexcept;

  std::mutex mutex_;
  std::array<std::array<Cell, kDepths>, kNumEvidence> cells_;
};

}  // namespace fastdraft

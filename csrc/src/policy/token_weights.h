// Weights that a live store has learned for certain tokens.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fastdraft/token.h"
#include "index/bits.h"

namespace fastdraft {

// Weights that name tokens: the acceptance model's other features know how well a token is matched,
// these know which token it is, and after which ones. A weight belongs to a hash of them, as the
// contexts of PAQ's mixers do (M. Mahoney, 2005), and begins at 0.
//
// They say something of the text that taught them. So a live store has its own, which only its
// requests read and teach. They are saved with the store; no calibration holds them.
//
// Thread-safe without locks: two threads that learn at once may lose a step.
class TokenWeights {
 public:
  // How much a weight moves by an error of 1. At 0.2 the seven together overshoot: probabilities
  // are off by more than 0.05 in six times as many bins, at the same speed within 0.1 %.
  static constexpr float kRate = 0.12f;
  static constexpr std::size_t kLeast = std::size_t{1} << 14;
  static constexpr std::size_t kMost = std::size_t{1} << 16;

  // In parts of 1/8192, from -4 to 4: seven of them make any token certain.
  using Weight = std::int16_t;

  static constexpr std::size_t kNames = 7;
  // The indices of a token's weights; a table of fewer than kMost takes their low bits.
  using Indices = std::array<std::uint16_t, kNames>;

  // The tokens before a candidate, hashed.
  struct Before {
    std::uint64_t last = 0, second = 0, both = 0;

    Before() = default;
    Before(Token last_token, Token second_token) noexcept
        : last(spread(last_token, kLast)),
          second(spread(second_token, kSecond)),
          both(spread(last_token, kLastOfBoth) ^ second) {}
  };

  // A table of `size` weights, a power of two from kLeast to kMost, with what `from` has learned,
  // which must not be larger; null: nothing.
  explicit TokenWeights(std::size_t size, const TokenWeights* from = nullptr)
      : mask_(static_cast<std::uint16_t>(size - 1)), lines_(new Line[size / kLine]) {
    for (std::size_t i = 0; i < size; ++i) {
      const Weight learned =
          from == nullptr ? Weight{0} : from->at(i & from->mask_).load(std::memory_order_relaxed);
      at(i).store(learned, std::memory_order_relaxed);
    }
  }

  // A table of the `size` weights that `values` wrote.
  TokenWeights(std::size_t size, const Weight* values) : TokenWeights(size) {
    for (std::size_t i = 0; i < size; ++i) at(i).store(values[i], std::memory_order_relaxed);
  }

  std::vector<Weight> values() const {
    std::vector<Weight> found(size());
    for (std::size_t i = 0; i < size(); ++i) found[i] = at(i).load(std::memory_order_relaxed);
    return found;
  }

  std::size_t size() const noexcept { return std::size_t{mask_} + 1; }
  std::int64_t bytes() const noexcept { return bytes_of(size()); }
  static constexpr std::int64_t bytes_of(std::size_t size) noexcept {
    return static_cast<std::int64_t>(size * sizeof(std::atomic<Weight>));
  }

  // For a token whose longest match is of the class `length`, and that of any other token of the
  // class `rival`; see AcceptanceModel::length_value.
  //
  // All these weights lie in four cache lines: one for the token, one for its pair with each of the
  // two tokens before it, and one for the last token. They do not depend on the lengths.
  static Indices indices(Token token, const Before& before, int length, int rival) noexcept {
    const std::uint64_t name = spread(token, kToken);
    const auto lengths = static_cast<std::uint64_t>(16 * length + rival + 1) * kLengths;
    const auto alone = static_cast<std::uint64_t>(length + 1) * kLengths;
    const std::uint64_t pair = name ^ before.last;
    return {index(name),
            index(pair),
            index(pair, name ^ before.both),
            index(name ^ before.second),
            index(name, name ^ lengths),
            index(before.last, before.last ^ lengths),
            index(before.last, before.both ^ alone)};
  }

  // Asks for the lines of these indices: they do not depend on the lengths.
  void prefetch(Token token, const Before& before) const noexcept {
    const std::uint64_t name = spread(token, kToken);
    fastdraft::prefetch(&lines_[(index(name) & mask_) / kLine]);
    fastdraft::prefetch(&lines_[(index(name ^ before.last) & mask_) / kLine]);
    fastdraft::prefetch(&lines_[(index(name ^ before.second) & mask_) / kLine]);
  }
  void prefetch(const Before& before) const noexcept {
    fastdraft::prefetch(&lines_[(index(before.last) & mask_) / kLine]);
  }

  // The sum of the weights.
  float weigh(const Indices& indices) const noexcept {
    const auto weight = [&](std::size_t i) {
      return static_cast<int>(at(indices[i] & mask_).load(std::memory_order_relaxed));
    };
    static_assert(kNames == 7);
    return static_cast<float>((weight(0) + weight(1)) + (weight(2) + weight(3)) +
                              (weight(4) + weight(5)) + weight(6)) *
           kUnit;
  }

  // Learns from `error`: 1 or 0, for a token that was emitted or not, less its probability.
  void learn(const Indices& indices, float error) noexcept {
    const auto step = static_cast<int>(std::lrint(kRate * error / kUnit));
    for (const std::uint16_t index : indices) {
      std::atomic<Weight>& weight = at(index & mask_);
      const int sum = weight.load(std::memory_order_relaxed) + step;
      weight.store(static_cast<Weight>(std::clamp(sum, -kLargest, kLargest)),
                   std::memory_order_relaxed);
    }
  }

 private:
  static constexpr std::uint64_t kToken = 0x9E3779B97F4A7C15u;
  static constexpr std::uint64_t kLast = 0xC2B2AE3D27D4EB4Fu;
  static constexpr std::uint64_t kSecond = 0x165667B19E3779F9u;
  static constexpr std::uint64_t kLastOfBoth = 0xD6E8FEB86659FD93u;
  static constexpr std::uint64_t kLengths = 0xA0761D6478BD642Fu;

  static std::uint64_t spread(Token token, std::uint64_t factor) noexcept {
    return (static_cast<std::uint64_t>(token) + 2) * factor;
  }
  // The high bits of a product depend on all bits of its factors: of these, the first name the line
  // and the next the slot in it.
  static std::uint16_t index(std::uint64_t hash) noexcept {
    return static_cast<std::uint16_t>(hash >> 48);
  }
  // An index in the line of `line` by another hash.
  static std::uint16_t index(std::uint64_t line, std::uint64_t hash) noexcept {
    return static_cast<std::uint16_t>((line >> 48 & ~std::uint64_t{kLine - 1}) |
                                      hash >> (64 - kLineBits));
  }

  static constexpr float kUnit = 1.0f / 8192;
  static constexpr int kLargest = 32767;
  static constexpr int kLineBits = 5;
  static constexpr std::size_t kLine = std::size_t{1} << kLineBits;
  struct alignas(64) Line {
    std::array<std::atomic<Weight>, kLine> weights;
  };
  std::atomic<Weight>& at(std::size_t i) const noexcept {
    return lines_[i / kLine].weights[i % kLine];
  }

  const std::uint16_t mask_;
  const std::unique_ptr<Line[]> lines_;
};

}  // namespace fastdraft

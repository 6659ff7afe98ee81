// How long outputs were: what a running one may still have before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "fastdraft/token.h"
#include "index/fork.h"

namespace fastdraft {

// The lengths of outputs, by prompt. Samples of one prompt are about as long: the mean rest of
// those that were longer than a running one tells its own rest. The mean rest of all longer outputs
// counts as one sample more.
//
// Thread-safe.
class OutputLengths {
 public:
  // Stands for a prompt. Two prompts of one key are taken for one, which is harmless.
  using Key = std::uint64_t;
  static Key key_of(const Token* prompt, std::int64_t size) noexcept;

  // Takes the length of an output, in tokens. The newest kNewest of a prompt are kept, and the
  // newest kPrompts prompts. Amortised O(1).
  void add(Key prompt, std::int64_t length);

  // A running output.
  struct Running {
    Key prompt = 0;
    std::int64_t emitted = 0;
    double rate = 0.0;  // its tokens a step; 0: there is no such output
  };

  // Returns how many tokens each output may still emit, at least 1. O(rows * kNewest + 256).
  std::vector<double> rests(const std::vector<Running>& rows) const;

  // Returns the weight of each row's tokens, 1 in the mean; 0 for a row that is none. A batch waits
  // for its slowest row, so a row weighs as much as the time that it is expected to need.
  std::vector<float> weights(const std::vector<Running>& rows) const;

 private:
  static constexpr std::size_t kNewest = 16;
  static constexpr std::size_t kPrompts = std::size_t{1} << 16;
  static constexpr int kBucketsOfOctave = 8;
  // All lengths, in buckets that are each about 9 % wide.
  struct Bucket {
    double count = 0.0;
    double tokens = 0.0;
  };
  using Buckets = std::array<Bucket, 32 * kBucketsOfOctave>;

  static std::size_t bucket_of(std::int64_t length) noexcept;
  // `others`: all outputs that are longer.
  double rest(const Bucket& others, Key prompt, std::int64_t emitted) const;

  mutable Mutex mutex_;
  std::unordered_map<Key, std::vector<std::int64_t>> by_prompt_;  // the newest last
  std::deque<Key> prompts_;                                       // the oldest first
  Buckets all_{};
};

}  // namespace fastdraft

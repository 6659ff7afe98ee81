// How likely a draft token is to be accepted.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "fastdraft/calibration.h"
#include "fastdraft/ngram_table.h"
#include "fastdraft/token.h"
#include "policy/first_indices.h"

namespace fastdraft {

// The probability that the target emits a certain token next. The evidence for and
// against the token is a few features; each value of a feature has a weight, and
// the probability is the logistic function of their sum: logistic regression, learned online by
// gradient descent on the coding cost, as the mixers of context-mixing compressors are (M. Mahoney,
// Adaptive Weighing of Context Models for Lossless Data Compression, 2005). Every step teaches,
// with a draft or without, and every token that was weighed. The weights start from a prior.
//
// With many requests in flight, other outcomes are learned between a prediction
// and its own outcome, so the gradient uses the current weights. Of the outcomes
// learned since the prediction, the n-th one with the same evidence takes
// 1 / sqrt(n) of a step, the square-root scaling of step sizes with the batch (A.
// Krizhevsky, One weird trick for parallelizing convolutional neural networks,
// 2014); with the same token too, as in copies of one prompt, 1 / n.
//
// An outcome that was expected changes the weights little. So only one of four of those is
// learned, with four times the step: the same gradient in the mean. See
// docs/explanation/what-pays.md.
//
// Thread-safe without locks. Two threads that learn at once may lose a step of
// the descent, which is nothing among thousands.
class AcceptanceModel {
 public:
  // The features, and how many values each has.
  enum Feature : std::uint8_t {
    kContextLength,   // the longest match of the token in the request's text
    kStoreLength,     // and in the datastores
    kRivalLength,     // the longest match of another token
    kContextCount,    // how many occurrences in the text go on with the token
    kStoreCount,      // and in the datastores
    kLatest,          // whether the latest of the longest matches of each go on with it
    kCopy,            // whether the copy that the output makes of its own text expects it
    kPrediction,      // whether the prediction expects it
    kBothLengths,     // kContextLength and kStoreLength together
    kShare,           // how many of all occurrences go on with it
    kLengthAndRival,  // the longest match of all for it, with kRivalLength
    kOutput,          // whether a model wrote it, here or in the datastores, with that length
    kFeatures,
    // Not of this evidence: the corrections of `path_probability`, and what a table of n-grams
    // says.
    kPath = kFeatures,
    kNgram,           // its probability in the table, and of which order
    kNgramAndLength,  // that probability, with the longest match of the token and its depth
    kAll
  };
  // Match lengths: 0, 1, 2, 3, 4, 5.., 7.., 10.., 16.., 32 and more.
  static constexpr int kLengths = 10;
  static constexpr int kCounts = 5;      // 0, 1, 2, 3.., 5 and more
  static constexpr int kShares = 6;      // fifths
  static constexpr int kFollowing = 12;  // see ExpectedText::value
  static constexpr int kDepths = 6;      // 0.., 4.., 8.., 16.., 24.., 40 and more
  static constexpr int kPaths = 24;      // equal parts of the range from 0 to 1
  // Values of the two n-gram features. 0: the table was not asked.
  static constexpr int kNgrams =
      1 + NgramTable::kOrders * NgramTable::kHalfBits + NgramTable::kOrders + 1;
  static constexpr int kNgramClasses = NgramTable::kHalfBits + NgramTable::kOrders + 1;
  static constexpr int kNgramDepths = 3;  // 0, 1, 2 and more
  static constexpr std::array<int, kAll> kValues = {kLengths,
                                                    kLengths,
                                                    kLengths,
                                                    kCounts,
                                                    kCounts,
                                                    9,
                                                    kFollowing,
                                                    kFollowing,
                                                    kLengths * kLengths,
                                                    kShares * kShares,
                                                    kLengths * kLengths,
                                                    4 * kLengths,
                                                    kDepths * (kPaths + 1),
                                                    kNgrams,
                                                    1 + kNgramClasses * kLengths * kNgramDepths};
  static constexpr std::array<const char*, kAll> kNames = {
      "context_length",   "store_length", "rival_length", "context_count", "store_count",
      "latest",           "copy",         "prediction",   "both_lengths",  "share",
      "length_and_rival", "output",       "path",         "ngram",         "ngram_and_length"};
  static constexpr int kWeights = first_indices(kValues).back() + kValues.back();

  // The value of each feature for one token, as the index of its weight.
  using Evidence = std::array<std::uint16_t, kFeatures>;

  static constexpr std::uint16_t weight_index(Feature feature, int value) noexcept {
    return static_cast<std::uint16_t>(kFirst[feature] + value);
  }

  // The table's evidence for a token.
  struct NgramEvidence {
    std::uint16_t alone = 0;        // the index of the weight of kNgram; 0: the table was not asked
    std::uint16_t with_length = 0;  // and of kNgramAndLength
  };
  // The indices for a token that follows a context of `order` tokens with a probability of
  // `half_bits`, where it follows none of more. half_bits = kHalfBits: it follows none of those
  // that the table has, and the longest of these has `order` tokens; 0: it has none. `length`: the
  // class of the longest match.
  static NgramEvidence ngram_evidence(int order, int half_bits, int length,
                                      std::int32_t depth) noexcept {
    const bool unknown = half_bits == NgramTable::kHalfBits;
    const int value = unknown ? 1 + NgramTable::kOrders * NgramTable::kHalfBits + order
                              : 1 + (order - 1) * NgramTable::kHalfBits + half_bits;
    const int of = unknown ? half_bits + order : half_bits;
    const int joint = (of * kLengths + length) * kNgramDepths + std::min(depth, kNgramDepths - 1);
    return {weight_index(kNgram, value), weight_index(kNgramAndLength, 1 + joint)};
  }

  static int length_value(std::int32_t length) noexcept {
    return kLengthValue[static_cast<std::size_t>(std::min(length, kLongest))];
  }
  // How many tokens longer the next length of another value is.
  static std::int32_t alike_after(std::int32_t length) noexcept {
    return kAlikeAfter[static_cast<std::size_t>(std::min(length, kLongest))];
  }
  static int count_value(std::int32_t count) noexcept {
    return count < 3 ? count : count < 5 ? 3 : 4;
  }

  static constexpr int kBuckets = 20;  // of reliability

  // The largest weight that is taken, far beyond any learned one: sums of larger ones could
  // overflow.
  static constexpr int kMostWeight = 1000;

  AcceptanceModel();

  // The sum of the evidence's weights: the more, the likelier.
  float weigh(const Evidence& evidence) const noexcept {
    const auto weight = [&](std::size_t i) {
      return weights_[evidence[i]].load(std::memory_order_relaxed);
    };
    // In four sums, which do not wait for each other.
    static_assert(kFeatures == 12);
    return (weight(0) + weight(4) + weight(8)) + (weight(1) + weight(5) + weight(9)) +
           (weight(2) + weight(6) + weight(10)) + (weight(3) + weight(7) + weight(11));
  }
  float weigh(const NgramEvidence& evidence) const noexcept {
    return weights_[evidence.alone].load(std::memory_order_relaxed) +
           weights_[evidence.with_length].load(std::memory_order_relaxed);
  }
  // The probability of evidence of this weight: the logistic function, within 1e-5. It is
  // interpolated between the entries of a table, and corrected by the second derivative.
  static float probability(float weight) noexcept {
    constexpr float kCurvature = 0.5f / (kEntriesPerUnit * kEntriesPerUnit);
    const float position = (std::clamp(weight, -kSurely, kSurely) + kSurely) * kEntriesPerUnit;
    const auto entry = static_cast<int>(position);
    const float* from = &kProbabilities[static_cast<std::size_t>(entry)];
    const float part = position - static_cast<float>(entry);
    const float line = from[0] + part * (from[1] - from[0]);
    return line - kCurvature * part * (1.0f - part) * line * (1.0f - line) * (1.0f - 2.0f * line);
  }

  // How often the weights have changed: the number of outcomes learned so far, and one more each
  // time that they were set, modulo 2^32.
  using Version = std::uint32_t;
  Version now() const noexcept { return now_.load(std::memory_order_relaxed); }

  // Says which outcomes are learned.
  class Sample {
   public:
    // How many outcomes the next one stands for, where evidence of this weight was followed by its
    // token or was not; 0: it is not learned.
    int next(float weight, bool accepted) noexcept {
      if ((accepted ? weight : -weight) < kExpected) return 1;
      if (--left_ > 0) return 0;
      left_ = draw();
      return kOf;
    }

   private:
    // Evidence of at least this weight made its outcome expected: a probability of 0.88 or more.
    static constexpr float kExpected = 2.005f;
    static constexpr int kOf = 4;  // expected ones

    // In how many expected outcomes the next one is learned: 4 in the mean, so that none of several
    // that take turns is always the one. By a linear congruential generator.
    int draw() noexcept {
      random_ = random_ * 1664525u + 1013904223u;
      return 1 + static_cast<int>((random_ >> 16) * (2 * kOf - 1) >> 16);
    }

    std::uint32_t random_ = 0;
    int left_ = kOf;
  };

  // One outcome that is learned.
  struct Outcome {
    bool accepted;    // whether the target emitted the token
    float predicted;  // the probability that was predicted
    float current;    // the probability with the current weights
    int times;        // how many outcomes it stands for
  };

  // Learns whether the target emitted `token` next, where the probability of the evidence was
  // predicted at `version`, and what its request's step taught began to be learned at `begun`.
  // Compute the current probabilities of all candidates of a node before the first is learned, so
  // that none depends on another's step. Returns the step by which the weights changed.
  float learn(const Evidence& evidence, Token token, Version version, Version begun,
              const Outcome& outcome) noexcept;
  // Takes the same step with what the table said.
  void learn(const NgramEvidence& evidence, float step) noexcept {
    add(evidence.alone, step);
    add(evidence.with_length, step);
  }

  // The probability that a draft's tokens from depth 0 to `depth` are all accepted. `path` is the
  // product of their probabilities. Deep in a draft the product is off, since the draft's own
  // tokens count as evidence for later ones. So it is corrected by how often drafts with a similar
  // product were accepted: an adaptive probability map, as in PAQ (M. Mahoney, 2005).
  //
  // In a `tree` most paths are improbable and differ by less than the noise of a correction, which
  // would reorder those of different depths. There corrections fade towards probabilities of 0 and
  // 1: trees of 64 gain 0.7 % by it at a token cost of 0.02, 1.2 % at 0.
  float path_probability(std::int32_t depth, float path, bool tree) const noexcept {
    const Bin bin = bin_of(depth, path);
    const float low = weights_[bin.index].load(std::memory_order_relaxed);
    const float high = weights_[bin.index + 1].load(std::memory_order_relaxed);
    const float share = tree ? 4.0f * path * (1.0f - path) : 1.0f;
    return std::clamp(path + share * (low + bin.part * (high - low)), 0.0f, 1.0f);
  }
  // Learns whether they all were accepted.
  void learn_path(std::int32_t depth, float path, bool tree, bool accepted) noexcept;

  std::array<float, kWeights> weights() const noexcept;
  void set_weights(const float* weights) noexcept;
  std::array<ReliabilityBucket, kBuckets> reliability() const noexcept;

 private:
  static constexpr std::int32_t kLongest = 32;
  static constexpr std::array<std::uint8_t, kLongest + 1> kLengthValue = {
      0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 8,
      8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 9};
  // The longest ones are alike for good: longer than any draft.
  static constexpr std::array<std::int32_t, kLongest + 1> kAlikeAfter = [] {
    std::array<std::int32_t, kLongest + 1> after{};
    after[kLongest] = std::int32_t{1} << 30;
    for (std::size_t i = kLongest; i-- > 0;) {
      after[i] = kLengthValue[i + 1] == kLengthValue[i] ? after[i + 1] + 1 : 1;
    }
    return after;
  }();
  static constexpr std::array<int, kAll> kFirst = first_indices(kValues);

  static constexpr float kSurely = 16.0f;  // a probability of 1, for a float
  static constexpr int kEntriesPerUnit = 8;
  static constexpr auto kProbabilities = [] {
    constexpr double kGrowth = 1.1331484530668263;  // e^(1 / kEntriesPerUnit)
    constexpr double kFirst = 8886110.520507872;    // e^kSurely
    std::array<float, 2 * static_cast<std::size_t>(kSurely) * kEntriesPerUnit + 2> probabilities{};
    double inverse = kFirst;  // of the odds
    for (float& probability : probabilities) {
      probability = static_cast<float>(1.0 / (1.0 + inverse));
      inverse /= kGrowth;
    }
    probabilities.front() = 0.0f;
    probabilities[probabilities.size() - 2] = 1.0f;
    probabilities.back() = 1.0f;
    return probabilities;
  }();

  // Outcomes of one kind: when the last one was learned, and of how many requests in a
  // row each was predicted before the previous one was learned. Clang calls a
  // library for atomics that it does not see aligned to their size.
  struct alignas(8) Outcomes {
    Version last = 0;
    std::uint16_t count = 0;
    std::uint16_t mark = 0;  // part of the hash, to notice another kind in this slot
  };
  static constexpr std::size_t kFewestKinds = 256;
  static constexpr std::size_t kMostKinds = 4096;
  // Sets of slots, indexed by the kind's hash. A full set gives up its older kind.
  static constexpr std::size_t kWays = 2;
  using Kinds = std::array<std::atomic<Outcomes>, kMostKinds>;
  // A kind's slot, when its last outcome was learned, and how many requests with it count.
  struct Slot {
    std::size_t index;
    Version last;
    std::uint32_t count;
  };

  // A correction is interpolated between two weights. `index` is the first one's, and `part`, 0 to
  // 1, is the share of the second.
  struct Bin {
    std::size_t index;
    float part;
  };
  static Bin bin_of(std::int32_t depth, float path) noexcept {
    const int of = depth < 8 ? depth / 4 : depth < 16 ? 2 : depth < 24 ? 3 : depth < 40 ? 4 : 5;
    const float at = path > 0.0f ? std::min(path, 1.0f) * kPaths : 0.0f;
    const int bin = std::min(static_cast<int>(at), kPaths - 1);
    return {weight_index(kPath, of * (kPaths + 1) + bin), at - static_cast<float>(bin)};
  }

  struct Counts {
    std::atomic<double> predicted{0};
    std::atomic<double> accepted{0};
    std::atomic<double> count{0};
  };

  friend struct AcceptanceModelTestAccess;

  Slot find(const Kinds& kinds, std::uint64_t kind, Version version, Version now) const noexcept;
  static void put(Kinds& kinds, std::size_t index, std::uint64_t kind, Version last,
                  std::uint32_t count) noexcept;
  float part(std::uint64_t kind, Token token, Version version, Version begun, Version now) noexcept;
  void make_room(std::uint32_t outcomes) noexcept;
  void make_room_beyond(std::size_t size) noexcept;
  void add(std::size_t index, float step) noexcept {
    std::atomic<float>& weight = weights_[index];
    weight.store(weight.load(std::memory_order_relaxed) + step, std::memory_order_relaxed);
  }
  void add(const Evidence& evidence, float step) noexcept;

  std::array<std::atomic<float>, kWeights> weights_;
  std::atomic<Version> now_{0};
  std::atomic<std::size_t> num_kinds_{kFewestKinds};  // slots in use of each of the next three
  Kinds alike_{};                                     // kinds of evidence
  // The only token seen with each of these; -1: they are counted with their tokens too. So
  // with few requests in flight one table is looked into, not two.
  std::array<std::atomic<Token>, kMostKinds> only_;
  Kinds copies_{};  // the same with the token
  std::array<Counts, kBuckets> reliability_;
};

}  // namespace fastdraft

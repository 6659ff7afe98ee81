// Learns what the offers of one kind are worth beside the engine's own evidence.
#pragma once

#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "policy/first_indices.h"

namespace fastdraft {

// A kind's recent offers for a request: the positions that were judged, and those of them where the
// target emitted a token that was offered.
struct OfferRecord {
  float judged = 0.0f;
  float right = 0.0f;
};

// The tokens that recent steps of a request had accepted, and what was expected of them; and the
// time that they spent on offers, each step counted for as many tokens as were expected of it.
struct StepRecord {
  float accepted = 2.0f;
  float expected = 2.0f;
  float spent = 2.0f;
};

// The least and the most that a saved number may be.
using SavedRange = std::pair<int, int>;

// The tokens that a step has accepted on average, by the tokens that the engine's own draft
// promises in it: learned, since what is promised for these requests may be too much or too little.
//
// Thread-safe without locks: two threads that learn at once may lose a step.
class StepPromises {
 public:
  struct Promise {
    float accepted;
    float drafted;
    float spent;  // the time of the offers, as a part of what it was said to be
  };

  // The learned state, as numbers, each within its range.
  static constexpr std::size_t kClasses = 10;
  static constexpr std::size_t kSaved = 4 * kClasses;
  static SavedRange range(std::size_t i) noexcept;
  void write(float* values) const noexcept;
  void read(const float* values) noexcept;

  // The most times that a step's offers count to have taken of what they were said to take.
  static constexpr int kLongestTime = 16;

  // Before anything is learned a step has at least `least` tokens accepted, and verifies `unsure`
  // more.
  StepPromises(float least, float unsure) noexcept : least_(least), unsure_(unsure) {}

  // For a step of the request with this record, whose own draft promises `own` tokens; `first` are
  // expected before anything is learned of such steps.
  Promise promise(float own, float first, const StepRecord& record) const noexcept;
  // Learns the outcome of such a step.
  void learn(float own, float first, const Promise& observed, StepRecord& record) noexcept;

 private:
  struct Mean {
    std::atomic<float> count{0.0f};
    std::atomic<float> accepted{0.0f};
    std::atomic<float> drafted{0.0f};
    std::atomic<float> spent{0.0f};
  };

  static std::size_t class_of(float own) noexcept;

  const float least_;
  const float unsure_;
  std::array<Mean, kClasses> means_;
};

// The probability that the target emits a token at a position where an offer has that token, or
// another.
//
// `before` is the weight (log-odds) of the token by everything else: the engine's own evidence, and
// the offers of other kinds that were weighed before. The probability is the logistic function of
// that weight plus a few learned ones, so what is learned is what the offer adds to the evidence: a
// drafter that is right where copies are right too adds little, one that is right where they
// fail adds much. Averages for each drafter alone cannot tell the two apart.
//
// Logistic regression by online gradient descent, as AcceptanceModel; each weight's step shrinks
// with the number of its samples (J. Duchi et al., Adaptive Subgradient Methods, 2011), since a
// kind's prior knows little of it.
//
// Thread-safe without locks: two threads that learn at once may lose a step.
class OfferModel {
 public:
  enum Feature : std::uint8_t { kSituation, kConfidence, kBoth, kRecord, kDepth, kFeatures };

  // Who expects the token, and how sure the best evidence is: the offer and others, by their
  // weight; the offer alone, by the weight of the best other token; others alone, by their weight.
  static constexpr int kSureness = 8;
  static constexpr int kSituations = 3 * (kSureness + 1);
  // The upper ends of the classes of confidence, finer where it is high.
  static constexpr std::array<float, 11> kConfidenceEdges = {0.1f, 0.2f, 0.3f, 0.4f,  0.5f, 0.6f,
                                                             0.7f, 0.8f, 0.9f, 0.95f, 0.99f};
  // No confidence, and the classes of it.
  static constexpr int kConfidences = 2 + static_cast<int>(kConfidenceEdges.size());
  // The probability that a token of a class of confidence is accepted, before anything is learned.
  static float first_probability(int confidence) noexcept;
  static constexpr int kRecords = 6;
  static constexpr int kDepths = 8;
  static constexpr std::array<int, kFeatures> kValues = {
      kSituations, 2 * kConfidences, kSituations * kConfidences, 2 * kRecords, 2 * kDepths};

  static constexpr std::array<int, kFeatures> kFirst = first_indices(kValues);
  static constexpr std::size_t kWeights = static_cast<std::size_t>(kFirst[kFeatures - 1]) +
                                          static_cast<std::size_t>(kValues[kFeatures - 1]);
  static constexpr std::size_t kSaved = 2 * kWeights + StepPromises::kSaved;

  using Evidence = std::array<std::uint16_t, kFeatures>;

  // A token at a position where tokens are offered.
  struct Token {
    bool offered;
    bool known;        // whether anything else expects it
    float before;      // its weight without the offer; of an unknown one 0
    bool rivalled;     // of an unknown one: whether anything else expects other tokens
    float rival;       // the weight of the best of these
    float confidence;  // of the offer in it, or in the best token that it offers instead; NaN: none
    std::int32_t depth;  // how many tokens of the draft lead to it
  };

  OfferModel();

  static Evidence evidence(const Token& token, const OfferRecord& record) noexcept;

  // Returns what the offer adds to the weight of a token.
  float weigh(const Evidence& evidence) const noexcept {
    float sum = 0.0f;
    for (const std::uint16_t index : evidence) {
      sum += weights_[index].load(std::memory_order_relaxed);
    }
    return sum;
  }

  // Learns whether the target emitted the token.
  void learn(const Evidence& evidence, float before, bool accepted) noexcept;

  // The learned state, as numbers, each within its range.
  static SavedRange range(std::size_t i) noexcept;
  void write(float* values) const noexcept;
  void read(const float* values) noexcept;

  // The outcomes of steps with offers.
  StepPromises& steps() noexcept { return steps_; }
  const StepPromises& steps() const noexcept { return steps_; }

 private:
  std::array<std::atomic<float>, kWeights> weights_;
  std::array<std::atomic<float>, kWeights> samples_{};
  StepPromises steps_;
};

}  // namespace fastdraft

#include "fastdraft/acceptance.h"

namespace fastdraft {
namespace {

// The prior counts as much as this many observations.
constexpr float kPriorWeight = 4.0f;
// Counts are halved here, so that the last few thousand drafts decide.
constexpr float kMostTried = 4000.0f;

// The rows of the table: three for each way to guess.
constexpr std::uint8_t kRepetition = 0;  // by Agreement
constexpr std::uint8_t kCopy = 3;        // by Footing
constexpr std::uint8_t kPrediction = 6;  // by Footing

}  // namespace

// Chances by match length: 0, 1, 2, 3, 4, 5.., 7.., 10.., 16.., 32 and more.
// Of repetitions and copies they are the means over 23 families of recorded
// requests (each family counted once, its own text as the only source), rounded
// to a twentieth; jumps were too rare to count and take the first row. The
// recorded requests have no predictions that were meant as such. On other
// references a prediction did as a copy did; since a caller expects it to
// hold, it starts above that, and at its beginning well above.
const Acceptance::Prior Acceptance::kPrior = {{
    {0.00f, 0.35f, 0.50f, 0.60f, 0.65f, 0.70f, 0.80f, 0.85f, 0.90f, 0.95f},  // single
    {0.00f, 0.50f, 0.55f, 0.60f, 0.65f, 0.70f, 0.75f, 0.85f, 0.90f, 0.95f},  // agree
    {0.00f, 0.15f, 0.30f, 0.35f, 0.50f, 0.55f, 0.60f, 0.65f, 0.75f, 0.90f},  // disagree
    {0.05f, 0.25f, 0.50f, 0.60f, 0.65f, 0.75f, 0.80f, 0.85f, 0.90f, 0.95f},  // following
    {0.05f, 0.35f, 0.50f, 0.60f, 0.65f, 0.70f, 0.80f, 0.85f, 0.90f, 0.95f},  // jumped
    {0.05f, 0.50f, 0.65f, 0.75f, 0.80f, 0.85f, 0.85f, 0.90f, 0.95f, 0.95f},  // guessed
    {0.30f, 0.50f, 0.65f, 0.75f, 0.80f, 0.85f, 0.90f, 0.95f, 0.95f, 0.95f},  // following
    {0.10f, 0.35f, 0.50f, 0.60f, 0.65f, 0.75f, 0.80f, 0.85f, 0.90f, 0.95f},  // jumped
    {0.30f, 0.70f, 0.85f, 0.90f, 0.95f, 0.95f, 0.95f, 0.95f, 0.95f, 0.95f},  // guessed
}};

Acceptance::Acceptance() {
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      cells_[row][bucket].chance = kPrior[row][bucket];
    }
  }
}

Acceptance::Evidence Acceptance::repetition(std::int32_t length, Agreement agreement) noexcept {
  return {static_cast<std::uint8_t>(kRepetition + static_cast<std::uint8_t>(agreement)), length};
}

Acceptance::Evidence Acceptance::copy(const CopyCursor::Place& place) noexcept {
  return {static_cast<std::uint8_t>(kCopy + static_cast<std::uint8_t>(place.footing)),
          place.length};
}

Acceptance::Evidence Acceptance::prediction(const CopyCursor::Place& place) noexcept {
  return {static_cast<std::uint8_t>(kPrediction + static_cast<std::uint8_t>(place.footing)),
          place.length};
}

void Acceptance::learn(Evidence evidence, std::int32_t accepted, bool mismatch) noexcept {
  for (std::int32_t depth = 0; depth < accepted; ++depth) count(evidence, depth, true);
  if (mismatch) count(evidence, accepted, false);
}

void Acceptance::count(Evidence evidence, std::int32_t depth, bool accepted) noexcept {
  const std::size_t bucket = bucket_of(evidence.length + depth);
  Cell& cell = cells_[evidence.row][bucket];
  float hits = cell.accepted.load(std::memory_order_relaxed) + (accepted ? 1.0f : 0.0f);
  float tries = cell.tried.load(std::memory_order_relaxed) + 1.0f;
  if (tries > kMostTried) {
    hits *= 0.5f;
    tries *= 0.5f;
  }
  const float prior = kPriorWeight * kPrior[evidence.row][bucket];
  cell.accepted.store(hits, std::memory_order_relaxed);
  cell.tried.store(tries, std::memory_order_relaxed);
  cell.chance.store((hits + prior) / (tries + kPriorWeight), std::memory_order_relaxed);
}

}  // namespace fastdraft

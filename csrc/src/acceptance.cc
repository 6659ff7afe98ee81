#include "fastdraft/acceptance.h"

#include <algorithm>

namespace fastdraft {
namespace {

// Upper ends of the buckets of match length: fine where a token more tells
// much, coarse where it tells little.
constexpr std::array<std::int32_t, 9> kLengthEnds = {0, 1, 2, 3, 4, 6, 9, 15, 31};

// A first guess counts as much as this many observations.
constexpr float kPriorWeight = 4.0f;
// Counts are halved here, so that the last few thousand drafts decide.
constexpr float kMostTried = 4000.0f;

}  // namespace

// Longer matches and deeper tokens are safer. The slopes are those of the
// recorded requests' counts, rounded; a prediction was handed over because it
// is expected to hold, so it starts one step of trust higher.
float Acceptance::prior(Kind kind, int length_bucket, int depth) noexcept {
  const float trust = kind == Kind::kPrediction ? 0.2f : 0.0f;
  return std::min(0.95f, 0.25f + trust + 0.07f * static_cast<float>(length_bucket) +
                             0.08f * static_cast<float>(std::min(depth, 4)));
}

Acceptance::Acceptance() {
  for (int evidence = 0; evidence < kNumEvidence; ++evidence) {
    const auto kind = static_cast<Kind>(evidence / (kLengths * kCertainties));
    const int length_bucket = evidence / kCertainties % kLengths;
    for (int depth = 0; depth < kDepths; ++depth) {
      Cell& cell = cells_[static_cast<std::size_t>(evidence)][static_cast<std::size_t>(depth)];
      cell.prior = prior(kind, length_bucket, depth);
      cell.chance = cell.prior;
    }
  }
}

Acceptance::Evidence Acceptance::number(Kind kind, std::int32_t length, int certainty) noexcept {
  const auto bucket = static_cast<int>(
      std::lower_bound(kLengthEnds.begin(), kLengthEnds.end(), length) - kLengthEnds.begin());
  return static_cast<Evidence>((static_cast<int>(kind) * kLengths + bucket) * kCertainties +
                               certainty);
}

Acceptance::Evidence Acceptance::repetition(std::int32_t length, Agreement agreement) noexcept {
  return number(Kind::kRepetition, length, static_cast<int>(agreement));
}

Acceptance::Evidence Acceptance::copy(const CopyCursor::Place& place) noexcept {
  return number(Kind::kCopy, place.length, static_cast<int>(place.footing));
}

Acceptance::Evidence Acceptance::prediction(const CopyCursor::Place& place) noexcept {
  return number(Kind::kPrediction, place.length, static_cast<int>(place.footing));
}

void Acceptance::learn(Evidence evidence, std::int32_t accepted, bool mismatch) {
  const std::scoped_lock guard(mutex_);
  auto& cells = cells_[evidence];
  for (std::int32_t depth = 0; depth < accepted; ++depth) {
    count(cells[bucket_of_depth(depth)], true);
  }
  if (mismatch) count(cells[bucket_of_depth(accepted)], false);
}

void Acceptance::count(Cell& cell, bool accepted) noexcept {
  cell.accepted += accepted ? 1.0f : 0.0f;
  cell.tried += 1.0f;
  if (cell.tried > kMostTried) {
    cell.accepted *= 0.5f;
    cell.tried *= 0.5f;
  }
  cell.chance.store((cell.accepted + kPriorWeight * cell.prior) / (cell.tried + kPriorWeight),
                    std::memory_order_relaxed);
}

}  // namespace fastdraft

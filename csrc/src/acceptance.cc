#include "fastdraft/acceptance.h"

#include <algorithm>

namespace fastdraft {
namespace {

// The step of the descent. With any from 0.02 to 0.06 the recorded requests were
// drafted for as well within half a percent.
constexpr float kRate = 0.03f;

// Weights of an engine that has seen nothing. They are what recorded requests
// taught, by bench/calibration.py: the mean over families of what the
// requests of each leave, to two digits.
constexpr float kPrior[] = {
#include "acceptance_prior.inc"
};
static_assert(sizeof(kPrior) / sizeof(kPrior[0]) == Acceptance::kWeights);

void add(std::atomic<double>& sum, double value) noexcept {
  sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

}  // namespace

Acceptance::Acceptance() { set_weights(kPrior); }

void Acceptance::learn(const Evidence& evidence, float told, bool accepted) noexcept {
  const float step = kRate * ((accepted ? 1.0f : 0.0f) - told);
  for (const std::uint16_t place : evidence) {
    std::atomic<float>& weight = weights_[place];
    weight.store(weight.load(std::memory_order_relaxed) + step, std::memory_order_relaxed);
  }
  const int bucket = std::min(kBuckets - 1, static_cast<int>(told * kBuckets));
  Counts& counts = reliability_[static_cast<std::size_t>(bucket)];
  add(counts.told, static_cast<double>(told));
  add(counts.accepted, accepted ? 1.0 : 0.0);
  add(counts.count, 1.0);
}

std::array<float, Acceptance::kWeights> Acceptance::weights() const noexcept {
  std::array<float, kWeights> weights;
  for (std::size_t i = 0; i < kWeights; ++i) {
    weights[i] = weights_[i].load(std::memory_order_relaxed);
  }
  return weights;
}

void Acceptance::set_weights(const float* weights) noexcept {
  for (std::size_t i = 0; i < kWeights; ++i) {
    weights_[i].store(weights[i], std::memory_order_relaxed);
  }
}

std::array<Acceptance::Bucket, Acceptance::kBuckets> Acceptance::reliability() const noexcept {
  std::array<Bucket, kBuckets> buckets;
  for (std::size_t i = 0; i < kBuckets; ++i) {
    buckets[i] = {reliability_[i].told.load(std::memory_order_relaxed),
                  reliability_[i].accepted.load(std::memory_order_relaxed),
                  reliability_[i].count.load(std::memory_order_relaxed)};
  }
  return buckets;
}

}  // namespace fastdraft

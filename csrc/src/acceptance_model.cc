#include "acceptance_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fastdraft {
namespace {

// The step size. From 0.01 to 0.03 modelled speed on the recorded requests changes
// by half a percent at most. A smaller one predicts better and adapts more slowly.
constexpr float kRate = 0.015f;

// Weights of an engine that has seen nothing. They are what recorded requests
// taught, by bench/calibration.py: the mean over families of what the
// requests of each leave, to two digits.
constexpr float kPrior[] = {
#include "acceptance_model_prior.inc"
};
static_assert(sizeof(kPrior) / sizeof(kPrior[0]) == AcceptanceModel::kWeights);

void count(std::atomic<double>& sum, double value) noexcept {
  sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

// The high bits of the result depend on all bits of both.
std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word ^ hash >> 32) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 32;
}

std::uint64_t hash(const AcceptanceModel::Evidence& evidence) noexcept {
  std::array<std::uint64_t, 3> words;
  static_assert(sizeof(words) == sizeof(evidence));
  std::memcpy(words.data(), evidence.data(), sizeof(words));
  std::uint64_t hash = 0;
  for (const std::uint64_t word : words) hash = mix(hash, word);
  return hash;
}

}  // namespace

AcceptanceModel::AcceptanceModel() { set_weights(kPrior); }

float AcceptanceModel::count_lesson(Kinds& kinds, std::uint64_t kind, Moment moment,
                                    Moment now) noexcept {
  static_assert(std::atomic<Lessons>::is_always_lock_free);
  // The low bits are the mark.
  const std::size_t sets = num_kinds_.load(std::memory_order_relaxed) / kWays;
  std::atomic<Lessons>* set = &kinds[kWays * (kind >> 16 & (sets - 1))];
  const auto mark = static_cast<std::uint16_t>(kind);
  // The kind's own place, or that of the older kind. Without branches: which it is, is as good as
  // random, and a branch guessed wrong costs more than the rest.
  static_assert(kWays == 2);
  const Lessons first = set[0].load(std::memory_order_relaxed);
  const Lessons second = set[1].load(std::memory_order_relaxed);
  const auto is_of_kind = [mark](Lessons lessons) {
    return static_cast<unsigned>(lessons.mark == mark) & static_cast<unsigned>(lessons.count > 0);
  };
  const unsigned in_first = is_of_kind(first);
  const unsigned in_second = is_of_kind(second);
  const auto second_is_older = static_cast<unsigned>(now - second.last > now - first.last);
  const unsigned way = in_second | (second_is_older & ~in_first & 1u);
  const std::uint32_t last = in_second != 0 ? second.last : first.last;
  const std::uint32_t known = in_second != 0 ? second.count : first.count;
  // Compares the difference, since moments wrap around.
  const unsigned since =
      (in_first | in_second) & static_cast<unsigned>(static_cast<std::int32_t>(last - moment) >= 0);
  const std::uint32_t count = 1 + since * std::min<std::uint32_t>(known, 0xFFFE);
  set[way].store({now, static_cast<std::uint16_t>(count), mark}, std::memory_order_relaxed);
  return static_cast<float>(count);
}

// Makes room for the kinds of `outcomes`. Only those since a prediction matter: with few requests
// in flight few places are in use, which stay in the nearest cache.
void AcceptanceModel::make_room(std::uint32_t outcomes) noexcept {
  constexpr std::uint64_t kRoom = 16;  // places for each
  std::size_t size = num_kinds_.load(std::memory_order_relaxed);
  if (kRoom * outcomes <= size || size == kMostKinds) return;
  // What is known stays where it is and is copied to where it may be looked for from now on.
  for (Kinds* kinds : {&alike_, &copies_}) {
    for (std::size_t i = 0; i < size; ++i) {
      (*kinds)[size + i].store((*kinds)[i].load(std::memory_order_relaxed),
                               std::memory_order_relaxed);
    }
  }
  num_kinds_.store(2 * size, std::memory_order_relaxed);
}

// Takes a step: adds it to the evidence's weights.
void AcceptanceModel::add(const Evidence& evidence, float step) noexcept {
  const auto move = [&](std::size_t i) {
    std::atomic<float>& weight = weights_[evidence[i]];
    weight.store(weight.load(std::memory_order_relaxed) + step, std::memory_order_relaxed);
  };
  static_assert(kFeatures == 12);
  for (std::size_t i = 0; i < kFeatures; i += 4) {
    move(i);
    move(i + 1);
    move(i + 2);
    move(i + 3);
  }
}

void AcceptanceModel::learn(const Evidence& evidence, Token token, float predicted, Moment moment,
                            bool accepted, float current) noexcept {
  const Moment now = now_.load(std::memory_order_relaxed);
  now_.store(now + 1, std::memory_order_relaxed);
  make_room(now - moment);
  const std::uint64_t kind = hash(evidence);
  const float alike = count_lesson(alike_, kind, moment, now);
  const float copies =
      count_lesson(copies_, mix(kind, static_cast<std::uint64_t>(token)), moment, now);
  const float rate = alike == 1.0f ? kRate : kRate / std::max(std::sqrt(alike), copies);
  add(evidence, rate * ((accepted ? 1.0f : 0.0f) - current));
  // NaN goes to the first bucket.
  const int bucket =
      predicted > 0.0f ? static_cast<int>(std::min(predicted * kBuckets, kBuckets - 1.0f)) : 0;
  Counts& counts = reliability_[static_cast<std::size_t>(bucket)];
  count(counts.predicted, static_cast<double>(predicted));
  count(counts.accepted, accepted ? 1.0 : 0.0);
  count(counts.count, 1.0);
}

std::array<float, AcceptanceModel::kWeights> AcceptanceModel::weights() const noexcept {
  std::array<float, kWeights> weights;
  for (std::size_t i = 0; i < kWeights; ++i) {
    weights[i] = weights_[i].load(std::memory_order_relaxed);
  }
  return weights;
}

void AcceptanceModel::set_weights(const float* weights) noexcept {
  for (std::size_t i = 0; i < kWeights; ++i) {
    weights_[i].store(weights[i], std::memory_order_relaxed);
  }
  // What was weighed before weighs something else now.
  now_.fetch_add(1, std::memory_order_relaxed);
}

std::array<ReliabilityBucket, AcceptanceModel::kBuckets> AcceptanceModel::reliability()
    const noexcept {
  std::array<ReliabilityBucket, kBuckets> buckets;
  for (std::size_t i = 0; i < kBuckets; ++i) {
    buckets[i] = {reliability_[i].predicted.load(std::memory_order_relaxed),
                  reliability_[i].accepted.load(std::memory_order_relaxed),
                  reliability_[i].count.load(std::memory_order_relaxed)};
  }
  return buckets;
}

}  // namespace fastdraft

#include "policy/acceptance_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fastdraft {
namespace {

// The step size. From 0.01 to 0.03 modelled speed on the recorded requests changes
// by half a percent at most. A smaller one predicts better and adapts more slowly.
constexpr float kRate = 0.015f;
// The step size of the corrections of paths.
constexpr float kPathRate = 0.02f;

// Weights of an engine that has seen nothing. They are what recorded requests
// taught, by bench/calibration.py: the mean over families of what the
// requests of each leave, to two digits.
constexpr float kPrior[] = {
#include "policy/acceptance_model_prior.inc"
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

AcceptanceModel::AcceptanceModel() {
  set_weights(kPrior);
  for (std::atomic<Token>& token : only_) token.store(-1, std::memory_order_relaxed);
}

// The kind's own slot, or that of the older kind. Without branches: which it is, is as good as
// random, and a branch guessed wrong costs more than the rest.
AcceptanceModel::Slot AcceptanceModel::find(const Kinds& kinds, std::uint64_t kind, Version version,
                                            Version now) const noexcept {
  static_assert(std::atomic<Outcomes>::is_always_lock_free);
  static_assert(kWays == 2);
  const std::size_t sets = num_kinds_.load(std::memory_order_relaxed) / kWays;
  // The low bits are the mark.
  const std::size_t set = kWays * (kind >> 16 & (sets - 1));
  const auto mark = static_cast<std::uint16_t>(kind);
  const Outcomes first = kinds[set].load(std::memory_order_relaxed);
  const Outcomes second = kinds[set + 1].load(std::memory_order_relaxed);
  const auto in_first = static_cast<unsigned>(first.mark == mark);
  const auto in_second = static_cast<unsigned>(second.mark == mark);
  const auto second_is_older = static_cast<unsigned>(now - second.last > now - first.last);
  const unsigned way = in_second | (second_is_older & ~in_first & 1u);
  const Version last = in_second != 0 ? second.last : first.last;
  const std::uint32_t count = in_second != 0 ? second.count : first.count;
  // Compares the difference, since versions wrap around.
  const unsigned since = (in_first | in_second) &
                         static_cast<unsigned>(static_cast<std::int32_t>(last - version) >= 0);
  return {set + way, last, since * count};
}

void AcceptanceModel::put(Kinds& kinds, std::size_t index, std::uint64_t kind, Version last,
                          std::uint32_t count) noexcept {
  const auto most = std::min<std::uint32_t>(count, 0xFFFF);
  kinds[index].store({last, static_cast<std::uint16_t>(most), static_cast<std::uint16_t>(kind)},
                     std::memory_order_relaxed);
}

// Counts a request whose step, learned from `begun` on, has an outcome of the kind with this hash
// and with this token. Returns the part of a step of descent that the outcome takes, by how many
// requests taught one of the kind since `version`.
float AcceptanceModel::part(std::uint64_t kind, Token token, Version version, Version begun,
                            Version now) noexcept {
  // How many requests, this one included.
  const auto requests = [begun](const Slot& slot) {
    const bool is_counted = slot.count > 0 && static_cast<std::int32_t>(slot.last - begun) >= 0;
    return slot.count + (is_counted ? 0 : 1);
  };
  const Slot alike = find(alike_, kind, version, now);
  const std::uint32_t with_evidence = requests(alike);
  put(alike_, alike.index, kind, now, with_evidence);
  std::atomic<Token>& only = only_[alike.index];
  if (alike.count == 0) {
    only.store(token, std::memory_order_relaxed);
    return 1.0f;
  }
  const auto with = [kind](Token of) { return mix(kind, static_cast<std::uint64_t>(of)); };
  const Token before = only.load(std::memory_order_relaxed);
  if (before >= 0) {
    only.store(-1, std::memory_order_relaxed);
    const std::uint64_t copy = with(before);
    put(copies_, find(copies_, copy, version, now).index, copy, alike.last, alike.count);
  }
  const std::uint64_t copy = with(token);
  const Slot copies = find(copies_, copy, version, now);
  const std::uint32_t with_token = requests(copies);
  put(copies_, copies.index, copy, now, with_token);
  return 1.0f /
         std::max(std::sqrt(static_cast<float>(with_evidence)), static_cast<float>(with_token));
}

// Makes room for the kinds of `outcomes`. Only those since a prediction matter: with few requests
// in flight few slots are in use, which stay in the nearest cache.
void AcceptanceModel::make_room(std::uint32_t outcomes) noexcept {
  constexpr std::uint64_t kRoom = 16;  // slots for each
  const std::size_t size = num_kinds_.load(std::memory_order_relaxed);
  if (kRoom * outcomes > size && size < kMostKinds) make_room_beyond(size);
}

// Doubles the number of kinds, if it still is `size`.
void AcceptanceModel::make_room_beyond(std::size_t size) noexcept {
  // Known outcomes stay in their slots and are copied to those in which later searches look.
  const auto copy = [size](auto& slots) {
    for (std::size_t i = 0; i < size; ++i) {
      slots[size + i].store(slots[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
    }
  };
  copy(alike_);
  copy(only_);
  copy(copies_);
  // Another thread may have made more room since.
  num_kinds_.compare_exchange_strong(size, 2 * size, std::memory_order_relaxed);
}

// Takes a step: adds it to the evidence's weights.
void AcceptanceModel::add(const Evidence& evidence, float step) noexcept {
  const auto move = [&](std::size_t i) { add(evidence[i], step); };
  static_assert(kFeatures == 12);
  for (std::size_t i = 0; i < kFeatures; i += 4) {
    move(i);
    move(i + 1);
    move(i + 2);
    move(i + 3);
  }
}

float AcceptanceModel::learn(const Evidence& evidence, Token token, Version version, Version begun,
                             const Outcome& outcome) noexcept {
  const Version now = now_.load(std::memory_order_relaxed);
  now_.store(now + 1, std::memory_order_relaxed);
  make_room(now - version);
  const auto times = static_cast<float>(outcome.times);
  const float share = part(hash(evidence), token, version, begun, now);
  const float observed = outcome.accepted ? 1.0f : 0.0f;
  const float step = kRate * times * share * (observed - outcome.current);
  add(evidence, step);
  // NaN goes to the first bucket.
  const float predicted = outcome.predicted;
  const int bucket =
      predicted > 0.0f ? static_cast<int>(std::min(predicted * kBuckets, kBuckets - 1.0f)) : 0;
  Counts& counts = reliability_[static_cast<std::size_t>(bucket)];
  count(counts.predicted, static_cast<double>(times * predicted));
  count(counts.accepted, static_cast<double>(times * observed));
  count(counts.count, static_cast<double>(times));
  return step;
}

void AcceptanceModel::learn_path(std::int32_t depth, float path, bool tree,
                                 bool accepted) noexcept {
  const Bin bin = bin_of(depth, path);
  const float observed = accepted ? 1.0f : 0.0f;
  const float step = kPathRate * (observed - path_probability(depth, path, tree));
  add(bin.index, (1.0f - bin.part) * step);
  add(bin.index + 1, bin.part * step);
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
  // Earlier weights are out of date now.
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

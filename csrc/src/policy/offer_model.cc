#include "policy/offer_model.h"

#include <algorithm>

#include "fastdraft/offers.h"
#include "policy/acceptance_model.h"

namespace fastdraft {
namespace {

constexpr float kFirstRate = 0.12f;
constexpr float kLeastRate = 0.01f;

constexpr auto& kEdges = OfferModel::kConfidenceEdges;

// How sure a drafter that gives no confidence is taken to be before anything is learned.
constexpr float kUnsaid = 0.6f;

constexpr int kMemory = 200;  // steps of a class

// A kind that is not known yet: four tokens, each accepted with a probability of 0.7.
constexpr float kFirstAccepted = 1.8f;
constexpr float kFirstDrafted = 4.0f;

float log_odds(float probability) { return std::log(probability / (1.0f - probability)); }

int confidence_class(float confidence) noexcept {
  if (std::isnan(confidence)) return 0;
  const auto* end = std::upper_bound(kEdges.begin(), kEdges.end(), confidence);
  return 1 + static_cast<int>(end - kEdges.begin());
}

// Classes begin beside the round numbers, which sums of the prior's weights often are: rounding
// does not decide between two classes.
int sureness(float weight) noexcept {
  return static_cast<int>(std::clamp(weight + 4.005f, 0.0f, OfferModel::kSureness - 1.0f));
}

}  // namespace

float OfferModel::first_probability(int confidence) noexcept {
  if (confidence == 0) return kUnsaid;
  const auto edge = static_cast<std::size_t>(confidence - 1);
  const float low = edge == 0 ? 0.0f : kEdges[edge - 1];
  const float high = edge == kEdges.size() ? 1.0f : kEdges[edge];
  return 0.2f + 0.75f * 0.5f * (low + high);  // small models are overconfident
}

OfferModel::OfferModel() : steps_(kFirstAccepted, kFirstDrafted - kFirstAccepted) {
  for (auto& weight : weights_) weight.store(0.0f, std::memory_order_relaxed);
  const auto set = [&](Feature feature, int value, float weight) {
    const std::size_t index =
        static_cast<std::size_t>(kFirst[feature]) + static_cast<std::size_t>(value);
    weights_[index].store(weight, std::memory_order_relaxed);
  };
  for (int i = 0; i < kConfidences; ++i) {
    const float probability = first_probability(i);
    set(kConfidence, i, log_odds(probability));                    // for the offered token
    set(kConfidence, kConfidences + i, std::log1p(-probability));  // against the others
  }
  // The surer the engine is of another token, the less an offer is worth.
  for (int i = 0; i < kSureness; ++i) {
    const float rival = static_cast<float>(i) - 3.5f;
    set(kSituation, (kSureness + 1) + i, -std::log1p(std::exp(rival)));
  }
}

OfferModel::Evidence OfferModel::evidence(const Token& token, const OfferRecord& record) noexcept {
  int situation = 0;
  if (token.offered && token.known) {
    situation = sureness(token.before);
  } else if (token.offered) {
    situation = kSureness + 1 + (token.rivalled ? sureness(token.rival) : kSureness);
  } else {
    situation = 2 * (kSureness + 1) + sureness(token.before);
  }
  const int confidence = confidence_class(token.confidence);
  const int other = token.offered ? 0 : 1;
  int rightness = 0;
  if (record.judged > 0.0f) {
    // Two more of each, so that few tokens say little.
    const float right = (record.right + 1.0f) / (record.judged + 2.0f);
    rightness = 1 + std::min(static_cast<int>(right * 5.0f), kRecords - 2);
  }
  const auto index = [](Feature feature, int value) {
    return static_cast<std::uint16_t>(kFirst[feature] + value);
  };
  return {index(kSituation, situation), index(kConfidence, other * kConfidences + confidence),
          index(kBoth, situation * kConfidences + confidence),
          index(kRecord, other * kRecords + rightness),
          index(kDepth, other * kDepths + std::min(token.depth, kDepths - 1))};
}

void OfferModel::learn(const Evidence& evidence, float before, bool accepted) noexcept {
  const float probability = 1.0f / (1.0f + std::exp(-(before + weigh(evidence))));
  const float error = (accepted ? 1.0f : 0.0f) - probability;
  for (const std::uint16_t index : evidence) {
    const float samples = samples_[index].load(std::memory_order_relaxed) + 1.0f;
    samples_[index].store(samples, std::memory_order_relaxed);
    const float rate = std::max(kLeastRate, kFirstRate / std::sqrt(samples));
    std::atomic<float>& weight = weights_[index];
    weight.store(weight.load(std::memory_order_relaxed) + rate * error, std::memory_order_relaxed);
  }
}

SavedRange OfferModel::range(std::size_t i) noexcept {
  constexpr int kMostSamples = 1 << 24;  // where a float stops counting
  if (i < kWeights) return {-AcceptanceModel::kMostWeight, AcceptanceModel::kMostWeight};
  return i < 2 * kWeights ? SavedRange{0, kMostSamples} : StepPromises::range(i - 2 * kWeights);
}

void OfferModel::write(float* values) const noexcept {
  for (const auto* each : {&weights_, &samples_}) {
    for (const std::atomic<float>& value : *each) *values++ = value.load(std::memory_order_relaxed);
  }
  steps_.write(values);
}

void OfferModel::read(const float* values) noexcept {
  for (auto* each : {&weights_, &samples_}) {
    for (std::atomic<float>& value : *each) value.store(*values++, std::memory_order_relaxed);
  }
  steps_.read(values);
}

SavedRange StepPromises::range(std::size_t i) noexcept {
  constexpr std::array<int, 4> kMost = {kMemory, 2 * kMostOffered, 2 * kMostOffered, kLongestTime};
  return {0, kMost[i % kMost.size()]};
}

void StepPromises::write(float* values) const noexcept {
  for (const Mean& mean : means_) {
    for (const auto* each : {&mean.count, &mean.accepted, &mean.drafted, &mean.spent}) {
      *values++ = each->load(std::memory_order_relaxed);
    }
  }
}

void StepPromises::read(const float* values) noexcept {
  for (Mean& mean : means_) {
    for (auto* each : {&mean.count, &mean.accepted, &mean.drafted, &mean.spent}) {
      each->store(*values++, std::memory_order_relaxed);
    }
  }
}

std::size_t StepPromises::class_of(float own) noexcept {
  constexpr std::array<float, kClasses - 1> kOwn = {0.1f, 0.25f, 0.5f, 0.8f, 1.2f,
                                                    2.0f, 3.5f,  6.0f, 10.0f};
  return static_cast<std::size_t>(std::upper_bound(kOwn.begin(), kOwn.end(), own) - kOwn.begin());
}

StepPromises::Promise StepPromises::promise(float own, float first,
                                            const StepRecord& record) const noexcept {
  constexpr float kFirstCount = 3.0f;
  const Mean& mean = means_[class_of(own)];
  const float count = mean.count.load(std::memory_order_relaxed);
  first = std::max(first, least_);
  const auto shrunk = [&](float prior, const std::atomic<float>& learned) {
    return (kFirstCount * prior + count * learned.load(std::memory_order_relaxed)) /
           (kFirstCount + count);
  };
  // How many tokens of one step are accepted varies about as much as their mean: the record counts
  // with a prior of n average steps.
  constexpr float kUsualSteps = 4.0f;
  const float accepted = shrunk(first, mean.accepted);
  const float usual = kUsualSteps * accepted;
  const float expected = record.expected + usual;
  return {accepted * (record.accepted + usual) / expected, shrunk(first + unsure_, mean.drafted),
          shrunk(1.0f, mean.spent) * (record.spent + usual) / expected};
}

void StepPromises::learn(float own, float first, const Promise& observed,
                         StepRecord& record) noexcept {
  const Promise expected = promise(own, first, {});
  Mean& mean = means_[class_of(own)];
  const float count = std::min(mean.count.load(std::memory_order_relaxed) + 1.0f, float{kMemory});
  mean.count.store(count, std::memory_order_relaxed);
  const auto move = [&](std::atomic<float>& value, float to) {
    const float known = value.load(std::memory_order_relaxed);
    value.store(known + (to - known) / count, std::memory_order_relaxed);
  };
  move(mean.accepted, observed.accepted);
  move(mean.drafted, observed.drafted);
  move(mean.spent, observed.spent);
  // The last ten steps count, and as much as two tokens of each that were what was expected.
  constexpr float kDecay = 0.9f;
  constexpr float kFirst = 2.0f * (1.0f - kDecay);
  record.accepted = kDecay * record.accepted + kFirst + observed.accepted;
  record.expected = kDecay * record.expected + kFirst + expected.accepted;
  const float part = observed.spent / std::max(expected.spent, 1e-3f);
  record.spent = kDecay * record.spent + kFirst + part * expected.accepted;
}

}  // namespace fastdraft

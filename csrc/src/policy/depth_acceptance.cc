#include "policy/depth_acceptance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

// Before anything is known the first token is right with this probability, and each further one as
// often as the one before it. Such a guess counts as `kGuessed` drafts.
constexpr double kFirst = 0.6;
constexpr double kGuessed = 4.0;

}  // namespace

DepthAcceptance::DepthAcceptance(std::int64_t longest, double half_life) : half_life_(half_life) {
  check_range("longest", longest, 1, 65536);
  if (!(half_life > 0.0)) {
    throw InvalidValueError("half_life must be above 0, got " + std::to_string(half_life));
  }
  depths_.resize(static_cast<std::size_t>(longest));
}

void DepthAcceptance::observe(const std::int64_t* accepted, const std::int64_t* judged,
                              std::int64_t drafts) {
  const auto longest = static_cast<std::int64_t>(depths_.size());
  // By length: the drafts of which n tokens were judged, were accepted, and were reached.
  struct Drafts {
    double judged = 0.0;
    double right = 0.0;
    double reached = 0.0;
  };
  std::vector<Drafts> of_length(depths_.size() + 1);
  for (std::int64_t i = 0; i < drafts; ++i) {
    check_range("judged", judged[i], 0, longest);
    check_range("accepted", accepted[i], 0, judged[i]);
    of_length[static_cast<std::size_t>(judged[i])].judged += 1.0;
    of_length[static_cast<std::size_t>(accepted[i])].right += 1.0;
    of_length[static_cast<std::size_t>(std::min(accepted[i] + 1, judged[i]))].reached += 1.0;
  }
  // From the deepest: the drafts that go on beyond a depth.
  Drafts beyond;
  for (std::size_t depth = depths_.size(); depth-- > 0;) {
    const Drafts& ended = of_length[depth + 1];
    beyond = {beyond.judged + ended.judged, beyond.right + ended.right,
              beyond.reached + ended.reached};
    const double kept = std::exp2(-beyond.judged / half_life_);
    depths_[depth].reached = kept * depths_[depth].reached + beyond.reached;
    depths_[depth].right = kept * depths_[depth].right + beyond.right;
  }
}

void DepthAcceptance::forget(double part) {
  if (!(part >= 0.0 && part <= 1.0)) {
    throw InvalidValueError("part must be from 0 to 1, got " + std::to_string(part));
  }
  for (Counts& each : depths_) {
    each.reached *= 1.0 - part;
    each.right *= 1.0 - part;
  }
}

std::vector<double> DepthAcceptance::probabilities() const {
  std::vector<double> probabilities;
  probabilities.reserve(depths_.size());
  double probability = kFirst;
  for (const Counts& each : depths_) {
    probability = (each.right + kGuessed * probability) / (each.reached + kGuessed);
    probabilities.push_back(probability);
  }
  return probabilities;
}

std::vector<double> DepthAcceptance::expected_tokens() const {
  std::vector<double> expected{1.0};
  double path = 1.0;
  for (const double probability : probabilities()) {
    path *= probability;
    expected.push_back(expected.back() + path);
  }
  return expected;
}

}  // namespace fastdraft

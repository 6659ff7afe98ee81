// How fast a request emits tokens: the price of its time.
#pragma once

namespace fastdraft {

// Tokens emitted per unit of step time, a step without drafts being 1: a
// decaying mean that starts from `initial`.
class EmissionRate {
 public:
  explicit EmissionRate(double initial) noexcept : tokens_(initial * kWeight) {}
  double value() const noexcept { return tokens_ / time_; }
  void add(double tokens, double time) noexcept {
    tokens_ = kDecay * tokens_ + tokens;
    time_ = kDecay * time_ + time;
  }

 private:
  static constexpr double kDecay = 0.98;  // the last 50 steps or so count
  static constexpr double kWeight = 8.0;  // the first value counts as eight steps

  double tokens_;
  double time_ = kWeight;
};

}  // namespace fastdraft

// The cost of a target forward, and how many draft tokens it is worth.
#pragma once

#include <cstdint>
#include <vector>

#include "fastdraft/export.h"

namespace fastdraft {

// The time of a target forward by the tokens in it, relative to the forward
// that a step without drafts would take.
class FASTDRAFT_EXPORT StepCost {
 public:
  // Each further token costs `token_cost` (0 or more) of a forward over one.
  // Throws InvalidValueError.
  static StepCost constant(double token_cost);

  // curve[n - 1], greater than 0, is the time of a forward over n tokens, in
  // any unit. It goes on past its end, `size` at least 1, with its last slope
  // where that is positive. The curve must outlive the StepCost. Throws
  // InvalidValueError. O(size).
  static StepCost curve(const double* curve, std::int64_t size);

  // The time of a forward over `rows` requests and `drafted` draft tokens in
  // all, where one without drafts is 1.
  double relative(std::int64_t rows, std::int64_t drafted) const noexcept {
    if (curve_ == nullptr) return 1.0 + slope(rows) * static_cast<double>(drafted);
    return time(rows + drafted) / time(rows);
  }

  // `time`, in the unit of the curve, as a part of a forward over `rows` requests without drafts;
  // at a constant cost it is such a part already.
  double part_of_step(std::int64_t rows, double time) const noexcept {
    return curve_ == nullptr ? time : time / this->time(rows);
  }

  // The price of time for keep_what_pays where `rows` requests have been emitting `rate` tokens in
  // all in the time of a step without drafts: the rate, with a premium of up to 30 %. Probabilities
  // are estimates, and those that look best were most likely estimated too high (the winner's
  // curse). The premium fades as the price of a token, the mean over `most` of each row, nears 1:
  // a certain token is drafted as long as it pays.
  double price_of_time(std::int64_t rows, double rate, std::int64_t most) const noexcept;

  // keep_what_pays drops every token less probable than this, so drafters need not
  // guess it. `most` is the longest draft of a row. O(rows * most) for a curve.
  double least_of_batch(std::int64_t rows, double rate, bool padded,
                        std::int64_t most) const noexcept;

  bool is_constant() const noexcept { return curve_ == nullptr; }

  // The cost of a draft token beside `rows` requests, where that is constant.
  double slope(std::int64_t rows) const noexcept {
    return token_cost_ / (1.0 + token_cost_ * static_cast<double>(rows - 1));
  }

 private:
  double time(std::int64_t tokens) const noexcept;

  double token_cost_ = 0.0;
  const double* curve_ = nullptr;
  std::int64_t size_ = 0;
};

// The worth-it rule: cuts the drafts of a batch to the tokens that pay.
// counts[r] tokens of row r have the probabilities[r * stride + i], never
// rising along the row, of being accepted. Kept are the most probable tokens,
// as many as make emitted tokens - rate * time greatest, where `rate` is the
// tokens that the batch has been emitting in the time of a step without
// drafts: with that rate as the price of time, no other choice emits the whole
// text sooner (W. Dinkelbach, On nonlinear fractional programming, 1967).
// If the forward is `padded`, each row pays for the longest draft.
//
// O(rows * stride), with a sort of the probabilities for a curve.
FASTDRAFT_EXPORT void keep_what_pays(const StepCost& cost, double rate, bool padded,
                                     const float* probabilities, std::int64_t rows,
                                     std::int64_t stride, std::int32_t* counts);

}  // namespace fastdraft

#include "fastdraft/step_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {

StepCost StepCost::constant(double token_cost) {
  if (!(token_cost >= 0.0) || std::isinf(token_cost)) {
    throw InvalidValueError("token_cost must be a finite number of at least 0, got " +
                            std::to_string(token_cost));
  }
  StepCost cost;
  cost.token_cost_ = token_cost;
  return cost;
}

StepCost StepCost::curve(const double* curve, std::int64_t size) {
  if (size < 1) {
    throw InvalidValueError("cost must have at least 1 time, got " + std::to_string(size));
  }
  for (std::int64_t i = 0; i < size; ++i) {
    if (!(curve[i] > 0.0) || std::isinf(curve[i])) {
      throw InvalidValueError("cost must be finite times above 0, got " + std::to_string(curve[i]) +
                              " for " + std::to_string(i + 1) + " tokens");
    }
  }
  StepCost cost;
  cost.curve_ = curve;
  cost.size_ = size;
  return cost;
}

double StepCost::price_of_time(std::int64_t rows, double rate, std::int64_t most) const noexcept {
  // On the recorded requests any premium from 0.2 to 0.4 is worth the same within 0.1 %.
  constexpr double kPremium = 0.3;
  if (rows == 0) return rate;
  const auto tokens = static_cast<double>(rows * most);
  const double slope_of_all =
      is_constant() ? slope(rows) : (relative(rows, rows * most) - 1.0) / tokens;
  return rate * (1.0 + kPremium * (1.0 - std::clamp(rate * slope_of_all, 0.0, 1.0)));
}

double StepCost::least_of_batch(std::int64_t rows, double rate, bool padded,
                                std::int64_t most) const noexcept {
  // keep_what_pays compares sums, which round: guess slightly more than it keeps.
  constexpr double kRoundingRoom = 1.0 - 1e-6;
  // Tokens at the same depth of all rows are kept together, however improbable one is.
  if (rows == 0 || (padded && rows > 1)) return 0.0;
  if (is_constant()) return slope(rows) * rate * kRoundingRoom;
  // The last token that is kept pays for what it adds to the forward, and is the least probable.
  double least = std::numeric_limits<double>::infinity();
  const std::int64_t end = rows * (1 + most);
  for (std::int64_t n = rows; n < std::min(end, size_); ++n) {
    least = std::min(least, curve_[n] - curve_[n - 1]);
  }
  if (end > size_) {
    const std::int64_t first = std::max(rows, size_);
    least = std::min(least, time(first + 1) - time(first));
  }
  return rate * least / time(rows) * kRoundingRoom;
}

double StepCost::time(std::int64_t tokens) const noexcept {
  if (tokens <= size_) return curve_[tokens - 1];
  const double last = curve_[size_ - 1];
  const double slope = size_ > 1 ? std::max(0.0, last - curve_[size_ - 2]) : 0.0;
  return last + slope * static_cast<double>(tokens - size_);
}

namespace {

// How many of the gains to take: gain[i] is what the i-th adds to the emitted tokens, and `width`
// the tokens that each adds to the forward.
std::int64_t best_count(const StepCost& cost, double rate, std::int64_t rows, std::int64_t width,
                        const std::vector<double>& gain) {
  double emitted = 0.0;
  double best = -rate;  // no draft: a step of time 1
  std::int64_t count = 0;
  for (std::size_t i = 0; i < gain.size(); ++i) {
    emitted += gain[i];
    const auto next = static_cast<std::int64_t>(i) + 1;
    const double value = emitted - rate * cost.relative(rows, next * width);
    if (value >= best) {
      best = value;
      count = next;
    }
  }
  return count;
}

}  // namespace

void keep_what_pays(const StepCost& cost, double rate, bool padded, const float* probabilities,
                    std::int64_t rows, std::int64_t stride, std::int32_t* counts) {
  if (cost.is_constant() && (!padded || rows == 1)) {
    const double price = cost.slope(rows) * rate;
    for (std::int64_t row = 0; row < rows; ++row) {
      // From the end: nearly all are kept, and no token is more probable than one before it.
      std::int32_t& kept = counts[row];
      while (kept > 0 && static_cast<double>(probabilities[row * stride + kept - 1]) < price) {
        --kept;
      }
    }
    return;
  }
  if (padded || rows == 1) {
    const std::int64_t longest = *std::max_element(counts, counts + rows);
    std::vector<double> gain(static_cast<std::size_t>(longest), 0.0);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int32_t i = 0; i < counts[row]; ++i) {
        gain[static_cast<std::size_t>(i)] += static_cast<double>(probabilities[row * stride + i]);
      }
    }
    const auto width = static_cast<std::int32_t>(best_count(cost, rate, rows, rows, gain));
    for (std::int64_t row = 0; row < rows; ++row) counts[row] = std::min(counts[row], width);
    return;
  }
  struct DraftToken {
    double probability;
    std::int64_t row;
  };
  std::vector<DraftToken> tokens;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int32_t i = 0; i < counts[row]; ++i) {
      tokens.push_back({static_cast<double>(probabilities[row * stride + i]), row});
    }
    counts[row] = 0;
  }
  // Stable, so that among equals the earlier rows come first on every machine.
  std::stable_sort(tokens.begin(), tokens.end(), [](const DraftToken& a, const DraftToken& b) {
    return a.probability > b.probability;
  });
  std::vector<double> gain(tokens.size());
  std::transform(tokens.begin(), tokens.end(), gain.begin(),
                 [](const DraftToken& token) { return token.probability; });
  const std::int64_t count = best_count(cost, rate, rows, 1, gain);
  for (std::int64_t i = 0; i < count; ++i) ++counts[tokens[static_cast<std::size_t>(i)].row];
}

}  // namespace fastdraft

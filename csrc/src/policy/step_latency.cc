#include "policy/step_latency.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

// Widths with a point of the curve; between them it is linear, beyond them proportional. Those
// below 1 are for rows that share a curve with more rows; those beyond the longest draft for steps
// that read prompts too.
constexpr std::array<double, 19> kWidths = {0.5, 0.75, 1,  2,  3,  4,  5,   6,   8,  12,
                                            17,  24,   33, 48, 65, 96, 129, 192, 257};
constexpr std::size_t kPoints = kWidths.size();
constexpr std::size_t kPlain = 2;  // the width of a step without drafts
constexpr double kWidest = kWidths.back();
static_assert(kWidths[kPlain] == 1.0);

// The variables: the logarithm of the seconds of a step without drafts, at the index of its width;
// the other widths' logarithms relative to it; and what one graph adds.
constexpr std::size_t kVariables = kPoints + 1;
constexpr std::size_t kGraph = kPoints;
using Vector = std::array<double, kVariables>;
using Matrix = std::array<Vector, kVariables>;

// Standard deviations, all of a logarithm, so about relative errors.
constexpr double kMeasurement = 0.10;  // at least; a busy machine shows in how plain steps scatter
constexpr double kScatterRate = 0.1;
constexpr double kPrompts = 0.2;  // a prompt's tokens need other attention, and hardly any logits
// A width's first forward also pays for set-up: memory, kernel choice.
constexpr double kFirstMeasurement = 0.5;
constexpr double kShape = 0.6;
constexpr double kLevelDrift = 0.03;
constexpr double kShapeReturn = 1.0 / 800.0;  // part of the way back to the typical curve, a step
// Without trials nothing is learned. Stairs have widths that are better than all nearby, so a
// step, also one without drafts, is expected to be faster by this many standard deviations.
constexpr double kHope = 0.25;
// A forward in one graph is cheaper by about this much, before anything is measured; and how sure
// that is. Graphs save the launches of kernels, which is much for a small model and nothing for a
// large.
constexpr double kGraphGain = -0.05;
constexpr double kGraphDeviation = 0.15;
// A measurement counts as at most this many standard deviations off.
constexpr double kLargestSurprise = 2.5;
// A width's second surprise in a row adds this doubt about all that was known.
constexpr double kChanged = 0.5;
constexpr double kUnknownLevel = 1e4;  // the variance of what nothing is known of

// A wider forward is taken when it costs less than this part of the one that is needed.
constexpr double kWorthPadding = 0.95;

constexpr std::int64_t kPlainAtFirst = 2;
constexpr std::int64_t kPlainEvery = 128;
// Not every step can be measured: one that nothing was heard of is asked for again after this many.
constexpr std::int64_t kPlainAgain = 16;

// The points around `at` and the right one's share; beyond the ends the last point alone.
template <std::size_t N>
std::pair<std::size_t, double> between(const std::array<double, N>& points, double at) noexcept {
  const auto above = std::lower_bound(points.begin(), points.end(), at) - points.begin();
  const auto right = std::clamp<std::size_t>(static_cast<std::size_t>(above), 1, N - 1);
  const double share = (at - points[right - 1]) / (points[right] - points[right - 1]);
  return {right, std::clamp(share, 0.0, 1.0)};
}

// Linear between the points, constant beyond them.
template <std::size_t N>
double interpolate(const std::array<double, N>& points, const std::array<double, N>& values,
                   double at) noexcept {
  const auto [right, share] = between(points, at);
  if (share == 1.0) return values[right];  // exactly
  return values[right - 1] + share * (values[right] - values[right - 1]);
}

// Time of a forward over `tokens` tokens relative to one, before anything is measured.
double typical(double tokens, StepLatency::Device device) noexcept {
  // An accelerator reads the weights once for all tokens, until the arithmetic takes longer than
  // that.
  if (device == StepLatency::Device::kAccelerator) {
    return 1.0 + 0.002 * tokens + std::max(tokens - 256.0, 0.0) / 256.0;
  }
  // A 135 M model on two cores: several tokens need a matrix product where one needs only matrix
  // times vector, and from then on the arithmetic grows.
  constexpr std::array<double, 8> kTokens = {1, 2, 3, 4, 5, 9, 17, 33};
  constexpr std::array<double, 8> kTimes = {1.0, 1.45, 1.8, 1.45, 1.35, 1.6, 1.9, 2.5};
  return interpolate(kTokens, kTimes, tokens) + 0.045 * std::max(tokens - kTokens.back(), 0.0);
}

// Beyond the widest point the time is proportional.
double beyond(double width) noexcept { return std::max(width / kWidest, 1.0); }

// The largest number of rows that shares a curve with `rows`.
std::int64_t shared(std::int64_t rows) noexcept {
  std::int64_t most = 1;
  while (most < rows) most *= 2;
  return most;
}

void check_rows(std::int64_t rows) { check_range("rows", rows, 1, StepLatency::kMostRows); }

}  // namespace

// Level and shape for one number of rows.
class StepLatency::Curve {
 public:
  Curve(std::int64_t rows, Device device) {
    std::array<double, kPoints> times{};
    for (std::size_t i = 0; i < kPoints; ++i) {
      times[i] = typical(static_cast<double>(rows) * kWidths[i], device);
    }
    for (std::size_t i = 0; i < kPoints; ++i) mean_[i] = std::log(times[i] / times[kPlain]);
    mean_[kGraph] = kGraphGain;
    typical_ = mean_;
    for (std::size_t i = 0; i < kPoints; ++i) {
      for (std::size_t j = 0; j < kPoints; ++j) {
        // An error at one width is mostly an error at all, and a little at its own
        // kernels.
        const double octaves = std::log2(kWidths[i] / kWidths[j]) / 3.0;
        const double nearness = 0.85 * std::exp(-0.5 * octaves * octaves) + (i == j ? 0.15 : 0.0);
        const bool level = i == kPlain || j == kPlain;
        start_[i][j] = level ? 0.0 : kShape * kShape * nearness;
      }
    }
    start_[kGraph][kGraph] = kGraphDeviation * kGraphDeviation;
    covariance_ = start_;
    covariance_[kPlain][kPlain] = kUnknownLevel;
  }

  bool wants_plain_step() noexcept {
    if (plain_steps_ >= kPlainAtFirst && steps_since_plain_ < kPlainEvery) return false;
    if (--patience_ >= 0) return false;
    patience_ = kPlainAgain;
    return true;
  }

  void observe(double width, double seconds, bool plain, bool prompts, bool one_graph) {
    ++steps_since_plain_;
    if (plain) {
      steps_since_plain_ = 0;
      ++plain_steps_;
      patience_ = 0;
    }
    // How the time of prompts grows beyond that is another matter.
    if (!prompts || width <= kWidest) learn(width, seconds, plain, prompts, one_graph);
  }

  // The logarithms of a step's seconds at the points.
  std::array<double, kPoints> logarithms(bool optimistic) const noexcept {
    std::array<double, kPoints> found{};
    const double level = mean_[kPlain];
    for (std::size_t i = 0; i < kPoints; ++i) {
      found[i] = i == kPlain ? level : level + mean_[i];
      if (optimistic) found[i] -= kHope * deviation(i);
    }
    return found;
  }

  double seconds_in_one_graph(double width) const noexcept {
    const Vector weights = weights_of(width, true);
    const double variance = std::max(dot(weights, product(weights)), 0.0);
    const double hope = kHope * std::min(std::sqrt(variance), kShape);
    return std::exp(dot(weights, mean_) - hope) * beyond(width);
  }

 private:
  // How much each variable counts in a step of a width.
  static Vector weights_of(double width, bool one_graph) noexcept {
    Vector weights{};
    const auto [right, share] = between(kWidths, width);
    weights[right - 1] = 1.0 - share;
    weights[right] = share;
    weights[kPlain] = 1.0;  // the level counts in full, whatever its neighbours do
    weights[kGraph] = one_graph ? 1.0 : 0.0;
    return weights;
  }

  static double dot(const Vector& a, const Vector& b) noexcept {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  }

  // The covariance with what `weights` makes of the variables.
  Vector product(const Vector& weights) const noexcept {
    Vector found{};
    for (std::size_t i = 0; i < kVariables; ++i) {
      if (weights[i] == 0.0) continue;  // as most are
      for (std::size_t j = 0; j < kVariables; ++j) found[j] += weights[i] * covariance_[i][j];
    }
    return found;
  }

  // The standard deviation of the logarithm of a step's seconds. That of a step without drafts too:
  // while drafts go on it is not measured, and what they gain over it becomes less and less
  // certain.
  double deviation(std::size_t point) const noexcept {
    double variance = covariance_[kPlain][kPlain];
    if (point != kPlain) variance += covariance_[point][point] + 2.0 * covariance_[point][kPlain];
    return std::min(std::sqrt(std::max(variance, 0.0)), kShape);
  }

  // A step passes: the shape returns to the typical curve a little, the level drifts.
  void pass() noexcept {
    for (std::size_t i = 0; i < kVariables; ++i) {
      mean_[i] = stays(i) * mean_[i] + (1.0 - stays(i)) * typical_[i];
      for (std::size_t j = 0; j < kVariables; ++j) {
        const double stay = stays(i) * stays(j);
        covariance_[i][j] = stay * covariance_[i][j] + (1.0 - stay) * start_[i][j];
      }
    }
    covariance_[kPlain][kPlain] += kLevelDrift * kLevelDrift;
  }

  // The part of a variable that a step keeps. The level does not return.
  static constexpr double stays(std::size_t variable) noexcept {
    return variable == kPlain ? 1.0 : 1.0 - kShapeReturn;
  }

  double noise() const noexcept { return std::max(scatter_, kMeasurement); }

  void learn(double width, double seconds, bool plain, bool prompts, bool one_graph) {
    pass();
    const Vector weights = weights_of(width, one_graph);
    const auto forward = static_cast<std::int64_t>(std::ceil(width));
    const bool seen = seen_.count(forward) != 0;
    double noise = seen ? this->noise() : std::max(this->noise(), kFirstMeasurement);
    if (prompts) noise = std::hypot(noise, kPrompts);
    const double surprise = std::log(seconds) - dot(weights, mean_);
    if (plain && !prompts && seen) {
      // 1.25 times the mean deviation is the standard deviation of a normal distribution.
      const double scatter = 1.25 * std::min(std::abs(surprise), 1.0);
      scatter_ += kScatterRate * (scatter - scatter_);
    }
    Vector gain = product(weights);
    double variance = dot(weights, gain) + noise * noise;
    if (std::abs(surprise) <= kLargestSurprise * std::sqrt(variance)) {
      doubted_.erase(forward);
    } else if (!doubted_.insert(forward).second) {
      // At first it seems that something else had the machine briefly; a second time, that
      // something has changed.
      for (std::size_t i = 0; i < kVariables; ++i) {
        for (std::size_t j = 0; j < kVariables; ++j) {
          covariance_[i][j] += kChanged * kChanged / (kShape * kShape) * start_[i][j];
        }
      }
      covariance_[kPlain][kPlain] += kChanged * kChanged;
      gain = product(weights);
      variance = dot(weights, gain) + noise * noise;
    }
    // The largest surprise that counts in full.
    const double bound = kLargestSurprise * std::sqrt(variance);
    const double counted = std::clamp(surprise, -bound, bound) / variance;
    for (std::size_t i = 0; i < kVariables; ++i) {
      mean_[i] += gain[i] * counted;
      const double part = gain[i] / variance;
      for (std::size_t j = 0; j < kVariables; ++j) covariance_[i][j] -= part * gain[j];
    }
    seen_.insert(forward);
  }

  Vector typical_{};
  Vector mean_{};
  Matrix start_{};
  Matrix covariance_{};
  double scatter_ = kMeasurement;
  std::set<std::int64_t> seen_;     // widths of which a forward was measured
  std::set<std::int64_t> doubted_;  // widths whose last measurement was a surprise
  std::int64_t steps_since_plain_ = 0;
  std::int64_t plain_steps_ = 0;
  std::int64_t patience_ = 0;
};

namespace {

// Seconds of steps at a width, of logarithms at the points.
double seconds_at(const std::array<double, kPoints>& logarithms, double width) noexcept {
  return std::exp(interpolate(kWidths, logarithms, width)) * beyond(width);
}

}  // namespace

StepLatency::StepLatency(Device device, std::vector<std::int64_t> sizes, bool a_row)
    : device_(device), sizes_(sizes.begin(), sizes.end()), a_row_(a_row) {
  for (const std::int64_t size : sizes) check_range("sizes", size, 1, kMostRows * kMostWidth);
  std::sort(sizes_.begin(), sizes_.end());
}

StepLatency::~StepLatency() = default;

bool StepLatency::wants_plain_step(std::int64_t rows) {
  check_rows(rows);
  const std::lock_guard lock(mutex_);
  return curve(rows).wants_plain_step();
}

void StepLatency::observe(std::int64_t rows, double width, double seconds, double prompt_tokens,
                          bool one_graph) {
  check_rows(rows);
  for (const auto& [name, value] : {std::pair{"width", width}, std::pair{"seconds", seconds},
                                    std::pair{"prompt_tokens", prompt_tokens}}) {
    if (std::isfinite(value)) continue;
    throw InvalidValueError(std::string(name) + " must be finite, got " + std::to_string(value));
  }
  if (!(width > 0.0)) {
    throw InvalidValueError("width must be above 0, got " + std::to_string(width));
  }
  if (seconds <= 0.0) return;
  const auto count = static_cast<double>(rows);
  const std::lock_guard lock(mutex_);
  curve(rows).observe(width_of(rows, count * width), seconds, width - prompt_tokens / count <= 1.0,
                      prompt_tokens > 0.0, one_graph);
}

StepLatency::Widths StepLatency::best_widths(std::int64_t rows, std::int64_t widest) {
  check_rows(rows);
  check_range("widest", widest, 1, kMostWidth);
  if (a_row_ && !sizes_.empty()) {
    widest = std::min(widest, static_cast<std::int64_t>(sizes_.back()));
  }
  Widths found;
  found.seconds.resize(static_cast<std::size_t>(widest));
  found.widths.resize(static_cast<std::size_t>(widest));
  const auto count = static_cast<double>(rows);
  const std::lock_guard lock(mutex_);
  const auto logarithms = curve(rows).logarithms(false);
  // From the widest: the cheapest of those as wide or wider.
  double cheapest = 0.0;
  std::int64_t cheapest_width = 0;
  for (std::int64_t width = widest; width > 0; --width) {
    const auto i = static_cast<std::size_t>(width - 1);
    const double tokens = padded(rows, count * static_cast<double>(width));
    const double own = seconds_at(logarithms, width_of(rows, tokens));
    const auto own_width = static_cast<std::int64_t>(tokens / count);
    if (width == widest || own <= cheapest) {
      cheapest = own;
      cheapest_width = own_width;
    }
    // A step without drafts is never padded: its time is known best, and others are judged by it.
    const bool pads = width > 1 && cheapest <= kWorthPadding * own;
    found.seconds[i] = pads ? cheapest : own;
    found.widths[i] = pads ? cheapest_width : own_width;
  }
  return found;
}

std::vector<double> StepLatency::seconds_by_tokens(std::int64_t rows, std::int64_t widest,
                                                   bool optimistic) {
  check_rows(rows);
  check_range("widest", widest, 1, kMostWidth);
  std::vector<double> found(static_cast<std::size_t>(rows * widest));
  const auto count = static_cast<double>(rows);
  const std::lock_guard lock(mutex_);
  const auto logarithms = curve(rows).logarithms(optimistic);
  if (!a_row_ && !sizes_.empty()) {
    double known = -1.0;  // the tokens whose time is known: all those padded to them
    double seconds = 0.0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const double tokens = padded(rows, std::max(static_cast<double>(i + 1), count));
      if (tokens != known) seconds = seconds_at(logarithms, width_of(rows, tokens));
      known = tokens;
      found[i] = seconds;
    }
    return found;
  }
  // Known where each row has as many tokens, linear between.
  double before = 0.0;
  for (std::int64_t width = 1; width <= widest; ++width) {
    const double seconds =
        seconds_at(logarithms, width_of(rows, count * static_cast<double>(width)));
    if (width == 1) before = seconds;
    for (std::int64_t row = 1; row <= rows; ++row) {
      found[static_cast<std::size_t>((width - 1) * rows + row - 1)] =
          before + static_cast<double>(row) / count * (seconds - before);
    }
    before = seconds;
  }
  return found;
}

double StepLatency::seconds_in_one_graph(std::int64_t rows, std::int64_t width) {
  check_rows(rows);
  check_range("width", width, 1, kMostWidth);
  const std::lock_guard lock(mutex_);
  return curve(rows).seconds_in_one_graph(width_of(rows, static_cast<double>(rows * width)));
}

// The tokens that a forward over `tokens` tokens really has.
double StepLatency::padded(std::int64_t rows, double tokens) const noexcept {
  const double each = a_row_ ? static_cast<double>(rows) : 1.0;
  const auto size = std::lower_bound(sizes_.begin(), sizes_.end(), tokens,
                                     [&](double a, double b) { return a * each < b; });
  return size == sizes_.end() ? tokens : *size * each;
}

// The width of a forward on the curve of `rows`, by the tokens in it.
double StepLatency::width_of(std::int64_t rows, double tokens) const noexcept {
  // Sizes of all rows together: all numbers of rows that share a curve pad to the same ones.
  const bool together = !a_row_ && !sizes_.empty();
  return padded(rows, tokens) / static_cast<double>(together ? shared(rows) : rows);
}

StepLatency::Curve& StepLatency::curve(std::int64_t rows) {
  const std::int64_t key = shared(rows);
  std::unique_ptr<Curve>& found = curves_[key];
  if (found == nullptr) found = std::make_unique<Curve>(key, device_);
  return *found;
}

}  // namespace fastdraft

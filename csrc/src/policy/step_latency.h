// The latency of steps, measured: how long a forward takes by the number of tokens in it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace fastdraft {

// The measured latency of one model's steps, which says what drafts cost.
//
// The ratio to a step without drafts decides, and it has to come out of few and noisy
// measurements on shared machines. So the logarithm of a step's time is taken as a level, which
// drifts (longer context, busier machine), plus a shape over the width of the forward, its tokens a
// row, which hardly does; a Kalman filter keeps both. The shape starts from a typical curve, its
// points are correlated with their neighbours, so that one measurement teaches about widths nearby,
// and it slowly returns to where it started, so that one bad hour is not forever. Numbers of rows
// within a power of two share a curve.
//
// Why not a smoothed monotone table? On a modelled CPU a wider forward can be the faster one.
// There, replays of 24 families reach with the table 0.88 of the speed that known times would give
// for one row and 0.75 for four rows, and with the filter 0.99 and 0.97. On modelled stairs,
// neither is always better.
//
// A host with captured graphs pads each forward to the next size that was captured: its steps are
// stairs, and tokens up to the next size are free. Where the host says its sizes, the curve is
// learned and asked at padded tokens alone. Forwards of one form, such as those where each row has
// the same number of tokens, may run in one graph as a whole and be cheaper: how much is one more
// variable.
//
// Thread-safe: calls take turns. `rows` is from 1 to kMostRows and `widest` from 1 to kMostWidth;
// else InvalidValueError is thrown.
class StepLatency {
 public:
  enum class Device : std::uint8_t { kCpu, kAccelerator };

  // The widest forward that is asked for where nothing else is said.
  static constexpr std::int64_t kLongest = 65;
  static constexpr std::int64_t kMostRows = std::int64_t{1} << 20;
  static constexpr std::int64_t kMostWidth = std::int64_t{1} << 20;

  // `device` chooses the typical curve. `sizes`, in any order, are the tokens to which the host
  // pads a forward: those of all rows together, where a forward over more than the largest is not
  // padded, or of each row if they are `a_row`, and then no forward has more than the largest.
  // Throws InvalidValueError for a size below 1.
  explicit StepLatency(Device device, std::vector<std::int64_t> sizes = {}, bool a_row = false);
  ~StepLatency();

  // Returns whether the next step should go without drafts, to learn what that costs. Ask once a
  // step. One that is not measured then is wanted again some steps later.
  bool wants_plain_step(std::int64_t rows);

  // Learns from a step of `rows` rows of `width` tokens, their mean where they differ, that took
  // `seconds`; one that took none teaches nothing. A forward that reads prompts too teaches what
  // its tokens take, if not as exactly: `prompt_tokens` says how many of all its tokens are theirs.
  // `one_graph` says that the forward ran in one graph as a whole. Throws InvalidValueError for
  // numbers that are not finite or a width that is not above 0.
  void observe(std::int64_t rows, double width, double seconds, double prompt_tokens = 0.0,
               bool one_graph = false);

  // Prices of drafts when a forward may be padded to a width that is cheaper.
  struct Widths {
    std::vector<double> seconds;       // of a step that has room for i + 1 tokens a row
    std::vector<std::int64_t> widths;  // to give its forward
  };

  // For 1 .. `widest` tokens a row, or up to the largest size where sizes are of each row.
  // O(widest).
  Widths best_widths(std::int64_t rows, std::int64_t widest = kLongest);

  // Seconds of a forward over n tokens of all rows together in entry n - 1, rows x widest in all,
  // at least those of one token a row; `optimistic`: less where little is known, so that it will be
  // tried. It is what the engine takes as the cost of a batch. O(rows x widest).
  std::vector<double> seconds_by_tokens(std::int64_t rows, std::int64_t widest = kLongest,
                                        bool optimistic = false);

  // Seconds of a step where each row has `width` tokens and all run in one graph; optimistic.
  double seconds_in_one_graph(std::int64_t rows, std::int64_t width);

 private:
  class Curve;

  double padded(std::int64_t rows, double tokens) const noexcept;
  double width_of(std::int64_t rows, double tokens) const noexcept;
  Curve& curve(std::int64_t rows);

  Device device_;
  std::vector<double> sizes_;  // rising
  bool a_row_;
  std::mutex mutex_;
  // By the largest number of rows that shares one.
  std::map<std::int64_t, std::unique_ptr<Curve>> curves_;
};

}  // namespace fastdraft

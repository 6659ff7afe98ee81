// What an engine has learned about which draft tokens are accepted.
#pragma once

#include <vector>

namespace fastdraft {

// The tokens whose predicted acceptance probability fell into one range, of twenty
// of equal width.
struct ReliabilityBucket {
  double predicted = 0;  // the sum of the predicted probabilities
  double accepted = 0;   // how many of the tokens the target emitted
  double count = 0;      // how many tokens
};

struct Calibration {
  std::vector<float> weights;                  // of the acceptance model, feature by feature
  std::vector<ReliabilityBucket> reliability;  // since the engine began, by rising probability
};

}  // namespace fastdraft

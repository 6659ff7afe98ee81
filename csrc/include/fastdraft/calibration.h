// The learned state of an engine: which draft tokens are accepted.
#pragma once

#include <string>
#include <vector>

namespace fastdraft {

// The tokens whose predicted acceptance probability fell into one range, of twenty
// of equal width.
struct ReliabilityBucket {
  double predicted = 0;  // the sum of the predicted probabilities
  double accepted = 0;   // how many of the tokens the target emitted
  double count = 0;      // how many tokens
};

// The learned state of the offers of one kind, as numbers that OfferModel writes and reads.
struct OfferCalibration {
  std::string kind;
  std::vector<float> values;
};

struct Calibration {
  std::vector<float> weights;                  // of the acceptance model, feature by feature
  std::vector<ReliabilityBucket> reliability;  // since the engine began, by rising probability
  std::vector<OfferCalibration> offers;        // in the order of the kinds
  std::vector<float> plain_steps;              // what steps without offers come to
};

}  // namespace fastdraft

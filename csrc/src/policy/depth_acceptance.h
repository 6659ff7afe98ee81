// How likely draft tokens are to be accepted, by their depth alone.
#pragma once

#include <cstdint>
#include <vector>

namespace fastdraft {

// Learns from the outcomes of one drafter's chains. It serves those who know nothing else of a
// token: a scheduler that sees no drafts, or a host that has a draft head beside the lookups.
//
// For example, the target verified two drafts of 3 tokens, of which it accepted all and none. The
// first tokens count 1 of 2, and those of depths 1 and 2, which only the first draft reached, 1 of
// 1 each.
//
// Not thread-safe.
class DepthAcceptance {
 public:
  // For drafts of at most `longest` tokens. At each depth an outcome counts half after `half_life`
  // further ones. Throws InvalidValueError: `longest` is 1 to 65536, `half_life` above 0.
  DepthAcceptance(std::int64_t longest, double half_life);

  // Learns from `drafts` drafts: of judged[i] tokens of draft i, whose tokens up to there the
  // target's own are known, the first accepted[i] were right. Throws InvalidValueError unless
  // 0 <= accepted[i] <= judged[i] <= longest. O(drafts + longest).
  void observe(const std::int64_t* accepted, const std::int64_t* judged, std::int64_t drafts);

  // Forgets a part, 0 to 1, of what was counted: that share of the requests is new, and other
  // requests say little about them. Throws InvalidValueError.
  void forget(double part);

  // By depth, the probability that a token is accepted where those before it were.
  std::vector<double> probabilities() const;

  // By the length of a draft, from 0 to the longest: the tokens that a step is expected to emit.
  std::vector<double> expected_tokens() const;

 private:
  struct Counts {
    double reached = 0.0;  // drafts whose tokens before this depth were right,
    double right = 0.0;    // and those of which the token at this depth was right too
  };

  const double half_life_;
  std::vector<Counts> depths_;
};

}  // namespace fastdraft

// The tokens that may follow the nodes of one draft, weighed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "acceptance_model.h"
#include "copy_cursor.h"
#include "fastdraft/draft.h"
#include "fastdraft/token.h"
#include "matched_texts.h"

namespace fastdraft {

// The text that a cursor expects next: what the output copies of itself, or the prediction.
struct ExpectedText {
  const Token* next = nullptr;
  std::int32_t count = 0;
  CopyCursor::Place place;

  ExpectedText() = default;
  ExpectedText(CopyCursor::Place found, const Token* text, std::int64_t size) noexcept
      : place(found) {
    if (place.position < 0) return;
    next = text + place.position;
    count = static_cast<std::int32_t>(size) - place.position;
  }

  // The token `depth` tokens on; -1: none.
  Token token(std::int32_t depth) const noexcept { return depth < count ? next[depth] : -1; }

  // The value of the features kCopy and kPrediction for `candidate`, where `expected` is what
  // token(depth) is, or -1: nothing is expected, the token after a guess, after a match, or
  // another one.
  int value(std::int32_t depth, Token expected, Token candidate) const noexcept {
    if (expected < 0) return 0;
    const int length = AcceptanceModel::length_value(place.length + depth);
    if (expected != candidate) return 8 + std::min(3, length / 3);
    const bool guessed = depth == 0 && place.footing == CopyCursor::Footing::kGuessed;
    return guessed ? 1 : 2 + std::min(4, length / 2);
  }
};

// Which of the sources agree with a path of the draft, or with a token.
struct Agreement {
  MatchSet matches;
  bool copy;
  bool prediction;
};

struct Candidate {
  Token token;
  float weight;  // of the evidence: more is likelier
  Agreement agreement;
  AcceptanceModel::Evidence evidence;
  Source source;
};

// Not thread-safe.
class Candidates {
 public:
  // The most that follow one node.
  static constexpr std::size_t kMost = MatchedTexts::kMost + 2;

  // Those that follow one node: candidates first .. last - 1.
  struct Range {
    std::size_t first;
    std::size_t last;
  };

  // For chains, or for trees, which draft from what a chain leaves out as unlikely.
  Candidates(const AcceptanceModel& acceptance, const MatchedTexts& matches, bool tree) noexcept
      : acceptance_(acceptance), matches_(matches), tree_(tree) {}

  // Begins a draft from the matches as they are now. Gives the agreement of the root.
  Agreement begin(const ExpectedText& copy, const ExpectedText& prediction) noexcept;

  // Weighs the tokens that may follow a node, `depth` tokens below the root. For a chain, call
  // this for its nodes in order: each is the best candidate of the one before.
  Range expand(std::int32_t depth, const Agreement& agreement);

  // For a chain that goes on with a token that is not among these.
  void leave() noexcept { repeating_ = false; }

  const Candidate& operator[](std::size_t i) const noexcept { return candidates_[i]; }

 private:
  // A chain is never drafted from a match of so few tokens beside one of kStrong.
  static constexpr std::int32_t kWeak = 1;

  // A token that may follow the node, and the sources that expect it.
  struct Group {
    Token token;
    std::int32_t context_length, store_length;  // of the longest matches
    std::int32_t context_count, store_count;    // of the matches
    Agreement agreement;
    bool output_of_context, output_of_store;  // whether a model wrote it anywhere there

    std::int32_t length() const noexcept { return std::max(context_length, store_length); }
  };

  // What the sources expect after a node; -1: nothing.
  struct Expected {
    Token copy;
    Token prediction;
    Token latest_of_context;  // by the latest of the longest matches
    Token latest_of_stores;
  };

  Group& group_of(Token token) noexcept;
  bool repeat(std::int32_t depth, Expected expected);
  void begin_repeating() noexcept;
  void weigh(const Group& group, std::int32_t depth, int total, std::int32_t rival_length,
             const Expected& expected);

  const AcceptanceModel& acceptance_;
  const MatchedTexts& matches_;
  const bool tree_;
  ExpectedText copy_;
  ExpectedText prediction_;
  std::vector<Candidate> candidates_;
  std::array<Group, kMost> groups_;
  int num_groups_ = 0;

  // While all sources agree on one token after another.
  bool repeating_ = false;
  std::array<int, 4> repeated_values_{};
  std::array<std::uint8_t, MatchedTexts::kMost> agreeing_;  // the matches
  int num_agreeing_ = 0;
};

}  // namespace fastdraft

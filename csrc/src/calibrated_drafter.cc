#include <algorithm>
#include <array>
#include <optional>

#include "fastdraft/acceptance.h"
#include "fastdraft/copy_cursor.h"
#include "fastdraft/drafter.h"
#include "fastdraft/prediction.h"

namespace fastdraft {
namespace {

// A continuation copied from a text that is already known. It names the place
// instead of copying the tokens, and holds until that text grows.
struct Guess {
  const Token* from = nullptr;
  std::int32_t period = 1;  // the copy starts over after so many tokens
  std::int32_t count = 0;   // how many tokens it gives; 0: no guess
  Source source = Source::kContext;
  Acceptance::Evidence evidence{};

  Token operator[](std::int32_t i) const noexcept { return from[i < period ? i : i % period]; }

  // Writes the tokens as a chain, and not their probabilities.
  void write(const DraftColumns& draft) const noexcept {
    const std::int32_t straight = std::min(count, period);
    draft.write_chain(from, straight, source);
    for (std::int32_t i = straight; i < count; ++i) {
      draft.token_ids[i] = draft.token_ids[i - period];
      draft.parents[i] = i - 1;
      draft.sources[i] = source;
    }
  }

  // How many of its first `most` tokens `emitted` begins with.
  std::int32_t common_prefix(const Token* emitted, std::int32_t most) const noexcept {
    std::int32_t length = 0;
    while (length < most && (*this)[length] == emitted[length]) ++length;
    return length;
  }
};

// Drafts what followed the context's longest repeated suffix the last time,
// where the copy that the output makes of the context goes on, or the prediction.
class CalibratedDrafter final : public Drafter {
 public:
  CalibratedDrafter(const SuffixAutomaton& context, const Sources& sources, Acceptance& acceptance,
                    MemoryBudget& budget)
      : context_(context), acceptance_(acceptance) {
    if (sources.prediction_size > 0) {
      prediction_.emplace(sources.prediction, sources.prediction_size, budget);
    }
  }

  void advance() override {
    // A short repeated suffix stands in many places, and is drafted from as
    // such: no reason to follow the text from there.
    CopyCursor::Place elsewhere;
    const Match match = context_.repeated_suffix();
    if (match.length >= kShortestJump) {
      elsewhere.position = context_.latest_end(match.state) + 1;
      elsewhere.length = match.length;
    }
    copy_.advance(context_.text(), static_cast<std::int32_t>(context_.size()) - 1, context_.text(),
                  context_.size(), elsewhere);
    if (prediction_) prediction_->advance(context_.text(), context_.size());
  }

  std::int32_t guess(std::int32_t limit, const DraftColumns& draft) override {
    // Of guesses that promise the same, the first is drafted.
    guesses_ = {from_prediction(limit), from_repetition(limit), from_copy(limit)};
    // Where both name one place, the repeated suffix says more about it.
    if (guesses_[2].from == guesses_[1].from) guesses_[2] = {};
    const Guess& chosen = guesses_[most_promising()];
    chosen.write(draft);
    float path = 1.0f;
    for (std::int32_t i = 0; i < chosen.count; ++i) {
      path *= acceptance_.chance(chosen.evidence, i);
      draft.probabilities[i] = path;
    }
    return chosen.count;
  }

  void learn(const Token* emitted, std::int64_t count) override {
    for (const Guess& guess : guesses_) {
      const auto known = static_cast<std::int32_t>(std::min<std::int64_t>(guess.count, count));
      if (known == 0) continue;
      const std::int32_t accepted = guess.common_prefix(emitted, known);
      acceptance_.learn(guess.evidence, accepted, accepted < known);
    }
  }

 private:
  static constexpr std::int32_t kShortestJump = 4;

  // `limit` tokens at most from `position` of the request's own text. Where the
  // copy reaches the text's end it goes on with what it copied, as LZ77 does: a
  // period repeats.
  Guess of_context(std::int32_t position, std::int32_t limit,
                   Acceptance::Evidence evidence) const noexcept {
    return {context_.text() + position, static_cast<std::int32_t>(context_.size()) - position,
            limit, Source::kContext, evidence};
  }

  Guess from_repetition(std::int32_t limit) const noexcept {
    const Match match = context_.repeated_suffix();
    if (match.length == 0) return {};
    const std::int32_t latest = context_.latest_end(match.state) + 1;
    const std::int32_t first = context_.first_end(match.state) + 1;
    const Token* text = context_.text();
    const Agreement agreement = first == latest               ? Agreement::kSingle
                                : text[first] == text[latest] ? Agreement::kAgree
                                                              : Agreement::kDisagree;
    return of_context(latest, limit, Acceptance::repetition(match.length, agreement));
  }

  Guess from_copy(std::int32_t limit) const noexcept {
    const CopyCursor::Place place = copy_.place();
    if (place.position < 0) return {};
    return of_context(place.position, limit, Acceptance::copy(place));
  }

  Guess from_prediction(std::int32_t limit) const noexcept {
    if (!prediction_) return {};
    const CopyCursor::Place place = prediction_->place();
    if (place.position < 0) return {};
    const auto left = static_cast<std::int32_t>(prediction_->size()) - place.position;
    if (left == 0) return {};
    return {prediction_->text() + place.position, left, std::min(limit, left), Source::kPrediction,
            Acceptance::prediction(place)};
  }

  std::size_t most_promising() const noexcept {
    std::size_t best = 0;
    std::size_t guesses = 0;
    for (std::size_t i = 0; i < guesses_.size(); ++i) {
      if (guesses_[i].count == 0) continue;
      ++guesses;
      best = i;
    }
    if (guesses < 2) return best;
    float most = -1.0f;
    for (std::size_t i = 0; i < guesses_.size(); ++i) {
      const float promised = promise(guesses_[i]);
      if (guesses_[i].count > 0 && promised > most) {
        most = promised;
        best = i;
      }
    }
    return best;
  }

  // The number of tokens that a guess is expected to have accepted.
  float promise(const Guess& guess) const noexcept {
    float path = 1.0f;
    float sum = 0.0f;
    for (std::int32_t i = 0; i < guess.count; ++i) {
      path *= acceptance_.chance(guess.evidence, i);
      sum += path;
    }
    return sum;
  }

  const SuffixAutomaton& context_;
  Acceptance& acceptance_;
  CopyCursor copy_{-1};  // follows what the output copies from the text itself
  std::optional<Prediction> prediction_;
  std::array<Guess, 3> guesses_;
};

class CalibratedPolicy final : public DraftPolicy {
 public:
  std::unique_ptr<Drafter> begin(const SuffixAutomaton& context, const Sources& sources,
                                 MemoryBudget& budget) override {
    return std::make_unique<CalibratedDrafter>(context, sources, acceptance_, budget);
  }

  bool drafts_what_pays() const noexcept override { return true; }

 private:
  Acceptance acceptance_;
};

}  // namespace

std::unique_ptr<DraftPolicy> DraftPolicy::calibrated() {
  return std::make_unique<CalibratedPolicy>();
}

}  // namespace fastdraft

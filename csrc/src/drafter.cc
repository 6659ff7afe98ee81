#include "fastdraft/drafter.h"

#include <algorithm>

namespace fastdraft {
namespace {

class CalibratedDrafter final : public Drafter {
 public:
  void advance(Request& request) const override {
    const SuffixAutomaton& context = request.context;
    if (context.size() <= request.prompt_size) return;
    // A short repeated suffix stands in many places, and is drafted from as
    // such: no reason to follow the text from there.
    CopyCursor::Place elsewhere;
    const Match match = context.repeated_suffix();
    if (match.length >= kShortestJump) {
      elsewhere.position = context.latest_end(match.state) + 1;
      elsewhere.length = match.length;
    }
    request.copy.advance(context.text(), static_cast<std::int32_t>(context.size()) - 1,
                         context.text(), context.size(), elsewhere);
    if (request.prediction) request.prediction->advance(context.text(), context.size());
  }

  std::int32_t guess(Request& request, std::int32_t limit, float* probabilities) const override {
    Request::Proposal& proposal = request.proposal;
    // Of guesses that promise the same, the first is drafted.
    proposal.guesses = {from_prediction(request, limit), from_repetition(request.context, limit),
                        from_copy(request, limit)};
    // Where both name one place, the repeated suffix says more about it.
    if (proposal.guesses[2].from == proposal.guesses[1].from) proposal.guesses[2] = {};
    proposal.chosen = most_promising(proposal);
    const Guess& chosen = proposal.guesses[proposal.chosen];
    float path = 1.0f;
    for (std::int32_t i = 0; i < chosen.count; ++i) {
      path *= acceptance_.chance(chosen.evidence, i);
      probabilities[i] = path;
    }
    return chosen.count;
  }

  void learn(const Request::Proposal& proposal, const Token* emitted, std::int64_t count) override {
    for (const Guess& guess : proposal.guesses) {
      const auto known = static_cast<std::int32_t>(std::min<std::int64_t>(guess.count, count));
      if (known == 0) continue;
      const std::int32_t accepted = guess.common_prefix(emitted, known);
      acceptance_.learn(guess.evidence, accepted, accepted < known);
    }
  }

  bool drafts_what_pays() const noexcept override { return true; }

 private:
  static constexpr std::int32_t kShortestJump = 4;

  // `limit` tokens at most from `position` of the request's own text. Where the
  // copy reaches the text's end it goes on with what it copied, as LZ77 does: a
  // period repeats.
  static Guess of_context(const SuffixAutomaton& context, std::int32_t position, std::int32_t limit,
                          Acceptance::Evidence evidence) noexcept {
    return {context.text() + position, static_cast<std::int32_t>(context.size()) - position, limit,
            Source::kContext, evidence};
  }

  static Guess from_repetition(const SuffixAutomaton& context, std::int32_t limit) noexcept {
    const Match match = context.repeated_suffix();
    if (match.length == 0) return {};
    const std::int32_t latest = context.latest_end(match.state) + 1;
    const std::int32_t first = context.first_end(match.state) + 1;
    const Token* text = context.text();
    const Agreement agreement = first == latest               ? Agreement::kSingle
                                : text[first] == text[latest] ? Agreement::kAgree
                                                              : Agreement::kDisagree;
    return of_context(context, latest, limit, Acceptance::repetition(match.length, agreement));
  }

  static Guess from_copy(const Request& request, std::int32_t limit) noexcept {
    const CopyCursor::Place place = request.copy.place();
    if (place.position < 0) return {};
    return of_context(request.context, place.position, limit, Acceptance::copy(place));
  }

  static Guess from_prediction(const Request& request, std::int32_t limit) noexcept {
    if (!request.prediction) return {};
    const Prediction& prediction = *request.prediction;
    const CopyCursor::Place place = prediction.place();
    if (place.position < 0) return {};
    const auto left = static_cast<std::int32_t>(prediction.size()) - place.position;
    if (left == 0) return {};
    return {prediction.text() + place.position, left, std::min(limit, left), Source::kPrediction,
            Acceptance::prediction(place)};
  }

  std::size_t most_promising(const Request::Proposal& proposal) const noexcept {
    std::size_t best = 0;
    std::size_t guesses = 0;
    for (std::size_t i = 0; i < proposal.guesses.size(); ++i) {
      if (proposal.guesses[i].count == 0) continue;
      ++guesses;
      best = i;
    }
    if (guesses < 2) return best;
    float most = -1.0f;
    for (std::size_t i = 0; i < proposal.guesses.size(); ++i) {
      const float promised = promise(proposal.guesses[i]);
      if (proposal.guesses[i].count > 0 && promised > most) {
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

  Acceptance acceptance_;
};

class PromptLookupDrafter final : public Drafter {
 public:
  explicit PromptLookupDrafter(std::int32_t max_ngram) : max_ngram_(max_ngram) {}

  void advance(Request& request) const override {
    const SuffixAutomaton& context = request.context;
    const Match grown =
        context.advance(context.renew(request.ngram), context.text()[context.size() - 1]);
    request.ngram = context.shorten(grown, max_ngram_);
  }

  std::int32_t guess(Request& request, std::int32_t limit, float* probabilities) const override {
    const SuffixAutomaton& context = request.context;
    const auto size = static_cast<std::int32_t>(context.size());
    request.proposal = {};
    Match match = request.ngram;
    while (match.length > 0 && context.first_end(match.state) == size - 1) {
      match = context.shorten(match, match.length - 1);
    }
    if (match.length == 0) return 0;
    const std::int32_t next = context.first_end(match.state) + 1;
    Guess& guess = request.proposal.guesses[0];
    guess.from = context.text() + next;
    guess.period = size - next;
    guess.count = std::min(limit, size - next);
    std::fill_n(probabilities, guess.count, 1.0f);
    return guess.count;
  }

  void learn(const Request::Proposal&, const Token*, std::int64_t) override {}

  bool drafts_what_pays() const noexcept override { return false; }

 private:
  const std::int32_t max_ngram_;
};

}  // namespace

std::unique_ptr<Drafter> Drafter::calibrated() { return std::make_unique<CalibratedDrafter>(); }

std::unique_ptr<Drafter> Drafter::prompt_lookup(std::int32_t max_ngram) {
  return std::make_unique<PromptLookupDrafter>(max_ngram);
}

}  // namespace fastdraft

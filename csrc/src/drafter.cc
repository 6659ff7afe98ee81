#include "fastdraft/drafter.h"

#include <algorithm>

namespace fastdraft {
namespace {

class CalibratedDrafter final : public Drafter {
 public:
  void advance(Request& request) const override {
    if (request.prediction && request.context.size() > request.prompt_size) {
      request.prediction->advance(request.context.text(), request.context.size(),
                                  request.prompt_size);
    }
  }

  std::int32_t guess(Request& request, std::int32_t limit, float* probabilities) const override {
    Request::Proposal& proposal = request.proposal;
    proposal.guesses[0] = from_context(request.context, limit);
    proposal.guesses[1] =
        request.prediction ? from_prediction(*request.prediction, limit) : Guess{};
    const bool predicted = proposal.guesses[1].count > 0 &&
                           promise(proposal.guesses[1]) >= promise(proposal.guesses[0]);
    proposal.chosen = predicted ? 1 : 0;
    const Guess& chosen = proposal.guesses[proposal.chosen];
    float path = 1.0f;
    for (std::int32_t i = 0; i < chosen.count; ++i) {
      path *= acceptance_.hazard(chosen.evidence, i);
      probabilities[i] = path;
    }
    return chosen.count;
  }

  void learn(const Request::Proposal& proposal, const Token* emitted, std::int64_t count) override {
    for (const Guess& guess : proposal.guesses) {
      const auto known = static_cast<std::int32_t>(std::min<std::int64_t>(guess.count, count));
      if (known == 0) continue;
      std::int32_t accepted = 0;
      while (accepted < known && guess[accepted] == emitted[accepted]) ++accepted;
      acceptance_.learn(guess.evidence, accepted, accepted < known);
    }
  }

  bool drafts_what_pays() const noexcept override { return true; }

 private:
  // The text that followed the latest earlier occurrence of its longest
  // repeated suffix. Where the copy reaches the text's end it goes on with
  // what it copied, as LZ77 does: a period repeats.
  static Guess from_context(const SuffixAutomaton& context, std::int32_t limit) noexcept {
    const Match match = context.repeated_suffix();
    if (match.length == 0) return {};
    const std::int32_t latest = context.latest_end(match.state) + 1;
    const std::int32_t first = context.first_end(match.state) + 1;
    const Token* text = context.text();
    const Agreement agreement = first == latest               ? Agreement::kSingle
                                : text[first] == text[latest] ? Agreement::kAgree
                                                              : Agreement::kDisagree;
    return {text + latest, static_cast<std::int32_t>(context.size()) - latest, limit,
            Source::kContext, Acceptance::context(match.length, agreement)};
  }

  static Guess from_prediction(const Prediction& prediction, std::int32_t limit) noexcept {
    const Prediction::Place place = prediction.place();
    const auto left = static_cast<std::int32_t>(prediction.size() - place.position);
    if (left == 0) return {};
    return {prediction.text() + place.position, left, std::min(limit, left), Source::kPrediction,
            Acceptance::prediction(place.length, place.footing)};
  }

  // The number of tokens that a guess is expected to have accepted.
  float promise(const Guess& guess) const noexcept {
    float path = 1.0f;
    float sum = 0.0f;
    for (std::int32_t i = 0; i < guess.count; ++i) {
      path *= acceptance_.hazard(guess.evidence, i);
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

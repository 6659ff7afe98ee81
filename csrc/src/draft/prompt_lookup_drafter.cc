#include <algorithm>

#include "draft/drafter.h"

namespace fastdraft {
namespace {

class PromptLookupDrafter final : public Drafter {
 public:
  PromptLookupDrafter(SuffixAutomaton& context, std::int32_t max_ngram)
      : Drafter(context), max_ngram_(max_ngram) {
    const std::int64_t size = context.size();
    for (std::int64_t i = std::max<std::int64_t>(0, size - max_ngram); i < size; ++i) {
      ngram_ = context.advance(ngram_, context.text()[i]);
    }
  }

  std::int32_t guess(std::int32_t limit, float, const RowOffers*,
                     const DraftColumns& draft) override {
    const auto size = static_cast<std::int32_t>(context().size());
    Match match = ngram_;
    while (match.length > 0 && context().first_end(match.state) == size - 1) {
      match = context().shorten(match, match.length - 1);
    }
    if (match.length == 0) return 0;
    const std::int32_t next = context().first_end(match.state) + 1;
    const std::int32_t count = std::min(limit, size - next);
    draft.write_chain(context().text() + next, count, Source::kContext);
    return count;
  }

 private:
  void advance() override {
    ngram_ = context().advance(context().renew(ngram_), context().text()[context().size() - 1]);
    ngram_ = context().shorten(ngram_, max_ngram_);
  }

  const std::int32_t max_ngram_;
  Match ngram_;  // the text's last tokens, max_ngram_ of them
};

}  // namespace

std::unique_ptr<Drafter> make_drafter(const PromptLookupConfig& config,
                                      const DrafterInputs& inputs) {
  return std::make_unique<PromptLookupDrafter>(inputs.context, config.max_ngram);
}

}  // namespace fastdraft

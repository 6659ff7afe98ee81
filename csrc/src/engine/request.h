// One generation: its text, who drafts for it, and what was last proposed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "draft/drafter.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/token.h"
#include "index/memory.h"
#include "index/suffix_automaton.h"
#include "policy/emission_rate.h"
#include "policy/offer_value.h"
#include "policy/output_lengths.h"
#include "store/running_texts.h"

namespace fastdraft {

// Not thread-safe; the engine locks each request.
struct Request {
  // An empty text, and room for drafts of `most_drafted` tokens. `initial_rate`
  // is the engine's. Throws MemoryLimitError.
  Request(std::int32_t most_drafted, double initial_rate, MemoryBudget& budget)
      : counted(budget, std::int64_t{sizeof(Request)} + DraftColumns::bytes(most_drafted)),
        context(budget),
        draft_memory(new std::byte[static_cast<std::size_t>(DraftColumns::bytes(most_drafted))]),
        draft(DraftColumns::in(draft_memory.get(), most_drafted)),
        rate(initial_rate) {}

  // Prompt and output, without the templates.
  std::int64_t size() const noexcept { return context.size() - templates_size; }
  const Token* text() const noexcept { return context.text() + templates_size; }

  // Prefetching short contexts gains nothing: they are in cache already. With 64 rows of 100,000
  // tokens, prefetching takes 0.9 of the time of a batch on an AMD EPYC; with 1,000 tokens it
  // gained nothing.
  bool is_far() const noexcept { return context.size() >= 8192; }

  OfferState& known_offers(OfferKinds& kinds) {
    if (offers == nullptr) offers = std::make_unique<OfferState>(kinds);
    return *offers;
  }

  const CountedBytes counted;  // it and its draft
  SuffixAutomaton context;     // the templates, and then prompt and output
  SuffixAutomaton::Approach approach{};
  std::int64_t templates_size = 0;
  std::int64_t prompt_size = 0;
  OutputLengths::Key prompt_key = 0;  // where the engine learns how long outputs are
  Stores stores;                      // those it was given, and then those that it only reads
  std::size_t num_entered = 0;        // the first n are those that its text enters
  std::vector<std::unique_ptr<RunningTexts::Text>>
      running;  // its text in these, but in frozen ones
  std::unique_ptr<Drafter> drafter;

  const std::unique_ptr<std::byte[]> draft_memory;
  const DraftColumns draft;
  std::optional<Proposal> proposal;  // until it is observed
  // A guess that was forgotten, though the text is still the same.
  std::optional<Proposal> kept;

  std::unique_ptr<OfferState> offers;  // null: there was none, and none was asked about

  EmissionRate rate;
  double paced = 0.0;  // the tokens of all steps that the rate counts
  double time = 0.0;   // of these steps; one without drafts takes 1
  DraftCounts counts;
};

}  // namespace fastdraft

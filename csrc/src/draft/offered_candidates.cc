#include "draft/offered_candidates.h"

#include <algorithm>
#include <limits>

namespace fastdraft {

void OfferedCandidates::begin(const RowOffers& offers) {
  offers_ = offers;
  candidates_.clear();
  for (std::size_t k = 0; k < static_cast<std::size_t>(offers.size); ++k) {
    const RowOffer& offer = offers.offers[k];
    Links& links = links_[k];
    links.first.assign(static_cast<std::size_t>(offer.count) + 1, -1);
    links.next.assign(static_cast<std::size_t>(offer.count), -1);
    // From the last one on, so that siblings are listed in their order.
    for (std::int32_t i = offer.count - 1; i >= 0; --i) {
      std::int32_t& first = links.first[static_cast<std::size_t>(offer.parent(i)) + 1];
      links.next[static_cast<std::size_t>(i)] = first;
      first = i;
    }
  }
}

OfferedCandidate::Places OfferedCandidates::root() const noexcept {
  OfferedCandidate::Places places = OfferedCandidate::nowhere();
  std::fill_n(places.begin(), offers_.size, -1);
  return places;
}

Candidates::Range OfferedCandidates::expand(const OfferedCandidate::Places& places,
                                            std::int32_t depth, const Candidates& all,
                                            Candidates::Range own) {
  const std::size_t first = candidates_.size();
  for (std::size_t c = own.first; c < own.last; ++c) {
    OfferedCandidate& candidate = candidates_.emplace_back();
    candidate.candidate = all[c];
    candidate.found = true;
  }
  for (std::size_t k = 0; k < static_cast<std::size_t>(offers_.size); ++k) {
    if (places[k] == OfferedCandidate::kNowhere) continue;
    weigh(k, places[k], depth, first);
  }
  return {first, candidates_.size()};
}

void OfferedCandidates::weigh(std::size_t k, std::int32_t node, std::int32_t depth,
                              std::size_t first) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const RowOffer& offer = offers_.offers[k];
  const Links& links = links_[k];
  std::int32_t child = links.first[static_cast<std::size_t>(node) + 1];
  if (child < 0) return;
  const std::size_t known = candidates_.size();
  // What an offered token is up against that is not among the candidates found without this offer.
  float rival = kNone;
  for (std::size_t c = first; c < known; ++c) {
    rival = std::max(rival, candidates_[c].candidate.weight);
  }
  float surest = std::numeric_limits<float>::quiet_NaN();
  for (; child >= 0; child = links.next[static_cast<std::size_t>(child)]) {
    const auto i = static_cast<std::size_t>(child);
    if (offer.confidences != nullptr && !(surest >= offer.confidences[i])) {
      surest = offer.confidences[i];
    }
    const Token token = offer.token_ids[i];
    auto place =
        std::find_if(candidates_.begin() + static_cast<std::ptrdiff_t>(first), candidates_.end(),
                     [&](const OfferedCandidate& other) { return other.candidate.token == token; });
    if (place == candidates_.end()) {
      place = candidates_.emplace(place);
      place->candidate = {token, 0.0f, {0, false, false}, {}, source_of(offer.kind), false, {}};
    }
    // Of equal siblings the first one counts.
    if (place->places[k] == OfferedCandidate::kNowhere) place->places[k] = child;
  }
  for (std::size_t c = first; c < candidates_.size(); ++c) {
    OfferedCandidate& each = candidates_[c];
    const float before = each.candidate.weight;
    const std::int32_t place = each.places[k];
    const bool offered = place >= 0;
    const float confidence = offered && offer.confidences != nullptr
                                 ? offer.confidences[static_cast<std::size_t>(place)]
                                 : surest;
    OfferedCandidate::Weighed& weighed = each.weighed[k];
    weighed.by_offer = true;
    weighed.before = before;
    weighed.evidence = OfferModel::evidence(
        {offered, c < known, before, rival != kNone, rival, confidence, depth}, *offer.record);
    each.candidate.weight = before + offer.model->weigh(weighed.evidence);
  }
}

void OfferedCandidates::learn(Candidates::Range following, Token emitted) noexcept {
  std::array<bool, static_cast<std::size_t>(kMostOffers)> offered{};
  std::array<bool, static_cast<std::size_t>(kMostOffers)> right{};
  for (std::size_t c = following.first; c < following.last; ++c) {
    const OfferedCandidate& each = candidates_[c];
    const bool accepted = each.candidate.token == emitted;
    for (std::size_t k = 0; k < static_cast<std::size_t>(offers_.size); ++k) {
      if (!each.weighed[k].by_offer) continue;
      offered[k] = true;
      right[k] = right[k] || (accepted && each.places[k] >= 0);
      offers_.offers[k].model->learn(each.weighed[k].evidence, each.weighed[k].before, accepted);
    }
  }
  for (std::size_t k = 0; k < static_cast<std::size_t>(offers_.size); ++k) {
    if (!offered[k]) continue;
    OfferRecord& record = *offers_.offers[k].record;
    constexpr float kDecay = 0.95f;  // the last twenty count
    record.judged = kDecay * record.judged + 1.0f;
    record.right = kDecay * record.right + (right[k] ? 1.0f : 0.0f);
  }
}

}  // namespace fastdraft

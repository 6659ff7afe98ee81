#include "draft/offered_candidates.h"

#include <algorithm>
#include <limits>

namespace fastdraft {

void OfferedCandidates::begin(const RowOffers& offers) {
  offers_ = offers;
  candidates_.clear();
  offered_.clear();
  nodes_.clear();
  Indices& root = nodes_.emplace_back();
  root.fill(kNotOffered);
  std::fill_n(root.begin(), offers.size, -1);
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

OfferedCandidates::Offered& OfferedCandidates::add(const Candidate& candidate) {
  candidates_.push_back(candidate);
  Offered& offered = offered_.emplace_back();
  offered.indices.fill(kNotOffered);
  return offered;
}

bool OfferedCandidates::add_node(std::size_t candidate) {
  nodes_.push_back(offered_[candidate].indices);
  return offered_[candidate].found;
}

Candidates::Range OfferedCandidates::expand(std::size_t node, std::int32_t depth,
                                            const Candidates& all, Candidates::Range own) {
  const std::size_t first = candidates_.size();
  for (std::size_t c = own.first; c < own.last; ++c) add(all[c]).found = true;
  for (std::size_t k = 0; k < static_cast<std::size_t>(offers_.size); ++k) {
    if (nodes_[node][k] != kNotOffered) weigh(k, nodes_[node][k], depth, first);
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
  // The best rival of an offered token that the others do not expect.
  float rival = kNone;
  for (std::size_t c = first; c < known; ++c) {
    rival = std::max(rival, candidates_[c].weight);
  }
  float surest = std::numeric_limits<float>::quiet_NaN();
  for (; child >= 0; child = links.next[static_cast<std::size_t>(child)]) {
    const auto i = static_cast<std::size_t>(child);
    if (offer.confidences != nullptr && !(surest >= offer.confidences[i])) {
      surest = offer.confidences[i];
    }
    const Token token = offer.token_ids[i];
    const auto same =
        std::find_if(candidates_.begin() + static_cast<std::ptrdiff_t>(first), candidates_.end(),
                     [&](const Candidate& other) { return other.token == token; });
    const auto c = static_cast<std::size_t>(same - candidates_.begin());
    if (same == candidates_.end()) {
      add({token, 0.0f, {0, false, false}, {}, source_of(offer.kind), false, {}});
    }
    // Among equal siblings the first one counts.
    std::int32_t& index = offered_[c].indices[k];
    if (index == kNotOffered) index = child;
  }
  for (std::size_t c = first; c < candidates_.size(); ++c) {
    const float before = candidates_[c].weight;
    const std::int32_t index = offered_[c].indices[k];
    const bool offered = index >= 0;
    const float confidence = offered && offer.confidences != nullptr
                                 ? offer.confidences[static_cast<std::size_t>(index)]
                                 : surest;
    Offered::Weighed& weighed = offered_[c].weighed[k];
    weighed.by_offer = true;
    weighed.before = before;
    weighed.evidence = OfferModel::evidence(
        {offered, c < known, before, rival != kNone, rival, confidence, depth}, *offer.record);
    candidates_[c].weight = before + offer.model->weigh(weighed.evidence);
  }
}

void OfferedCandidates::learn(Candidates::Range following, Token emitted) noexcept {
  std::array<bool, static_cast<std::size_t>(kMostOffers)> offered{};
  std::array<bool, static_cast<std::size_t>(kMostOffers)> right{};
  for (std::size_t c = following.first; c < following.last; ++c) {
    const Offered& each = offered_[c];
    const bool accepted = candidates_[c].token == emitted;
    for (std::size_t k = 0; k < static_cast<std::size_t>(offers_.size); ++k) {
      if (!each.weighed[k].by_offer) continue;
      offered[k] = true;
      right[k] = right[k] || (accepted && each.indices[k] >= 0);
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

// The offers for one request's next step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "fastdraft/offers.h"
#include "fastdraft/token.h"
#include "policy/offer_model.h"

namespace fastdraft {

// One kind's offer: checked, and not empty.
struct RowOffer {
  OfferKind kind;
  OfferModel* model;
  OfferRecord* record;  // the request's
  std::int32_t count;
  const Token* token_ids;
  const std::int32_t* parents;  // null: a chain
  const float* confidences;     // null: none
  bool drawn;

  std::int32_t parent(std::int32_t i) const noexcept {
    return parents == nullptr ? i - 1 : parents[i];
  }
};

struct RowOffers {
  std::array<RowOffer, static_cast<std::size_t>(kMostOffers)> offers;
  int size = 0;

  // The index of the offer that has to be drafted as it is; `size`: there is none.
  int drawn() const noexcept {
    return static_cast<int>(
        std::find_if(begin(), end(), [](const RowOffer& each) { return each.drawn; }) - begin());
  }
  const RowOffer* begin() const noexcept { return offers.data(); }
  const RowOffer* end() const noexcept { return offers.data() + size; }
};

}  // namespace fastdraft

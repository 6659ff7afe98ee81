// Guesses that others make: a neural drafter's tokens, for example.
#pragma once

#include <cstdint>

#include "fastdraft/draft.h"
#include "fastdraft/token.h"

namespace fastdraft {

// Who made an offer, such as "eagle": an engine's number for a name.
using OfferKind = std::int32_t;

// The most kinds of an engine, and the most offers of one call, each of another kind.
inline constexpr OfferKind kMostOfferKinds = 16;
inline constexpr std::int64_t kMostOffers = 4;
// The most tokens of one row's offer.
inline constexpr std::int64_t kMostOffered = 1024;

// The source of a token that only an offer of this kind expected.
constexpr Source source_of(OfferKind kind) noexcept {
  return static_cast<Source>(static_cast<std::uint8_t>(Source::kOffer) + kind);
}

// The guesses of one kind of drafter for the rows of a batch, a tree of tokens for each row: row
// r's tokens are offsets[r] to offsets[r + 1] - 1. A row without any has no offer. The arrays are
// read during the call that they are passed to, and not afterwards.
struct Offers {
  OfferKind kind = 0;  // see Engine::offer_kind
  const std::int64_t* offsets = nullptr;
  const Token* token_ids = nullptr;
  // A token's parent is its predecessor's index in the row, before its own, or -1 for the last
  // token of the request's text. Null: each row is a chain.
  const std::int32_t* parents = nullptr;
  // How sure the drafter is of each token where those before it are right, from 0 to 1. What that
  // is worth is learned, so it need not be calibrated. Null: it does not say.
  const float* confidences = nullptr;
  // The time to make them, for all rows together: in the unit of the cost curve, or, at a
  // constant token cost, as a part of a step without drafts.
  double time = 0.0;
  // True if the drafter drew each token at random from its distribution, to be verified against
  // that. Then a row with such an offer, a chain, drafts just that: to choose among drawn tokens
  // would bias the output.
  bool drawn = false;
};

}  // namespace fastdraft

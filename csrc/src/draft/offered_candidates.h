// The tokens that may follow the nodes of one draft, weighed with what others offer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft/candidates.h"
#include "draft/row_offers.h"

namespace fastdraft {

// A candidate whose weight counts the offers too.
struct OfferedCandidate {
  // Where each offer has this token, if the path to it is offered: its index in the offer.
  using Places = std::array<std::int32_t, static_cast<std::size_t>(kMostOffers)>;
  static constexpr std::int32_t kNowhere = -2;
  static constexpr Places nowhere() noexcept {
    Places places{};
    for (std::int32_t& place : places) place = kNowhere;
    return places;
  }

  // What an offer said of it, and its weight before.
  struct Weighed {
    bool by_offer = false;
    float before;
    OfferModel::Evidence evidence;
  };

  Candidate candidate;
  bool found = false;  // whether the engine found it itself
  Places places = nowhere();
  std::array<Weighed, static_cast<std::size_t>(kMostOffers)> weighed;
};

// Every offer in turn corrects the weights that came of the engine's evidence and of the offers
// before it, and adds the tokens that only it expects.
//
// Not thread-safe.
class OfferedCandidates {
 public:
  // Begins a draft.
  void begin(const RowOffers& offers);

  // Weighs the tokens that may follow a node, `depth` tokens below the root: what the engine found,
  // candidates own.first .. own.last - 1 of `all`, and the children of `places` in the offers.
  Candidates::Range expand(const OfferedCandidate::Places& places, std::int32_t depth,
                           const Candidates& all, Candidates::Range own);

  // The root's places.
  OfferedCandidate::Places root() const noexcept;

  const OfferedCandidate& operator[](std::size_t i) const noexcept { return candidates_[i]; }

  // Learns from the token that the target emitted after a node with these candidates.
  void learn(Candidates::Range following, Token emitted) noexcept;

 private:
  // The children of a node of an offer are a list of siblings.
  struct Links {
    std::vector<std::int32_t> first;  // of the root, and then of each token; -1: none
    std::vector<std::int32_t> next;
  };

  void weigh(std::size_t k, std::int32_t node, std::int32_t depth, std::size_t first);

  RowOffers offers_;
  std::array<Links, static_cast<std::size_t>(kMostOffers)> links_;
  std::vector<OfferedCandidate> candidates_;
};

}  // namespace fastdraft

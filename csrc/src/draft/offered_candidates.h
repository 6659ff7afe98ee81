// The tokens that may follow the nodes of one draft, weighed with what others offer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft/candidates.h"
#include "draft/row_offers.h"

namespace fastdraft {

// Every offer in turn corrects the weights that follow from the engine's evidence and from the
// offers before it, and adds the tokens that only it expects. For example, the engine expects 5,
// and an offer 5 and 8: 5 is a candidate whose weight counts both, 8 one that the engine did not
// find.
//
// Not thread-safe.
class OfferedCandidates {
 public:
  // Begins a draft: its root is the first node.
  void begin(const RowOffers& offers);

  // Weighs the tokens that may follow a node, `depth` tokens below the root: what the engine found,
  // candidates own.first .. own.last - 1 of `all`, and the children of the node in the offers.
  Candidates::Range expand(std::size_t node, std::int32_t depth, const Candidates& all,
                           Candidates::Range own);

  // Makes a candidate the next node. Returns whether the engine found it itself.
  bool add_node(std::size_t candidate);

  // Valid until the next call of `expand`.
  const Candidate* data() const noexcept { return candidates_.data(); }

  // Learns from the token that the target emitted after a node with these candidates.
  void learn(Candidates::Range following, Token emitted) noexcept;

 private:
  // The index of a node in each offer, if the path to it is offered; of the root -1.
  using Indices = std::array<std::int32_t, static_cast<std::size_t>(kMostOffers)>;
  static constexpr std::int32_t kNotOffered = -2;

  // The offers' evidence for a candidate.
  struct Offered {
    // An offer's evidence, and the weight before it.
    struct Weighed {
      bool by_offer = false;
      float before;
      OfferModel::Evidence evidence;
    };

    bool found = false;  // whether the engine found it itself
    Indices indices;
    std::array<Weighed, static_cast<std::size_t>(kMostOffers)> weighed;
  };

  // The children of a node of an offer are a list of siblings.
  struct Links {
    std::vector<std::int32_t> first;  // of the root, and then of each token; -1: none
    std::vector<std::int32_t> next;
  };

  Offered& add(const Candidate& candidate);
  void weigh(std::size_t k, std::int32_t node, std::int32_t depth, std::size_t first);

  RowOffers offers_;
  std::array<Links, static_cast<std::size_t>(kMostOffers)> links_;
  std::vector<Candidate> candidates_;
  std::vector<Offered> offered_;  // beside candidates_
  std::vector<Indices> nodes_;
};

}  // namespace fastdraft

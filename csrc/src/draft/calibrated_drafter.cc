#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "draft/candidates.h"
#include "draft/copy_cursor.h"
#include "draft/drafter.h"
#include "draft/matched_texts.h"
#include "draft/offered_candidates.h"
#include "draft/prediction.h"
#include "policy/acceptance_model.h"

namespace fastdraft {
namespace {

// Weighs what followed the text's last tokens wherever they occur, in its own text, in the
// prediction and in the datastores, and drafts the tokens that are most likely to be accepted. How
// they are put together, `grow` decides. Offered tokens enter the list of choices as those that the
// drafter found itself.
class CalibratedDrafter : public Drafter {
 public:
  // `bytes`: the size of the object. `tree`: whether drafts are trees.
  CalibratedDrafter(const CalibratedConfig& config, const DrafterInputs& inputs, std::size_t bytes,
                    bool tree)
      : Drafter(inputs.context),
        counted_(inputs.budget, static_cast<std::int64_t>(bytes)),
        lookahead_(inputs.lookahead),
        tree_(tree),
        acceptance_(*inputs.acceptance),
        weights_(inputs.weights),
        matches_(inputs, tree_),
        ngrams_(config.ngrams),
        candidates_(acceptance_, weights_.get(), ngrams_.get(), matches_, tree_, inputs.budget),
        nodes_(CountedAllocator<DraftNode>(inputs.budget)) {
    // A request that was taken can be drafted for, whatever others take since.
    nodes_.resize(static_cast<std::size_t>(std::min(lookahead_, kFirstNodes)) + 1);
    if (inputs.prediction_size > 0) {
      prediction_.emplace(inputs.prediction, inputs.prediction_size, inputs.budget);
    }
  }

  bool approach(int step) override { return matches_.approach(step); }

  std::int32_t guess(std::int32_t limit, float least, const RowOffers* offers,
                     const DraftColumns& draft) final {
    begin(limit);
    begin_offers(offers, least);
    expand(0);
    if (offers != nullptr && offers->drawn() < offers->size) {
      return follow(offers->offers[static_cast<std::size_t>(offers->drawn())], limit, draft);
    }
    return grow(limit, least, draft);
  }

 protected:
  // A token of the draft. The root stands for the text, and has its last token.
  struct DraftNode {
    std::int32_t parent;
    Token token;
    std::int32_t depth;   // the tokens of the draft that lead to it, itself included
    float path;           // the product of the probabilities of these tokens
    float probability;    // that all of them are accepted
    Agreement agreement;  // of the sources with its path
    Candidates::Range following = {0, 0};  // those that were found,
    Candidates::Range choices = {0, 0};    // and those that may be drafted: offered ones too
    bool refused = false;                  // it, or a token before it
  };

  // Drafts from the choices at the root on, and returns the number of tokens. `expand` finds the
  // choices at a node, `draft_choice` makes one of them a node.
  virtual std::int32_t grow(std::int32_t limit, float least, const DraftColumns& draft) = 0;

  // Finds what may follow a node.
  void expand(std::size_t at) {
    DraftNode& node = nodes_[at];
    const auto above = static_cast<std::size_t>(node.parent);
    const Token second = at == 0 ? text_token(1) : nodes_[above].token;
    if (ngrams_ != nullptr) {
      const Token third = at == 0 ? text_token(2)
                          : above == 0
                              ? text_token(1)
                              : nodes_[static_cast<std::size_t>(nodes_[above].parent)].token;
      candidates_.precede({node.token, second, third});
    }
    node.following = candidates_.expand(node.depth, node.agreement, node.token, second);
    if (offered_ == nullptr) {
      node.choices = node.following;
      choices_ = candidates_.data();
    } else {
      node.choices = offered_->expand(at, node.depth, candidates_, node.following);
      choices_ = offered_->data();
    }
  }

  // The probability that a token below this node is accepted, with all before it.
  float probability_below(const DraftNode& node, float path) const noexcept {
    return std::min(node.probability, acceptance_.path_probability(node.depth, path, tree_));
  }

  // Makes a choice the next node, and writes it as the next token of the draft unless it is less
  // probable than `least`. Returns whether it is drafted.
  bool draft_choice(std::size_t parent, std::size_t chosen, float path, float least,
                    const DraftColumns& draft) {
    const float probability = probability_below(nodes_[parent], path);
    return draft_choice(parent, chosen, path, probability, least, draft);
  }
  // The same for a choice whose probability is known.
  bool draft_choice(std::size_t parent, std::size_t chosen, float path, float probability,
                    float least, const DraftColumns& draft) {
    const Candidate& next = choices_[chosen];
    const auto above = static_cast<std::int32_t>(parent);
    // Field by field: a temporary is copied by wide loads, which wait for the stores of its fields.
    // That took a fifth of a proposal.
    DraftNode& node = nodes_[num_nodes_];
    node.parent = above;
    node.token = next.token;
    node.depth = nodes_[parent].depth + 1;
    node.path = path;
    node.probability = probability;
    node.agreement = next.agreement;
    node.following = node.choices = {0, 0};
    node.refused = false;
    num_weighed_ = num_nodes_ + 1;
    if (probability < least) return false;
    const std::size_t index = num_nodes_++ - 1;
    draft.token_ids[index] = next.token;
    draft.parents[index] = above - 1;
    draft.probabilities[index] = probability;
    draft.sources[index] = next.source;
    if (offered_ != nullptr && !offered_->add_node(chosen)) candidates_.leave();
    return true;
  }

  // Returns whether offers are among the choices of this guess.
  bool offers_weigh() const noexcept { return offered_ != nullptr; }

  std::int32_t lookahead() const noexcept { return lookahead_; }
  const DraftNode& node(std::size_t i) const noexcept { return nodes_[i]; }
  const Candidate& choice(std::size_t i) const noexcept { return choices_[i]; }
  // How many nodes from this depth on have one choice that weighs what the last one does.
  std::int32_t alike(std::int32_t depth) const noexcept { return candidates_.alike(depth); }
  // Finds what may follow the first of these nodes, as `expand` does.
  void repeat_alike(std::int32_t depth) noexcept {
    DraftNode& node = nodes_[static_cast<std::size_t>(depth)];
    node.following = node.choices = candidates_.repeat_alike(depth);
  }

 private:
  static constexpr std::int32_t kShortestJump = 4;
  static constexpr std::int32_t kFirstNodes = 64;

  void advance() final {
    // A short repeated suffix occurs in many positions, which are all weighed: no reason to follow
    // the text from one of them.
    CopyCursor::Continuation elsewhere;
    const Match match = context().repeated_suffix();
    if (match.length >= kShortestJump) {
      elsewhere.position = context().latest_end(match.state) + 1;
      elsewhere.length = match.length;
    }
    const Token* const text = context().text();
    const std::int64_t size = context().size();
    copy_.advance(text, static_cast<std::int32_t>(size) - 1, text, size, elsewhere);
    if (prediction_) prediction_->advance(text, size);
  }

  std::int32_t learn(TokenSpan observed) final {
    learn_paths(observed);
    const AcceptanceModel::Version begun = acceptance_.now();
    visit_path(observed, [&](std::size_t node, Token next) {
      learn_of(nodes_[node].following, next, begun);
    });
    if (offered_ == nullptr) return 0;
    std::int32_t without_offers = 0;
    float path = 1.0f;
    visit_path(observed, [&](std::size_t node, Token next) {
      path = follow_without_offers(nodes_[node], path, next);
      without_offers += path > 0.0f ? 1 : 0;
      offered_->learn(nodes_[node].choices, next);
    });
    return without_offers;
  }

  // Learns which tokens of the draft were accepted, as far as the emitted ones reach.
  void learn_paths(TokenSpan observed) noexcept {
    for (std::size_t n = 1; n < num_weighed_; ++n) {
      DraftNode& node = nodes_[n];
      const bool is_known = node.depth <= observed.size;
      node.refused = nodes_[static_cast<std::size_t>(node.parent)].refused ||
                     (is_known && node.token != observed.token_ids[node.depth - 1]);
      if (node.refused || is_known) {
        acceptance_.learn_path(node.depth - 1, node.path, tree_, !node.refused);
      }
    }
  }

  // Visits the nodes of the draft that the target followed, from the root on, each with the token
  // that it emitted there. `learn_paths` has compared them.
  template <typename Visit>
  void visit_path(TokenSpan observed, Visit visit) {
    std::size_t node = 0;
    for (std::int32_t depth = 0; depth < observed.size; ++depth) {
      visit(node, observed.token_ids[depth]);
      do {
        ++node;
        if (node >= num_nodes_) return;
      } while (nodes_[node].refused || nodes_[node].depth != depth + 1);
    }
  }

  // Learns which of one node's candidates was emitted. `begun`: when the step began to be learned.
  void learn_of(Candidates::Range following, Token emitted,
                AcceptanceModel::Version begun) noexcept {
    struct Sampled {
      std::size_t candidate;
      AcceptanceModel::Outcome outcome;
    };
    std::array<Sampled, Candidates::kMost> sampled;
    std::size_t count = 0;
    // If nothing has been learned since the guess, the weights are the same.
    const bool unchanged = acceptance_.now() == version_;
    for (std::size_t c = following.first; c < following.last; ++c) {
      const Candidate& candidate = candidates_[c];
      const bool accepted = candidate.token == emitted;
      const int times = sample_.next(candidate.weight, accepted);
      if (times == 0) continue;
      const float predicted = AcceptanceModel::probability(candidate.weight);
      const float current =
          unchanged ? predicted : AcceptanceModel::probability(candidates_.weight_now(c));
      sampled[count++] = {c, {accepted, predicted, current, times}};
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto& [c, outcome] = sampled[i];
      const Candidate& candidate = candidates_[c];
      const float step =
          acceptance_.learn(candidate.evidence, candidate.token, version_, begun, outcome);
      const AcceptanceModel::NgramEvidence* ngrams = candidates_.ngram_evidence(c);
      if (ngrams != nullptr) acceptance_.learn(*ngrams, step);
      if (candidate.named) {
        const float observed = outcome.accepted ? 1.0f : 0.0f;
        weights_->learn(candidate.names,
                        static_cast<float>(outcome.times) * (observed - outcome.current));
      }
    }
  }

  // Goes on along the path that a guess without offers would share with the target. Returns the
  // path's probability with the emitted token; 0: that guess would not have held it.
  float follow_without_offers(const DraftNode& node, float path, Token emitted) const noexcept {
    const Candidates::Range following = node.following;
    const Candidate* same = nullptr;
    float best = 0.0f;
    for (std::size_t c = following.first; c < following.last; ++c) {
      const Candidate& candidate = candidates_[c];
      if (candidate.token == emitted) same = &candidate;
      best = c == following.first ? candidate.weight : std::max(best, candidate.weight);
    }
    if (same == nullptr || (!tree_ && same->weight < best)) return 0.0f;
    path *= AcceptanceModel::probability(same->weight);
    return acceptance_.path_probability(node.depth, path, tree_) < least_ ? 0.0f : path;
  }

  // The token that stands `before` tokens before the text's last one; -1: there is none.
  Token text_token(std::int64_t before) const noexcept {
    return context().size() > before ? context().text()[context().size() - 1 - before] : -1;
  }

  // Finds what may follow the text, for a guess of at most `limit` tokens.
  void begin(std::int32_t limit) {
    version_ = acceptance_.now();
    matches_.find();
    ExpectedText expected;
    if (prediction_) {
      expected =
          ExpectedText(prediction_->continuation(), prediction_->text(), prediction_->size());
    }
    const ExpectedText copy(copy_.continuation(), context().text(), context().size());
    if (nodes_.size() <= static_cast<std::size_t>(limit)) {
      nodes_.resize(static_cast<std::size_t>(limit) + 1);
    }
    nodes_[0] = {-1, text_token(0), 0, 1.0f, 1.0f, candidates_.begin(copy, expected)};
    num_nodes_ = 1;
    num_weighed_ = 1;
  }

  // `offers` may be null.
  void begin_offers(const RowOffers* offers, float least) {
    offered_ = nullptr;
    if (offers == nullptr) return;
    if (offers_ == nullptr) offers_ = std::make_unique<OfferedCandidates>();
    offered_ = offers_.get();
    offered_->begin(*offers);
    least_ = least;
  }

  // Drafts an offer as it is.
  std::int32_t follow(const RowOffer& offer, std::int32_t limit, const DraftColumns& draft) {
    limit = std::min(limit, lookahead_);
    float path = 1.0f;
    std::int32_t count = 0;
    while (count < std::min(limit, offer.count)) {
      const auto node = static_cast<std::size_t>(count);
      std::size_t chosen = nodes_[node].choices.first;
      while (choices_[chosen].token != offer.token_ids[count]) ++chosen;
      path *= AcceptanceModel::probability(choices_[chosen].weight);
      draft_choice(node, chosen, path, 0.0f, draft);
      if (++count < limit) expand(node + 1);
    }
    return count;
  }

  const CountedBytes counted_;
  const std::int32_t lookahead_;
  const bool tree_;
  AcceptanceModel& acceptance_;
  const std::shared_ptr<TokenWeights> weights_;  // null: none
  AcceptanceModel::Sample sample_;
  CopyCursor copy_{-1};  // follows what the output copies from the text itself
  std::optional<Prediction> prediction_;
  MatchedTexts matches_;
  const std::shared_ptr<const NgramTable> ngrams_;  // null: none

  // The last guess, until the next one, and when it was made.
  AcceptanceModel::Version version_ = 0;
  Candidates candidates_;
  const Candidate* choices_ = nullptr;  // those of the nodes: of candidates_, or of offered_
  // The first num_nodes_ are the guess.
  std::vector<DraftNode, CountedAllocator<DraftNode>> nodes_;
  std::size_t num_nodes_ = 0;
  std::size_t num_weighed_ = 0;  // the same with the token that was too improbable for a chain
  OfferedCandidates* offered_ = nullptr;       // null: the guess has no offers
  float least_ = 0.0f;                         // of a guess with offers
  std::unique_ptr<OfferedCandidates> offers_;  // null: there have been none
};

// Drafts the most probable choice, and on from there.
class ChainDrafter final : public CalibratedDrafter {
 public:
  ChainDrafter(const CalibratedConfig& config, const DrafterInputs& inputs)
      : CalibratedDrafter(config, inputs, sizeof(ChainDrafter), false) {}

 protected:
  std::int32_t grow(std::int32_t limit, float least, const DraftColumns& draft) override {
    limit = std::min(limit, lookahead());
    std::int32_t count = 0;
    float path = 1.0f;
    float weight = 0.0f;
    float probability = 0.0f;
    while (count < limit) {
      const Candidates::Range next = node(static_cast<std::size_t>(count)).choices;
      if (next.first == next.last) break;
      std::size_t best = next.first;
      float heaviest = choice(best).weight;
      for (std::size_t c = next.first + 1; c < next.last; ++c) {
        if (choice(c).weight <= heaviest) continue;
        best = c;
        heaviest = choice(c).weight;
      }
      // In a long copy most tokens weigh the same.
      if (count == 0 || heaviest != weight) {
        weight = heaviest;
        probability = AcceptanceModel::probability(weight);
      }
      path *= probability;
      if (!draft_choice(static_cast<std::size_t>(count), best, path, least, draft)) break;
      ++count;
      if (!offers_weigh() && !draft_alike(limit, least, probability, &path, &count, draft)) break;
      if (count < limit) expand(static_cast<std::size_t>(count));
    }
    return count;
  }

 private:
  // Goes on with the tokens of a run that all are as likely as the one before. Returns whether the
  // chain goes on after them.
  bool draft_alike(std::int32_t limit, float least, float probability, float* path,
                   std::int32_t* count, const DraftColumns& draft) {
    const std::int32_t end = std::min(limit, *count + alike(*count));
    for (; *count < end; ++*count) {
      const auto parent = static_cast<std::size_t>(*count);
      repeat_alike(*count);
      *path *= probability;
      if (!draft_choice(parent, node(parent).choices.first, *path, least, draft)) return false;
    }
    return true;
  }
};

// Drafts the choices that are most likely to be accepted anywhere in the tree, best first.
class TreeDrafter final : public CalibratedDrafter {
 public:
  TreeDrafter(const CalibratedConfig& config, const DrafterInputs& inputs)
      : CalibratedDrafter(config, inputs, sizeof(TreeDrafter), true),
        waiting_(CountedAllocator<Waiting>(inputs.budget)) {}

 private:
  // A choice that may be drafted next.
  struct Waiting {
    float path;
    float probability;
    std::uint32_t chosen;
    std::uint32_t parent;
    // Among equals the first comes first.
    bool operator<(const Waiting& other) const noexcept {
      return probability != other.probability ? probability < other.probability
                                              : chosen > other.chosen;
    }
  };

 protected:
  std::int32_t grow(std::int32_t limit, float least, const DraftColumns& draft) override {
    waiting_.clear();
    std::int32_t count = 0;
    while (count < limit) {
      const auto drafted = static_cast<std::size_t>(count);
      Waiting best = kNone;
      if (node(drafted).depth < lookahead()) {
        if (drafted > 0) expand(drafted);
        best = best_below(drafted, least);
      }
      if (!waiting_.empty() && best < waiting_.front()) {
        std::pop_heap(waiting_.begin(), waiting_.end());
        std::swap(best, waiting_.back());
        if (waiting_.back().probability < 0.0f) {
          waiting_.pop_back();
        } else {
          std::push_heap(waiting_.begin(), waiting_.end());
        }
      }
      if (best.probability < 0.0f) break;
      draft_choice(best.parent, best.chosen, best.path, best.probability, least, draft);
      ++count;
    }
    return count;
  }

 private:
  static constexpr Waiting kNone{0.0f, -1.0f, 0, 0};

  // The best of the choices at a node; kNone: none is as probable as `least`. The others wait.
  // Mostly the best is drafted next, so it would wait for nothing.
  Waiting best_below(std::size_t parent, float least) {
    const DraftNode& above = node(parent);
    Waiting best = kNone;
    for (std::size_t c = above.choices.first; c < above.choices.last; ++c) {
      const float path = above.path * AcceptanceModel::probability(choice(c).weight);
      Waiting each{path, probability_below(above, path), static_cast<std::uint32_t>(c),
                   static_cast<std::uint32_t>(parent)};
      if (each.probability < least) continue;
      if (best < each) std::swap(best, each);
      if (each.probability < 0.0f) continue;
      waiting_.push_back(each);
      std::push_heap(waiting_.begin(), waiting_.end());
    }
    return best;
  }

  std::vector<Waiting, CountedAllocator<Waiting>> waiting_;
};

}  // namespace

std::unique_ptr<Drafter> make_drafter(const CalibratedConfig& config, const DrafterInputs& inputs) {
  if (config.tree_budget) return std::make_unique<TreeDrafter>(config, inputs);
  return std::make_unique<ChainDrafter>(config, inputs);
}

}  // namespace fastdraft

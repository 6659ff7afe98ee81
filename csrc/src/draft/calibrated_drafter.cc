#include <algorithm>
#include <array>
#include <cstddef>
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
// prediction and in the datastores, and drafts the tokens that are most likely to be accepted: a
// chain, or a tree.
class CalibratedDrafter final : public Drafter {
 public:
  CalibratedDrafter(const CalibratedConfig& config, const DrafterInputs& inputs)
      : counted_(inputs.budget, sizeof(CalibratedDrafter)),
        context_(inputs.context),
        lookahead_(inputs.lookahead),
        tree_(config.tree_budget.has_value()),
        acceptance_(*inputs.acceptance),
        weights_(inputs.weights),
        matches_(inputs, tree_),
        ngrams_(config.ngrams),
        candidates_(acceptance_, weights_.get(), ngrams_.get(), matches_, tree_, inputs.budget),
        nodes_(CountedAllocator<DraftNode>(inputs.budget)),
        waiting_(CountedAllocator<Waiting>(inputs.budget)) {
    // A request that was taken can be drafted for, whatever others take since.
    nodes_.resize(static_cast<std::size_t>(std::min(lookahead_, kFirstNodes)) + 1);
    if (inputs.prediction_size > 0) {
      prediction_.emplace(inputs.prediction, inputs.prediction_size, inputs.budget);
    }
  }

  void advance() override {
    // A short repeated suffix occurs in many places, which are all weighed: no reason to follow
    // the text from one of them.
    CopyCursor::Place elsewhere;
    const Match match = context_.repeated_suffix();
    if (match.length >= kShortestJump) {
      elsewhere.position = context_.latest_end(match.state) + 1;
      elsewhere.length = match.length;
    }
    copy_.advance(context_.text(), static_cast<std::int32_t>(context_.size()) - 1, context_.text(),
                  context_.size(), elsewhere);
    if (prediction_) prediction_->advance(context_.text(), context_.size());
  }

  bool approach(int step) override { return matches_.approach(step); }

  std::int32_t guess(std::int32_t limit, float least, const RowOffers* offers,
                     const DraftColumns& draft) override {
    with_offers_ = offers != nullptr;
    begin(limit);
    if (offers != nullptr) begin_offers(*offers, least);
    expand(0);
    if (offers != nullptr && offers->drawn() < offers->size) {
      return follow(offers->offers[static_cast<std::size_t>(offers->drawn())], limit, draft);
    }
    return tree_ ? grow_tree(limit, least, draft) : grow_chain(limit, least, draft);
  }

  void learn(const Token* emitted, std::int64_t count) override {
    if (with_offers_) offered_->accepted_without = 0;
    learn_paths(emitted, count);
    const AcceptanceModel::Moment begun = acceptance_.now();
    float path = 1.0f;  // without offers
    std::size_t node = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (with_offers_) path = follow_without_offers(nodes_[node], path, emitted[i]);
      learn_of(nodes_[node].following, emitted[i], begun);
      if (with_offers_) offered_->candidates.learn(offered_->nodes[node].following, emitted[i]);
      std::size_t child = node + 1;
      while (child < num_nodes_ && (nodes_[child].parent != static_cast<std::int32_t>(node) ||
                                    nodes_[child].token != emitted[i])) {
        ++child;
      }
      if (child == num_nodes_) return;
      node = child;
    }
  }

  std::int32_t accepted_without_offers() const override {
    return offered_ == nullptr ? 0 : offered_->accepted_without;
  }

 private:
  static constexpr std::int32_t kShortestJump = 4;
  static constexpr std::int32_t kFirstNodes = 64;

  // A token of the draft. The root stands for the text, and has its last token.
  struct DraftNode {
    std::int32_t parent;
    Token token;
    std::int32_t depth;   // how many tokens of the draft lead to it, itself included
    float path;           // the product of the chances of the tokens that lead to it
    float chance;         // that all of them are accepted
    Agreement agreement;  // of the sources with its path
    Candidates::Range following;
    bool refused = false;  // it, or a token before it
  };

  // A candidate that may be drafted next.
  struct Waiting {
    float path;
    float chance;
    std::size_t candidate;
    std::size_t parent;
    // Of equals the first comes first.
    bool operator<(const Waiting& other) const noexcept {
      return chance != other.chance ? chance < other.chance : candidate > other.candidate;
    }
  };

  // Learns which tokens of the draft were accepted, as far as the emitted ones tell.
  void learn_paths(const Token* emitted, std::int64_t count) noexcept {
    for (std::size_t n = 1; n < num_weighed_; ++n) {
      DraftNode& node = nodes_[n];
      const bool is_told = node.depth <= count;
      node.refused = nodes_[static_cast<std::size_t>(node.parent)].refused ||
                     (is_told && node.token != emitted[node.depth - 1]);
      if (node.refused || is_told) {
        acceptance_.learn_path(node.depth - 1, node.path, !node.refused);
      }
    }
  }

  // Learns which of one node's candidates was emitted. `begun`: when the step began to be learned.
  void learn_of(Candidates::Range following, Token emitted,
                AcceptanceModel::Moment begun) noexcept {
    struct Lesson {
      std::size_t candidate;
      AcceptanceModel::Outcome outcome;
    };
    std::array<Lesson, Candidates::kMost> lessons;
    std::size_t count = 0;
    // Where nothing has been learned since the guess, all weigh what they did.
    const bool unchanged = acceptance_.now() == moment_;
    for (std::size_t c = following.first; c < following.last; ++c) {
      const Candidate& candidate = candidates_[c];
      const bool accepted = candidate.token == emitted;
      const int times = sample_.next(candidate.weight, accepted);
      if (times == 0) continue;
      const float predicted = AcceptanceModel::chance(candidate.weight);
      const float current =
          unchanged ? predicted : AcceptanceModel::chance(candidates_.weight_now(c));
      lessons[count++] = {c, {accepted, predicted, current, times}};
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto& [c, outcome] = lessons[i];
      const Candidate& candidate = candidates_[c];
      const float step =
          acceptance_.learn(candidate.evidence, candidate.token, moment_, begun, outcome);
      const AcceptanceModel::NgramEvidence* ngrams = candidates_.ngram_evidence(c);
      if (ngrams != nullptr) acceptance_.learn(*ngrams, step);
      if (candidate.named) {
        const float came = outcome.accepted ? 1.0f : 0.0f;
        weights_->learn(candidate.names,
                        static_cast<float>(outcome.times) * (came - outcome.current));
      }
    }
  }

  // What a draft with offers holds besides, once there has been one.
  struct OfferedDraft {
    struct Node {
      OfferedCandidate::Places places;
      Candidates::Range following;
    };

    float least = 0.0f;
    std::int32_t accepted_without = 0;
    OfferedCandidates candidates;
    std::vector<Node> nodes;  // beside nodes_
  };

  void begin_offers(const RowOffers& offers, float least) {
    if (offered_ == nullptr) offered_ = std::make_unique<OfferedDraft>();
    offered_->least = least;
    offered_->candidates.begin(offers);
    offered_->nodes.clear();
    offered_->nodes.push_back({offered_->candidates.root(), {0, 0}});
  }

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
    if (!with_offers_) return;
    OfferedDraft::Node& offered = offered_->nodes[at];
    offered.following =
        offered_->candidates.expand(offered.places, node.depth, candidates_, node.following);
  }

  // The candidates that may follow a node, offered ones too.
  Candidates::Range choices_at(std::size_t node) const noexcept {
    return with_offers_ ? offered_->nodes[node].following : nodes_[node].following;
  }
  const Candidate& choice(std::size_t i) const noexcept {
    return with_offers_ ? offered_->candidates[i].candidate : candidates_[i];
  }

  // Goes on along the path that a guess without offers would share with the target: counts the
  // emitted token if that guess would have held it. Returns the chance of the path; 0: it has
  // ended.
  float follow_without_offers(const DraftNode& node, float path, Token emitted) {
    const Candidates::Range following = node.following;
    const Candidate* same = nullptr;
    float best = 0.0f;
    for (std::size_t c = following.first; c < following.last; ++c) {
      const Candidate& candidate = candidates_[c];
      if (candidate.token == emitted) same = &candidate;
      best = c == following.first ? candidate.weight : std::max(best, candidate.weight);
    }
    if (same == nullptr || (!tree_ && same->weight < best)) return 0.0f;
    path *= AcceptanceModel::chance(same->weight);
    if (acceptance_.path_chance(node.depth, path) < offered_->least) return 0.0f;
    if (path > 0.0f) ++offered_->accepted_without;
    return path;
  }

  // The token that stands `before` tokens before the text's last one; -1: there is none.
  Token text_token(std::int64_t before) const noexcept {
    return context_.size() > before ? context_.text()[context_.size() - 1 - before] : -1;
  }

  // Finds what may follow the text, for a guess of at most `limit` tokens.
  void begin(std::int32_t limit) {
    moment_ = acceptance_.now();
    matches_.find();
    ExpectedText expected;
    if (prediction_) {
      expected = ExpectedText(prediction_->place(), prediction_->text(), prediction_->size());
    }
    const ExpectedText copy(copy_.place(), context_.text(), context_.size());
    if (nodes_.size() <= static_cast<std::size_t>(limit)) {
      nodes_.resize(static_cast<std::size_t>(limit) + 1);
    }
    const Token last = context_.size() > 0 ? context_.text()[context_.size() - 1] : -1;
    nodes_[0] = {-1, last, 0, 1.0f, 1.0f, candidates_.begin(copy, expected), {0, 0}};
    num_nodes_ = 1;
    num_weighed_ = 1;
  }

  // The chance that a token below this node is accepted, with all before it.
  float chance_below(const DraftNode& node, float path) const noexcept {
    return std::min(node.chance, acceptance_.path_chance(node.depth, path));
  }

  // Makes a candidate the next node, and writes it as the next token of the draft unless it is less
  // probable than `least`. Returns whether it is drafted.
  bool draft_candidate(std::size_t parent, std::size_t chosen, float path, float least,
                       const DraftColumns& draft) {
    const Candidate& next = choice(chosen);
    const float chance = chance_below(nodes_[parent], path);
    const auto above = static_cast<std::int32_t>(parent);
    nodes_[num_nodes_] = {above,          next.token, nodes_[parent].depth + 1, path, chance,
                          next.agreement, {0, 0}};
    num_weighed_ = num_nodes_ + 1;
    if (chance < least) return false;
    const std::size_t place = num_nodes_++ - 1;
    draft.token_ids[place] = next.token;
    draft.parents[place] = above - 1;
    draft.probabilities[place] = chance;
    draft.sources[place] = next.source;
    if (with_offers_) {
      const OfferedCandidate& offered = offered_->candidates[chosen];
      if (!offered.found) candidates_.leave();
      offered_->nodes.push_back({offered.places, {0, 0}});
    }
    return true;
  }

  std::int32_t grow_chain(std::int32_t limit, float least, const DraftColumns& draft) {
    limit = std::min(limit, lookahead_);
    std::int32_t count = 0;
    float path = 1.0f;
    float weight = 0.0f;
    float chance = 0.0f;
    while (count < limit) {
      const Candidates::Range next = choices_at(static_cast<std::size_t>(count));
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
        chance = AcceptanceModel::chance(weight);
      }
      path *= chance;
      if (!draft_candidate(static_cast<std::size_t>(count), best, path, least, draft)) break;
      ++count;
      if (!with_offers_ && !draft_alike(limit, least, chance, &path, &count, draft)) break;
      if (count < limit) expand(static_cast<std::size_t>(count));
    }
    return count;
  }

  // Goes on with the tokens of a run that all are as likely as the one before. Returns whether the
  // chain goes on after them.
  bool draft_alike(std::int32_t limit, float least, float chance, float* path, std::int32_t* count,
                   const DraftColumns& draft) {
    const std::int32_t end = std::min(limit, *count + candidates_.alike(*count));
    for (; *count < end; ++*count) {
      const auto node = static_cast<std::size_t>(*count);
      nodes_[node].following = candidates_.repeat_alike(*count);
      *path *= chance;
      if (!draft_candidate(node, nodes_[node].following.first, *path, least, draft)) return false;
    }
    return true;
  }

  // Drafts an offer as it is.
  std::int32_t follow(const RowOffer& offer, std::int32_t limit, const DraftColumns& draft) {
    limit = std::min(limit, lookahead_);
    float path = 1.0f;
    std::int32_t count = 0;
    while (count < std::min(limit, offer.count)) {
      const auto node = static_cast<std::size_t>(count);
      std::size_t chosen = choices_at(node).first;
      while (choice(chosen).token != offer.token_ids[count]) ++chosen;
      path *= AcceptanceModel::chance(choice(chosen).weight);
      draft_candidate(node, chosen, path, 0.0f, draft);
      if (++count < limit) expand(node + 1);
    }
    return count;
  }

  // Best first: the tokens most likely to be accepted anywhere in the tree.
  std::int32_t grow_tree(std::int32_t limit, float least, const DraftColumns& draft) {
    waiting_.clear();
    const auto wait_for = [&](std::size_t node) {
      const Candidates::Range next = choices_at(node);
      for (std::size_t c = next.first; c < next.last; ++c) {
        const float path = nodes_[node].path * AcceptanceModel::chance(choice(c).weight);
        const float chance = chance_below(nodes_[node], path);
        if (chance < least) continue;
        waiting_.push_back({path, chance, c, node});
        std::push_heap(waiting_.begin(), waiting_.end());
      }
    };
    wait_for(0);
    std::int32_t count = 0;
    while (count < limit && !waiting_.empty()) {
      std::pop_heap(waiting_.begin(), waiting_.end());
      const Waiting next = waiting_.back();
      waiting_.pop_back();
      draft_candidate(next.parent, next.candidate, next.path, least, draft);
      const auto node = static_cast<std::size_t>(++count);
      if (count == limit || nodes_[node].depth == lookahead_) continue;
      expand(node);
      wait_for(node);
    }
    return count;
  }

  const CountedBytes counted_;
  const SuffixAutomaton& context_;
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
  AcceptanceModel::Moment moment_ = 0;
  Candidates candidates_;
  // The first num_nodes_ are the guess.
  std::vector<DraftNode, CountedAllocator<DraftNode>> nodes_;
  std::size_t num_nodes_ = 0;
  std::size_t num_weighed_ = 0;  // the same with the token that was too unlikely for a chain
  std::vector<Waiting, CountedAllocator<Waiting>> waiting_;
  bool with_offers_ = false;
  std::unique_ptr<OfferedDraft> offered_;  // null: there have been no offers
};

}  // namespace

std::unique_ptr<Drafter> make_drafter(const CalibratedConfig& config, const DrafterInputs& inputs) {
  return std::make_unique<CalibratedDrafter>(config, inputs);
}

}  // namespace fastdraft

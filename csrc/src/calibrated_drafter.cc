#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "acceptance_model.h"
#include "copy_cursor.h"
#include "drafter.h"
#include "fastdraft/datastore.h"
#include "prediction.h"
#include "token_links.h"

namespace fastdraft {
namespace {

// How much of what is known is weighed. On the recorded requests more of any of
// these gained less than a thousandth, but of the occurrences for trees, which
// draft from what is rare too.
constexpr int kSuffixes = 3;  // repeated suffixes of the text, the longest ones
constexpr int kTokens = 8;    // earlier occurrences of its last token
constexpr int kTokensOfTree = 16;
constexpr int kStored = 8;  // occurrences in the datastores
constexpr int kStoredOfTree = 32;
constexpr int kMostOccurrences = 2 * kSuffixes + kTokensOfTree + kStoredOfTree;
static_assert(kMostOccurrences <= 64);

// Matches are told apart up to this length.
constexpr std::int32_t kLongest = 32;

// A place where the text's last tokens stand too: what followed them there.
struct Occurrence {
  const Token* next;
  // Of the request's own text, after so many tokens the copy starts over, as LZ77's
  // does: a period repeats. Of a datastore, there are no more.
  std::int32_t count;
  std::int32_t length;  // how many of the text's last tokens stand before it
  bool stored;
  bool output;  // whether a model wrote what follows
  // Of a datastore: how many matches as long it has that are later.
  std::int32_t rank;

  // -1: none.
  Token token(std::int32_t depth) const noexcept {
    if (depth < count) return next[depth];
    return stored ? -1 : next[depth % count];
  }
};

// Which of up to 64 occurrences.
using Occurrences = std::uint64_t;

// What the copy, or the prediction, says goes on.
struct Following {
  const Token* next = nullptr;
  std::int32_t count = 0;
  CopyCursor::Place place;

  Following() = default;
  Following(CopyCursor::Place found, const Token* text, std::int64_t size) noexcept : place(found) {
    if (place.position < 0) return;
    next = text + place.position;
    count = static_cast<std::int32_t>(size) - place.position;
  }

  Token token(std::int32_t depth) const noexcept { return depth < count ? next[depth] : -1; }

  // The value of AcceptanceModel::kCopy and kPrediction for `token`: nothing is said,
  // the token after a guess, after a match, or another one.
  int value(std::int32_t depth, Token token_id, bool followed) const noexcept {
    const Token said = followed ? token(depth) : -1;
    if (said < 0) return 0;
    const int length = AcceptanceModel::length_value(place.length + depth);
    if (said != token_id) return 8 + std::min(3, length / 3);
    const bool guessed = depth == 0 && place.footing == CopyCursor::Footing::kGuessed;
    return guessed ? 1 : 2 + std::min(4, length / 2);
  }
};

// Weighs what followed the text's last tokens wherever they stand, in its own
// text, in the prediction and in the datastores, and drafts the tokens that are most likely
// to be accepted: a chain, or a tree.
class CalibratedDrafter final : public Drafter {
 public:
  CalibratedDrafter(const CalibratedConfig& config, const DrafterInputs& inputs)
      : context_(inputs.context),
        prompt_size_(context_.size()),
        lookahead_(inputs.lookahead),
        tree_(config.tree_budget.has_value()),
        acceptance_(*inputs.acceptance),
        links_(inputs.budget),
        stores_(inputs.stores) {
    link();
    if (inputs.prediction_size > 0) {
      prediction_.emplace(inputs.prediction, inputs.prediction_size, inputs.budget);
    }
    if (!stores_.empty()) {
      stored_.resize(static_cast<std::size_t>(most_stored()) *
                     static_cast<std::size_t>(lookahead_));
    }
  }

  void advance() override {
    // A short repeated suffix stands in many places, and is weighed as such: no
    // reason to follow the text from there.
    CopyCursor::Place elsewhere;
    const Match match = context_.repeated_suffix();
    if (match.length >= kShortestJump) {
      elsewhere.position = context_.latest_end(match.state) + 1;
      elsewhere.length = match.length;
    }
    copy_.advance(context_.text(), static_cast<std::int32_t>(context_.size()) - 1, context_.text(),
                  context_.size(), elsewhere);
    if (prediction_) prediction_->advance(context_.text(), context_.size());
    link();
  }

  std::int32_t guess(std::int32_t limit, float least, const DraftColumns& draft) override {
    moment_ = acceptance_.now();
    num_occurrences_ = 0;
    num_stored_ = 0;
    find_suffixes();
    const std::int32_t repeated = tree_ ? 0 : context_.repeated_suffix().length;
    if (repeated < kStrong) find_last_token();
    if (repeated < kClear) {
      const std::int32_t shortest = std::clamp(repeated, 1, Datastore::kOrders.front());
      for (const auto& store : stores_) find_in(*store, shortest);
    }
    follow();
    straight_ = false;

    candidates_.clear();
    if (nodes_.size() <= static_cast<std::size_t>(limit)) {
      nodes_.resize(static_cast<std::size_t>(limit) + 1);
    }
    nodes_[0] = {-1, -1, 0, 1.0f, ~Occurrences{0}, true, true, 0, 0};
    num_nodes_ = 1;
    expand(0);
    return tree_ ? grow_tree(limit, least, draft) : grow_chain(limit, least, draft);
  }

  void learn(const Token* emitted, std::int64_t count) override {
    std::size_t node = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::size_t c = nodes_[node].first; c < nodes_[node].last; ++c) {
        const Candidate& candidate = candidates_[c];
        acceptance_.learn(candidate.evidence, candidate.token,
                          AcceptanceModel::chance(candidate.weight), moment_,
                          candidate.token == emitted[i]);
      }
      std::size_t child = node + 1;
      while (child < num_nodes_ && (nodes_[child].parent != static_cast<std::int32_t>(node) ||
                                    nodes_[child].token != emitted[i])) {
        ++child;
      }
      if (child == num_nodes_) return;
      node = child;
    }
  }

 private:
  static constexpr std::int32_t kShortestJump = 4;
  // A chain is never drafted from a match of kWeak tokens beside one of kStrong.
  static constexpr std::int32_t kStrong = 4;
  static constexpr std::int32_t kWeak = 1;
  // Where the text repeats itself that long, a chain is drafted from there.
  static constexpr std::int32_t kClear = 8;

  // A token that may be drafted, in its place. The root stands for the text.
  struct Node {
    std::int32_t parent;
    Token token;
    std::int32_t depth;       // how many tokens stand between it and the text, with it
    float path;               // the chance that it is accepted, with all before it
    Occurrences occurrences;  // those that agree so far
    bool copied;              // whether the copy agrees so far
    bool predicted;
    std::size_t first, last;  // of the candidates to follow it
  };

  // A token that something says may follow a node, and what says so.
  struct Group {
    Token token;
    std::int32_t context_length, store_length;  // of the longest matches
    std::int32_t context_count, store_count;    // of the occurrences
    Occurrences occurrences;
    bool copied;
    bool predicted;
    bool output_of_context, output_of_store;  // whether a model wrote it anywhere there

    std::int32_t length() const noexcept { return std::max(context_length, store_length); }
  };

  // A token that may follow a node, weighed.
  struct Candidate {
    Token token;
    float weight;  // of the evidence: more is likelier
    Occurrences occurrences;
    AcceptanceModel::Evidence evidence;
    Source source;
    bool copied;
    bool predicted;
  };

  int most_stored() const noexcept { return tree_ ? kStoredOfTree : kStored; }

  // Brings the links up to the text; memory may have ended before.
  void link() {
    while (links_.size() < context_.size()) links_.append(context_.text()[links_.size()]);
  }

  void add_of_context(std::int32_t position, std::int32_t length) noexcept {
    const Token* next = context_.text() + position;
    for (int i = 0; i < num_occurrences_; ++i) {
      if (occurrences_[static_cast<std::size_t>(i)].next == next) return;
    }
    occurrences_[static_cast<std::size_t>(num_occurrences_++)] = {
        next,
        static_cast<std::int32_t>(context_.size()) - position,
        std::min(length, kLongest),
        false,
        position >= prompt_size_,
        0};
  }

  void find_suffixes() noexcept {
    Match match = context_.repeated_suffix();
    for (int i = 0; i < kSuffixes && match.length > 0; ++i) {
      add_of_context(context_.latest_end(match.state) + 1, match.length);
      add_of_context(context_.first_end(match.state) + 1, match.length);
      match = context_.shorter(match);
    }
  }

  void find_last_token() noexcept {
    const auto last = static_cast<std::int32_t>(context_.size()) - 1;
    if (last < 0 || links_.size() <= last) return;
    const Token* text = context_.text();
    std::int32_t position = links_.previous(last);
    for (int i = tree_ ? kTokensOfTree : kTokens; i > 0 && position >= 0; --i) {
      const std::int64_t length =
          common_suffix(text + position, text + last, std::min(kLongest - 1, position));
      add_of_context(position + 1, static_cast<std::int32_t>(length) + 1);
      position = links_.previous(position);
    }
  }

  // What of a store a chain may be drafted from besides the text's own repeated suffix, matches
  // of `shortest` tokens. On the recorded requests that, and leaving out the last token's other
  // places, costs a thousandth of the speed, and saves a third of the time.
  //
  // All stores share most_stored() slots, the longest matches first; of equally long ones each
  // store's latest, then each one's second latest, so that none hides what another one has.
  void find_in(const Datastore& store, std::int32_t shortest) {
    std::array<fastdraft::Occurrence, kStoredOfTree> found;
    const Datastore::Reader reader(store);
    const int count = reader.find(context_.text(), context_.size(), found.data(), most_stored(),
                                  tree_ ? 2 * kStoredOfTree : Datastore::kLinks, shortest);
    std::int32_t rank = 0;
    for (int i = 0; i < count; ++i) {
      const fastdraft::Occurrence& place = found[static_cast<std::size_t>(i)];
      const bool equal = i > 0 && found[static_cast<std::size_t>(i) - 1].length == place.length;
      rank = equal ? rank + 1 : 0;
      const auto last = occurrences_.begin() + num_occurrences_;
      auto at = last;
      for (; at != last - num_stored_; --at) {
        const Occurrence& kept = *(at - 1);
        if (kept.length > place.length || (kept.length == place.length && kept.rank <= rank)) break;
      }
      const bool full = num_stored_ == most_stored();
      if (full && at == last) return;  // nor has the store any that is better
      // Copied, since the text may leave the store as soon as it is not read.
      Token* tokens = stored_.data() + (full ? (last - 1)->next - stored_.data()
                                             : std::ptrdiff_t{num_stored_} * lookahead_);
      const auto copied = static_cast<std::int32_t>(reader.copy(place.next, tokens, lookahead_));
      if (copied == 0) continue;
      if (!full) {
        ++num_stored_;
        ++num_occurrences_;
      }
      std::copy_backward(at, full ? last - 1 : last, full ? last : last + 1);
      *at = {tokens, copied, place.length, true, place.output, rank};
    }
  }

  void follow() noexcept {
    copying_ = Following(copy_.place(), context_.text(), context_.size());
    expected_ = {};
    if (prediction_) {
      expected_ = Following(prediction_->place(), prediction_->text(), prediction_->size());
    }
  }

  struct Latest {
    Token of_context;
    Token of_stores;
  };

  Group& group_of(Token token) noexcept {
    for (int i = 0; i < num_groups_; ++i) {
      if (groups_[static_cast<std::size_t>(i)].token == token) {
        return groups_[static_cast<std::size_t>(i)];
      }
    }
    Group& group = groups_[static_cast<std::size_t>(num_groups_++)];
    group = {token, 0, 0, 0, 0, 0, false, false, false, false};
    return group;
  }

  // What everything that has a say agreed on for the last node, it may agree on for
  // the next one, which is then weighed as that was, with longer matches. Says
  // whether it was so. In a long copy it is so for nearly every token.
  bool go_straight(std::size_t index) {
    const Node& node = nodes_[index];
    Group& group = groups_[0];
    const Token copy = node.copied ? copying_.token(node.depth) : -1;
    const Token expected = node.predicted ? expected_.token(node.depth) : -1;
    Token token = std::max(copy, expected);
    for (int i = 0; i < num_agreeing_; ++i) {
      const Token next = occurrences_[agreeing_[static_cast<std::size_t>(i)]].token(node.depth);
      if (next < 0) return false;
      token = next;
      if (next != occurrences_[agreeing_[0]].token(node.depth)) return false;
    }
    if (token < 0 || (copy >= 0 && copy != token) || (expected >= 0 && expected != token)) {
      return false;
    }
    const auto values = [&] {
      return std::array<int, 4>{AcceptanceModel::length_value(group.context_length),
                                AcceptanceModel::length_value(group.store_length),
                                copying_.value(node.depth, token, node.copied),
                                expected_.value(node.depth, token, node.predicted)};
    };
    group.token = token;
    group.copied = copy >= 0;
    group.predicted = expected >= 0;
    if (group.context_count > 0) {
      group.context_length = std::min(group.context_length + 1, kLongest);
    }
    if (group.store_count > 0) {
      group.store_length = std::min(group.store_length + 1, kLongest);
    }
    nodes_[index].first = candidates_.size();
    if (values() == straight_values_) {
      Candidate again = candidates_.back();
      again.token = token;
      candidates_.push_back(again);
    } else {
      straight_values_ = values();
      weigh(group, node, group.context_count + group.store_count, 0,
            {group.context_count > 0 ? token : -1, group.store_count > 0 ? token : -1});
    }
    nodes_[index].last = candidates_.size();
    return true;
  }

  // From now on everything agrees.
  void begin_straight(const Group& group) noexcept {
    straight_ = true;
    straight_values_ = {-1, -1, -1, -1};
    num_agreeing_ = 0;
    for (int i = 0; i < num_occurrences_; ++i) {
      if ((group.occurrences >> i & 1) == 0) continue;
      agreeing_[static_cast<std::size_t>(num_agreeing_++)] = static_cast<std::uint8_t>(i);
    }
  }

  // Weighs the tokens that may follow the node.
  void expand(std::size_t index) {
    if (straight_ && go_straight(index)) return;
    const Node& node = nodes_[index];
    num_groups_ = 0;
    int total = 0;
    // What the latest of the longest matches say, of the text and of the datastores.
    Latest latest{-1, -1};
    std::int32_t longest_of_context = 0;
    std::int32_t longest_of_stores = 0;
    const Token* latest_of_context = nullptr;
    for (int i = 0; i < num_occurrences_; ++i) {
      if ((node.occurrences >> i & 1) == 0) continue;
      const Occurrence& occurrence = occurrences_[static_cast<std::size_t>(i)];
      const Token token = occurrence.token(node.depth);
      if (token < 0) continue;
      const std::int32_t length = std::min(occurrence.length + node.depth, kLongest);
      Group& group = group_of(token);
      group.occurrences |= Occurrences{1} << i;
      ++total;
      if (occurrence.stored) {
        group.store_length = std::max(group.store_length, length);
        ++group.store_count;
        group.output_of_store |= occurrence.output;
        // They come in this order: of the longest, each store's latest first.
        if (length > longest_of_stores) {
          longest_of_stores = length;
          latest.of_stores = token;
        }
      } else {
        group.context_length = std::max(group.context_length, length);
        ++group.context_count;
        group.output_of_context |= occurrence.output;
        if (length > longest_of_context ||
            (length == longest_of_context && occurrence.next > latest_of_context)) {
          longest_of_context = length;
          latest.of_context = token;
          latest_of_context = occurrence.next;
        }
      }
    }
    const Token copy = node.copied ? copying_.token(node.depth) : -1;
    if (copy >= 0) group_of(copy).copied = true;
    const Token expected = node.predicted ? expected_.token(node.depth) : -1;
    if (expected >= 0) group_of(expected).predicted = true;

    // The longest match of all, and the longest of any other token.
    std::int32_t best = 0;
    std::int32_t second = 0;
    for (int i = 0; i < num_groups_; ++i) {
      const std::int32_t length = groups_[static_cast<std::size_t>(i)].length();
      second = std::max(second, std::min(best, length));
      best = std::max(best, length);
    }
    nodes_[index].first = candidates_.size();
    for (int i = 0; i < num_groups_; ++i) {
      const Group& group = groups_[static_cast<std::size_t>(i)];
      const bool outdone = best >= kStrong && group.length() <= kWeak;
      if (outdone && !tree_ && !group.copied && !group.predicted) continue;
      weigh(group, node, total, group.length() == best ? second : best, latest);
    }
    nodes_[index].last = candidates_.size();
    straight_ = false;
    if (!tree_ && num_groups_ == 1) begin_straight(groups_[0]);
  }

  void weigh(const Group& group, const Node& node, int total, std::int32_t rival_length,
             const Latest& latest) {
    const auto says = [&](Token token) { return token < 0 ? 0 : token == group.token ? 1 : 2; };
    const int context = AcceptanceModel::length_value(group.context_length);
    const int store = AcceptanceModel::length_value(group.store_length);
    const int rival = AcceptanceModel::length_value(rival_length);
    const int fifths = 5 * (group.context_count + group.store_count);
    // fifths / total, and less than a division.
    const int share = total == 0
                          ? 0
                          : (fifths >= total) + (fifths >= 2 * total) + (fifths >= 3 * total) +
                                (fifths >= 4 * total) + (fifths >= 5 * total);
    const int of = total < 3 ? total : total < 6 ? 3 : total < 10 ? 4 : 5;
    Candidate& candidate = candidates_.emplace_back();
    candidate.token = group.token;
    candidate.occurrences = group.occurrences;
    candidate.copied = group.copied;
    candidate.predicted = group.predicted;
    candidate.source = group.predicted                             ? Source::kPrediction
                       : group.store_length > group.context_length ? Source::kDatastore
                                                                   : Source::kContext;
    using A = AcceptanceModel;
    const int longest = std::max(context, store);
    const int written = 2 * group.output_of_context + group.output_of_store;
    candidate.evidence = {
        A::place(A::kContextLength, context),
        A::place(A::kStoreLength, store),
        A::place(A::kRivalLength, rival),
        A::place(A::kContextCount, A::count_value(group.context_count)),
        A::place(A::kStoreCount, A::count_value(group.store_count)),
        A::place(A::kLatest, says(latest.of_context) + 3 * says(latest.of_stores)),
        A::place(A::kCopy, copying_.value(node.depth, group.token, node.copied)),
        A::place(A::kPrediction, expected_.value(node.depth, group.token, node.predicted)),
        A::place(A::kBothLengths, context * A::kLengths + store),
        A::place(A::kShare, share + A::kShares * of),
        A::place(A::kLengthAndRival, longest * A::kLengths + rival),
        A::place(A::kOutput, written * A::kLengths + longest)};
    candidate.weight = acceptance_.weigh(candidate.evidence);
  }

  // Makes a candidate a node, and writes it as the next token of the draft.
  std::int32_t draft_candidate(std::size_t parent, const Candidate& candidate, float path,
                               const DraftColumns& draft) {
    const auto place = static_cast<std::int32_t>(num_nodes_) - 1;
    draft.token_ids[place] = candidate.token;
    draft.parents[place] = static_cast<std::int32_t>(parent) - 1;
    draft.probabilities[place] = path;
    draft.sources[place] = candidate.source;
    nodes_[num_nodes_++] = {static_cast<std::int32_t>(parent),
                            candidate.token,
                            nodes_[parent].depth + 1,
                            path,
                            candidate.occurrences,
                            candidate.copied,
                            candidate.predicted,
                            0,
                            0};
    return place + 1;
  }

  std::int32_t grow_chain(std::int32_t limit, float least, const DraftColumns& draft) {
    limit = std::min(limit, lookahead_);
    std::int32_t count = 0;
    float weight = 0.0f;
    float chance = 0.0f;
    while (count < limit) {
      const auto node = static_cast<std::size_t>(count);
      const auto begin = candidates_.begin() + static_cast<std::ptrdiff_t>(nodes_[node].first);
      const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(nodes_[node].last);
      const auto best = std::max_element(
          begin, end, [](const Candidate& a, const Candidate& b) { return a.weight < b.weight; });
      if (best == end) break;
      // In a long copy most tokens weigh the same.
      if (count == 0 || best->weight != weight) {
        weight = best->weight;
        chance = AcceptanceModel::chance(weight);
      }
      const float path = nodes_[node].path * chance;
      if (path < least) break;
      count = draft_candidate(node, *best, path, draft);
      if (count < limit) expand(static_cast<std::size_t>(count));
    }
    return count;
  }

  // Best first: the tokens most likely to be accepted anywhere in the tree.
  std::int32_t grow_tree(std::int32_t limit, float least, const DraftColumns& draft) {
    waiting_.clear();
    const auto wait_for = [&](std::size_t node) {
      for (std::size_t c = nodes_[node].first; c < nodes_[node].last; ++c) {
        const float path = nodes_[node].path * AcceptanceModel::chance(candidates_[c].weight);
        if (path < least) continue;
        waiting_.push_back({path, c, node});
        std::push_heap(waiting_.begin(), waiting_.end());
      }
    };
    wait_for(0);
    std::int32_t count = 0;
    while (count < limit && !waiting_.empty()) {
      std::pop_heap(waiting_.begin(), waiting_.end());
      const Waiting next = waiting_.back();
      waiting_.pop_back();
      const Candidate candidate = candidates_[next.candidate];
      count = draft_candidate(next.parent, candidate, next.path, draft);
      const auto node = static_cast<std::size_t>(count);
      if (count == limit || nodes_[node].depth == lookahead_) continue;
      expand(node);
      wait_for(node);
    }
    return count;
  }

  struct Waiting {
    float path;
    std::size_t candidate;
    std::size_t parent;
    // Of equals the first comes first.
    bool operator<(const Waiting& other) const noexcept {
      return path != other.path ? path < other.path : candidate > other.candidate;
    }
  };

  const SuffixAutomaton& context_;
  const std::int64_t prompt_size_;
  const std::int32_t lookahead_;
  const bool tree_;
  AcceptanceModel& acceptance_;
  TokenLinks links_;
  CopyCursor copy_{-1};  // follows what the output copies from the text itself
  std::optional<Prediction> prediction_;
  const Stores& stores_;

  // The last guess, until the next one: when it was made, what was found, and what was made of it.
  AcceptanceModel::Moment moment_ = 0;
  std::array<Occurrence, kMostOccurrences> occurrences_;
  int num_occurrences_ = 0;
  int num_stored_ = 0;
  std::vector<Token> stored_;  // what follows the occurrences in datastores
  Following copying_;
  Following expected_;
  std::vector<Node> nodes_;  // the first num_nodes_ are the guess
  std::size_t num_nodes_ = 0;
  std::array<Group, kMostOccurrences + 2> groups_;
  int num_groups_ = 0;
  bool straight_ = false;  // whether groups_[0] was alone at the chain's last node
  std::array<int, 4> straight_values_{};
  std::array<std::uint8_t, kMostOccurrences> agreeing_;
  int num_agreeing_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<Waiting> waiting_;
};

}  // namespace

std::unique_ptr<Drafter> make_drafter(const CalibratedConfig& config, const DrafterInputs& inputs) {
  return std::make_unique<CalibratedDrafter>(config, inputs);
}

}  // namespace fastdraft

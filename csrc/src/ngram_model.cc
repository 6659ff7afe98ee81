#include "ngram_model.h"

namespace fastdraft {

NgramModel::NgramModel(const Token* text, std::int64_t size, std::int32_t order,
                       MemoryBudget& budget)
    : order_(order), nodes_(budget), transitions_(budget) {
  nodes_.reserve(1);
  nodes_.push_back({-1, kNoState});
  Context context;
  for (std::int64_t i = 0; i < size; ++i) context = add(context, text[i]);
}

// Counts `token` after a context of the text and after all of its suffixes, and
// returns the context of both.
NgramModel::Context NgramModel::add(Context context, Token token) {
  State first = kNoState;
  State longer = kNoState;
  for (State at = context.node; at != kNoState; at = nodes_[at].shorter) {
    nodes_.reserve(nodes_.size() + 1);
    const auto fresh = static_cast<State>(nodes_.size());
    State ngram = transitions_.find_or_insert(nodes_[at].longer, token, fresh);
    if (ngram == kNoState) {
      ngram = fresh;
      nodes_.push_back({token, 0});
    }
    if (longer == kNoState) {
      first = ngram;
    } else {
      nodes_[longer].shorter = ngram;
    }
    longer = ngram;
    Node& node = nodes_[at];
    ++nodes_[ngram].count;
    ++node.followed;
    if (node.most_frequent == kNoState || nodes_[ngram].count >= nodes_[node.most_frequent].count) {
      node.most_frequent = ngram;
    }
  }
  return grown(first, context.length + 1);
}

NgramModel::Context NgramModel::advance(Context context, Token token) const noexcept {
  for (;;) {
    const State next = transitions_.find(nodes_[context.node].longer, token);
    if (next != kNoState) return grown(next, context.length + 1);
    if (context.length == 0) return {};
    context = shorten(context);
  }
}

NgramModel::Continuation NgramModel::continuation(Context context) const noexcept {
  while (nodes_[context.node].followed == 0) context = shorten(context);
  const Node& node = nodes_[context.node];
  const Node& next = nodes_[node.most_frequent];
  return {next.token, static_cast<double>(next.count) / node.followed,
          grown(node.most_frequent, context.length + 1)};
}

}  // namespace fastdraft

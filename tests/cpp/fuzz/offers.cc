// Any offers. Wrong ones are left out, and what is drafted is a tree of known tokens
// whose probabilities never rise.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "../texts.h"
#include "fastdraft/engine.h"
#include "target.h"

namespace fastdraft::fuzz_offers {

FASTDRAFT_FUZZ(Offers, 300) {
  if (size == 0) return 0;
  EngineConfig config;
  config.vocabulary = 8;
  config.token_cost = (data[0] % 4) * 0.01;
  if (data[0] % 2 == 1) config.drafter = CalibratedConfig{12};
  Engine engine(config);
  const testing::Tokens prompt = {1, 2, 3, 1, 2};
  const RequestId id = engine.add_request({{prompt.data(), 5}});
  std::size_t at = 1;
  const auto next = [&]() -> int { return at < size ? data[at++] : 0; };
  while (at < size) {
    std::vector<Offers> offers(static_cast<std::size_t>(next() % 3));
    std::vector<std::vector<Token>> tokens(offers.size());
    std::vector<std::vector<std::int32_t>> parents(offers.size());
    std::vector<std::vector<float>> confidences(offers.size());
    std::vector<std::vector<std::int64_t>> offsets(offers.size());
    for (std::size_t k = 0; k < offers.size(); ++k) {
      const int count = next() % 12;
      for (int i = 0; i < count; ++i) {
        tokens[k].push_back(next() % 10 - 1);
        parents[k].push_back(next() % 12 - 2);
        const int sure = next();
        confidences[k].push_back(sure == 255 ? std::numeric_limits<float>::quiet_NaN()
                                             : static_cast<float>(sure) / 200.0f);
      }
      offsets[k] = {0, count};
      offers[k].kind = engine.offer_kind(k == 0 ? "a" : "b");
      offers[k].offsets = offsets[k].data();
      offers[k].token_ids = tokens[k].data();
      if (next() % 2 == 0) offers[k].parents = parents[k].data();
      if (next() % 2 == 0) offers[k].confidences = confidences[k].data();
    }
    ProposeOptions options;
    options.offers = offers.data();
    options.num_offers = static_cast<std::int64_t>(offers.size());
    const DraftBatch drafts = engine.propose_batch(&id, 1, options);
    const DraftColumns& draft = drafts.columns;
    std::vector<Token> emitted;
    for (std::int32_t i = 0; i < drafts.offsets[1]; ++i) {
      if (draft.token_ids[i] < 0 || draft.token_ids[i] >= config.vocabulary) std::abort();
      if (draft.parents[i] < -1 || draft.parents[i] >= i) std::abort();
      if (!(draft.probabilities[i] >= 0.0f && draft.probabilities[i] <= 1.0f)) std::abort();
      if (i > 0 && draft.probabilities[i] > draft.probabilities[i - 1]) std::abort();
      if (draft.parents[i] == static_cast<std::int32_t>(emitted.size()) - 1 && next() % 2 == 0) {
        emitted.push_back(draft.token_ids[i]);
      }
    }
    emitted.push_back(static_cast<Token>(next() % 8));
    engine.observe(id, emitted.data(), static_cast<std::int64_t>(emitted.size()));
  }
  return 0;
}

}  // namespace fastdraft::fuzz_offers

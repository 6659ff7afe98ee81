// A live store to which documents are added while the oldest leave and its limit moves,
// against looking everywhere.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "../stores.h"
#include "../texts.h"
#include "fastdraft/datastore.h"
#include "target.h"

namespace fastdraft::fuzz_live_datastore {

using testing::Tokens;

constexpr Token kLargest = (1 << 22) - 2;  // that a live store knows
constexpr int kSteps = 24;
constexpr std::int64_t kLeastKilobytes = 40;

void check(const Datastore& store, const Tokens& text, int most, int links) {
  const auto expected = testing::look_everywhere(store, text, most, links);
  std::vector<Occurrence> found(static_cast<std::size_t>(most));
  const Datastore::Reader reader(store);
  const int count =
      reader.find(text.data(), static_cast<std::int64_t>(text.size()), found.data(), most, links);
  found.resize(static_cast<std::size_t>(count));
  const auto same = [](const Occurrence& a, const Occurrence& b) {
    return a.next == b.next && a.length == b.length && a.output == b.output;
  };
  if (!std::equal(found.begin(), found.end(), expected.begin(), expected.end(), same)) std::abort();
}

// The first two bytes are the limit and how many different tokens there are. Each step takes four:
// what to do, and a document or a limit. Documents may hold token ids up to the largest allowed.
FASTDRAFT_FUZZ(LiveDatastore, 30) {
  if (size < 2) return 0;
  const auto limit = [](std::uint8_t byte) { return (kLeastKilobytes + byte) << 10; };
  const auto vocabulary = static_cast<Token>(2 + data[1]);
  const auto store = Datastore::live(limit(data[0]));
  Tokens text;
  int step = 0;
  for (std::size_t at = 2; at + 4 <= size && step < kSteps; at += 4, ++step) {
    if (data[at] % 8 == 0) {
      store->limit(limit(data[at + 1]));
    } else {
      text = testing::random_text(1 + 8 * std::size_t{data[at + 2]}, vocabulary, data[at + 1]);
      if (data[at] % 8 == 1) {
        for (Token& token : text) token = kLargest - token;
      }
      // No document begins as another does.
      text.front() = 1'000'000 + step;
      const auto length = static_cast<std::int64_t>(text.size());
      store->add(text.data(), length, length * data[at + 3] / 255);
    }
    if (store->bytes() > store->max_bytes()) std::abort();
    for (const std::size_t part : {1U, 3U, 7U}) {
      const auto end = static_cast<std::ptrdiff_t>(text.size() * part / 7);
      if (end == 0) continue;
      check(*store, Tokens(text.begin(), text.begin() + end), 1 + data[at + 3] % 16,
            1 + data[at] % 31);
    }
  }
  return 0;
}

}  // namespace fastdraft::fuzz_live_datastore

// Text for datastores, and a slow answer to hold them against.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "fastdraft/datastore.h"
#include "texts.h"

namespace fastdraft::testing {

// Adds a document that is all prompt.
inline void add_text(Datastore& store, const Tokens& text) {
  const auto size = static_cast<std::int64_t>(text.size());
  store.add(text.data(), size, size);
}

// The oracle of Datastore::Reader::find, by looking at every position: in a store whose documents
// have no common beginning, which would be stored once.
inline std::vector<Occurrence> look_everywhere(const Datastore& store, const Tokens& text, int most,
                                               int links) {
  const Datastore::Reader reader(store);
  std::map<std::int64_t, std::int32_t> lengths;
  for (const std::int32_t order : Datastore::kOrders) {
    if (lengths.size() >= static_cast<std::size_t>(most)) break;
    for (std::int64_t next = reader.end(); next-- > reader.begin() && links > 0;) {
      if (reader.at(next) < 0) continue;
      std::int32_t length = 0;
      while (length < Datastore::kLongestMatch && length < static_cast<std::int32_t>(text.size()) &&
             reader.at(next - 1 - length) ==
                 text[text.size() - 1 - static_cast<std::size_t>(length)]) {
        ++length;
      }
      if (length < order) continue;
      lengths[next] = length;
      --links;
    }
  }
  std::vector<Occurrence> found;
  for (const auto& [next, length] : lengths) found.push_back({next, length, reader.output(next)});
  std::sort(found.begin(), found.end(), [](const Occurrence& a, const Occurrence& b) {
    return a.length != b.length ? a.length > b.length : a.next > b.next;
  });
  found.resize(std::min(found.size(), static_cast<std::size_t>(most)));
  return found;
}

}  // namespace fastdraft::testing

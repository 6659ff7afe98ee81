// The text of a datastore, document by document.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/error.h"
#include "store/datastore_index.h"

namespace fastdraft {

// Calls begin(context) before each document of a store, and then append(tokens, size, output) for
// its tokens, a run at a time; the store's lock is not held meanwhile. What is no token is damage,
// and ends a document as a mark does. Throws DatastoreClosedError.
template <typename Begin, typename Append>
void for_each_document(const Datastore& source, Begin begin, Append append) {
  // So much is copied while text that is added to the source has to wait.
  constexpr std::int64_t kStep = 4096;
  struct Run {
    std::int64_t first, size;  // of tokens; without any a document begins
    bool output;
    std::int64_t context;
  };
  std::vector<Token> tokens(static_cast<std::size_t>(kStep));
  std::vector<Run> runs;
  std::int64_t position = 0;
  const std::int64_t end = Datastore::Reader(source).end();
  while (position < end && !source.closed()) {
    runs.clear();
    {
      const Datastore::Reader reader(source);
      if (position < reader.begin()) {
        // What came before has left since, or never was held.
        position = reader.begin();
        runs.push_back({});
      }
      const std::int64_t count =
          reader.read(position, tokens.data(), std::min(kStep, end - position));
      const auto is_token = [&](std::int64_t i) {
        const Token token = tokens[static_cast<std::size_t>(i)];
        return token >= 0 && token <= reader.largest_token();
      };
      std::int64_t i = 0;
      while (i < count) {
        if (!is_token(i)) {
          const Token mark = tokens[static_cast<std::size_t>(i)];
          const std::int64_t context = mark < 0 ? mark_context(mark) : 0;
          runs.push_back({i++, 0, false, std::min(context, kContextTokens)});
          continue;
        }
        const bool output = reader.output(position + i);
        const std::int64_t from = i;
        do {
          ++i;
        } while (i < count && is_token(i) && reader.output(position + i) == output);
        runs.push_back({from, i - from, output, 0});
      }
      position += std::max<std::int64_t>(i, 1);
    }
    for (const Run& run : runs) {
      if (run.size == 0) {
        begin(run.context);
      } else {
        append(tokens.data() + run.first, run.size, run.output);
      }
    }
  }
  if (source.closed()) throw DatastoreClosedError("the datastore is closed");
}

}  // namespace fastdraft

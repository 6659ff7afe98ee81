// Requests that begin, write and end in any order, against looking through what each has
// written. How many occurrences a draft looks at is tested with the engine's, in tests/core.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "../texts.h"
#include "store/running_texts.h"
#include "target.h"

namespace fastdraft::fuzz_running_texts {

using testing::Tokens;

constexpr std::size_t kRequests = 5;
constexpr std::int64_t kMostTokens = 400;
constexpr std::int64_t kMostCopied = 300;
constexpr int kAll = 10'000;  // occurrences

struct Request {
  Tokens tokens;
  std::int64_t prompt_size = 0;
  std::int64_t written = 0;
  std::int64_t entered = 0;  // the tokens before it are known to the others
  bool cleared = false;
  std::unique_ptr<RunningTexts::Text> text;

  // How many of the tokens before one are the last ones of `other`.
  std::int32_t common(std::int64_t index, const Tokens& other) const {
    const std::int64_t begin = std::max<std::int64_t>(0, prompt_size - Datastore::kLongestMatch);
    const std::int64_t most = std::min({std::int64_t{Datastore::kLongestMatch}, index - begin,
                                        static_cast<std::int64_t>(other.size())});
    return static_cast<std::int32_t>(
        common_suffix(tokens.data() + index, other.data() + other.size(), most));
  }
};

// How long a match is, and what follows it.
using Found = std::pair<std::int32_t, Tokens>;

struct Model {
  std::array<Request, kRequests> requests;
  std::vector<std::pair<Request*, std::int64_t>> positions;  // of tokens, as they entered

  void write(Request& request, std::int64_t count) {
    request.written = std::min(request.written + count, kMostTokens);
    const std::int64_t first = std::max(request.entered, request.prompt_size);
    const auto running = std::count_if(requests.begin(), requests.end(),
                                       [](const Request& each) { return each.text != nullptr; });
    if (running < 2 || request.cleared || request.written <= first) return;
    request.entered = std::min(request.written, first + RunningTexts::kSliceTokens);
    for (std::int64_t at = first; at < request.entered; ++at) positions.emplace_back(&request, at);
  }

  void forget(const Request& request) {
    const auto is_of = [&](const auto& position) { return position.first == &request; };
    positions.erase(std::remove_if(positions.begin(), positions.end(), is_of), positions.end());
  }

  // The longest first, of equally long ones the latest.
  std::vector<Found> find(const Request* reader, const Tokens& text) const {
    std::vector<Found> all;
    for (auto position = positions.rbegin(); position != positions.rend(); ++position) {
      const auto& [request, index] = *position;
      const std::int32_t length = request->common(index, text);
      if (request == reader || length == 0) continue;
      const auto begin = request->tokens.begin();
      all.emplace_back(
          length, Tokens(begin + index, begin + std::min(request->entered, index + kMostCopied)));
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const Found& a, const Found& b) { return a.first > b.first; });
    return all;
  }
};

std::vector<Found> find(const RunningTexts& texts, const Request* reader, const Tokens& text) {
  std::vector<Occurrence> occurrences(kAll);
  const RunningTexts::Reader running(texts, reader);
  const int count = running.find(text.data(), static_cast<std::int64_t>(text.size()),
                                 occurrences.data(), kAll, kAll, 1);
  std::vector<Found> found;
  for (auto at = occurrences.begin(); at != occurrences.begin() + count; ++at) {
    Tokens next(static_cast<std::size_t>(kMostCopied));
    next.resize(static_cast<std::size_t>(running.copy(at->next, next.data(), kMostCopied)));
    found.emplace_back(at->length, next);
  }
  return found;
}

// The first byte tells how many different tokens there are. Each step takes three: what to do, with
// which request, and how much.
FASTDRAFT_FUZZ(RunningTexts, 200) {
  if (size == 0) return 0;
  const auto vocabulary = static_cast<Token>(1 + data[0] % 64);
  std::int64_t bytes = 0;
  RunningTexts texts([&](std::int64_t more) {
    bytes += more;
    return true;
  });
  Model model;
  for (std::size_t at = 1; at + 3 <= size; at += 3) {
    const std::uint8_t much = data[at + 2];
    Request& request = model.requests[data[at + 1] % kRequests];
    if (data[at] == 255) {
      texts.clear();
      if (bytes != 0) std::abort();
      // A request of which nothing had entered may go on.
      for (Request& each : model.requests) each.cleared |= each.entered > each.prompt_size;
      model.positions.clear();
    } else if (request.text == nullptr) {
      request.tokens = testing::random_text(kMostTokens, vocabulary, data[at + 1]);
      request.prompt_size = request.written = much % 48;
      request.entered = 0;
      request.cleared = false;
      request.text = std::make_unique<RunningTexts::Text>(texts, &request);
    } else if (data[at] % 16 == 0) {
      request.text.reset();
      model.forget(request);
    } else {
      model.write(request, much);
      request.text->grow(request.tokens.data(), request.written, request.prompt_size);
    }
    const Request& asked = model.requests[data[at] % kRequests];
    const Tokens text(asked.tokens.begin(), asked.tokens.begin() + asked.written);
    const Request* reader = much % 3 == 0 ? nullptr : &asked;
    if (!text.empty() && find(texts, reader, text) != model.find(reader, text)) std::abort();
  }
  for (Request& request : model.requests) request.text.reset();
  if (bytes != 0) std::abort();
  return 0;
}

}  // namespace fastdraft::fuzz_running_texts

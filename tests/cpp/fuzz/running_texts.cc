// Requests that begin, write and end in any order, against looking through what each has
// written.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../texts.h"
#include "store/running_texts.h"
#include "target.h"

namespace fastdraft::fuzz_running_texts {

using testing::Tokens;

constexpr std::size_t kRequests = 5;
constexpr std::int64_t kMostTokens = 400;
constexpr std::int64_t kMostCopied = 300;

struct Request {
  Tokens tokens;
  std::int64_t prompt_size = 0;
  std::int64_t written = 0;
  std::int64_t entered = 0;  // the tokens before it are known to the others
  bool cleared = false;
  std::unique_ptr<RunningTexts::Text> text;

  bool has_entered() const { return entered > prompt_size; }
  // The first token that an occurrence may reach back to.
  std::int64_t begin() const {
    return std::max<std::int64_t>(0, prompt_size - Datastore::kLongestMatch);
  }
};

// A token that has entered.
struct Place {
  std::size_t request;
  std::int64_t index;
};

struct Found {
  std::int32_t length;
  Tokens next;
  bool operator==(const Found& other) const { return length == other.length && next == other.next; }
};

class Model {
 public:
  std::array<Request, kRequests> requests;

  bool runs(std::size_t i) const { return requests[i].text != nullptr; }
  std::size_t running() const {
    return static_cast<std::size_t>(std::count_if(
        requests.begin(), requests.end(), [](const Request& r) { return r.text != nullptr; }));
  }

  void write(std::size_t i, std::int64_t count) {
    Request& request = requests[i];
    request.written = std::min(request.written + count, kMostTokens);
    const std::int64_t first = std::max(request.entered, request.prompt_size);
    if (running() < 2 || request.cleared || request.written <= first) return;
    request.entered = std::min(request.written, first + RunningTexts::kSliceTokens);
    for (std::int64_t at = first; at < request.entered; ++at) places_.push_back({i, at});
  }

  void forget(std::size_t i) {
    places_.erase(std::remove_if(places_.begin(), places_.end(),
                                 [&](const Place& place) { return place.request == i; }),
                  places_.end());
  }

  // The latest first, `links` of them over all orders; three for each link are passed over where
  // they are the reader's own.
  std::vector<Found> find(const Request* reader, const Tokens& text, std::size_t most, int links,
                          std::int32_t least) const {
    std::vector<Found> all;
    int own = 3 * links;
    std::int32_t longer = Datastore::kLongestMatch + 1;
    for (const std::int32_t order : Datastore::kOrders) {
      if (order < least || all.size() >= most) break;
      if (static_cast<std::int32_t>(text.size()) < order) continue;
      for (auto place = places_.rbegin(); place != places_.rend() && links > 0; ++place) {
        const Request& request = requests[place->request];
        const std::int32_t length = common(request, place->index, text);
        if (length < order) continue;
        if (&request == reader) {
          if (own-- == 0) break;
          continue;
        }
        --links;
        if (length >= longer) continue;
        const std::int64_t end = std::min(request.entered, place->index + kMostCopied);
        all.push_back(
            {length, Tokens(request.tokens.begin() + place->index, request.tokens.begin() + end)});
      }
      own = std::max(own, 0);
      longer = order;
      std::stable_sort(all.begin(), all.end(),
                       [](const Found& a, const Found& b) { return a.length > b.length; });
      if (all.size() > most) all.resize(most);
    }
    return all;
  }

 private:
  static std::int32_t common(const Request& request, std::int64_t index, const Tokens& text) {
    std::int32_t length = 0;
    while (length < Datastore::kLongestMatch && index - 1 - length >= request.begin() &&
           length < static_cast<std::int32_t>(text.size()) &&
           request.tokens[static_cast<std::size_t>(index - 1 - length)] ==
               text[text.size() - 1 - static_cast<std::size_t>(length)]) {
      ++length;
    }
    return length;
  }

  std::vector<Place> places_;  // as they entered
};

std::vector<Found> find(const RunningTexts& texts, const Request* reader, const Tokens& text,
                        std::size_t most, int links, std::int32_t least) {
  std::vector<Occurrence> occurrences(most);
  const RunningTexts::Reader running(texts, reader);
  const int count = running.find(text.data(), static_cast<std::int64_t>(text.size()),
                                 occurrences.data(), static_cast<int>(most), links, least);
  std::vector<Found> found;
  for (int i = 0; i < count; ++i) {
    const Occurrence& occurrence = occurrences[static_cast<std::size_t>(i)];
    Tokens next(static_cast<std::size_t>(kMostCopied));
    next.resize(static_cast<std::size_t>(running.copy(occurrence.next, next.data(), kMostCopied)));
    found.push_back({occurrence.length, next});
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
    const std::size_t i = data[at + 1] % kRequests;
    const std::uint8_t much = data[at + 2];
    Request& request = model.requests[i];
    if (data[at] == 255) {
      texts.clear();
      if (bytes != 0) std::abort();
      for (std::size_t j = 0; j < kRequests; ++j) {
        model.forget(j);
        // A request of which nothing had entered may go on.
        if (model.requests[j].has_entered()) model.requests[j].cleared = true;
      }
    } else if (!model.runs(i)) {
      request.tokens = testing::random_text(kMostTokens, vocabulary, data[at + 1]);
      request.prompt_size = request.written = much % 48;
      request.entered = 0;
      request.cleared = false;
      request.text = std::make_unique<RunningTexts::Text>(texts, &request);
    } else if (data[at] % 16 == 0) {
      request.text.reset();
      model.forget(i);
    } else {
      model.write(i, much);
      request.text->grow(request.tokens.data(), request.written, request.prompt_size);
    }
    const Request& asked = model.requests[data[at] % kRequests];
    const Tokens text(asked.tokens.begin(), asked.tokens.begin() + asked.written);
    if (text.empty()) continue;
    const Request* reader = much % 3 == 0 ? nullptr : &asked;
    const std::size_t most = 1 + much % 9;
    const int links = 1 + much % 40;
    for (const std::int32_t least : {1, 4}) {
      if (find(texts, reader, text, most, links, least) !=
          model.find(reader, text, most, links, least)) {
        std::abort();
      }
    }
  }
  for (Request& request : model.requests) request.text.reset();
  if (bytes != 0) std::abort();
  return 0;
}

}  // namespace fastdraft::fuzz_running_texts

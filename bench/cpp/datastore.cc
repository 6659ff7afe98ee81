// A datastore's speed without Python, as JSON: adding to a live store, the pauses that this makes,
// and lookups in it and in a frozen store.
//
//   bench_datastore TOKENS STORE.fds      as bench/datastore.py makes them
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "fastdraft/datastore.h"

namespace {

using fastdraft::Datastore;
using fastdraft::Token;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kDocument = 2'000;  // tokens
constexpr std::int64_t kLiveTokens = 10'000'000;
constexpr std::int64_t kQueryTokens = 200'000;  // the last ones, which no store has
constexpr std::int64_t kPrompt = 100;           // of each document that is decoded
constexpr std::int64_t kLookups = 40'000;
constexpr int kMost = 4;

double elapsed_ns(Clock::time_point begin) {
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

// This thread's own time: a pause is not what the system gave to others.
double thread_ns() {
  std::timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

std::string percentiles(std::vector<double>* ns) {
  std::sort(ns->begin(), ns->end());
  const auto at = [&](double share) {
    return (*ns)[static_cast<std::size_t>(share * static_cast<double>(ns->size() - 1))];
  };
  char text[160];
  std::snprintf(text, sizeof(text), R"({"p50_us": %.3f, "p99_us": %.3f, "max_us": %.1f})",
                at(0.5) / 1e3, at(0.99) / 1e3, at(1.0) / 1e3);
  return text;
}

// Adds `count` tokens as documents. Returns the seconds it took.
double add(Datastore& store, const Token* tokens, std::int64_t count) {
  const Clock::time_point begin = Clock::now();
  for (std::int64_t at = 0; at < count; at += kDocument) {
    store.add(tokens + at, std::min(kDocument, count - at), kDocument);
  }
  return elapsed_ns(begin) / 1e9;
}

// Documents no longer than what is added under one lock: each is a pause.
std::string pauses(Datastore& store, const Token* tokens, std::int64_t count) {
  std::vector<double> times;
  for (std::int64_t at = 0; at + 128 <= count; at += 128) {
    const double begin = thread_ns();
    store.add(tokens + at, 128, 128);
    times.push_back(thread_ns() - begin);
  }
  return percentiles(&times);
}

// One lookup a token, as requests make them that decode one document after another,
// or of texts that have nothing to do with the one before.
std::string lookups(const Datastore& store, const Token* queries, bool scattered) {
  std::vector<double> times;
  fastdraft::Occurrence found[kMost];
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < kLookups; ++i) {
    const std::int64_t position = scattered ? i * 7919 : i;
    const std::int64_t decoded = kDocument - kPrompt;
    const std::int64_t document = position / decoded % (kQueryTokens / kDocument);
    const std::int64_t size = kPrompt + position % decoded;
    const Clock::time_point begin = Clock::now();
    {
      const Datastore::Reader reader(store);
      total += reader.find(queries + document * kDocument, size, found, kMost);
    }
    times.push_back(elapsed_ns(begin));
  }
  std::string text = percentiles(&times);
  text.back() = ',';
  char share[64];
  std::snprintf(share, sizeof(share), R"( "found": %.2f})",
                static_cast<double>(total) / static_cast<double>(kLookups));
  return text + share;
}

// The first pass has the system map the file's pages; there are too many for the caches.
std::string both_lookups(const Datastore& store, const Token* queries) {
  std::string text = "{";
  for (const bool scattered : {false, true}) {
    lookups(store, queries, scattered);
    text += scattered ? R"(, "scattered": )" : R"("decoding": )";
    text += lookups(store, queries, scattered);
  }
  return text + "}";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s TOKENS STORE.fds\n", argv[0]);
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary | std::ios::ate);
  const auto size = static_cast<std::int64_t>(file.tellg()) / std::int64_t{sizeof(Token)};
  if (size < kLiveTokens + kQueryTokens) {
    std::fprintf(stderr, "%s must hold more tokens, got %lld\n", argv[1],
                 static_cast<long long>(size));
    return 1;
  }
  const auto read = [&](std::int64_t from, std::int64_t count) {
    std::vector<Token> tokens(static_cast<std::size_t>(count));
    file.seekg(from * std::int64_t{sizeof(Token)});
    file.read(reinterpret_cast<char*>(tokens.data()), count * std::int64_t{sizeof(Token)});
    return tokens;
  };
  const std::vector<Token> tokens = read(0, kLiveTokens);
  const std::vector<Token> queries = read(size - kQueryTokens, kQueryTokens);

  const auto live = Datastore::live(Datastore::kDefaultMaxBytes);
  const double seconds = add(*live, tokens.data(), kLiveTokens);
  std::printf(R"({"live": {"tokens": %lld, "bytes_a_token": %.2f, "add_us_a_token": %.4f,)",
              static_cast<long long>(live->num_tokens()),
              static_cast<double>(live->bytes()) / static_cast<double>(live->num_tokens()),
              seconds * 1e6 / static_cast<double>(kLiveTokens));
  std::printf(R"( "lookup": %s,)", both_lookups(*live, queries.data()).c_str());
  const auto growing = Datastore::live(Datastore::kDefaultMaxBytes);
  std::printf(R"( "pause_growing": %s,)", pauses(*growing, tokens.data(), kLiveTokens).c_str());
  const auto full = Datastore::live(std::int64_t{64} << 20);
  std::printf(R"( "pause_evicting": %s},)", pauses(*full, tokens.data(), kLiveTokens).c_str());

  const Clock::time_point begin = Clock::now();
  const auto frozen = Datastore::open(argv[2]);
  std::printf(R"( "frozen": {"tokens": %lld, "open_ms": %.3f,)",
              static_cast<long long>(frozen->num_tokens()), elapsed_ns(begin) / 1e6);
  std::printf(R"( "lookup": %s}})", both_lookups(*frozen, queries.data()).c_str());
  std::putchar('\n');
  return 0;
}

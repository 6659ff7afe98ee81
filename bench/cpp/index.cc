// The index's speed without Python: add_request, observe and propose over
// contexts of text. Each call is timed on its own, at positions that all
// differ; the clock's own cost is taken off.
//
//   bench_index TOKENS [CONTEXT]     a file of int32 token ids, as bench/corpus.py writes
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "fastdraft/engine.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kContexts[] = {1'000, 10'000, 100'000, 1'000'000};
constexpr std::int64_t kSteps = 2'000;  // timed positions for each context
constexpr std::size_t kTextTokens = 1'200'000;

double elapsed_ns(Clock::time_point begin) {
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

struct Times {
  std::vector<double> ns;

  double percentile(double share) {
    const auto place =
        ns.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(ns.size() - 1));
    std::nth_element(ns.begin(), place, ns.end());
    return *place;
  }
};

double clock_cost() {
  Times times;
  for (int i = 0; i < 10'000; ++i) times.ns.push_back(elapsed_ns(Clock::now()));
  return times.percentile(0.5);
}

// Empty where the file cannot be read.
std::vector<fastdraft::Token> read_tokens(const char* path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {};
  std::vector<fastdraft::Token> tokens(static_cast<std::size_t>(file.tellg()) /
                                       sizeof(fastdraft::Token));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(tokens.data()),
            static_cast<std::streamsize>(tokens.size() * sizeof(fastdraft::Token)));
  return tokens;
}

void measure(const std::vector<fastdraft::Token>& text, std::int64_t context, double clock_ns) {
  const std::int64_t requests = std::clamp<std::int64_t>(400'000 / context, 4, 20);
  const std::int64_t steps = kSteps / requests;
  Times observe;
  Times propose;
  double prompt_ns = 0.0;
  double bytes = 0.0;
  const fastdraft::EngineConfig config;
  fastdraft::Engine engine(config);
  std::vector<std::byte> memory(
      static_cast<std::size_t>(fastdraft::DraftColumns::bytes(config.lookahead)));
  const fastdraft::DraftColumns draft =
      fastdraft::DraftColumns::in(memory.data(), config.lookahead);
  for (std::int64_t index = 0; index < requests; ++index) {
    const fastdraft::Token* prompt = text.data() + index * 50'000 % 1'000'000;
    const std::int64_t before = engine.bytes();
    Clock::time_point begin = Clock::now();
    const fastdraft::RequestId request = engine.add_request(prompt, context, nullptr, 0);
    prompt_ns += elapsed_ns(begin);
    bytes += static_cast<double>(engine.bytes() - before);
    for (std::int64_t step = 0; step < steps; ++step) {
      begin = Clock::now();
      engine.observe(request, prompt + context + step, 1);
      observe.ns.push_back(elapsed_ns(begin) - clock_ns);
      begin = Clock::now();
      engine.propose(request, {}, draft);
      propose.ns.push_back(elapsed_ns(begin) - clock_ns);
    }
  }
  const auto tokens = static_cast<double>(requests * context);
  std::printf("%9lld %14.1f %14.1f %10.0f %10.0f %10.0f %10.0f\n", static_cast<long long>(context),
              prompt_ns / tokens, bytes / tokens, observe.percentile(0.5), observe.percentile(0.99),
              propose.percentile(0.5), propose.percentile(0.99));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: %s TOKENS [CONTEXT]\n", argv[0]);
    return 2;
  }
  const std::vector<fastdraft::Token> text = read_tokens(argv[1]);
  if (text.size() < kTextTokens) {
    std::fprintf(stderr, "%s must hold at least %zu tokens, got %zu\n", argv[1], kTextTokens,
                 text.size());
    return 1;
  }
  const double clock_ns = clock_cost();
  std::printf("%9s %14s %14s %21s %21s\n", "context", "prompt", "memory", "observe, ns",
              "propose, ns");
  std::printf("%9s %14s %14s %10s %10s %10s %10s\n", "", "ns a token", "bytes a token", "p50",
              "p99", "p50", "p99");
  if (argc == 3) {
    measure(text, std::strtoll(argv[2], nullptr, 10), clock_ns);
    return 0;
  }
  for (const std::int64_t context : kContexts) measure(text, context, clock_ns);
  return 0;
}

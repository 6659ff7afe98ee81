// Twelve operations of the engine and its stores, whose instructions bench/instructions.py counts.
// Each is a function of its name. Texts come from a generator of their own, so that every machine
// does the same work. Prints the compiler, and how many calls of each operation were made.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/engine.h"
#include "fastdraft/ngram_table.h"

namespace {

using fastdraft::Datastore;
using fastdraft::DraftColumns;
using fastdraft::Engine;
using fastdraft::EngineConfig;
using fastdraft::RequestId;
using fastdraft::Token;
using Text = std::vector<Token>;

constexpr std::int64_t kPrompt = 4'000;
constexpr std::int64_t kStored = 300'000;
constexpr std::int64_t kDocument = 2'000;
constexpr std::int64_t kCalls = 400;
constexpr std::int64_t kBatchCalls = 50;
constexpr std::int64_t kEnded = 60;  // many, since stores hash by seeds of their own
constexpr std::int64_t kRows = 64;

// Text as models write it, in what matters to an index: few tokens are frequent and most are rare,
// some follow others, and spans of 4 to 40 tokens return, now and then changed.
class Writer {
 public:
  explicit Writer(std::uint64_t seed) : state_(seed) {}

  Text write(std::int64_t size) {
    Text text;
    while (static_cast<std::int64_t>(text.size()) < size) {
      if (text.size() > 100 && below(5) < 2) {
        const auto from = static_cast<std::size_t>(below(text.size() - 50));
        const auto length = static_cast<std::size_t>(4 + below(37));
        for (std::size_t i = 0; i < length; ++i) {
          text.push_back(below(50) != 0 ? text[from + i] : rare());
        }
      } else {
        text.push_back(below(2) == 0 || text.empty() ? rare() : (text.back() * 31 + 7) % 997);
      }
    }
    text.resize(static_cast<std::size_t>(size));
    return text;
  }

 private:
  std::uint64_t below(std::uint64_t limit) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % limit;
  }
  Token rare() {
    const std::uint64_t most = std::uint64_t{1} << (5 + below(11));
    return static_cast<Token>(below(most));
  }

  std::uint64_t state_;
};

// The columns of `draft`. Also keeps calls from being left out.
alignas(Token) std::byte memory[std::size_t{4096} * 16];
const DraftColumns draft = DraftColumns::in(memory, 4096);

EngineConfig chains() {
  EngineConfig config;
  config.vocabulary = 1 << 16;
  return config;
}
EngineConfig trees() {
  EngineConfig config = chains();
  config.drafter = fastdraft::CalibratedConfig{64};
  return config;
}

// The same with a table of what others of these texts have in common.
EngineConfig with_ngrams() {
  const std::string path = "operations.fdn";
  fastdraft::NgramTableWriter writer(path);
  for (std::uint64_t seed = 1000; seed < 1200; ++seed) {
    const Text text = Writer(seed).write(kDocument);
    writer.add(text.data(), kDocument, static_cast<std::int64_t>(seed));
  }
  writer.finish();
  EngineConfig config = chains();
  config.drafter = fastdraft::CalibratedConfig{std::nullopt, fastdraft::NgramTable::open(path)};
  std::remove(path.c_str());
  return config;
}

// One request that decodes a text of its own.
struct Decoding {
  Decoding(const EngineConfig& config, fastdraft::Stores stores, std::uint64_t seed)
      : engine(config, std::move(stores)), text(Writer(seed).write(kPrompt + kCalls)) {
    id = engine.add_request({{text.data(), kPrompt}});
  }

  Engine engine;
  Text text;
  RequestId id;
  std::int64_t done = kPrompt;
};

// 64 requests that decode side by side.
struct Batch {
  Batch() : engine(chains()) {
    Writer writer(7);
    for (std::int64_t row = 0; row < kRows; ++row) {
      texts.push_back(writer.write(kPrompt / 4 + kBatchCalls));
      ids.push_back(engine.add_request({{texts.back().data(), kPrompt / 4}}));
      offsets.push_back(row);
    }
    offsets.push_back(kRows);
  }

  Engine engine;
  std::vector<Text> texts;
  std::vector<RequestId> ids;
  std::vector<std::int64_t> offsets;
  Text emitted = Text(kRows);
};

// Compiled as they are, so that a profile names them.
#define FASTDRAFT_OPERATION extern "C" __attribute__((noinline, used))

FASTDRAFT_OPERATION void operation_propose(Engine& engine, RequestId id) {
  engine.propose(id, {}, draft);
}
FASTDRAFT_OPERATION void operation_propose_stored(Engine& engine, RequestId id) {
  engine.propose(id, {}, draft);
}
FASTDRAFT_OPERATION void operation_propose_tree(Engine& engine, RequestId id) {
  engine.propose(id, {}, draft);
}
FASTDRAFT_OPERATION void operation_propose_ngrams(Engine& engine, RequestId id) {
  engine.propose(id, {}, draft);
}
FASTDRAFT_OPERATION void operation_observe_ngrams(Engine& engine, RequestId id,
                                                  const Token* emitted) {
  engine.observe(id, emitted, 1);
}
FASTDRAFT_OPERATION void operation_observe(Engine& engine, RequestId id, const Token* emitted) {
  engine.observe(id, emitted, 1);
}
FASTDRAFT_OPERATION void operation_observe_stored(Engine& engine, RequestId id,
                                                  const Token* emitted) {
  engine.observe(id, emitted, 1);
}
FASTDRAFT_OPERATION RequestId operation_add_request(Engine& engine, const Text& prompt) {
  return engine.add_request({{prompt.data(), kPrompt}});
}
FASTDRAFT_OPERATION void operation_finish(Engine& engine, RequestId id) { engine.finish(id); }
FASTDRAFT_OPERATION void operation_propose_batch(Batch& batch) {
  batch.engine.propose_batch(batch.ids.data(), kRows, {});
}
FASTDRAFT_OPERATION void operation_observe_batch(Batch& batch) {
  static_cast<void>(batch.engine.observe_batch(batch.ids.data(), kRows, batch.emitted.data(),
                                               batch.offsets.data()));
}
FASTDRAFT_OPERATION void operation_store_add(Datastore& store, const Token* text) {
  store.add(text, kDocument, kDocument);
}

// A step of each call: a draft, and one token of the text.
template <typename Propose, typename Observe>
void decode(Decoding& decoding, Propose propose, Observe observe) {
  for (std::int64_t call = 0; call < kCalls; ++call) {
    propose(decoding.engine, decoding.id);
    observe(decoding.engine, decoding.id, decoding.text.data() + decoding.done++);
  }
}

}  // namespace

int main() {
  const std::shared_ptr<Datastore> store = Datastore::live(Datastore::kDefaultMaxBytes);
  const Text stored = Writer(1).write(kStored);
  for (std::int64_t at = 0; at < kStored; at += kDocument) {
    operation_store_add(*store, stored.data() + at);
  }
  Decoding alone(chains(), {}, 2);
  decode(alone, operation_propose, operation_observe);
  // The same text.
  Decoding knowing(with_ngrams(), {}, 2);
  decode(knowing, operation_propose_ngrams, operation_observe_ngrams);
  Decoding beside(chains(), {store}, 3);
  // It decodes what the store has text of.
  std::copy_n(stored.begin() + 1000, kCalls, beside.text.begin() + kPrompt);
  decode(beside, operation_propose_stored, operation_observe_stored);
  Decoding tree(trees(), {store}, 4);
  std::copy_n(stored.begin() + 9000, kCalls, tree.text.begin() + kPrompt);
  decode(tree, operation_propose_tree, [](Engine& engine, RequestId id, const Token* emitted) {
    engine.observe(id, emitted, 1);
  });
  Batch batch;
  for (std::int64_t call = 0; call < kBatchCalls; ++call) {
    for (std::size_t row = 0; row < kRows; ++row) {
      batch.emitted[row] = batch.texts[row][static_cast<std::size_t>(kPrompt / 4 + call)];
    }
    operation_propose_batch(batch);
    operation_observe_batch(batch);
  }
  Engine ending(chains(), {store});
  for (std::uint64_t seed = 0; seed < kEnded; ++seed) {
    operation_finish(ending, operation_add_request(ending, Writer(100 + seed).write(kPrompt)));
  }
  const std::pair<const char*, std::int64_t> calls[] = {{"propose", kCalls},
                                                        {"propose_stored", kCalls},
                                                        {"propose_tree", kCalls},
                                                        {"propose_ngrams", kCalls},
                                                        {"observe", kCalls},
                                                        {"observe_ngrams", kCalls},
                                                        {"observe_stored", kCalls},
                                                        {"propose_batch", kBatchCalls},
                                                        {"observe_batch", kBatchCalls},
                                                        {"add_request", kEnded},
                                                        {"finish", kEnded},
                                                        {"store_add", kStored / kDocument}};
  std::printf("%s\n", __VERSION__);
  for (const auto& [name, times] : calls) {
    std::printf("%s %lld\n", name, static_cast<long long>(times));
  }
  return 0;
}

// A frozen store of which numbers are changed, each a field of its format, and the
// checksums made right again. It is refused, or every token that leaves it, by whatever way, is one
// that its header allows, and nothing outside the file is read.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../folder.h"
#include "../texts.h"
#include "fastdraft/datastore.h"
#include "fastdraft/engine.h"
#include "fastdraft/error.h"
#include "store/datastore_file.h"
#include "store/datastore_index.h"
#include "target.h"

namespace fastdraft::fuzz_datastore {

constexpr Token kLargest = 2;  // of the whole store

const std::string& path() {
  static const testing::Folder folder;
  static const std::string path = folder.file("store.fds");
  return path;
}

std::vector<char> read_file(const std::string& name) {
  std::ifstream file(name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<char> whole_store() {
  DatastoreWriter writer(path(), {}, DatastoreWriter::kLeastSegmentTokens);
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    const auto text = testing::random_text(400, kLargest + 1, seed);
    writer.begin_document();
    writer.append(text.data(), static_cast<std::int64_t>(text.size()), seed % 2 == 0);
  }
  writer.finish();
  return read_file(path());
}

// The input, a number at a time; zeros follow it.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  std::size_t next(std::size_t below) { return static_cast<std::size_t>(number()) % below; }
  std::size_t byte() { return at_ == end_ ? 0 : *at_++; }
  std::int64_t number() {
    std::int64_t number = 0;
    for (int i = 0; i < 4; ++i) number = number << 8 | static_cast<std::int64_t>(byte());
    return number;
  }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

// Replaces the number at `at` by one of those that are likely to be taken for another.
template <typename Number>
void change(Input& input, char* at) {
  Number number;
  std::memcpy(&number, at, sizeof(number));
  const auto bits = static_cast<std::uint64_t>(number);
  const auto byte = static_cast<std::uint64_t>(input.byte());
  const std::uint64_t others[] = {~std::uint64_t{0},
                                  ~std::uint64_t{1} - byte,
                                  static_cast<std::uint64_t>(std::numeric_limits<Number>::min()),
                                  static_cast<std::uint64_t>(std::numeric_limits<Number>::max()),
                                  bits + 1,
                                  bits - 1,
                                  byte,
                                  static_cast<std::uint64_t>(input.number())};
  number = static_cast<Number>(others[input.next(std::size(others))]);
  std::memcpy(at, &number, sizeof(number));
}

// A number of the header, of a segment's entry in the directory, or in one of its sections.
void change_one(Input& input, std::vector<char>& content, const std::vector<char>& whole) {
  FileHeader header;
  std::memcpy(&header, whole.data(), sizeof(header));
  const std::int64_t position =
      header.directory_offset +
      static_cast<std::int64_t>(input.byte() % static_cast<std::size_t>(header.num_segments) *
                                sizeof(SegmentEntry));
  SegmentEntry entry;
  std::memcpy(&entry, whole.data() + position, sizeof(entry));
  const SegmentLayout layout(entry);
  const std::size_t order = input.byte() % kNumOrders;
  if (input.byte() % 8 == 0) {
    // Tags of all buckets, so that a search goes on and on.
    const auto tag = static_cast<char>(input.byte());
    for (std::int64_t bucket = 0; bucket < entry.buckets[order]; ++bucket) {
      std::memset(content.data() + layout.buckets[order] + bucket * 64, tag, Bucket::kEntries);
    }
    return;
  }
  struct {
    std::int64_t first, count, bytes;  // numbers of n bytes
  } const sections[] = {
      {0, sizeof(FileHeader) / 4, 4},
      {offsetof(FileHeader, num_tokens), 5, 8},
      {offsetof(FileHeader, largest_token), 1, 4},
      {position, sizeof(entry) / 8, 8},
      {layout.tokens, entry.size, 2},
      {layout.outputs, entry.size / 8, 1},
      {layout.postings[order], std::max<std::int64_t>(entry.postings[order], 1), 4},
      {layout.buckets[order], entry.buckets[order] * 16, 4},
  };
  const auto& [first, count, bytes] = sections[input.byte() % std::size(sections)];
  char* number = content.data() + first +
                 static_cast<std::int64_t>(input.next(static_cast<std::size_t>(count))) * bytes;
  if (bytes == 1) change<std::uint8_t>(input, number);
  if (bytes == 2) change<std::uint16_t>(input, number);
  if (bytes == 4) change<std::int32_t>(input, number);
  if (bytes == 8) change<std::int64_t>(input, number);
}

// Makes the checksums right. Without it hardly an input would be read.
void seal(std::vector<char>& content) {
  FileHeader header;
  std::memcpy(&header, content.data(), sizeof(header));
  const auto size = static_cast<std::int64_t>(content.size());
  const std::int64_t offset = header.directory_offset;
  if (offset >= FileHeader::kBytes && offset <= size) {
    header.directory_checksum = crc32(content.data() + offset, size - offset);
  }
  header.checksum = crc32(&header, offsetof(FileHeader, checksum));
  std::memcpy(content.data(), &header, sizeof(header));
}

void check(const Token* tokens, std::int64_t count, Token largest) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] > largest) std::abort();
  }
}

// All that a store says.
void check_text(const Datastore& store, Token largest) {
  const Datastore::Reader reader(store);
  Token tokens[100];
  for (std::int64_t at = reader.begin(); at < reader.end(); ++at) {
    check(tokens, reader.copy(at, tokens, 100), largest);
    if (reader.at(at) < -1 || reader.at(at) > largest) std::abort();
  }
  const auto text = testing::random_text(400, kLargest + 1, 2);
  for (std::int64_t end = 3; end < 400; end += 23) {
    Occurrence found[8];
    const int count = reader.find(text.data(), end, found, 8);
    for (int i = 0; i < count; ++i) {
      if (found[i].next < reader.begin() || found[i].next >= reader.end()) std::abort();
      check(tokens, reader.copy(found[i].next, tokens, 40), largest);
    }
  }
}

// Drafts from it, and from its saved file.
void check_ways(const std::shared_ptr<Datastore>& store, Token largest, std::int64_t vocabulary) {
  store->save(path() + "-saved");
  const Stores all = {store, Datastore::open(path() + "-saved")};
  EngineConfig config;
  config.vocabulary = vocabulary;
  config.token_cost = 0.0;
  config.drafter = CalibratedConfig{32};
  const auto most = static_cast<Token>(std::min<std::int64_t>(largest, vocabulary - 1));
  const auto text = testing::random_text(40, kLargest + 1, 2);
  for (const auto& each : all) {
    check_text(*each, largest);
    const Stores stores = {each};
    Engine engine(config);
    const auto request = engine.add_request({{text.data(), 30}, {}, {}, stores});
    for (int step = 30; step < 40; ++step) {
      const DraftBatch drafts = engine.propose_batch(&request, 1, {});
      // Its own text may hold tokens that the store does not.
      check(drafts.columns.token_ids, drafts.offsets.back(), std::max(most, kLargest));
      engine.observe(request, text.data() + step, 1);
    }
  }
}

FASTDRAFT_FUZZ(DamagedDatastore, 300) {
  static const std::vector<char> whole = whole_store();
  std::vector<char> content = whole;
  Input input(data, size);
  const std::size_t ways = input.byte();
  while (!input.empty()) {
    if (input.byte() % 8 == 0) {
      content[input.next(content.size())] = static_cast<char>(input.byte());
    } else {
      change_one(input, content, whole);
    }
  }
  if (ways % 16 == 15) content.resize(std::max(sizeof(FileHeader), content.size() - ways));
  seal(content);
  std::ofstream(path(), std::ios::binary)
      .write(content.data(), static_cast<std::streamsize>(content.size()));
  try {
    const auto store = Datastore::open(path());
    if (store->num_tokens() < 0 || store->num_documents() < 0) std::abort();
    FileHeader header;
    std::memcpy(&header, content.data(), sizeof(header));
    check_text(*store, header.largest_token);
    if (ways % 4 == 1) {  // which waits for the disk
      check_ways(store, header.largest_token, ways % 8 == 1 ? kLargest + 1 : kAllTokens);
    }
  } catch (const DatastoreError&) {
  }
  return 0;
}

}  // namespace fastdraft::fuzz_datastore

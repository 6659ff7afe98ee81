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
  switch (input.byte() % 8) {
    case 0:
      number = static_cast<Number>(-1);
      break;
    case 1:
      number = static_cast<Number>(-2 - static_cast<int>(input.byte()));
      break;
    case 2:
      number = std::numeric_limits<Number>::min();
      break;
    case 3:
      number = std::numeric_limits<Number>::max();
      break;
    case 4:
      number = static_cast<Number>(static_cast<std::uint64_t>(number) + 1);
      break;
    case 5:
      number = static_cast<Number>(static_cast<std::uint64_t>(number) - 1);
      break;
    case 6:
      number = static_cast<Number>(input.byte());
      break;
    default:
      number = static_cast<Number>(input.number());
  }
  std::memcpy(at, &number, sizeof(number));
}

void change_header(Input& input, std::vector<char>& content) {
  char* header = content.data();
  constexpr std::size_t kWide[] = {
      offsetof(FileHeader, num_tokens), offsetof(FileHeader, num_documents),
      offsetof(FileHeader, num_segments), offsetof(FileHeader, directory_offset),
      offsetof(FileHeader, file_bytes)};
  constexpr std::size_t kNarrow[] = {
      offsetof(FileHeader, version),         offsetof(FileHeader, most_postings),
      offsetof(FileHeader, num_orders),      offsetof(FileHeader, orders),
      offsetof(FileHeader, has_fingerprint), offsetof(FileHeader, largest_token)};
  const std::size_t field = input.byte() % (std::size(kWide) + 2 * std::size(kNarrow));
  if (field < std::size(kWide)) {
    change<std::int64_t>(input, header + kWide[field]);
  } else if (field < std::size(kWide) + std::size(kNarrow)) {
    change<std::int32_t>(input, header + kNarrow[field - std::size(kWide)]);
  } else {
    change<std::int32_t>(input, header + offsetof(FileHeader, largest_token));
  }
}

// A number of a segment's: of its entry in the directory, or in one of its sections.
void change_segment(Input& input, std::vector<char>& content, const std::vector<char>& whole) {
  FileHeader header;
  std::memcpy(&header, whole.data(), sizeof(header));
  const std::size_t place =
      static_cast<std::size_t>(header.directory_offset) +
      input.byte() % static_cast<std::size_t>(header.num_segments) * sizeof(SegmentEntry);
  SegmentEntry entry;
  std::memcpy(&entry, whole.data() + place, sizeof(entry));
  const SegmentLayout layout(entry);
  const std::size_t order = input.byte() % kNumOrders;
  const auto at = [&](std::int64_t section, std::int64_t count, std::size_t bytes) {
    return content.data() + section +
           input.next(static_cast<std::size_t>(std::max<std::int64_t>(count, 1))) * bytes;
  };
  switch (input.byte() % 6) {
    case 0:
      change<std::int64_t>(input, content.data() + place + input.byte() % 9 * 8);
      break;
    case 1:
      change<std::uint16_t>(input, at(layout.tokens, entry.size, 2));
      break;
    case 2:
      change<std::uint8_t>(input, at(layout.outputs, entry.size / 8, 1));
      break;
    case 3:
      change<std::uint32_t>(input, at(layout.postings[order], entry.postings[order], 4));
      break;
    case 4:
      change<std::uint32_t>(input, at(layout.buckets[order], entry.buckets[order], sizeof(Bucket)) +
                                       offsetof(Bucket, positions) +
                                       input.byte() % Bucket::kEntries * 4);
      break;
    default: {
      // Tags of all buckets, so that a search goes on and on.
      const auto tag = static_cast<char>(input.byte());
      for (std::int64_t bucket = 0; bucket < entry.buckets[order]; ++bucket) {
        std::memset(content.data() + layout.buckets[order] + bucket * 64, tag, Bucket::kEntries);
      }
    }
  }
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

// What is drafted from it, and from what is saved of it.
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
    const auto request = engine.add_request(text.data(), 30, nullptr, 0, &stores);
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
    switch (input.byte() % 8) {
      case 0:
      case 1:
        change_header(input, content);
        break;
      case 2:
        content[input.next(content.size())] = static_cast<char>(input.byte());
        break;
      default:
        change_segment(input, content, whole);
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

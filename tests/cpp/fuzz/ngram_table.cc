// A table of n-grams of which bytes are changed, and the checksums made right again. It is refused,
// or what it guesses and what is drafted from it are tokens of 20 bits, and nothing outside the
// file is read.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../folder.h"
#include "../texts.h"
#include "fastdraft/engine.h"
#include "fastdraft/error.h"
#include "fastdraft/ngram_table.h"
#include "store/datastore_file.h"
#include "target.h"

namespace fastdraft::fuzz_ngram_table {

constexpr std::size_t kHeader = 96;  // docs/reference/file-formats.md
constexpr std::size_t kSize = 72;    // where it has the file's size, of 8 bytes
constexpr std::size_t kContents = kHeader - 8;
constexpr std::size_t kChecksum = kHeader - 4;

const std::string& path() {
  static const testing::Folder folder;
  static const std::string path = folder.file("table.fdn");
  return path;
}

std::vector<char> whole_table() {
  NgramTableWriter writer(path());
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const auto text = testing::random_text(60, 5, seed);
    writer.add(text.data(), static_cast<std::int64_t>(text.size()), seed);
  }
  writer.finish();
  std::ifstream file(path(), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename Number>
void put(std::vector<char>& content, std::size_t at, Number number) {
  std::memcpy(content.data() + at, &number, sizeof(number));
}

void seal(std::vector<char>& content) {
  put(content, kSize, static_cast<std::int64_t>(content.size()));
  put(content, kContents,
      crc32(content.data() + kHeader, static_cast<std::int64_t>(content.size() - kHeader)));
  put(content, kChecksum, crc32(content.data(), kChecksum));
}

void check(Token token) {
  if (token < 0 || token > NgramTable::kLargestToken) std::abort();
}

void draft_from(const std::shared_ptr<const NgramTable>& table, std::optional<std::int32_t> tree) {
  EngineConfig config;
  config.token_cost = 0.0;
  config.drafter = CalibratedConfig{tree, table};
  Engine engine(config);
  const auto text = testing::random_text(40, 5, 3);
  const RequestId request = engine.add_request({{text.data(), 30}});
  for (int step = 30; step < 40; ++step) {
    const DraftBatch drafts = engine.propose_batch(&request, 1, {});
    for (std::int64_t i = 0; i < drafts.offsets.back(); ++i) check(drafts.columns.token_ids[i]);
    engine.observe(request, text.data() + step, 1);
  }
}

FASTDRAFT_FUZZ(DamagedNgramTable, 300) {
  static const std::vector<char> whole = whole_table();
  std::vector<char> content = whole;
  // Three bytes of input: where, and what. The first one moves bytes of the header and the index,
  // which are few, more often than others.
  for (std::size_t i = 0; i + 3 <= size; i += 3) {
    const std::size_t position = std::size_t{data[i]} << 8 | data[i + 1];
    const std::size_t end = data[i] % 2 == 0 ? content.size() : kHeader + 64;
    content[position % end] = static_cast<char>(data[i + 2]);
  }
  if (size > 0 && data[0] % 16 == 15) content.resize(content.size() - data[0] % 64);
  seal(content);
  std::ofstream(path(), std::ios::binary)
      .write(content.data(), static_cast<std::streamsize>(content.size()));
  std::shared_ptr<const NgramTable> table;
  try {
    table = NgramTable::open(path());
  } catch (const DatastoreError&) {
    return 0;
  }
  const auto text = testing::random_text(60, 6, 1);
  std::array<NgramTable::Guess, NgramTable::kOrders * NgramTable::kSuccessors> guesses;
  for (std::int64_t end = 0; end <= 60; ++end) {
    const int count =
        table->guess(text.data(), end, guesses.data(), static_cast<int>(guesses.size()));
    for (int i = 0; i < count; ++i) check(guesses[static_cast<std::size_t>(i)].token);
  }
  table->count_known(text.data(), 60, 2);
  draft_from(table, std::nullopt);
  draft_from(table, 20);
  return 0;
}

}  // namespace fastdraft::fuzz_ngram_table

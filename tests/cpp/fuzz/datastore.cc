// libFuzzer: a frozen store whose bytes are changed at will, its checksums made
// right again. It is refused, or it is read, and saved, without leaving the file.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../texts.h"
#include "datastore_file.h"
#include "fastdraft/datastore.h"
#include "fastdraft/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using fastdraft::Datastore;
using fastdraft::FileHeader;

const std::string& path() {
  static const std::string path =
      (std::filesystem::temp_directory_path() / ("fuzz_datastore-" + std::to_string(std::rand())))
          .string();
  return path;
}

std::vector<char> whole_store() {
  fastdraft::DatastoreWriter writer(path(), {}, fastdraft::DatastoreWriter::kLeastSegmentTokens);
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    const auto text = fastdraft::testing::random_text(400, 3, seed);
    writer.begin_document();
    writer.append(text.data(), static_cast<std::int64_t>(text.size()));
  }
  writer.finish();
  std::ifstream file(path(), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Without it hardly an input would get past the header.
void seal(std::vector<char>* content) {
  FileHeader header;
  if (content->size() < FileHeader::kBytes) return;
  std::memcpy(&header, content->data(), sizeof(header));
  const auto size = static_cast<std::int64_t>(content->size());
  if (header.directory_offset >= 0 && header.directory_offset <= size) {
    header.directory_checksum =
        fastdraft::crc32(content->data() + header.directory_offset, size - header.directory_offset);
  }
  header.checksum = fastdraft::crc32(&header, offsetof(FileHeader, checksum));
  std::memcpy(content->data(), &header, sizeof(header));
}

// What is saved of it is whole, and no token in it is greater than its header says.
void save(const Datastore& store, const std::vector<char>& content) {
  FileHeader header;
  std::memcpy(&header, content.data(), sizeof(header));
  store.save(path() + "-saved");
  const auto saved = Datastore::open(path() + "-saved", {}, true);
  const Datastore::Reader reader(*saved);
  for (std::int64_t at = 0; at < reader.end(); ++at) {
    if (reader.at(at) > header.largest_token) std::abort();
  }
}

}  // namespace

// Every four bytes of the input are one write: in which part of the file, at which offset, to how
// many buckets in a row, and which byte.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<char> whole = whole_store();
  FileHeader header;
  std::memcpy(&header, whole.data(), sizeof(header));
  std::vector<char> content = whole;
  for (std::size_t i = 0; i + 4 <= size; i += 4) {
    const std::size_t bases[] = {0, static_cast<std::size_t>(header.directory_offset),
                                 static_cast<std::size_t>(data[i]) << 8, 4096};
    const std::size_t at = bases[data[i] % 4] + data[i + 1] + 256U * (data[i + 2] % 8U);
    // Tags of a run of buckets, so that a search goes on and on.
    const std::size_t times = std::size_t{1} << (data[i + 2] >> 5);
    for (std::size_t j = 0; j < times; ++j) {
      content[(at + 64 * j) % content.size()] = static_cast<char>(data[i + 3]);
    }
  }
  if (size % 4 == 3)
    content.resize(content.size() - std::min(content.size(), std::size_t{data[0]}));
  seal(&content);
  std::ofstream(path(), std::ios::binary)
      .write(content.data(), static_cast<std::streamsize>(content.size()));
  try {
    const auto store = Datastore::open(path());
    if (store->num_tokens() < 0 || store->num_documents() < 0) std::abort();
    if (size > 0 && data[0] % 16 == 0) save(*store, content);  // which waits for the disk
    const Datastore::Reader reader(*store);
    const auto text = fastdraft::testing::random_text(400, 3, 2);
    for (std::int64_t end = 3; end < 400; end += 23) {
      fastdraft::Occurrence found[8];
      const int count = reader.find(text.data(), end, found, 8);
      for (int i = 0; i < count; ++i) {
        fastdraft::Token tokens[40];
        reader.copy(found[i].next, tokens, 40);
        if (found[i].next < reader.begin() || found[i].next >= reader.end()) std::abort();
        // Not a token where the header has been told that none is so large.
        const fastdraft::Token last = reader.at(found[i].next - 1);
        if (last != text[static_cast<std::size_t>(end) - 1] && last != -1) std::abort();
      }
    }
  } catch (const fastdraft::DatastoreError&) {
  }
  return 0;
}

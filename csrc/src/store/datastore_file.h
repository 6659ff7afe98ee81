// The file of a frozen datastore: its layout, and what the operating system
// does for it.
//
//   header       4,096 bytes, FileHeader and zeros
//   segments     each has these sections, each from a multiple of 64 bytes on:
//                its tokens, with a mark before each document; every token takes
//                2, 3 or 4 bytes, as the segment's largest token needs;
//                a bit for each token, 1 for a model's output;
//                for each order the postings and the buckets of a hash table
//   weights      those of tokens that the store's requests have taught, from a multiple of 64 bytes
//                on; none in a file that was not saved from a live store
//   directory    a SegmentEntry for each segment
#pragma once

#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/token.h"

namespace fastdraft {

// Tokens in 2, 3 or 4 bytes each, the lowest first. A document's mark is negative, and so one of
// the largest numbers of that width.
struct TokenCode {
  // The fewest bytes in which the tokens up to `largest` can be distinguished from marks.
  static std::int64_t width_for(Token largest) noexcept;
  static Token largest(std::int64_t width) noexcept;

  static bool valid(std::int64_t width) noexcept { return width >= 2 && width <= 4; }
  static void encode(const Token* tokens, std::int64_t count, std::int64_t width,
                     std::uint8_t* out) noexcept;
  static void decode(const std::uint8_t* bytes, std::int64_t count, std::int64_t width,
                     Token* out) noexcept;
};

// An n-gram's position in a segment, and who wrote the token behind it. An entry of a table is
// one, or tells where an n-gram's postings begin: the latest first, kMost of them at most.
class Posting {
 public:
  static constexpr int kMost = 64;  // a lookup of a tree's drafts follows no more

  explicit Posting(std::uint32_t bits) noexcept : bits_(bits) {}
  Posting(std::int64_t position, bool output, bool last) noexcept
      : bits_(static_cast<std::uint32_t>(position) | (output ? kOutput : 0) | (last ? kLast : 0)) {}
  static Posting list(std::int64_t first) noexcept {
    return Posting(static_cast<std::uint32_t>(first) | kList);
  }

  std::uint32_t bits() const noexcept { return bits_; }
  std::int64_t position() const noexcept { return bits_ & kNumber; }
  bool output() const noexcept { return (bits_ & kOutput) != 0; }
  bool last() const noexcept { return (bits_ & kLast) != 0; }
  bool is_list() const noexcept { return (bits_ & kList) != 0; }
  std::int64_t first() const noexcept { return bits_ & kNumber; }  // of a list

 private:
  static constexpr std::uint32_t kOutput = 0x80000000u;
  static constexpr std::uint32_t kLast = 0x40000000u;
  static constexpr std::uint32_t kList = 0x20000000u;
  static constexpr std::uint32_t kNumber = 0x1FFFFFFFu;
  static_assert(DatastoreWriter::kSegmentTokens <= kNumber);

  std::uint32_t bits_;
};
static_assert(sizeof(Posting) == 4);

struct FileHeader {
  // The first byte is none of text, and a transfer that changes the ends of lines
  // breaks the last ones (as in PNG).
  static constexpr std::array<std::uint8_t, 8> kMagic{0x89, 'F', 'D', 'S', '\r', '\n', 0x1A, '\n'};
  static constexpr std::uint32_t kVersion = 5;
  static constexpr std::uint32_t kByteOrder = 0x01020304;
  static constexpr std::int64_t kBytes = 4096;

  std::array<std::uint8_t, 8> magic;
  std::uint32_t version;
  std::uint32_t byte_order;
  std::uint32_t most_postings;  // of an n-gram in a segment
  std::uint32_t num_orders;
  std::array<std::int32_t, 8> orders;  // zeros follow
  Fingerprint fingerprint;
  std::uint32_t has_fingerprint;
  Token largest_token;  // -1 where there are none
  std::int64_t num_tokens;
  std::int64_t num_documents;
  std::int64_t num_segments;
  std::int64_t directory_offset;
  std::int64_t file_bytes;
  std::uint32_t directory_checksum;
  std::uint32_t segments_checksum;  // of all between header and directory
  std::uint32_t num_weights;
  std::uint32_t checksum;  // of all fields before this one
};
static_assert(sizeof(FileHeader) == 152);

struct SegmentEntry {
  std::int64_t offset;  // of its first section in the file
  std::int64_t size;    // its tokens and marks
  std::int64_t token_bytes;
  std::array<std::int64_t, Datastore::kOrders.size()> postings;
  std::array<std::int64_t, Datastore::kOrders.size()> buckets;
};

// The offsets of a segment's sections in the file.
struct SegmentLayout {
  std::int64_t tokens;
  std::int64_t outputs;
  std::array<std::int64_t, Datastore::kOrders.size()> postings;
  std::array<std::int64_t, Datastore::kOrders.size()> buckets;
  std::int64_t end;

  explicit SegmentLayout(const SegmentEntry& entry) noexcept;
  static std::int64_t aligned(std::int64_t offset) noexcept { return (offset + 63) / 64 * 64; }
};

// The CRC-32 of IEEE 802.3, as zlib has it, continued from `checksum`.
std::uint32_t crc32(const void* data, std::int64_t bytes, std::uint32_t checksum = 0) noexcept;

// A file in memory, read-only.
class MappedFile {
 public:
  // Throws DatastoreError, and InvalidValueError for a path with a NUL byte.
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::byte* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  const std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Throws DatastoreError with the file's path and `what` is wrong with it.
[[noreturn]] void refuse_file(const std::string& path, const std::string& what);

// Refuses a file that does not have as many bytes as its header says.
void check_file_bytes(const MappedFile& file, const std::string& path, std::int64_t expected);

// The header of a mapped file. Refuses what does not begin with one of this version, and a damaged
// one. `kind`: what the file should be, for the message.
template <typename Header>
Header read_header(const MappedFile& file, const std::string& path, const char* kind) {
  Header header{};
  if (file.bytes() < static_cast<std::int64_t>(header.magic.size()) ||
      std::memcmp(file.data(), Header::kMagic.data(), header.magic.size()) != 0) {
    refuse_file(path, std::string("not ") + kind);
  }
  if (file.bytes() < Header::kBytes) {
    refuse_file(path,
                "truncated: " + std::to_string(file.bytes()) + " bytes are less than a header");
  }
  std::memcpy(&header, file.data(), sizeof(header));
  if (header.byte_order != Header::kByteOrder) {
    refuse_file(path, "written on a machine of another byte order, or its header is damaged");
  }
  // A newer version may have put its checksum elsewhere.
  if (header.version != Header::kVersion) {
    refuse_file(path, "written in version " + std::to_string(header.version) +
                          " of the format, this fastdraft reads version " +
                          std::to_string(Header::kVersion) +
                          (header.version < Header::kVersion ? ": build it again" : ""));
  }
  if (header.checksum != crc32(&header, offsetof(Header, checksum))) {
    refuse_file(path, "the checksum of its header is wrong: damaged");
  }
  return header;
}

// Returns the fingerprint in a header, if it has one. Refuses the file if another one is expected.
template <typename Header>
std::optional<Fingerprint> fingerprint_in(const Header& header, const std::string& path,
                                          const std::optional<Fingerprint>& expected) {
  std::optional<Fingerprint> found;
  if (header.has_fingerprint != 0) found = header.fingerprint;
  if (expected && found != expected) {
    refuse_file(path, "of another tokenizer: its fingerprint is " +
                          (found ? to_hex(*found) : "not known") + ", expected " +
                          to_hex(*expected));
  }
  return found;
}

// A file that is written beside `path` and replaces it when it is complete. Only the process
// that made it may write to it; in a fork of it the destructor leaves the file alone.
class OutputFile {
 public:
  // `path`.tmp, locked until it is closed; it replaces one whose writer was killed. On
  // disks without locks two writers of one path would write to one file. Throws DatastoreError, as
  // do all its methods, and InvalidValueError for a path with a NUL byte.
  explicit OutputFile(const std::string& path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  // Removes what was not completed.
  ~OutputFile();

  void write(const void* data, std::int64_t bytes);
  // Overwrites from the file's beginning on, and has all of it on the disk under its
  // name when it returns.
  void complete(const void* beginning, std::int64_t bytes);

 private:
  [[noreturn]] void fail(const char* what) const;

  std::string path_;
  std::string temporary_;
  const pid_t process_ = ::getpid();
  int file_ = -1;
};

}  // namespace fastdraft

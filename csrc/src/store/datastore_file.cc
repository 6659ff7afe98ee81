#include "store/datastore_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <system_error>

#include "fastdraft/error.h"
#include "index/bits.h"
#include "store/datastore_index.h"

namespace fastdraft {
namespace {

std::string reason() { return std::generic_category().message(errno); }

// The system would take what comes before a NUL byte for the whole.
std::string checked(const std::string& path) {
  const std::size_t nul = path.find('\0');
  if (nul == std::string::npos) return path;
  throw InvalidValueError("a path must have no NUL byte, got one at index " + std::to_string(nul));
}

// The folder of a path, with a slash at its end.
std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "./" : path.substr(0, slash + 1);
}

template <int kWidth>
void encode_as(const Token* tokens, std::int64_t count, std::uint8_t* out) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint32_t>(tokens[i]);
    for (int byte = 0; byte < kWidth; ++byte) {
      *out++ = static_cast<std::uint8_t>(bits >> (8 * byte));
    }
  }
}

template <int kWidth>
void decode_as(const std::uint8_t* bytes, std::int64_t count, Token* out) noexcept {
  // Marks are the numbers above the largest token.
  const auto largest = static_cast<std::uint32_t>(TokenCode::largest(kWidth));
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    for (int byte = 0; byte < kWidth; ++byte) {
      bits |= static_cast<std::uint32_t>(*bytes++) << (8 * byte);
    }
    if (kWidth < 4 && bits > largest) bits |= 0xFFFFFFFFu << (8 * (kWidth % 4));
    out[i] = static_cast<Token>(bits);
  }
}

// [k][b]: what byte b does to a checksum after k more bytes.
using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr CrcTables crc_tables() noexcept {
  CrcTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (0xEDB88320u & (0u - (value & 1u)));
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFFu];
    }
  }
  return tables;
}

}  // namespace

// Eight bytes a step (Intel's slicing-by-8, 2006).
std::uint32_t crc32(const void* data, std::int64_t bytes, std::uint32_t checksum) noexcept {
  static constexpr CrcTables kTables = crc_tables();
  const auto* at = static_cast<const std::uint8_t*>(data);
  std::uint32_t value = ~checksum;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      const std::uint32_t mixed = i < 4 ? value >> (8 * i) : 0;
      next ^= kTables[7 - i][(mixed ^ at[i]) & 0xFFu];
    }
    value = next;
  }
  for (; bytes > 0; --bytes, ++at) value = (value >> 8) ^ kTables[0][(value ^ *at) & 0xFFu];
  return ~value;
}

std::int64_t TokenCode::width_for(Token largest) noexcept {
  std::int64_t width = 2;
  while (largest > TokenCode::largest(width)) ++width;
  return width;
}

Token TokenCode::largest(std::int64_t width) noexcept {
  constexpr std::int64_t kMarks = kContextTokens + 1;
  return width >= 4 ? std::numeric_limits<Token>::max()
                    : static_cast<Token>((std::int64_t{1} << (8 * width)) - 1 - kMarks);
}

void TokenCode::encode(const Token* tokens, std::int64_t count, std::int64_t width,
                       std::uint8_t* out) noexcept {
  if (width == 2) return encode_as<2>(tokens, count, out);
  if (width == 3) return encode_as<3>(tokens, count, out);
  encode_as<4>(tokens, count, out);
}

void TokenCode::decode(const std::uint8_t* bytes, std::int64_t count, std::int64_t width,
                       Token* out) noexcept {
  if (width == 2) return decode_as<2>(bytes, count, out);
  if (width == 3) return decode_as<3>(bytes, count, out);
  decode_as<4>(bytes, count, out);
}

SegmentLayout::SegmentLayout(const SegmentEntry& entry) noexcept : tokens(entry.offset) {
  outputs = aligned(tokens + entry.size * entry.token_bytes);
  std::int64_t at = outputs + (entry.size + 7) / 8;
  for (std::size_t order = 0; order < postings.size(); ++order) {
    postings[order] = aligned(at);
    buckets[order] = aligned(postings[order] +
                             entry.postings[order] * static_cast<std::int64_t>(sizeof(Posting)));
    at = buckets[order] + entry.buckets[order] * static_cast<std::int64_t>(sizeof(Bucket));
  }
  end = at;
}

void refuse_file(const std::string& path, const std::string& what) {
  throw DatastoreError(path + ": " + what);
}

void check_file_bytes(const MappedFile& file, const std::string& path, std::int64_t expected) {
  if (file.bytes() == expected) return;
  refuse_file(path, "truncated or overwritten: it has " + std::to_string(file.bytes()) +
                        " bytes of " + std::to_string(expected));
}

MappedFile::MappedFile(const std::string& path) {
  // A FIFO would wait for somebody who writes to it.
  const int file = ::open(checked(path).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) throw DatastoreError("cannot open " + path + ": " + reason());
  struct stat status{};
  void* mapped = MAP_FAILED;
  if (::fstat(file, &status) == 0) {
    bytes_ = static_cast<std::int64_t>(status.st_size);
    if (!S_ISREG(status.st_mode)) {
      ::close(file);
      throw DatastoreError(path + " is not a regular file");
    }
    if (bytes_ > 0) {
      mapped = ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_SHARED, file, 0);
    }
  }
  const std::string why = reason();
  ::close(file);
  if (bytes_ > 0 && mapped == MAP_FAILED) throw DatastoreError("cannot map " + path + ": " + why);
  if (bytes_ > 0) data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) {
    ::munmap(const_cast<std::byte*>(data_), static_cast<std::size_t>(bytes_));
  }
}

OutputFile::OutputFile(const std::string& path) : path_(checked(path)), temporary_(path + ".tmp") {
  const char* name = temporary_.c_str();
  for (;;) {
    const int file = ::open(name, O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (file < 0) fail("cannot create a file beside");
    const bool others = ::flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    struct stat locked{};
    struct stat named{};
    // Its writer may have completed it before the lock.
    const bool same = ::fstat(file, &locked) == 0 && ::stat(name, &named) == 0 &&
                      locked.st_ino == named.st_ino && locked.st_dev == named.st_dev;
    if (!others && same && ::ftruncate(file, 0) == 0) {
      file_ = file;
      return;
    }
    const std::string why = reason();
    ::close(file);
    if (others) throw DatastoreError("another writer is at " + path_);
    if (same) throw DatastoreError("cannot write " + temporary_ + ": " + why);
  }
}

OutputFile::~OutputFile() {
  if (file_ < 0) return;
  // First, or another writer might lock it in between.
  if (process_ == ::getpid()) std::remove(temporary_.c_str());
  ::close(file_);
}

void OutputFile::write(const void* data, std::int64_t bytes) {
  if (process_ != ::getpid()) {
    throw DatastoreError("the file is process " + std::to_string(process_) +
                         "'s, which began it and alone may write it; this is a fork of it");
  }
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    // No system takes more in one call.
    const auto count = std::min<std::int64_t>(bytes, std::int64_t{1} << 30);
    const ssize_t written = ::write(file_, at, static_cast<std::size_t>(count));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot write");
    at += written;
    bytes -= written;
  }
}

void OutputFile::complete(const void* beginning, std::int64_t bytes) {
  if (::lseek(file_, 0, SEEK_SET) != 0) fail("cannot write");
  write(beginning, bytes);
  if (::fsync(file_) != 0 || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail("cannot write");
  }
  ::close(file_);
  file_ = -1;
  // The new name is safe once the folder is; a file system that cannot sync folders
  // has nothing more to offer.
  const int directory = ::open(folder_of(path_).c_str(), O_RDONLY | O_CLOEXEC);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}

void OutputFile::fail(const char* what) const {
  const std::string why = reason();
  throw DatastoreError(std::string(what) + " " + path_ + ": " + why);
}

}  // namespace fastdraft

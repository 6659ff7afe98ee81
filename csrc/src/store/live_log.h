// Holds a live datastore's text, and drops the oldest when the datastore's memory limit is reached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "fastdraft/token.h"
#include "index/bits.h"
#include "index/memory.h"
#include "store/datastore_index.h"

namespace fastdraft {

// A ring of chunks, and all memory of the store: the oldest chunk leaves when its memory is needed.
//
// Not thread-safe; const calls may overlap.
class LiveLog {
 public:
  static constexpr std::int64_t kChunkTokens = 1364;
  // The beginnings of documents are known at every n-th token.
  static constexpr std::int64_t kPrefixStep = kContextTokens / 2;

  // A token takes 3 bytes: 23 bits, the highest of which is its sign, and whether it was a model's
  // output. No vocabulary has larger ones than kLargestToken; hosts that put other numbers in the
  // lieu of tokens, as for images, have kUnknown stored for them, which ends what is drafted.
  static constexpr std::int64_t kWidth = 3;
  static constexpr Token kUnknown = (Token{1} << 22) - 1;
  static constexpr Token kLargestToken = kUnknown - 1;

  // A stretch of the log. Where a token begins 4 bytes may be read, where two begin 8.
  struct alignas(64) Chunk {
    std::uint8_t tokens[kChunkTokens * kWidth + 4];
  };
  static_assert(sizeof(Chunk) == 4096);

  // Bytes of a chunk itself: the allocator's header, the bytes lost to alignment and the entry
  // in a list are in it.
  static constexpr std::int64_t kBlockBytes = sizeof(Chunk) + alignof(Chunk) + 2 * sizeof(void*);
  // A store larger than this takes its memory by the slab, a huge page.
  static constexpr std::int64_t kSmallStore = std::int64_t{16} << 20;
  static constexpr auto kSlab = static_cast<std::int64_t>(kHugePage);
  static constexpr std::int64_t kSlabBlocks = kSlab / static_cast<std::int64_t>(sizeof(Chunk));
  static_assert(kSlab % sizeof(Chunk) == 0);
  // With the page that holds the allocator's header, and entries of lists, which may be half empty.
  static constexpr std::int64_t kSlabBytes = kSlab + 4096 + 2 * (1 + kSlabBlocks) * sizeof(void*);
  // Rings and directories of tables begin with this many pointers.
  static constexpr std::size_t kFirstPointers = 16;
  static constexpr std::int64_t bytes_of(std::size_t pointers) noexcept {
    return static_cast<std::int64_t>(pointers * sizeof(void*));
  }

  // For a store that takes `own_bytes` itself.
  LiveLog(std::int64_t max_bytes, std::int64_t own_bytes)
      : max_bytes_(max_bytes),
        bytes_(own_bytes + bytes_of(kFirstPointers)),
        ring_(kFirstPointers) {}
  LiveLog(const LiveLog&) = delete;
  LiveLog& operator=(const LiveLog&) = delete;
  ~LiveLog() { release(); }

  // Throws MemoryLimitError, and then the token is missing and old ones may have left.
  void append(Token token, bool output);
  // Frees all memory, that of the tables too.
  void release() noexcept;
  // Sets the limit, to what is held if that is more.
  void limit(std::int64_t max_bytes) noexcept { max_bytes_ = std::max(max_bytes, bytes_); }
  // Gives memory back to the system: a block that was kept, or the oldest chunk's. Returns whether
  // there was one but the last, which is being written.
  bool drop_block() noexcept;
  // The older half of the tokens leaves, which counts as all: all that it leads to is to be
  // cleaned.
  void forget_quarter() noexcept;
  // The text before `position` leaves, and makes room for as much.
  void forget_before(std::int64_t position) noexcept;

  std::int64_t begin() const noexcept { return begin_; }
  std::int64_t end() const noexcept { return end_; }
  bool empty() const noexcept { return num_chunks_ == 0; }
  std::int64_t num_tokens() const noexcept { return num_tokens_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  std::int64_t max_bytes() const noexcept { return max_bytes_; }
  // True if `tokens` and kLeastRoom more can enter before the oldest text leaves, since the
  // index too takes blocks.
  static constexpr std::int64_t kLeastRoom = 2 * kChunkTokens;
  bool has_room(std::int64_t tokens) const noexcept {
    const std::int64_t unused = (max_bytes_ - bytes_) / kBlockBytes;
    return (tokens + kLeastRoom) / kChunkTokens <= unused + num_kept_ + kSlabBlocks - used_of_slab_;
  }
  // The text that has left, in parts of what there was at the time: for each chunk 1 / num_chunks.
  double left() const noexcept { return left_; }
  std::int64_t directory_bytes() const noexcept { return bytes_of(ring_.size()); }

  // For positions that are held.
  Token token(std::int64_t position) const noexcept { return decoded(load_32(coded(position))); }
  bool output(std::int64_t position) const noexcept {
    return (coded(position)[kWidth - 1] & kOutput) != 0;
  }
  // Copies the `count` tokens from `position` on.
  void copy(std::int64_t position, std::int64_t count, Token* out) const noexcept;
  // Asks for the `count` tokens before `position`.
  void prefetch(std::int64_t position, std::int64_t count) const noexcept {
    for (std::int64_t at = std::max(begin_, position - count); at < position; at += kLineTokens) {
      fastdraft::prefetch(coded(at));
    }
  }
  // The same of a few tokens.
  void prefetch_around(std::int64_t position, std::int64_t count) const noexcept {
    if (position - count < begin_) return;
    fastdraft::prefetch(coded(position - count));
    fastdraft::prefetch(coded(position - 1) + kWidth - 1);
  }
  // The same of the tokens from `position` on, as many as a cache line holds.
  void prefetch_from(std::int64_t position) const noexcept {
    if (position < begin_) return;
    const std::uint8_t* first = coded(position);
    fastdraft::prefetch(first);
    fastdraft::prefetch(first + kLineTokens * kWidth);
  }
  // Returns whether the `count` tokens before `position` are held and those before `last`.
  bool matches(std::int64_t position, const Token* last, std::int64_t count) const noexcept {
    if (position - count < begin_) return false;
    const std::uint8_t* end = coded_end(position, count);
    if (end == nullptr) return common_copied(position, last, count) == count;
    // A constant size compares without a loop.
    switch (count) {
      case 1:
        return common_coded(end, last, 1) == 1;
      case 2:
        return common_coded(end, last, 2) == 2;
      case 4:
        return common_coded(end, last, 4) == 4;
      default:
        return common_coded(end, last, count) == count;
    }
  }
  // How many tokens before `position` the table of documents' beginnings hashes; 0: they are not
  // held.
  std::int64_t prefix_window(std::int64_t position) const noexcept;
  // The latest position with these low bits.
  std::int64_t expand(std::uint32_t position) const noexcept {
    return end_ - (static_cast<std::uint32_t>(end_) - position);
  }

  // How many of the tokens before `position` are the text's last ones, Datastore::kLongestMatch at
  // most.
  std::int32_t common(std::int64_t position, const Token* text, std::int64_t size) const noexcept {
    const std::int64_t most =
        std::min({std::int64_t{Datastore::kLongestMatch}, size, position - begin_});
    const std::uint8_t* end = coded_end(position, most);
    return static_cast<std::int32_t>(end == nullptr ? common_copied(position, text + size, most)
                                                    : common_coded(end, text + size, most));
  }
  // Memory for a chunk, a page of a table or a block of lists, which are as large; the oldest
  // chunk's where the limit is reached and there are more than `keep`. Throws MemoryLimitError.
  void* allocate_block(std::int64_t keep);
  // Takes a block back, for the next that is allocated.
  void keep_block(void* block) noexcept {
    kept_ = new (block) Kept{kept_};
    ++num_kept_;
  }
  // Memory for many blocks. The system clears it at once, which takes up to milliseconds: call this
  // without the store's lock. Null where there is no memory.
  struct FreeSlab {
    void operator()(std::byte* slab) const noexcept {
      ::operator delete(slab, std::align_val_t{static_cast<std::size_t>(kSlab)});
    }
  };
  using Slab = std::unique_ptr<std::byte, FreeSlab>;
  static Slab allocate_slab() noexcept;
  // Returns whether the store is large, has used its slabs up, and has room for one more. Without
  // one blocks are allocated one by one.
  bool wants_slab() const noexcept {
    return kHugePages && used_of_slab_ == kSlabBlocks && given_back_.empty() &&
           bytes_ >= kSmallStore && bytes_ + kSlabBytes <= max_bytes_;
  }
  // If it still does.
  void add_slab(Slab slab);
  // Counts `bytes` more; old chunks leave as needed. Throws MemoryLimitError.
  void charge(std::int64_t bytes);
  void refund(std::int64_t bytes) noexcept { bytes_ -= bytes; }
  // An array of twice as many pointers, counted instead of the one it follows. Throws
  // MemoryLimitError.
  template <typename T>
  std::vector<T*> wider(const std::vector<T*>& pointers) {
    // Both are held until the new one is filled.
    const std::int64_t more = bytes_of(pointers.size() * 2);
    charge(more);
    std::vector<T*> twice;
    try {
      twice.resize(pointers.size() * 2);
    } catch (const std::bad_alloc&) {
      bytes_ -= more;
      throw_out_of_memory(more);
    }
    bytes_ -= bytes_of(pointers.size());
    return twice;
  }

 private:
  Chunk& chunk(std::int64_t position) const noexcept {
    return *ring_[slot(position, ring_.size())];
  }
  // The index of the position's chunk in a ring of this size.
  static std::size_t slot(std::int64_t position, std::size_t size) noexcept {
    return static_cast<std::size_t>(position / kChunkTokens) & (size - 1);
  }
  void widen_ring();
  struct Kept {
    Kept* next;
  };
  void* take_kept() noexcept {
    --num_kept_;
    return std::exchange(kept_, kept_->next);
  }

  static constexpr int kLowBits = 23;
  static constexpr std::uint32_t kLow = (std::uint32_t{1} << kLowBits) - 1;
  static constexpr std::uint8_t kOutput = 0x80;  // of a token's last byte
  // The least number of tokens that a cache line holds.
  static constexpr std::int64_t kLineTokens = 64 / kWidth;

  static Token decoded(std::uint32_t bits) noexcept {
    constexpr std::uint32_t kSign = std::uint32_t{1} << (kLowBits - 1);
    return static_cast<Token>((bits & kLow) ^ kSign) - static_cast<Token>(kSign);
  }
  const std::uint8_t* coded(std::int64_t position) const noexcept {
    return chunk(position).tokens + position % kChunkTokens * kWidth;
  }
  // Behind the `count` tokens before `position`; null where they do not lie side by side.
  const std::uint8_t* coded_end(std::int64_t position, std::int64_t count) const noexcept {
    const std::int64_t end = (position - 1) % kChunkTokens + 1;
    if (end < count) return nullptr;
    return chunk(position - 1).tokens + end * kWidth;
  }
  // How many of the tokens before `stored` are those before `last`, `most` at most.
  static std::int64_t common_coded(const std::uint8_t* stored, const Token* last,
                                   std::int64_t most) noexcept {
    // Two tokens at once, each in 32 bits.
    constexpr std::uint64_t kTwo = kLow | std::uint64_t{kLow} << 32;
    // Bits of no token that is stored but for a mark, which is in no text.
    constexpr std::uint64_t kOthers = ~(kTwo >> 1) | std::uint64_t{1} << 31;
    std::int64_t length = 0;
    for (; length + 2 <= most; length += 2) {
      const std::uint64_t coded = load_64(stored - (length + 2) * kWidth);
      const std::uint64_t two = (coded & kLow) | (coded << 8 & std::uint64_t{kLow} << 32);
      const std::uint64_t wanted = static_cast<std::uint32_t>(last[-2 - length]) |
                                   std::uint64_t{static_cast<std::uint32_t>(last[-1 - length])}
                                       << 32;
      const std::uint64_t differs = (two ^ wanted) | (wanted & kOthers);
      if (differs != 0) return length + (differs >> 32 == 0 ? 1 : 0);
    }
    if (length == most) return most;
    return length + (decoded(load_32(stored - (length + 1) * kWidth)) == last[-1 - length] ? 1 : 0);
  }
  // The same of tokens before `position` that do not lie side by side.
  std::int64_t common_copied(std::int64_t position, const Token* last,
                             std::int64_t most) const noexcept {
    Token copied[kContextTokens];
    copy(position - most, most, copied);
    return common_suffix(copied + most, last, most);
  }

  void free_block(void* block) noexcept;
  Chunk* drop_oldest() noexcept;
  void forget(std::int64_t position) noexcept;

  std::int64_t max_bytes_;
  std::int64_t bytes_;
  std::int64_t num_tokens_ = 0;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  // All memory: blocks that were allocated one by one, and slabs. Of the last slab the first
  // used_of_slab_ blocks have been used. Blocks of slabs that were given back to the system are not
  // counted in bytes_.
  std::vector<void*> blocks_;
  std::vector<Slab> slabs_;
  std::int64_t used_of_slab_ = kSlabBlocks;
  std::vector<void*> given_back_;  // with room for all blocks of slabs
  Kept* kept_ = nullptr;           // blocks that are not used, but counted
  std::int64_t num_kept_ = 0;
  std::vector<Chunk*> ring_;  // by the chunk's number, modulo the size, a power of two
  std::int64_t num_chunks_ = 0;
  double left_ = 0.0;
};

}  // namespace fastdraft

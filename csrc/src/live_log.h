// Holds a live datastore's text, and drops the oldest when the datastore's memory limit is reached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "datastore_index.h"
#include "fastdraft/token.h"
#include "memory.h"

namespace fastdraft {

// A ring of chunks, and all memory of the store: the oldest chunk leaves when its place is needed.
//
// Not thread-safe; const calls may overlap.
class LiveLog {
 public:
  static constexpr std::int64_t kChunkTokens = 31 * 32;
  // The beginnings of documents are known at every so many tokens.
  static constexpr std::int64_t kPrefixStep = kContextTokens / 2;

  // A stretch of the log, and a bit for each token: whether it was a model's output.
  struct alignas(64) Chunk {
    Token tokens[kChunkTokens];
    std::uint32_t outputs[kChunkTokens / 32];
  };
  static_assert(sizeof(Chunk) == 4096);

  // What a chunk takes by itself: the allocator's header, the bytes lost to alignment and the place
  // in a list are in it.
  static constexpr std::int64_t kBlockBytes = sizeof(Chunk) + alignof(Chunk) + 2 * sizeof(void*);
  // A store that has grown beyond so much takes its memory by the slab, a huge page.
  static constexpr std::int64_t kSmallStore = std::int64_t{16} << 20;
  static constexpr auto kSlab = static_cast<std::int64_t>(kHugePage);
  static constexpr std::int64_t kSlabBlocks = kSlab / static_cast<std::int64_t>(sizeof(Chunk));
  static_assert(kSlab % sizeof(Chunk) == 0);
  // With the page that holds the allocator's header, and places in lists, which may be half empty.
  static constexpr std::int64_t kSlabBytes = kSlab + 4096 + 2 * (1 + kSlabBlocks) * sizeof(void*);
  // Rings and directories of tables begin with so many pointers.
  static constexpr std::size_t kFirstPointers = 16;
  static constexpr std::int64_t bytes_of(std::size_t pointers) noexcept {
    return static_cast<std::int64_t>(pointers * sizeof(void*));
  }

  // Of a store that takes `own_bytes` itself.
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

  std::int64_t begin() const noexcept { return begin_; }
  std::int64_t end() const noexcept { return end_; }
  bool empty() const noexcept { return num_chunks_ == 0; }
  std::int64_t num_tokens() const noexcept { return num_tokens_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  std::int64_t max_bytes() const noexcept { return max_bytes_; }
  std::int64_t num_chunks() const noexcept { return num_chunks_; }
  // The text that has left, in parts of what there was at the time: for each chunk 1 / num_chunks.
  double left() const noexcept { return left_; }
  std::int64_t directory_bytes() const noexcept { return bytes_of(ring_.size()); }

  // Of positions that are held.
  Token token(std::int64_t position) const noexcept {
    return chunk(position).tokens[position % kChunkTokens];
  }
  bool output(std::int64_t position) const noexcept {
    const std::int64_t at = position % kChunkTokens;
    return (chunk(position).outputs[at / 32] >> (at % 32) & 1) != 0;
  }
  // The tokens from `position` on that lie side by side, and how many.
  const Token* run(std::int64_t position, std::int64_t* count) const noexcept {
    *count = std::min(end_, (position / kChunkTokens + 1) * kChunkTokens) - position;
    return chunk(position).tokens + position % kChunkTokens;
  }
  // The `count` tokens before `position`, where they lie or, where a chunk ends between
  // them, in `copy`.
  const Token* before(std::int64_t position, std::int64_t count, Token* copy) const noexcept {
    const std::int64_t first = position - count;
    if (first / kChunkTokens == (position - 1) / kChunkTokens) {
      return chunk(first).tokens + first % kChunkTokens;
    }
    for (std::int64_t i = 0; i < count; ++i) copy[i] = token(first + i);
    return copy;
  }
  void prefetch(std::int64_t position, std::int64_t count) const noexcept {
    constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(Token));
    for (std::int64_t at = std::max(begin_, position - count); at < position; at += kLine) {
      fastdraft::prefetch(chunk(at).tokens + at % kChunkTokens);
    }
  }
  // The same of a few tokens.
  void prefetch_around(std::int64_t position, std::int64_t count) const noexcept {
    if (position - count < begin_) return;
    fastdraft::prefetch(&chunk(position - count).tokens[(position - count) % kChunkTokens]);
    fastdraft::prefetch(&chunk(position - 1).tokens[(position - 1) % kChunkTokens]);
  }
  // The same of the tokens from `position` on, as many as a cache line holds.
  void prefetch_from(std::int64_t position) const noexcept {
    constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(Token));
    if (position < begin_) return;
    const Token* first = chunk(position).tokens + position % kChunkTokens;
    fastdraft::prefetch(first);
    fastdraft::prefetch(first + kLine - 1);
  }
  // Whether the `count` tokens before `position` are held and those before `last`.
  bool matches(std::int64_t position, const Token* last, std::int64_t count) const noexcept {
    if (position - count < begin_) return false;
    Token copy[kContextTokens];
    const Token* tokens = before(position, count, copy);
    const Token* wanted = last - count;
    // A constant size compares without a loop.
    switch (count) {
      case 1:
        return *tokens == *wanted;
      case 2:
        return std::memcmp(tokens, wanted, 2 * sizeof(Token)) == 0;
      case 4:
        return std::memcmp(tokens, wanted, 4 * sizeof(Token)) == 0;
      default:
        return std::equal(tokens, tokens + count, wanted);
    }
  }
  // How many tokens before `position` the table of documents' beginnings hashes; 0: they are not
  // held.
  std::int64_t prefix_window(std::int64_t position) const noexcept;
  // The latest position with these low bits.
  std::int64_t expand(std::uint32_t position) const noexcept {
    return end_ - (static_cast<std::uint32_t>(end_) - position);
  }

  std::int32_t common(std::int64_t position, const Token* text, std::int64_t size) const noexcept;
  // Memory for a chunk, a page of a table or a block of lists, which are as large; the oldest
  // chunk's where the limit is reached and there are more than `keep`. Throws MemoryLimitError.
  void* allocate_block(std::int64_t keep);
  // Takes a block back, for the next that is allocated.
  void keep_block(void* block) noexcept { kept_ = new (block) Kept{kept_}; }
  // Memory for many blocks. The system clears it at once, which takes up to milliseconds: call this
  // without the store's lock. Null where there is no memory.
  struct FreeSlab {
    void operator()(std::byte* slab) const noexcept {
      ::operator delete(slab, std::align_val_t{static_cast<std::size_t>(kSlab)});
    }
  };
  using Slab = std::unique_ptr<std::byte, FreeSlab>;
  static Slab allocate_slab() noexcept;
  // Whether the store is large, has used its slabs up, and has room for one more. Without one
  // blocks are allocated one by one.
  bool wants_slab() const noexcept {
    return kHugePages && used_of_slab_ == kSlabBlocks && given_back_.empty() &&
           bytes_ >= kSmallStore && bytes_ + kSlabBytes <= max_bytes_;
  }
  // If it still does.
  void add_slab(Slab slab);
  // Counts `bytes` more; old chunks leave as needed. Throws MemoryLimitError.
  void charge(std::int64_t bytes);
  void refund(std::int64_t bytes) noexcept { bytes_ -= bytes; }
  // An array of twice as many pointers, counted in the place of the one it follows. Throws
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
    return *ring_[static_cast<std::size_t>(position / kChunkTokens) & (ring_.size() - 1)];
  }
  struct Kept {
    Kept* next;
  };

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
  std::vector<Chunk*> ring_;       // by the chunk's number, modulo the size, a power of two
  std::int64_t num_chunks_ = 0;
  double left_ = 0.0;
};

}  // namespace fastdraft

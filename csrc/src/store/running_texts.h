// Text that running requests have written so far, for other requests to draft from.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/token.h"
#include "store/datastore_index.h"
#include "store/phase_fair_mutex.h"

namespace fastdraft {

// The outputs of the requests that run and will enter a live datastore when they finish, and an
// index of their n-grams. Each text stands here while its request runs: when that has finished, its
// text is in the datastore, and when it was cancelled, nowhere.
//
// The log of a datastore only loses its oldest text, so texts that leave in any order have an index
// of their own: from the hash of an n-gram to its latest occurrence, and from each occurrence to
// the ones before and after it. Taking a token out is O(1).
//
// Thread-safe. Readers overlap, and wait for a writer's kSliceTokens tokens at most.
class RunningTexts {
 public:
  // The number of tokens that enter at a time.
  static constexpr std::int64_t kSliceTokens = 128;

  // Whose text it is: an address that no other text has as long as this one runs.
  using Owner = const void*;

  // `charge` counts bytes as the datastore's, or no longer where they are negative, and returns
  // whether there is room; it may wait for the datastore's lock.
  explicit RunningTexts(std::function<bool(std::int64_t)> charge);
  RunningTexts(const RunningTexts&) = delete;
  RunningTexts& operator=(const RunningTexts&) = delete;
  ~RunningTexts();

  class Text;
  class Reader;

  // Returns whether no text may have entered; without a lock.
  bool empty() const noexcept { return num_entered_.load(std::memory_order_relaxed) == 0; }

  // Takes all texts out; what their requests write from now on does not enter either.
  void clear() noexcept;

 private:
  static constexpr int kBlockBits = 7;
  static constexpr std::uint32_t kBlockTokens = std::uint32_t{1} << kBlockBits;
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  // A token's position: the number of its block, and its index there.
  using Position = std::uint32_t;

  // The n-gram's occurrence before this one, and the one after.
  struct Links {
    Position earlier;
    Position later;
  };

  struct Block {
    Owner owner;
    Position before;  // the last token of the text's block before
    Position after;   // the first one of the block after
    std::uint32_t used;
    Token tokens[kBlockTokens];
    Links links[kNumOrders][kBlockTokens];
  };

  // With the allocator's header and the entries of both lists, which may be half empty.
  static constexpr std::int64_t kBlockBytes =
      sizeof(Block) + 2 * sizeof(void*) + 2 * (sizeof(void*) + sizeof(std::uint32_t));

  // From the low half of an n-gram's hash to its latest occurrence; open addressing.
  struct Table {
    struct Entry {
      std::uint32_t hash;
      Position latest;  // kNone: the entry is free
    };
    std::vector<Entry> entries;
    std::size_t used = 0;

    // The first entry from the hash's slot on that leads there; to kNone: a free one.
    static std::size_t find(const std::vector<Entry>& entries, std::uint32_t hash,
                            Position latest) noexcept {
      std::size_t at = hash & (entries.size() - 1);
      while (entries[at].latest != latest) at = (at + 1) & (entries.size() - 1);
      return at;
    }
  };

  Block& block(Position position) const noexcept { return *blocks_[position >> kBlockBits]; }
  Token token(Position position) const noexcept {
    return block(position).tokens[position % kBlockTokens];
  }
  Links& links(std::size_t order, Position position) const noexcept {
    return block(position).links[order][position % kBlockTokens];
  }
  // Each order has tables of its own: n-grams of two orders may have one hash.
  Table& table(std::size_t order, std::uint64_t hash) noexcept {
    return tables_[order][hash >> (64 - kTableBits)];
  }
  const Table& table(std::size_t order, std::uint64_t hash) const noexcept {
    return tables_[order][hash >> (64 - kTableBits)];
  }
  std::uint64_t hash(const Token* end, std::size_t order) const noexcept {
    const std::int32_t length = Datastore::kOrders[order];
    return hash_tokens(end - length, length, seed_);
  }
  std::int64_t copy_before(Position position, std::int64_t most, Token* end) const noexcept;
  const Table::Entry* entry_of(std::uint64_t hash, const Token* end,
                               std::size_t order) const noexcept;
  void prefetch_entry(std::uint64_t hash, std::size_t order) const noexcept;
  bool make_room(Table& table);
  Position add_block(Owner owner);
  void remove_block(std::uint32_t number) noexcept;
  void enter(std::size_t order, Position position, std::uint64_t hash, const Token* end) noexcept;
  void take_out(std::size_t order, Position position) noexcept;
  void release() noexcept;

  // Tables grow one by one, so that readers never wait for all to be built anew.
  static constexpr int kTableBits = 6;

  const std::function<bool(std::int64_t)> charge_;
  const std::uint64_t seed_;
  std::atomic<std::int32_t> num_running_{0};
  std::atomic<std::int32_t> num_entered_{0};  // of these, those with text here

  mutable PhaseFairMutex mutex_{ForkGuard::Turn::kRunningTexts};  // of all below
  std::uint64_t cleared_ = 0;                                     // how often
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::uint32_t> free_blocks_;
  std::array<std::array<Table, std::size_t{1} << kTableBits>, kNumOrders> tables_;
  std::int64_t bytes_ = 0;
};

// A running request's text; it is taken out by the destructor. Not thread-safe: its request's.
class RunningTexts::Text {
 public:
  Text(RunningTexts& texts, Owner owner) noexcept;
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text();

  // Notes that the request's text is tokens[0] .. tokens[size - 1] now, of which those from
  // tokens[prompt_size] on are output. Where other requests run, what is new of the output enters,
  // kSliceTokens tokens at most in one call. Once there has been no memory none enters any more.
  // O(1) amortised a token.
  void grow(const Token* tokens, std::int64_t size, std::int64_t prompt_size) {
    if (size > std::max(entered_, prompt_size) && has_room_ &&
        texts_.num_running_.load(std::memory_order_relaxed) > 1) {
      enter(tokens, size, prompt_size);
    }
  }

 private:
  void enter(const Token* tokens, std::int64_t size, std::int64_t prompt_size);
  bool make_room();
  // Returns whether there is an n-gram of the order before the request's i-th token, and that is
  // output.
  bool is_indexed(std::size_t order, std::int64_t i) const noexcept {
    return i >= prompt_size_ && i - begin_ >= Datastore::kOrders[order];
  }

  RunningTexts& texts_;
  const Owner owner_;
  // Here are the request's tokens from begin_ to before entered_, of which those before the output
  // are context.
  std::int64_t begin_ = 0;
  std::int64_t prompt_size_ = 0;
  std::int64_t entered_ = 0;
  bool has_room_ = true;
  std::uint64_t cleared_ = 0;  // how often the texts had been when its first tokens entered
  Position last_ = kNone;      // the first position of its last block; kNone: it has none
};

// A lock on the texts: they stay as they are while the reader lives. Keep it briefly, and
// ask its thread for no other lock meanwhile.
class RunningTexts::Reader {
 public:
  // How many occurrences are passed over, for each that is looked at, where they are the reader's
  // own.
  static constexpr int kPassedOver = 3;

  // The count of all texts but the owner's.
  explicit Reader(const RunningTexts& texts, Owner reader = nullptr)
      : texts_(texts), reader_(reader) {
    texts_.mutex_.lock_shared();
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() { texts_.mutex_.unlock_shared(); }

  // As Datastore::Reader::find: the latest are those that entered last. Of each occurrence `next`
  // is for `copy` alone, and all are of output. Of the reader's own occurrences it passes
  // kPassedOver * links at most. O(links).
  int find(const Datastore::Lookup& lookup, Occurrence* out, int most, int links) const;
  int find(const Token* text, std::int64_t size, Occurrence* out, int most, int links,
           std::int32_t least) const {
    return find({text, size, least}, out, most, links);
  }

  // Copies the tokens from there on, to the end of what has entered, `most` at most. Returns how
  // many.
  std::int64_t copy(std::int64_t next, Token* out, std::int64_t most) const;

 private:
  const RunningTexts& texts_;
  const Owner reader_;
};

}  // namespace fastdraft

// The occurrences of a live datastore's n-grams that occur more than once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "store/datastore_index.h"
#include "store/live_log.h"

namespace fastdraft {

// The latest postings of each n-gram side by side, 31 at most: a list begins with 3 postings and
// moves to one of about twice as many when it is full. Lists are allocated in blocks of a chunk's
// size, and what a list has left serves the next ones.
//
// Blocks leave in the order of their arrival: the lists of the oldest that are still of use move
// to the newest, without the postings whose text has left. So lists and text shrink together, a
// block at a time, and an address is never that of another list before 64 GB have been used.
//
// Not thread-safe; const calls may overlap.
class LiveLists {
 public:
  // The address of a list that is held: its number of 16 bytes since the beginning, modulo 2^32.
  using Address = std::uint32_t;

  // With 63, trees gained 0.02 % of speed on recorded requests for 0.8 bytes a token; chains gained
  // nothing.
  static constexpr int kMostPostings = 31;
  static constexpr std::int64_t kMostBlocks = std::int64_t{1} << 24;  // each has a number
  // Lists that one token may need.
  static constexpr int kListsOfToken = static_cast<int>(kNumOrders);

  // The low 31 bits of a position, and whether the token there was a model's output.
  class Posting {
   public:
    Posting() = default;
    Posting(std::int64_t position, bool output) noexcept
        : bits_((static_cast<std::uint32_t>(position) & kPosition) | (output ? kOutput : 0)) {}
    bool output() const noexcept { return (bits_ & kOutput) != 0; }
    // The latest position with these bits. A log that holds more than 2^31 tokens may have another
    // text there, which is then compared in vain.
    std::int64_t position(const LiveLog& log) const noexcept {
      return log.end() - ((static_cast<std::uint32_t>(log.end()) - bits_) & kPosition);
    }

   private:
    static constexpr std::uint32_t kOutput = 0x80000000u;
    static constexpr std::uint32_t kPosition = 0x7FFFFFFFu;

    std::uint32_t bits_;
  };
  static_assert(sizeof(Posting) == 4);

  // The bits of a hash that identify a list: neither the tag nor what a page is found by.
  static std::uint32_t check(std::uint64_t hash) noexcept {
    return static_cast<std::uint32_t>(hash) & ((1u << kCheckBits) - 1);
  }

  // The postings of a list, the latest first. Valid until a list changes.
  class Postings {
   public:
    Postings() = default;
    Postings(const Posting* postings, int capacity, int latest, int count) noexcept
        : postings_(postings), capacity_(capacity), at_(latest), left_(count) {}
    int left() const noexcept { return left_; }
    // The one `back` before the latest.
    Posting operator[](int back) const noexcept {
      return postings_[at_ >= back ? at_ - back : at_ - back + capacity_];
    }
    void next() noexcept {
      at_ = at_ == 0 ? capacity_ - 1 : at_ - 1;
      --left_;
    }

   private:
    const Posting* postings_ = nullptr;
    int capacity_ = 1;
    int at_ = 0;
    int left_ = 0;
  };

  LiveLists() = default;
  LiveLists(const LiveLists&) = delete;
  LiveLists& operator=(const LiveLists&) = delete;
  ~LiveLists() = default;

  // The log gives the memory, and must outlive the lists. Throws MemoryLimitError.
  // `first_block` and `most_blocks` are for tests.
  void open(LiveLog& log, std::uint32_t first_block = 0, std::int64_t most_blocks = kMostBlocks);
  // Forgets the lists, whose memory is the log's.
  void close() noexcept;

  // Returns whether the lists that one token needs fit.
  bool has_room() const noexcept { return left_ >= kListsOfToken; }
  // Takes a block of the log's for more. Throws MemoryLimitError, also where all numbers of blocks
  // are in use: at 64 GB.
  void add_block();
  std::int64_t num_blocks() const noexcept { return num_blocks_; }
  std::int64_t directory_bytes() const noexcept { return LiveLog::bytes_of(ring_.size()); }

  // Returns whether the address is in a block that has not left.
  bool held(Address address) const noexcept {
    return ((block_of(address) - oldest_) & kBlockMask) < static_cast<std::uint32_t>(num_blocks_);
  }
  // Returns whether there is a list.
  bool is_list(Address address) const noexcept {
    return held(address) && fits(address, at(address)->header);
  }
  // Returns whether there is a list with this check.
  bool is_of(Address address, std::uint32_t check) const noexcept {
    return is_list(address) && at(address)->header.check() == check;
  }
  // Returns whether an address may be one of long ago, and there another list.
  bool wrapped() const noexcept { return wrapped_; }
  void prefetch(Address address) const noexcept {
    if (held(address)) fastdraft::prefetch(at(address));
  }
  // For lists that are held.
  Postings postings(Address address) const noexcept { return postings_of(at(address)); }
  std::int64_t latest(Address address) const noexcept {
    return postings(address)[0].position(*log_);
  }

  // A list of `count` postings, the latest last; there is room.
  Address make(std::size_t order, std::uint32_t check, const Posting* postings, int count) noexcept;
  // Adds a posting, the latest. Returns where the list is now; there is room.
  Address add(Address address, Posting posting) noexcept;

  // A list of the block that is being cleaned.
  struct Leaving {
    std::size_t order;
    Postings postings;
    Address address;
    std::uint32_t check;
  };
  struct alignas(16) Unit {
    std::byte bytes[16];
  };
  struct alignas(64) Block {
    Unit units[sizeof(LiveLog::Chunk) / sizeof(Unit)];
  };
  // The oldest block is being cleaned, from begin_cleaning() to end_cleaning(). Its lists are held
  // no longer, but copied, so that there is room to make each that next_leaving() returns anew.
  void begin_cleaning(Block* copy) noexcept;
  // The next lists, `most` at most. Returns how many; 0: these were all.
  int next_leaving(Leaving* lists, int most) noexcept;
  void end_cleaning() noexcept;
  // The postings whose text is held, the latest last. Returns how many.
  int copy_live(const Postings& postings, Posting* out) const noexcept;

 private:
  static constexpr int kCheckBits = 20;
  static constexpr int kSizes = 4;  // 2^0 .. 2^3 units
  // Sizes in headers: what a list has left, whose state is its size; and nothing from here on.
  static constexpr unsigned kFree = 4;
  static constexpr unsigned kUnused = 5;
  static constexpr int kBlockUnits = static_cast<int>(sizeof(LiveLog::Chunk)) / 16;
  static constexpr int kChunkUnits = 1 << (kSizes - 1);
  static constexpr int kUnitBits = 8;
  static_assert(kBlockUnits == 1 << kUnitBits);
  static constexpr std::uint32_t kBlockMask = (1u << (32 - kUnitBits)) - 1;
  static_assert(kMostBlocks == std::int64_t{kBlockMask} + 1);

  // The size of a list, its state, order and check.
  class Header {
   public:
    Header() = default;
    Header(unsigned size, unsigned state, std::size_t order = 0, std::uint32_t check = 0) noexcept
        : bits_(size | state << 3 | static_cast<std::uint32_t>(order) << 10 | check << 12) {}

    unsigned size() const noexcept { return bits_ & 7; }
    // How many postings there are. In a full list of kMostPostings they go round: kMostPostings and
    // the index of the latest.
    unsigned state() const noexcept { return bits_ >> 3 & 127; }
    std::size_t order() const noexcept { return bits_ >> 10 & 3; }
    std::uint32_t check() const noexcept { return bits_ >> 12; }

    bool is_list() const noexcept { return size() < kSizes; }
    int count() const noexcept { return std::min(static_cast<int>(state()), kMostPostings); }
    int latest() const noexcept {
      const auto at = static_cast<int>(state());
      return at < kMostPostings ? at - 1 : at - kMostPostings;
    }
    // How long what stands here is.
    int units() const noexcept { return 1 << (is_list() ? size() : state()); }
    static unsigned state_of(int count) noexcept {
      return static_cast<unsigned>(count < kMostPostings ? count : 2 * kMostPostings - 1);
    }

   private:
    std::uint32_t bits_;
  };
  static_assert(sizeof(Header) == 4);

  // The unused entries of a list, by its size.
  struct Free {
    Address next;      // itself: there is none
    Address previous;  // of any but the first
  };

  struct List {
    Header header;
    union {
      Posting postings[kMostPostings];  // as many as the size tells
      Free free;
    };
  };

  static_assert(sizeof(Block) == sizeof(LiveLog::Chunk));

  static constexpr int capacity(unsigned size) noexcept { return (4 << size) - 1; }
  static std::uint32_t block_of(Address address) noexcept { return address >> kUnitBits; }
  Unit* unit(Address address) const noexcept {
    return ring_[block_of(address) & (ring_.size() - 1)]->units + (address & (kBlockUnits - 1));
  }
  List* at(Address address) const noexcept { return reinterpret_cast<List*>(unit(address)); }
  // Returns whether a list may be of this size here, and have n postings: what stands at an address
  // of long ago may be anything.
  static bool fits(Address address, Header header) noexcept {
    // By the size in a header; free and unused entries hold nothing.
    constexpr std::array<unsigned, 8> kMostStates{3, 7, 15, 2 * kMostPostings - 1, 0, 0, 0, 0};
    static_assert(kMostStates[kSizes - 2] == capacity(kSizes - 2));
    return (address & ((1u << header.size()) - 1)) == 0 &&
           header.state() - 1 < kMostStates[header.size()];
  }
  static Postings postings_of(const List* list) noexcept {
    const Header header = list->header;
    return {list->postings, capacity(header.size()), header.latest(), header.count()};
  }
  bool is_live(Posting posting) const noexcept { return posting.position(*log_) > log_->begin(); }

  Address allocate(unsigned size) noexcept;
  void release(Address address, unsigned size) noexcept;
  void take_out(Address address) noexcept;
  void begin_block(Block* block) noexcept;

  LiveLog* log_ = nullptr;
  std::vector<Block*> ring_;  // by the block's number, modulo the size, a power of two
  std::uint32_t oldest_ = 0;  // the number of the oldest block
  std::int64_t num_blocks_ = 0;
  std::int64_t most_blocks_ = kMostBlocks;
  // The newest block's postings for lists of the largest size that have not been used.
  Address next_ = 0;
  int left_ = 0;
  std::array<std::int64_t, kSizes> free_;  // the first of each size; less than 0: none
  bool wrapped_ = false;
  // The block that is being cleaned: its memory while that is not used again, what it held, the
  // address that it had, and how far it has been read.
  Block* spare_ = nullptr;
  const Block* cleaned_ = nullptr;
  Address cleaned_first_ = 0;
  int cleaned_units_ = 0;
};

}  // namespace fastdraft

// Finds the latest occurrence of some tokens in a live datastore.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/datastore_index.h"
#include "store/live_lists.h"
#include "store/live_log.h"

namespace fastdraft {

// Finds where an n-gram occurs in the log. Its hash leads to the position behind its only
// occurrence, or to the list of its latest ones. The caller compares each hit with the log, so an
// entry that outlived its text or its list does no harm; it is cleared away when its slot is
// needed.
//
// An extendible hash table (Fagin et al., 1979): a full page is split in two, so growth never
// stops the store for longer than a page takes.
//
// Not thread-safe; const calls may overlap.
class LiveTable {
 public:
  // A part of the table, of a chunk's size.
  struct alignas(64) Page {
    static constexpr std::int64_t kBuckets = sizeof(LiveLog::Chunk) / sizeof(Bucket) - 1;
    static constexpr std::int64_t kEntries = kBuckets * Bucket::kEntries;
    // A search goes on to the first bucket with a free entry, so no page may fill up.
    static constexpr std::int64_t kFull = kEntries * 15 / 16;
    // With fewer entries than this of use, a full page is cleaned instead of split.
    static constexpr std::int64_t kCrowded = kEntries * 3 / 4;

    int depth;  // how many bits of their hashes all entries share
    std::int64_t used;
    alignas(64) Bucket buckets[kBuckets];
  };
  static_assert(sizeof(Page) == sizeof(LiveLog::Chunk));

  LiveTable() = default;
  ~LiveTable() = default;
  LiveTable(const LiveTable&) = delete;
  LiveTable& operator=(const LiveTable&) = delete;

  // The hash of the `window` tokens before a position; 0: as many as the log's prefix_window says.
  // The log gives the memory, and must outlive the table. With `lists`, which too must outlive it,
  // more than the latest position is known: those of kOrders[order]. Throws MemoryLimitError.
  void open(LiveLog& log, std::int64_t window, std::uint64_t seed, LiveLists* lists = nullptr,
            std::size_t order = 0);
  // Forgets the entries, whose memory is the log's.
  void close() noexcept { directory_ = {}; }

  std::uint64_t hash(const Token* tokens, std::int64_t count) const noexcept {
    return hash_tokens(tokens, count, seed_);
  }
  void prefetch(std::uint64_t hash) const noexcept { static_cast<void>(prefetched(hash)); }
  // The hash's page, until the table is rebuilt or merged, and its bucket asked for.
  Page* prefetched(std::uint64_t hash) const noexcept {
    Page* page = this->page(hash);
    fastdraft::prefetch(page->buckets + Bucket::home(hash, Page::kBuckets));
    return page;
  }

  // Asks for the text that `put` compares the tokens with, or the list that it adds to; their
  // bucket should be here by now.
  void prefetch_text(const Page* page, std::uint64_t hash) const noexcept {
    if (!prefetch_entries(page, hash)) fastdraft::prefetch(page);  // where it will be counted
  }
  // Asks for what a search will read behind the bucket, which should be here by now.
  void prefetch_entries(std::uint64_t hash) const noexcept { prefetch_entries(page(hash), hash); }

  // The latest position of the tokens with this hash for which `matches(position)` holds, or -1;
  // of a table without lists.
  template <typename Matches>
  std::int64_t find(std::uint64_t hash, Matches matches) const {
    std::int64_t position = -1;
    const bool found = look(hash, [&](const Bucket& bucket, int i) {
      position = log_->expand(bucket.positions[i]);
      return is_held(position) && matches(position);
    });
    return found ? position : -1;
  }

  // The positions of the tokens before `last`, whose hash this is: all that is known of them, of a
  // table with lists. They are to be compared.
  LiveLists::Postings find_postings(std::uint64_t hash, const Token* last,
                                    LiveLists::Posting* single) const noexcept {
    LiveLists::Postings postings;
    look(hash, [&](const Bucket& bucket, int i) {
      if (has_bit(bucket.lists, i)) {
        if (!lists_->is_of(bucket.positions[i], LiveLists::check(hash))) return false;
        postings = lists_->postings(bucket.positions[i]);
        return true;
      }
      const std::int64_t position = log_->expand(bucket.positions[i]);
      if (!is_held(position) || !log_->matches(position, last, window_)) return false;
      *single = {position, has_bit(bucket.outputs, i)};
      postings = {single, 1, 0, 1};
      return true;
    });
    return postings;
  }

  // Enters `position` in the hash's page, instead of the latest one or, with lists, beside it;
  // `output` tells whether the token there is a model's output. Throws MemoryLimitError. For lists
  // there must be room.
  template <typename Matches>
  void put(Page* page, std::uint64_t hash, std::int64_t position, bool output, Matches matches) {
    const std::uint8_t tag = Bucket::tag(hash);
    // The position replaces an entry whose text has left, else it takes a free slot.
    Bucket* free_bucket = nullptr;
    int free_slot = 0;
    for (std::int64_t at = Bucket::home(hash, Page::kBuckets);; at = after(at)) {
      Bucket& bucket = page->buckets[at];
      for (std::uint32_t same = bucket.with_tag(tag); same != 0; same &= same - 1) {
        if (add(bucket, lowest_bit(same), hash, position, output, matches)) return;
      }
      if (free_bucket == nullptr && log_->begin() > 0) {
        free_slot = slot_of_left(bucket);
        if (free_slot < Bucket::kEntries) free_bucket = &bucket;
      }
      if (bucket.full()) continue;
      if (free_bucket == nullptr) {
        if (page->used >= Page::kFull) {
          page = make_room(page, hash);
          at = Bucket::home(hash, Page::kBuckets);
          while (page->buckets[at].full()) at = after(at);
          free_bucket = &page->buckets[at];
        } else {
          free_bucket = &bucket;
        }
        free_slot = lowest_bit(free_bucket->with_tag(0));
        ++page->used;
      }
      set(*free_bucket, free_slot, tag, {static_cast<std::uint32_t>(position), false, output});
      return;
    }
  }

  // Writes where the postings of a list are now that was at `address`: at the address that
  // make() returns or, where there is one, at `postings`. Nothing where the list has no entry.
  template <typename Make>
  void move_list(std::uint64_t hash, LiveLists::Address address, const LiveLists::Posting* postings,
                 int count, Make make) noexcept {
    look(hash, [&](const Bucket& found, int i) {
      if (!has_bit(found.lists, i) || found.positions[i] != address) return false;
      auto& bucket = const_cast<Bucket&>(found);
      if (count > 1) {
        bucket.positions[i] = make();
      } else {
        const auto position = static_cast<std::uint32_t>(postings->position(*log_));
        set(bucket, i, bucket.tags[i], {position, false, postings->output()});
      }
      return true;
    });
  }

  // Looks at the next page and the one that it was once split from: where what is of use fits into
  // half of one, they become one, and the log keeps the other's memory.
  void merge_next() noexcept;
  std::int64_t num_pages() const noexcept { return num_pages_; }
  std::int64_t directory_bytes() const noexcept { return LiveLog::bytes_of(directory_.size()); }
  // How often a full page was cleared of old entries or split.
  std::int64_t rebuilt() const noexcept { return rebuilt_; }

 private:
  // Returns whether there is an entry with the hash's tag in the first bucket.
  bool prefetch_entries(const Page* page, std::uint64_t hash) const noexcept {
    const Bucket& bucket = page->buckets[Bucket::home(hash, Page::kBuckets)];
    const std::uint32_t same = bucket.with_tag(Bucket::tag(hash));
    for (std::uint32_t left = same; left != 0; left &= left - 1) {
      const int i = lowest_bit(left);
      if (has_bit(bucket.lists, i)) {
        lists_->prefetch(bucket.positions[i]);
      } else {
        log_->prefetch_around(log_->expand(bucket.positions[i]), window_);
      }
    }
    return same != 0;
  }

  // The content of an entry.
  struct Entry {
    std::uint32_t position;  // its low 32 bits, or the address of a list
    bool list;
    bool output;
  };

  static bool has_bit(std::uint32_t bits, int i) noexcept { return (bits >> i & 1) != 0; }
  static Entry entry(const Bucket& bucket, int i) noexcept {
    return {bucket.positions[i], has_bit(bucket.lists, i), has_bit(bucket.outputs, i)};
  }
  static void set(Bucket& bucket, int i, std::uint8_t tag, Entry entry) noexcept {
    bucket.tags[i] = tag;
    bucket.positions[i] = entry.position;
    const auto bit = static_cast<std::uint32_t>(1) << i;
    bucket.lists = static_cast<std::uint16_t>((bucket.lists & ~bit) | (entry.list ? bit : 0));
    bucket.outputs = static_cast<std::uint16_t>((bucket.outputs & ~bit) | (entry.output ? bit : 0));
  }

  // Calls found(bucket, entry's index) for the entries with the hash's tag until that returns true.
  // Returns whether it did.
  template <typename Found>
  bool look(std::uint64_t hash, Found found) const {
    const Page& page = *this->page(hash);
    const std::uint8_t tag = Bucket::tag(hash);
    for (std::int64_t at = Bucket::home(hash, Page::kBuckets);; at = after(at)) {
      const Bucket& bucket = page.buckets[at];
      for (std::uint32_t same = bucket.with_tag(tag); same != 0; same &= same - 1) {
        if (found(bucket, lowest_bit(same))) return true;
      }
      if (!bucket.full()) return false;
    }
  }

  // Adds the position to an entry with its tag. Returns whether it is of the same tokens.
  template <typename Matches>
  bool add(Bucket& bucket, int i, std::uint64_t hash, std::int64_t position, bool output,
           Matches matches) noexcept {
    std::uint32_t& known = bucket.positions[i];
    if (has_bit(bucket.lists, i)) {
      if (!lists_->is_of(known, LiveLists::check(hash))) return false;
      if (lists_->wrapped() && !matches(lists_->latest(known))) return false;
      known = lists_->add(known, {position, output});
      return true;
    }
    const std::int64_t before = log_->expand(known);
    if (!is_held(before) || !matches(before)) return false;
    if (lists_ == nullptr) {
      known = static_cast<std::uint32_t>(position);
      return true;
    }
    const LiveLists::Posting postings[] = {{before, has_bit(bucket.outputs, i)},
                                           {position, output}};
    const LiveLists::Address list = lists_->make(order_, LiveLists::check(hash), postings, 2);
    set(bucket, i, bucket.tags[i], {list, true, false});
    return true;
  }

  static std::int64_t after(std::int64_t bucket) noexcept {
    return bucket + 1 == Page::kBuckets ? 0 : bucket + 1;
  }
  // The page's number in a directory for all hashes. Some pages get up to twice the n-grams of
  // others: if all filled up at one time, the whole table would be half empty after it.
  static std::uint32_t spread(std::uint64_t hash) noexcept {
    const std::uint64_t high = hash >> 32;
    return static_cast<std::uint32_t>(high + (high * (0x100000000u - high) >> 32) * 11 / 32);
  }
  Page* page(std::uint64_t hash) const noexcept {
    return directory_[spread(hash) >> (32 - depth_)];
  }
  // Returns whether what the entry leads to may be held; without a look at it.
  bool leads(const Bucket& bucket, int i) const noexcept {
    return has_bit(bucket.lists, i) ? lists_->held(bucket.positions[i])
                                    : is_held(log_->expand(bucket.positions[i]));
  }
  // The first entry that has left; kEntries: none.
  int slot_of_left(const Bucket& bucket) const noexcept {
    int i = 0;
    while (i < Bucket::kEntries && (bucket.tags[i] == 0 || leads(bucket, i))) ++i;
    return i;
  }
  bool is_held(std::int64_t position) const noexcept { return position - reach_ >= log_->begin(); }
  Page* add_page(int depth);
  Page* make_room(Page* page, std::uint64_t hash);
  std::int64_t latest(Entry entry) const noexcept;
  void reenter(Entry entry) noexcept;
  void reenter_all(const Page& page) noexcept;
  std::int64_t count_held(const Page& page) const noexcept;

  LiveLog* log_ = nullptr;
  LiveLists* lists_ = nullptr;
  std::size_t order_ = 0;
  std::int64_t window_ = 0;
  std::int64_t reach_ = 0;  // an entry is of use while this many tokens before it are held
  std::uint64_t seed_ = 0;
  std::int64_t rebuilt_ = 0;
  std::int64_t num_pages_ = 0;
  std::uint32_t next_ = 0;  // the first of the numbers that the page has that merge_next looks at
  int depth_ = 4;
  std::vector<Page*> directory_;  // by the first depth_ bits of `spread`
};

}  // namespace fastdraft

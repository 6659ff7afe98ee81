// Where a live datastore finds the latest occurrence of some tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "datastore_index.h"
#include "live_log.h"

namespace fastdraft {

// From the hash of the tokens before a position of the log to the latest such position. A hit is
// to be compared with the log, so an entry that outlived its text does no harm; it is cleared away
// when its place is needed.
//
// An extendible hash table (Fagin et al., 1979): a full page is split in two, so growth never
// stops the store for longer than a page takes.
//
// Not thread-safe; const calls may overlap.
class LiveTable {
 public:
  LiveTable() = default;
  ~LiveTable() = default;
  LiveTable(const LiveTable&) = delete;
  LiveTable& operator=(const LiveTable&) = delete;

  // Of the `window` tokens before a position; 0: as many as the log's prefix_window says. The
  // log gives the memory, and must outlive the table. Throws MemoryLimitError.
  void open(LiveLog& log, std::int64_t window, std::uint64_t seed);
  // Forgets the entries, whose memory is the log's.
  void close() noexcept { directory_ = {}; }

  std::uint64_t hash(const Token* tokens, std::int64_t count) const noexcept {
    return hash_tokens(tokens, count, seed_);
  }
  void prefetch(std::uint64_t hash) const noexcept {
    fastdraft::prefetch(page(hash)->buckets + Bucket::home(hash, Page::kBuckets));
  }

  // Asks for the text that `put` compares the tokens with; their bucket should be here by now.
  void prefetch_text(std::uint64_t hash) const noexcept {
    const Page* page = this->page(hash);
    const Bucket& bucket = page->buckets[Bucket::home(hash, Page::kBuckets)];
    std::uint32_t same = bucket.with_tag(Bucket::tag(hash));
    if (same == 0) fastdraft::prefetch(page);  // where it will be counted
    for (; same != 0; same &= same - 1) {
      log_->prefetch_around(log_->expand(bucket.positions[lowest_bit(same)]), window_);
    }
  }

  // The position of the tokens with this hash for which `matches(position)`
  // holds, or -1.
  template <typename Matches>
  std::int64_t find(std::uint64_t hash, Matches matches) const {
    const Page& page = *this->page(hash);
    const std::uint8_t tag = Bucket::tag(hash);
    for (std::int64_t at = Bucket::home(hash, Page::kBuckets);; at = after(at)) {
      const Bucket& bucket = page.buckets[at];
      for (std::uint32_t same = bucket.with_tag(tag); same != 0; same &= same - 1) {
        const std::int64_t position = log_->expand(bucket.positions[lowest_bit(same)]);
        if (is_held(position) && matches(position)) return position;
      }
      if (!bucket.full()) return -1;
    }
  }

  // Enters `position` and returns the one that it takes the place of, or -1. Throws
  // MemoryLimitError.
  template <typename Matches>
  std::int64_t put(std::uint64_t hash, std::int64_t position, Matches matches) {
    const std::uint8_t tag = Bucket::tag(hash);
    Page* page = this->page(hash);
    // Where the position goes: in place of an entry whose text has left, else in a free place.
    Bucket* free_bucket = nullptr;
    int free_place = 0;
    for (std::int64_t at = Bucket::home(hash, Page::kBuckets);; at = after(at)) {
      Bucket& bucket = page->buckets[at];
      for (std::uint32_t same = bucket.with_tag(tag); same != 0; same &= same - 1) {
        std::uint32_t& entry = bucket.positions[lowest_bit(same)];
        const std::int64_t known = log_->expand(entry);
        if (!is_held(known) || !matches(known)) continue;
        entry = static_cast<std::uint32_t>(position);
        return known;
      }
      if (free_bucket == nullptr && log_->begin() > 0) {
        free_place = place_of_left(bucket);
        if (free_place < Bucket::kEntries) free_bucket = &bucket;
      }
      if (bucket.full()) continue;
      if (free_bucket == nullptr) {
        if (page->used >= Page::kFull) {
          enter(hash, position, *make_room(page, hash));
          return -1;
        }
        free_bucket = &bucket;
        free_place = lowest_bit(bucket.with_tag(0));
        ++page->used;
      }
      free_bucket->tags[free_place] = tag;
      free_bucket->positions[free_place] = static_cast<std::uint32_t>(position);
      return -1;
    }
  }

  std::int64_t directory_bytes() const noexcept { return LiveLog::bytes_of(directory_.size()); }
  // How often a full page was cleared of old entries or split.
  std::int64_t rebuilt() const noexcept { return rebuilt_; }

 private:
  // A part of the table, of a chunk's size.
  struct alignas(64) Page {
    static constexpr std::int64_t kBuckets = sizeof(LiveLog::Chunk) / sizeof(Bucket) - 1;
    static constexpr std::int64_t kEntries = kBuckets * Bucket::kEntries;
    // Searches end at a bucket with a free entry: there must be some.
    static constexpr std::int64_t kFull = kEntries * 7 / 8;
    // With fewer entries than this of use, a full page is cleaned instead of split.
    static constexpr std::int64_t kCrowded = kEntries * 3 / 4;

    int depth;  // how many bits of their hashes all entries share
    std::int64_t used;
    alignas(64) Bucket buckets[kBuckets];
  };
  static_assert(sizeof(Page) == sizeof(LiveLog::Chunk));

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
  // The first entry that has left; kEntries: none.
  int place_of_left(const Bucket& bucket) const noexcept {
    int i = 0;
    while (i < Bucket::kEntries &&
           (bucket.tags[i] == 0 || is_held(log_->expand(bucket.positions[i])))) {
      ++i;
    }
    return i;
  }
  bool is_held(std::int64_t position) const noexcept { return position - reach_ >= log_->begin(); }
  Page* add_page(int depth);
  Page* make_room(Page* page, std::uint64_t hash);
  void reenter(std::int64_t position) noexcept;
  static void enter(std::uint64_t hash, std::int64_t position, Page& page) noexcept;

  LiveLog* log_ = nullptr;
  std::int64_t window_ = 0;
  std::int64_t reach_ = 0;  // an entry is of use while so many tokens before it are held
  std::uint64_t seed_ = 0;
  std::int64_t rebuilt_ = 0;
  int depth_ = 4;
  std::vector<Page*> directory_;  // by the first depth_ bits of `spread`
};

}  // namespace fastdraft

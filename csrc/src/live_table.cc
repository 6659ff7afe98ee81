#include "live_table.h"

#include <algorithm>
#include <cstring>

namespace fastdraft {

void LiveTable::open(LiveLog& log, std::int64_t window, std::uint64_t seed) {
  log_ = &log;
  window_ = window;
  reach_ = window > 0 ? window : LiveLog::kPrefixStep + 1;
  seed_ = seed;
  log.charge(LiveLog::bytes_of(LiveLog::kFirstPointers));
  directory_.assign(LiveLog::kFirstPointers, add_page(0));
}

LiveTable::Page* LiveTable::add_page(int depth) {
  Page* page = new (log_->allocate_block(1)) Page;
  std::memset(page->buckets, 0, sizeof(page->buckets));
  page->depth = depth;
  page->used = 0;
  return page;
}

// Clears a full page of entries that are of no use and, where too few go, splits
// it. Returns the page that is the hash's now.
LiveTable::Page* LiveTable::make_room(Page* page, std::uint64_t hash) {
  ++rebuilt_;
  std::int64_t held = 0;
  for (const Bucket& bucket : page->buckets) {
    for (int i = 0; i < Bucket::kEntries; ++i) {
      held += bucket.tags[i] != 0 && is_held(log_->expand(bucket.positions[i])) ? 1 : 0;
    }
  }
  if (held > Page::kCrowded) {
    if (page->depth == depth_) {
      std::vector<Page*> wider = log_->wider(directory_);
      for (std::size_t i = 0; i < wider.size(); ++i) wider[i] = directory_[i / 2];
      directory_.swap(wider);
      ++depth_;
    }
    Page* upper = add_page(page->depth + 1);
    ++page->depth;
    const std::size_t pages = std::size_t{1} << (depth_ - page->depth);
    const std::size_t first = (spread(hash) >> (32 - depth_)) & ~(2 * pages - 1);
    std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first + pages), pages, upper);
  }
  const Page full = *page;
  std::memset(page->buckets, 0, sizeof(page->buckets));
  page->used = 0;
  for (const Bucket& bucket : full.buckets) {
    const Bucket& next = *(&bucket + (&bucket + 1 < full.buckets + Page::kBuckets ? 1 : 0));
    for (int i = 0; i < Bucket::kEntries && next.tags[i] != 0; ++i) {
      log_->prefetch(log_->expand(next.positions[i]), window_ > 0 ? window_ : kContextTokens);
    }
    for (int i = 0; i < Bucket::kEntries && bucket.tags[i] != 0; ++i) {
      const std::int64_t position = log_->expand(bucket.positions[i]);
      if (is_held(position)) reenter(position);
    }
  }
  return this->page(hash);
}

// Enters a position that is not in the table, in a page with room.
void LiveTable::reenter(std::int64_t position) noexcept {
  const std::int64_t window = window_ > 0 ? window_ : log_->prefix_window(position);
  if (window == 0) return;
  Token copy[kContextTokens];
  const std::uint64_t hash = this->hash(log_->before(position, window, copy), window);
  enter(hash, position, *page(hash));
}

void LiveTable::enter(std::uint64_t hash, std::int64_t position, Page& page) noexcept {
  std::int64_t at = Bucket::home(hash, Page::kBuckets);
  while (page.buckets[at].full()) at = after(at);
  page.buckets[at].enter(hash, position);
  ++page.used;
}

}  // namespace fastdraft

#include "store/live_table.h"

#include <algorithm>
#include <cstring>

namespace fastdraft {
namespace {

// In a page that is rebuilt, lists are prefetched this many buckets ahead, their texts one fewer.
constexpr std::int64_t kListsAhead = 2;

}  // namespace

void LiveTable::open(LiveLog& log, std::int64_t window, std::uint64_t seed, LiveLists* lists,
                     std::size_t order) {
  log_ = &log;
  lists_ = lists;
  order_ = order;
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
  ++num_pages_;
  return page;
}

// Clears a full page of entries that are of no use and, where too few go, splits
// it. Returns the page that is the hash's now.
LiveTable::Page* LiveTable::make_room(Page* page, std::uint64_t hash) {
  ++rebuilt_;
  if (count_held(*page) > Page::kCrowded) {
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
  reenter_all(full);
  return this->page(hash);
}

void LiveTable::merge_next() noexcept {
  const Page* page = directory_[next_ >> (32 - depth_)];
  if (page->depth == 0) return;
  // The sum of all numbers, in 64 bits.
  const std::uint64_t numbers = std::uint64_t{1} << (32 - page->depth);
  const std::uint64_t first = next_ & ~(2 * numbers - 1);
  next_ = static_cast<std::uint32_t>((next_ & ~(numbers - 1)) + numbers);
  Page* lower = directory_[first >> (32 - depth_)];
  Page* upper = directory_[(first + numbers) >> (32 - depth_)];
  if (lower->depth != upper->depth) return;
  if (count_held(*lower) + count_held(*upper) > Page::kEntries / 2) return;
  const Page both[] = {*lower, *upper};
  std::memset(lower->buckets, 0, sizeof(lower->buckets));
  lower->used = 0;
  --lower->depth;
  const std::size_t pages = std::size_t{1} << (depth_ - lower->depth);
  std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first >> (32 - depth_)), pages,
              lower);
  for (const Page& old : both) reenter_all(old);
  --num_pages_;
  log_->keep_block(upper);
}

std::int64_t LiveTable::count_held(const Page& page) const noexcept {
  std::int64_t held = 0;
  for (const Bucket& bucket : page.buckets) {
    for (int i = 0; i < Bucket::kEntries; ++i) {
      held += bucket.tags[i] != 0 && leads(bucket, i) ? 1 : 0;
    }
  }
  return held;
}

// Enters what is of use in a page that was cleared or split.
void LiveTable::reenter_all(const Page& full) noexcept {
  const std::int64_t window = window_ > 0 ? window_ : kContextTokens;
  for (std::int64_t at = 0; at < Page::kBuckets + kListsAhead; ++at) {
    if (lists_ != nullptr && at < Page::kBuckets) {
      const Bucket& bucket = full.buckets[at];
      for (int i = 0; i < Bucket::kEntries && bucket.tags[i] != 0; ++i) {
        if (has_bit(bucket.lists, i)) lists_->prefetch(bucket.positions[i]);
      }
    }
    if (const std::int64_t ahead = at - kListsAhead + 1; ahead >= 0 && ahead < Page::kBuckets) {
      const Bucket& bucket = full.buckets[ahead];
      for (int i = 0; i < Bucket::kEntries && bucket.tags[i] != 0; ++i) {
        const std::int64_t position = latest(entry(bucket, i));
        if (is_held(position)) log_->prefetch(position, window);
      }
    }
    if (at < kListsAhead) continue;
    const Bucket& bucket = full.buckets[at - kListsAhead];
    for (int i = 0; i < Bucket::kEntries && bucket.tags[i] != 0; ++i) {
      reenter(entry(bucket, i));
    }
  }
}

// The latest position that an entry leads to, or -1.
std::int64_t LiveTable::latest(Entry entry) const noexcept {
  if (!entry.list) return log_->expand(entry.position);
  return lists_->is_list(entry.position) ? lists_->latest(entry.position) : -1;
}

// Enters an entry that is not in the table, in a page with room.
void LiveTable::reenter(Entry entry) noexcept {
  const std::int64_t position = latest(entry);
  if (!is_held(position)) return;
  const std::int64_t window = window_ > 0 ? window_ : log_->prefix_window(position);
  if (window == 0) return;
  Token tokens[kContextTokens];
  log_->copy(position - window, window, tokens);
  const std::uint64_t hash = this->hash(tokens, window);
  Page& page = *this->page(hash);
  std::int64_t at = Bucket::home(hash, Page::kBuckets);
  while (page.buckets[at].full()) at = after(at);
  Bucket& bucket = page.buckets[at];
  set(bucket, lowest_bit(bucket.with_tag(0)), Bucket::tag(hash), entry);
  ++page.used;
}

}  // namespace fastdraft

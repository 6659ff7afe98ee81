#include "store/live_lists.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>

#include "index/memory.h"

namespace fastdraft {

void LiveLists::open(LiveLog& log, std::uint32_t first_block, std::int64_t most_blocks) {
  log_ = &log;
  most_blocks_ = most_blocks;
  oldest_ = first_block;
  log.charge(LiveLog::bytes_of(LiveLog::kFirstPointers));
  ring_.assign(LiveLog::kFirstPointers, nullptr);
  free_.fill(-1);
  add_block();
}

void LiveLists::close() noexcept {
  ring_ = {};
  num_blocks_ = 0;
  left_ = 0;
  free_.fill(-1);
}

void LiveLists::add_block() {
  if (num_blocks_ >= most_blocks_) {
    refuse_memory([&] {
      return "the lists of a datastore have at most " + std::to_string(most_blocks_) + " blocks";
    });
  }
  if (num_blocks_ == static_cast<std::int64_t>(ring_.size())) {
    std::vector<Block*> wider = log_->wider(ring_);
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(num_blocks_); ++i) {
      const std::size_t number = (oldest_ + i) & kBlockMask;
      wider[number & (wider.size() - 1)] = ring_[number & (ring_.size() - 1)];
    }
    ring_.swap(wider);
  }
  begin_block(static_cast<Block*>(log_->allocate_block(1)));
}

void LiveLists::begin_block(Block* block) noexcept {
  for (; left_ > 0; --left_, next_ += kChunkUnits) release(next_, kSizes - 1);
  const std::uint32_t number = (oldest_ + static_cast<std::uint32_t>(num_blocks_++)) & kBlockMask;
  ring_[number & (ring_.size() - 1)] = block;
  next_ = number << kUnitBits;
  if (number == kBlockMask) wrapped_ = true;
  left_ = kBlockUnits / kChunkUnits;
  at(next_)->header = {kUnused, 0};
}

// The smallest posting left that is large enough; what is not needed of it stays free.
LiveLists::Address LiveLists::allocate(unsigned size) noexcept {
  unsigned from = size;
  while (from < kSizes && free_[from] < 0) ++from;
  Address address = 0;
  if (from < kSizes) {
    address = static_cast<Address>(free_[from]);
    take_out(address);
  } else {
    if (left_ == 0) {
      assert(spare_ != nullptr);
      begin_block(std::exchange(spare_, nullptr));
    }
    from = kSizes - 1;
    address = next_;
    next_ += kChunkUnits;
    if (--left_ > 0) at(next_)->header = {kUnused, 0};
  }
  while (from-- > size) release(address + (Address{1} << from), from);
  return address;
}

void LiveLists::release(Address address, unsigned size) noexcept {
  const std::int64_t next = free_[size];
  List* left = at(address);
  left->header = {kFree, size};
  left->free.next = next < 0 ? address : static_cast<Address>(next);
  if (next >= 0) at(left->free.next)->free.previous = address;
  free_[size] = address;
}

void LiveLists::take_out(Address address) noexcept {
  const List* left = at(address);
  const auto [next, previous] = left->free;
  const bool last = next == address;
  std::int64_t& first = free_[left->header.state()];
  if (first == address) {
    first = last ? -1 : std::int64_t{next};
    return;
  }
  at(previous)->free.next = last ? previous : next;
  if (!last) at(next)->free.previous = previous;
}

LiveLists::Address LiveLists::make(std::size_t order, std::uint32_t check, const Posting* postings,
                                   int count) noexcept {
  unsigned size = 0;
  while (capacity(size) < count) ++size;
  const Address address = allocate(size);
  List* list = at(address);
  list->header = {size, Header::state_of(count), order, check};
  std::copy_n(postings, count, list->postings);
  return address;
}

LiveLists::Address LiveLists::add(Address address, Posting posting) noexcept {
  List* list = at(address);
  const Header header = list->header;
  int count = header.count();
  if (count == kMostPostings) {
    const int next = header.latest() + 1 < kMostPostings ? header.latest() + 1 : 0;
    list->postings[next] = posting;
    list->header = {header.size(), static_cast<unsigned>(kMostPostings + next), header.order(),
                    header.check()};
    return address;
  }
  unsigned size = header.size();
  if (count == capacity(size)) {
    Posting* end = list->postings + count;
    Posting* live =
        std::find_if(list->postings, end, [&](Posting known) { return is_live(known); });
    List* moved = list;
    if (live == list->postings) {
      const Address larger = allocate(size + 1);
      moved = at(larger);
      std::copy(live, end, moved->postings);
      release(std::exchange(address, larger), size++);
    } else {
      std::copy(live, end, moved->postings);
    }
    list = moved;
    count = static_cast<int>(end - live);
  }
  list->postings[count++] = posting;
  list->header = {size, Header::state_of(count), header.order(), header.check()};
  return address;
}

void LiveLists::begin_cleaning(Block* copy) noexcept {
  spare_ = ring_[oldest_ & (ring_.size() - 1)];
  cleaned_first_ = oldest_ << kUnitBits;
  for (cleaned_units_ = 0; cleaned_units_ < kBlockUnits;) {
    const Address address = cleaned_first_ + static_cast<Address>(cleaned_units_);
    const Header header = at(address)->header;
    if (header.size() == kUnused) break;
    if (!header.is_list()) take_out(address);
    cleaned_units_ += header.units();
  }
  *copy = *spare_;
  cleaned_ = copy;
  cleaned_units_ = 0;
  oldest_ = (oldest_ + 1) & kBlockMask;
  if (--num_blocks_ == 0) left_ = 0;
}

int LiveLists::next_leaving(Leaving* lists, int most) noexcept {
  int count = 0;
  while (count < most && cleaned_units_ < kBlockUnits) {
    const auto* list = reinterpret_cast<const List*>(cleaned_->units + cleaned_units_);
    const Header header = list->header;
    if (header.size() == kUnused) break;
    if (header.is_list()) {
      const Address address = cleaned_first_ + static_cast<Address>(cleaned_units_);
      lists[count++] = {header.order(), postings_of(list), address, header.check()};
    }
    cleaned_units_ += header.units();
  }
  return count;
}

void LiveLists::end_cleaning() noexcept {
  if (spare_ == nullptr) return;
  // One block stays, however little memory there is.
  Block* block = std::exchange(spare_, nullptr);
  if (num_blocks_ == 0) return begin_block(block);
  log_->keep_block(block);
}

int LiveLists::copy_live(const Postings& postings, Posting* out) const noexcept {
  int count = 0;
  for (int back = postings.left(); back-- > 0;) {
    if (is_live(postings[back])) out[count++] = postings[back];
  }
  return count;
}

}  // namespace fastdraft

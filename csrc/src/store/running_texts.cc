#include "store/running_texts.h"

#include <algorithm>
#include <cassert>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <utility>

#include "index/bits.h"

namespace fastdraft {
namespace {

// The tokens before a text's output that tell how far an occurrence reaches back.
constexpr std::int64_t kContext = Datastore::kLongestMatch;
constexpr std::size_t kFirstEntries = 16;

}  // namespace

RunningTexts::RunningTexts(std::function<bool(std::int64_t)> charge)
    : charge_(std::move(charge)), seed_(random_seed()) {}

RunningTexts::~RunningTexts() = default;

void RunningTexts::clear() noexcept {
  const std::unique_lock<PhaseFairMutex> lock(mutex_);
  ++cleared_;
  num_entered_.store(0, std::memory_order_relaxed);
  release();
}

// Gives all memory back.
void RunningTexts::release() noexcept {
  std::vector<std::unique_ptr<Block>>().swap(blocks_);
  std::vector<std::uint32_t>().swap(free_blocks_);
  for (auto& tables : tables_) tables.fill(Table());
  charge_(-std::exchange(bytes_, 0));
}

// Writes the tokens before a position, `most` at most and as far as the text is here, to where they
// end at `end`. Returns how many.
std::int64_t RunningTexts::copy_before(Position position, std::int64_t most,
                                       Token* end) const noexcept {
  std::int64_t copied = 0;
  while (copied < most) {
    const Block& block = this->block(position);
    const std::int64_t here = std::min<std::int64_t>(most - copied, position % kBlockTokens);
    std::copy_n(block.tokens + position % kBlockTokens - here, here, end - copied - here);
    copied += here;
    if (copied == most || block.before == kNone) break;
    position = block.before;
    end[-++copied] = token(position);
  }
  return copied;
}

// The entry of the n-gram before `end`; null: there is none.
const RunningTexts::Table::Entry* RunningTexts::entry_of(std::uint64_t hash, const Token* end,
                                                         std::size_t order) const noexcept {
  const Table& table = this->table(order, hash);
  if (table.used == 0) return nullptr;
  const std::size_t mask = table.entries.size() - 1;
  const auto low = static_cast<std::uint32_t>(hash);
  const std::int64_t length = Datastore::kOrders[order];
  for (std::size_t at = low & mask;; at = (at + 1) & mask) {
    const Table::Entry& entry = table.entries[at];
    if (entry.latest == kNone) return nullptr;
    if (entry.hash != low) continue;
    Token found[Datastore::kOrders.front()];
    if (copy_before(entry.latest, length, found + length) == length &&
        std::equal(found, found + length, end - length)) {
      return &entry;
    }
  }
}

// Asks for the memory where the entry is looked for first.
void RunningTexts::prefetch_entry(std::uint64_t hash, std::size_t order) const noexcept {
  const Table& table = this->table(order, hash);
  if (table.used == 0) return;
  prefetch(&table.entries[static_cast<std::uint32_t>(hash) & (table.entries.size() - 1)]);
}

// Returns whether one more entry fits, after it has been made larger if need be.
bool RunningTexts::make_room(Table& table) {
  if (4 * (table.used + 1) <= 3 * table.entries.size()) return true;
  const std::size_t size = std::max(kFirstEntries, 2 * table.entries.size());
  // Both are held until the larger one is filled.
  const auto more = static_cast<std::int64_t>(size * sizeof(Table::Entry));
  if (!charge_(more)) return false;
  std::vector<Table::Entry> larger;
  try {
    larger.resize(size, {0, kNone});
  } catch (const std::bad_alloc&) {
    charge_(-more);
    return false;
  }
  for (const Table::Entry& entry : table.entries) {
    if (entry.latest != kNone) larger[Table::find(larger, entry.hash, kNone)] = entry;
  }
  table.entries.swap(larger);
  const auto fewer = static_cast<std::int64_t>(larger.size() * sizeof(Table::Entry));
  bytes_ += more - fewer;
  if (fewer > 0) charge_(-fewer);
  return true;
}

// The first position of a new block of the owner's; kNone where there is no memory.
RunningTexts::Position RunningTexts::add_block(Owner owner) {
  if (free_blocks_.empty() && blocks_.size() == std::size_t{kNone >> kBlockBits}) return kNone;
  if (!charge_(kBlockBytes)) return kNone;
  try {
    auto added = std::make_unique<Block>();
    added->owner = owner;
    added->before = kNone;
    added->after = kNone;
    added->used = 0;
    if (free_blocks_.empty()) {
      if (free_blocks_.capacity() <= blocks_.size()) free_blocks_.reserve(2 * blocks_.size() + 1);
      blocks_.push_back(nullptr);
      free_blocks_.push_back(static_cast<std::uint32_t>(blocks_.size() - 1));
    }
    const std::uint32_t number = free_blocks_.back();
    free_blocks_.pop_back();
    blocks_[number] = std::move(added);
    bytes_ += kBlockBytes;
    return number << kBlockBits;
  } catch (const std::bad_alloc&) {
    charge_(-kBlockBytes);
    return kNone;
  }
}

void RunningTexts::remove_block(std::uint32_t number) noexcept {
  blocks_[number].reset();
  free_blocks_.push_back(number);  // within its capacity
  bytes_ -= kBlockBytes;
  charge_(-kBlockBytes);
}

// Enters the occurrence of the n-gram before `end`, which the token at `position` follows; its
// table has room.
void RunningTexts::enter(std::size_t order, Position position, std::uint64_t hash,
                         const Token* end) noexcept {
  Links& here = links(order, position);
  here.later = kNone;
  if (const Table::Entry* entry = entry_of(hash, end, order)) {
    here.earlier = entry->latest;
    links(order, entry->latest).later = position;
    const_cast<Table::Entry*>(entry)->latest = position;
    return;
  }
  here.earlier = kNone;
  Table& table = this->table(order, hash);
  const auto low = static_cast<std::uint32_t>(hash);
  table.entries[Table::find(table.entries, low, kNone)] = {low, position};
  ++table.used;
}

void RunningTexts::take_out(std::size_t order, Position position) noexcept {
  const Links here = links(order, position);
  if (here.earlier != kNone) links(order, here.earlier).later = here.later;
  if (here.later != kNone) {
    links(order, here.later).earlier = here.earlier;
    return;
  }
  const std::int64_t length = Datastore::kOrders[order];
  Token before[Datastore::kOrders.front()];
  copy_before(position, length, before + length);
  const std::uint64_t hash = this->hash(before + length, order);
  Table& table = this->table(order, hash);
  const std::size_t mask = table.entries.size() - 1;
  std::size_t at = Table::find(table.entries, static_cast<std::uint32_t>(hash), position);
  if (here.earlier != kNone) {
    table.entries[at].latest = here.earlier;
    return;
  }
  // The entries behind it move up (Knuth, The Art of Computer Programming, volume 3, algorithm
  // 6.4R): searches end at a free one.
  --table.used;
  for (std::size_t next = (at + 1) & mask; table.entries[next].latest != kNone;
       next = (next + 1) & mask) {
    const std::size_t home = table.entries[next].hash & mask;
    if (((next - home) & mask) >= ((next - at) & mask)) {
      table.entries[at] = table.entries[next];
      at = next;
    }
  }
  table.entries[at].latest = kNone;
}

RunningTexts::Text::Text(RunningTexts& texts, Owner owner) noexcept : texts_(texts), owner_(owner) {
  texts_.num_running_.fetch_add(1, std::memory_order_relaxed);
}

void RunningTexts::Text::enter(const Token* tokens, std::int64_t size, std::int64_t prompt_size) {
  if (last_ == kNone) {
    prompt_size_ = prompt_size;
    entered_ = begin_ = std::max<std::int64_t>(0, prompt_size - kContext);
  }
  const std::int64_t first = std::max(entered_, prompt_size);
  const std::int64_t end = std::min(size, first + kSliceTokens);
  std::uint64_t hashes[kNumOrders][kSliceTokens];
  for (std::size_t order = 0; order < kNumOrders; ++order) {
    for (std::int64_t i = first; i < end; ++i) {
      if (is_indexed(order, i)) hashes[order][i - first] = texts_.hash(tokens + i, order);
    }
  }
  const std::unique_lock<PhaseFairMutex> lock(texts_.mutex_);
  for (std::size_t order = 0; order < kNumOrders; ++order) {
    for (std::int64_t i = first; i < end; ++i) {
      if (is_indexed(order, i)) texts_.prefetch_entry(hashes[order][i - first], order);
    }
  }
  if (last_ == kNone) cleared_ = texts_.cleared_;
  has_room_ = cleared_ == texts_.cleared_;
  while (entered_ < end && has_room_) {
    const std::int64_t i = entered_;
    has_room_ = make_room();
    for (std::size_t order = 0; order < kNumOrders && has_room_; ++order) {
      if (is_indexed(order, i)) {
        has_room_ = texts_.make_room(texts_.table(order, hashes[order][i - first]));
      }
    }
    if (!has_room_) return;
    Block& block = texts_.block(last_);
    const Position position = last_ + block.used;
    block.tokens[block.used++] = tokens[i];
    for (std::size_t order = 0; order < kNumOrders; ++order) {
      if (is_indexed(order, i)) {
        texts_.enter(order, position, hashes[order][i - first], tokens + i);
      }
    }
    ++entered_;
  }
}

// Returns whether one more token fits, after a block has been added if need be.
bool RunningTexts::Text::make_room() {
  if (last_ != kNone && texts_.block(last_).used < kBlockTokens) return true;
  const Position added = texts_.add_block(owner_);
  if (added == kNone) return false;
  if (last_ == kNone) {
    texts_.num_entered_.fetch_add(1, std::memory_order_relaxed);
  } else {
    texts_.block(added).before = last_ + kBlockTokens - 1;
    texts_.block(last_).after = added;
  }
  last_ = added;
  return true;
}

RunningTexts::Text::~Text() {
  texts_.num_running_.fetch_sub(1, std::memory_order_relaxed);
  if (last_ == kNone) return;
  const std::unique_lock<PhaseFairMutex> lock(texts_.mutex_);
  // From the end on, so that what is left is a text.
  while (cleared_ == texts_.cleared_) {
    for (std::uint32_t& used = texts_.block(last_).used; used > 0; --used) {
      --entered_;
      for (std::size_t order = 0; order < kNumOrders; ++order) {
        if (is_indexed(order, entered_)) texts_.take_out(order, last_ + used - 1);
      }
    }
    const Position before = texts_.block(last_).before;
    texts_.remove_block(last_ >> kBlockBits);
    if (before == kNone) {
      texts_.num_entered_.fetch_sub(1, std::memory_order_relaxed);
      if (texts_.free_blocks_.size() == texts_.blocks_.size()) texts_.release();
      return;
    }
    last_ = before - before % kBlockTokens;
    texts_.block(last_).after = kNone;
    texts_.mutex_.pass();
  }
}

int RunningTexts::Reader::find(const Datastore::Lookup& lookup, Occurrence* out, int most,
                               int links) const {
  if (most <= 0) return 0;
  const Token* end = lookup.text + lookup.size;
  std::array<std::uint64_t, kNumOrders> hashes{};
  for (std::size_t order = lookup.first; order < lookup.end; ++order) {
    hashes[order] = texts_.hash(end, order);
    texts_.prefetch_entry(hashes[order], order);
  }
  BestOccurrences best(out, most);
  int passed_over = kPassedOver * links;
  std::int32_t longer = Datastore::kLongestMatch + 1;
  for (std::size_t order = lookup.first; order < lookup.end; ++order) {
    if (best.full() || links == 0) break;
    const Table::Entry* entry = texts_.entry_of(hashes[order], end, order);
    Position position = entry == nullptr ? kNone : entry->latest;
    for (; position != kNone && links > 0 && !best.settled();
         position = texts_.links(order, position).earlier) {
      if (texts_.block(position).owner == reader_) {
        if (passed_over == 0) break;
        --passed_over;
        continue;
      }
      --links;
      Token before[Datastore::kLongestMatch];
      Token* before_end = before + Datastore::kLongestMatch;
      const std::int64_t held = texts_.copy_before(
          position, std::min<std::int64_t>(lookup.size, Datastore::kLongestMatch), before_end);
      const auto common = static_cast<std::int32_t>(common_suffix(before_end, end, held));
      // Longer ones have been met.
      if (common < longer) best.offer({position, common, true});
    }
    longer = Datastore::kOrders[order];
  }
  return best.count();
}

std::int64_t RunningTexts::Reader::copy(std::int64_t next, Token* out, std::int64_t most) const {
  auto position = static_cast<Position>(next);
  std::int64_t copied = 0;
  while (position != kNone && copied < most) {
    const Block& block = texts_.block(position);
    const Position first = position % kBlockTokens;
    const auto here = std::min<std::int64_t>(most - copied, block.used - first);
    std::copy_n(block.tokens + first, here, out + copied);
    copied += here;
    position = block.after;
  }
  return copied;
}

}  // namespace fastdraft

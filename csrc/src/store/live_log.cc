#include "store/live_log.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {

void LiveLog::append(Token token, bool output) {
  if (end_ % kChunkTokens == 0) {
    widen_ring();
    ring_[slot(end_, ring_.size())] = new (allocate_block(0)) Chunk;
    ++num_chunks_;
  }
  assert(end_ >= 0);
  const std::int64_t at = end_ % kChunkTokens;
  const std::uint32_t bits = static_cast<std::uint32_t>(token) & kLow;
  std::uint8_t* bytes = chunk(end_).tokens + at * kWidth;
  bytes[0] = static_cast<std::uint8_t>(bits);
  bytes[1] = static_cast<std::uint8_t>(bits >> 8);
  bytes[2] = static_cast<std::uint8_t>(bits >> 16 | (output ? kOutput : 0));
  ++end_;
  num_tokens_ += token >= 0 ? 1 : 0;
}

// Makes room for one more chunk in the ring.
void LiveLog::widen_ring() {
  if (num_chunks_ < static_cast<std::int64_t>(ring_.size())) return;
  std::vector<Chunk*> wider = this->wider(ring_);
  const std::int64_t first = begin_ / kChunkTokens * kChunkTokens;
  for (std::int64_t at = first; at < first + num_chunks_ * kChunkTokens; at += kChunkTokens) {
    wider[slot(at, wider.size())] = ring_[slot(at, ring_.size())];
  }
  ring_.swap(wider);
}

void LiveLog::release() noexcept {
  for (void* block : blocks_) ::operator delete(block, std::align_val_t{alignof(Chunk)});
  blocks_ = {};
  slabs_.clear();
  used_of_slab_ = kSlabBlocks;
  given_back_ = {};
  kept_ = nullptr;
  num_kept_ = 0;
  ring_ = {};
  num_chunks_ = 0;
  num_tokens_ = 0;
  begin_ = end_;
  bytes_ = 0;
}

void LiveLog::copy(std::int64_t position, std::int64_t count, Token* out) const noexcept {
  for (std::int64_t end = position + count; position < end;) {
    const std::int64_t run = std::min(end, (position / kChunkTokens + 1) * kChunkTokens);
    const std::uint8_t* from = coded(position);
    // Four at once: a compiler does not see that `out` is not part of the log.
    for (; position + 4 <= run; position += 4, from += 4 * kWidth, out += 4) {
      const std::array<Token, 4> four = {decoded(load_32(from)), decoded(load_32(from + kWidth)),
                                         decoded(load_32(from + 2 * kWidth)),
                                         decoded(load_32(from + 3 * kWidth))};
      std::memcpy(out, four.data(), sizeof(four));
    }
    for (; position < run; ++position, from += kWidth) *out++ = decoded(load_32(from));
  }
}

bool LiveLog::drop_block() noexcept {
  if (kept_ != nullptr) {
    free_block(take_kept());
    return true;
  }
  if (num_chunks_ <= 1) return false;
  free_block(drop_oldest());
  return true;
}

void LiveLog::forget_quarter() noexcept {
  forget_before(begin_ + (end_ - begin_ + 3) / 4);
  left_ += 1.0;
}

void LiveLog::forget_before(std::int64_t position) noexcept {
  while (num_chunks_ > 1 && position / kChunkTokens > begin_ / kChunkTokens) {
    keep_block(drop_oldest());
  }
  forget(position);
}

std::int64_t LiveLog::prefix_window(std::int64_t position) const noexcept {
  if (position - kPrefixStep - 1 < begin_) return 0;
  if (token(position - kPrefixStep - 1) < 0) return kPrefixStep;
  return position - kContextTokens < begin_ ? 0 : kContextTokens;
}

void* LiveLog::allocate_block(std::int64_t keep) {
  if (kept_ != nullptr) return take_kept();
  if (used_of_slab_ < kSlabBlocks) {
    return slabs_.back().get() + used_of_slab_++ * static_cast<std::int64_t>(sizeof(Chunk));
  }
  if (bytes_ + kBlockBytes > max_bytes_ && num_chunks_ > keep) return drop_oldest();
  if (!given_back_.empty()) {
    charge(sizeof(Chunk));
    void* block = given_back_.back();
    given_back_.pop_back();
    return block;
  }
  charge(kBlockBytes);
  try {
    if (blocks_.capacity() == blocks_.size()) blocks_.reserve(2 * (blocks_.size() + 1));
    blocks_.push_back(::operator new(sizeof(Chunk), std::align_val_t{alignof(Chunk)}));
  } catch (const std::bad_alloc&) {
    bytes_ -= kBlockBytes;
    throw_out_of_memory(kBlockBytes);
  }
  return blocks_.back();
}

LiveLog::Slab LiveLog::allocate_slab() noexcept {
  constexpr auto kBytes = static_cast<std::size_t>(kSlab);
  Slab slab(
      static_cast<std::byte*>(::operator new(kBytes, std::align_val_t{kBytes}, std::nothrow)));
  if (slab != nullptr) {
    advise_huge_pages(slab.get(), kBytes);
    // A write brings the huge page; without huge pages, each page of the usual size.
    for (std::size_t at = 0; at < kBytes; at += 4096) {
      *static_cast<volatile std::byte*>(slab.get() + at) = std::byte{0};
    }
  }
  return slab;
}

void LiveLog::add_slab(Slab slab) {
  if (slab == nullptr || !wants_slab()) return;
  try {
    const std::size_t blocks = (slabs_.size() + 1) * static_cast<std::size_t>(kSlabBlocks);
    if (given_back_.capacity() < blocks) given_back_.reserve(2 * blocks);
    if (slabs_.capacity() == slabs_.size()) slabs_.reserve(2 * (slabs_.size() + 1));
  } catch (const std::bad_alloc&) {
    return;
  }
  slabs_.push_back(std::move(slab));
  bytes_ += kSlabBytes;
  used_of_slab_ = 0;
}

// Gives a block's memory back to the system.
void LiveLog::free_block(void* block) noexcept {
  const auto found = std::find(blocks_.begin(), blocks_.end(), block);
  if (found == blocks_.end()) {
    discard_pages(block, sizeof(Chunk));
    given_back_.push_back(block);
    bytes_ -= static_cast<std::int64_t>(sizeof(Chunk));
    return;
  }
  *found = blocks_.back();
  blocks_.pop_back();
  ::operator delete(block, std::align_val_t{alignof(Chunk)});
  bytes_ -= kBlockBytes;
}

// The tokens before `position`, which is in the oldest chunk or where that ends, leave.
void LiveLog::forget(std::int64_t position) noexcept {
  for (; begin_ < position; ++begin_) num_tokens_ -= token(begin_) >= 0 ? 1 : 0;
}

// The oldest chunk leaves the log. Its memory is the caller's.
LiveLog::Chunk* LiveLog::drop_oldest() noexcept {
  Chunk* oldest = &chunk(begin_);
  forget(std::min(end_, (begin_ / kChunkTokens + 1) * kChunkTokens));
  left_ += 1.0 / static_cast<double>(num_chunks_--);
  return oldest;
}

void LiveLog::charge(std::int64_t bytes) {
  while (bytes_ + bytes > max_bytes_ && drop_block()) {
  }
  if (bytes_ + bytes > max_bytes_) {
    refuse_memory([&] {
      return "max_bytes is " + std::to_string(max_bytes_) + ": " + std::to_string(bytes_) +
             " bytes are in use and " + std::to_string(bytes) + " more are needed";
    });
  }
  bytes_ += bytes;
}

}  // namespace fastdraft

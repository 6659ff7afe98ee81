#include "engine/request_table.h"

#include <limits>
#include <new>
#include <string>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

// An id is a slot's index with the slot's generation above it. A slot whose last
// generation has ended is not used again, so no id is negative or given out twice.
constexpr int kIndexBits = 32;
constexpr std::int64_t kLastGeneration = std::numeric_limits<RequestId>::max() >> kIndexBits;

std::int64_t index_of(RequestId id) noexcept { return id & ((RequestId{1} << kIndexBits) - 1); }

}  // namespace

RequestTable::~RequestTable() {
  for (const auto& chunk : chunks_) delete[] chunk.load(std::memory_order_relaxed);
}

RequestTable::Slot* RequestTable::slot(std::int64_t index) const noexcept {
  const std::uint64_t shifted = static_cast<std::uint64_t>(index) + (1u << kLog2FirstChunk);
  int log2 = kLog2FirstChunk;
  while ((shifted >> (log2 + 1)) != 0) ++log2;
  const int chunk = log2 - kLog2FirstChunk;
  if (chunk >= kNumChunks) return nullptr;
  Slot* slots = chunks_[static_cast<std::size_t>(chunk)].load(std::memory_order_acquire);
  return slots == nullptr ? nullptr : slots + (shifted - (std::uint64_t{1} << log2));
}

std::optional<RequestTable::Locked> RequestTable::find(RequestId id, bool waits) const {
  Slot* found = id < 0 ? nullptr : slot(index_of(id));
  if (found == nullptr) return std::nullopt;
  std::unique_lock<std::mutex> guard(found->mutex, std::defer_lock);
  if (waits) guard.lock();
  if (!waits && !guard.try_lock()) return std::nullopt;
  if (found->request == nullptr || found->generation != id >> kIndexBits) return std::nullopt;
  return Locked(*found, std::move(guard));
}

RequestTable::Locked RequestTable::lock(RequestId id) const {
  if (std::optional<Locked> found = find(id)) return *std::move(found);
  throw_unknown(id);
}

void RequestTable::throw_unknown(RequestId id) {
  throw UnknownRequestError("unknown request " + std::to_string(id) +
                            ": it was never added, or has been finished or cancelled");
}

RequestId RequestTable::add(std::unique_ptr<Request> request) {
  const std::int64_t index = free_slot();
  Slot& found = *slot(index);
  const std::scoped_lock guard(found.mutex);
  found.request = std::move(request);
  size_.fetch_add(1, std::memory_order_relaxed);
  return (found.generation << kIndexBits) | index;
}

// The index of a slot that holds no request, and is nobody else's from now on.
std::int64_t RequestTable::free_slot() {
  const std::scoped_lock guard(mutex_);
  if (!free_slots_.empty()) {
    const std::int64_t index = free_slots_.back();
    free_slots_.pop_back();
    return index;
  }
  const std::int64_t index = num_slots_++;
  if (slot(index) == nullptr) {
    std::size_t chunk = 0;
    while (chunks_[chunk].load(std::memory_order_relaxed) != nullptr) ++chunk;
    chunks_[chunk].store(new Slot[std::size_t{1} << (kLog2FirstChunk + chunk)],
                         std::memory_order_release);
  }
  // Room for every slot to come back, so that `remove` never allocates.
  const auto slots = static_cast<std::size_t>(num_slots_);
  if (free_slots_.capacity() < slots) free_slots_.reserve(2 * slots);
  return index;
}

std::unique_ptr<Request> RequestTable::remove(RequestId id) {
  std::unique_ptr<Request> request;
  {
    const Locked locked = lock(id);
    ++locked.slot_->generation;
    request = std::move(locked.slot_->request);
    // Before anybody can learn that the id is unknown now.
    size_.fetch_sub(1, std::memory_order_relaxed);
  }
  const std::scoped_lock guard(mutex_);
  if (id >> kIndexBits < kLastGeneration) free_slots_.push_back(index_of(id));
  return request;
}

void RequestTable::in_child() noexcept {
  for (std::int64_t index = 0; index < num_slots_; ++index) {
    Slot& found = *slot(index);
    if (found.mutex.try_lock()) {
      found.mutex.unlock();
      continue;
    }
    new (&found.mutex) std::mutex;
    if (found.request == nullptr) continue;
    // A half-changed request cannot be freed.
    found.request.release();  // NOLINT(bugprone-unused-return-value)
    ++found.generation;
    size_.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace fastdraft

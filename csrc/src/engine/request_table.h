// The running requests, by id.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "fastdraft/engine.h"
#include "index/bits.h"
#include "index/fork.h"

namespace fastdraft {

// Thread-safe: each request has a lock of its own. Ids are never given out twice. In the child of a
// fork the requests that other threads had locked are no longer running: they may be half changed.
class RequestTable final : public ForkGuard {
  // Room for a request. Slots never move and are used again; the
  // generation, part of the id, tells their requests apart.
  struct Slot {
    std::mutex mutex;
    std::int64_t generation = 0;
    std::unique_ptr<Request> request;
  };

 public:
  // The number of requests that are visited together.
  static constexpr std::int64_t kTogether = 16;

  // A request while it is locked.
  class Locked {
   public:
    Locked(Slot& slot, std::unique_lock<std::mutex> lock) noexcept
        : slot_(&slot), lock_(std::move(lock)) {}
    Request& operator*() const noexcept { return *slot_->request; }
    Request* operator->() const noexcept { return slot_->request.get(); }

   private:
    friend class RequestTable;

    Slot* slot_;
    std::unique_lock<std::mutex> lock_;
  };

  RequestTable() : ForkGuard(Turn::kNone) {}
  ~RequestTable() override;

  RequestId add(std::unique_ptr<Request> request);

  // Locks a request. Returns nothing where no such request is running, nor, unless it `waits`,
  // where another thread has locked it.
  std::optional<Locked> find(RequestId id, bool waits = true) const;
  [[noreturn]] static void throw_unknown(RequestId id);  // an UnknownRequestError
  // Both throw UnknownRequestError where no such request is running.
  Locked lock(RequestId id) const;
  std::unique_ptr<Request> remove(RequestId id);

  // Calls `visit(row, request)` for each row of a batch, where `request` is an
  // std::optional<Locked>&, empty where no such request is running. Rows of one request are visited
  // in their order.
  //
  // Before, `approach(row, request, step)` asks for the memory that a visit reads, and returns
  // whether there is a next step. Several requests are locked at once and take their steps in
  // turns, so that one does not wait for another's memory. A thread that holds a lock never waits
  // for another request's: those that are locked elsewhere, and rows of the same request, are
  // visited after the others, one by one.
  template <typename Approach, typename Visit>
  void visit(const RequestId* ids, std::int64_t rows, Approach approach, Visit visit) const;

  void in_child() noexcept override;

  std::int64_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

 private:
  friend struct EngineTestAccess;

  // Slots lie in chunks that double in size: chunk k has kFirstChunk << k.
  static constexpr int kLog2FirstChunk = 6;
  static constexpr int kNumChunks = 26;

  Slot* slot(std::int64_t index) const noexcept;
  std::int64_t free_slot();

  std::atomic<std::int64_t> size_{0};
  std::array<std::atomic<Slot*>, kNumChunks> chunks_{};
  Mutex mutex_;  // guards the two below and the making of chunks
  std::int64_t num_slots_ = 0;
  std::vector<std::int64_t> free_slots_;
};

template <typename Approach, typename Visit>
void RequestTable::visit(const RequestId* ids, std::int64_t rows, Approach approach,
                         Visit visit) const {
  std::array<std::optional<Locked>, kTogether> held;
  for (std::int64_t first = 0; first < rows; first += kTogether) {
    const std::int64_t last = std::min(first + kTogether, rows);
    const auto locked = [&](std::int64_t row) -> std::optional<Locked>& {
      return held[static_cast<std::size_t>(row - first)];
    };
    std::uint32_t under_way = 0;
    for (std::int64_t row = first; row < last; ++row) {
      if (std::find(ids + first, ids + row, ids[row]) != ids + row) continue;
      locked(row) = find(ids[row], false);
      if (locked(row)) under_way |= 1u << (row - first);
    }
    for (int step = 0; under_way != 0 && last - first > 1; ++step) {
      for (std::uint32_t left = under_way; left != 0; left &= left - 1) {
        const std::int64_t row = first + lowest_bit(left);
        const std::optional<Locked>& request = locked(row);
        if (!request || !approach(row, **request, step)) under_way &= ~(1u << (row - first));
      }
    }
    std::array<std::int64_t, kTogether> later;
    std::size_t num_later = 0;
    for (std::int64_t row = first; row < last; ++row) {
      if (locked(row)) {
        visit(row, locked(row));
        locked(row).reset();
      } else {
        later[num_later++] = row;
      }
    }
    for (std::size_t i = 0; i < num_later; ++i) {
      std::optional<Locked> request = find(ids[later[i]]);
      visit(later[i], request);
    }
  }
}

}  // namespace fastdraft

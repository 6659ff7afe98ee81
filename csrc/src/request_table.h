// The running requests, by id.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "fastdraft/engine.h"
#include "request.h"

namespace fastdraft {

// Thread-safe: each request has a lock of its own. Ids are never given out twice.
class RequestTable {
  // A place for a request. Slots never move and are used again; the
  // generation, part of the id, tells their requests apart.
  struct Slot {
    std::mutex mutex;
    std::int64_t generation = 0;
    std::unique_ptr<Request> request;
  };

 public:
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

  RequestTable() = default;
  RequestTable(const RequestTable&) = delete;
  RequestTable& operator=(const RequestTable&) = delete;
  ~RequestTable();

  RequestId add(std::unique_ptr<Request> request);

  // Empty where no such request is running.
  std::optional<Locked> find(RequestId id) const;
  // Both throw UnknownRequestError where no such request is running.
  Locked lock(RequestId id) const;
  std::unique_ptr<Request> remove(RequestId id);

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
  std::mutex mutex_;  // guards the two below and the making of chunks
  std::int64_t num_slots_ = 0;
  std::vector<std::int64_t> free_slots_;
};

}  // namespace fastdraft

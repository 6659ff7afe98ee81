// Threads that share the rows of large batches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "index/fork.h"

namespace fastdraft {

// A few threads beside the caller's, which start when they are first needed and sleep between
// batches. All signals go to other threads. In the child of a fork they start anew.
//
// Thread-safe: while one caller has the threads, others work alone.
class BatchThreads final : public ForkGuard {
 public:
  // `count`: threads that work on a batch, the caller's included. 0: half the processors that this
  // process may use, four at most.
  explicit BatchThreads(std::int32_t count);
  ~BatchThreads() override;

  std::int64_t count() const noexcept { return count_; }

  // Calls work(part) for each part from 0 to below `parts`, in any order. If calls throw, throws
  // what one of them did, after all have ended.
  void run(std::int64_t parts, const std::function<void(std::int64_t)>& work);

  void in_child() noexcept override;

 private:
  // One call of `run`: each thread takes the next part until none is left.
  struct Job {
    Job(std::int64_t num_parts, const std::function<void(std::int64_t)>& of_part) noexcept
        : work(of_part), parts(num_parts) {}
    void help() noexcept;

    const std::function<void(std::int64_t)>& work;
    const std::int64_t parts;
    std::atomic<std::int64_t> next{0};
    std::atomic<int> helpers{0};  // threads other than the caller's that are at it
    std::mutex mutex;
    std::exception_ptr error;  // guarded by the mutex
  };

  void start() noexcept;
  bool start_one() noexcept;
  void wait_for_jobs() noexcept;

  const std::int64_t count_;
  std::atomic<bool> taken_{false};  // by a caller; guards threads_
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // guards the rest
  std::condition_variable wake_;
  Job* job_ = nullptr;  // null: there is none, or all its parts are taken
  std::uint64_t num_jobs_ = 0;
  bool ending_ = false;
};

}  // namespace fastdraft

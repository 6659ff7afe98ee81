#include "engine/batch_threads.h"

#include <csignal>

#include <algorithm>
#include <new>

namespace fastdraft {
namespace {

std::int64_t automatic() noexcept {
  return std::clamp<std::int64_t>(std::thread::hardware_concurrency() / 2, 1, 4);
}

}  // namespace

BatchThreads::BatchThreads(std::int32_t count)
    : ForkGuard(Turn::kNone), count_(count == 0 ? automatic() : count) {}

BatchThreads::~BatchThreads() {
  {
    const std::scoped_lock guard(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BatchThreads::Job::help() noexcept {
  for (;;) {
    const std::int64_t part = next.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts) return;
    try {
      work(part);
    } catch (...) {
      const std::scoped_lock guard(mutex);
      error = std::current_exception();
    }
  }
}

void BatchThreads::run(std::int64_t parts, const std::function<void(std::int64_t)>& work) {
  Job job(parts, work);
  const bool shared = parts > 1 && count_ > 1 && !taken_.exchange(true, std::memory_order_acquire);
  if (shared) {
    start();
    {
      const std::scoped_lock guard(mutex_);
      job_ = &job;
      ++num_jobs_;
    }
    wake_.notify_all();
  }
  job.help();
  if (shared) {
    {
      const std::scoped_lock guard(mutex_);
      job_ = nullptr;
    }
    // At most a part each is left, which takes less time than to sleep and be woken.
    while (job.helpers.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    taken_.store(false, std::memory_order_release);
  }
  if (job.error) std::rethrow_exception(job.error);
}

// Returns whether the system gave one more.
bool BatchThreads::start_one() noexcept {
  try {
    threads_.emplace_back([this] { wait_for_jobs(); });
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Starts the threads that are missing, as many as the system gives.
void BatchThreads::start() noexcept {
  const auto missing = [&] { return static_cast<std::int64_t>(threads_.size()) + 1 < count_; };
  if (!missing()) return;
  // A thread begins with the mask of the one that starts it.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (missing() && start_one()) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void BatchThreads::wait_for_jobs() noexcept {
  std::uint64_t seen = 0;
  std::unique_lock<std::mutex> guard(mutex_);
  for (;;) {
    wake_.wait(guard, [&] { return ending_ || (job_ != nullptr && num_jobs_ != seen); });
    if (ending_) return;
    seen = num_jobs_;
    Job& job = *job_;
    job.helpers.fetch_add(1, std::memory_order_relaxed);
    guard.unlock();
    job.help();
    job.helpers.fetch_sub(1, std::memory_order_release);
    guard.lock();
  }
}

// The child has none of the threads, and what they held is as they left it.
void BatchThreads::in_child() noexcept {
  new (&threads_) std::vector<std::thread>;
  new (&mutex_) std::mutex;
  new (&wake_) std::condition_variable;
  job_ = nullptr;
  taken_.store(false, std::memory_order_relaxed);
}

}  // namespace fastdraft

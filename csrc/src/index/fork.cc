#include "index/fork.h"

#include <pthread.h>

#include <unordered_set>

namespace fastdraft {

// All guards of the process.
class ForkGuards {
 public:
  // Never destroyed: guards may outlive what is static.
  static ForkGuards& get() {
    static auto* const guards = new ForkGuards;
    return *guards;
  }

  void add(ForkGuard* guard) {
    const std::scoped_lock lock(mutex_);
    guards_.insert(guard);
  }

  void remove(ForkGuard* guard) {
    const std::scoped_lock lock(mutex_);
    guards_.erase(guard);
  }

 private:
  ForkGuards() { pthread_atfork(&before, &in_parent, &in_child); }

  static void before() {
    ForkGuards& all = get();
    all.mutex_.lock();
    for (const auto turn :
         {ForkGuard::Turn::kRunningTexts, ForkGuard::Turn::kStore, ForkGuard::Turn::kLast}) {
      for (ForkGuard* guard : all.guards_) {
        if (guard->turn_ == turn) guard->before_fork();
      }
    }
  }
  static void in_parent() {
    for (ForkGuard* guard : get().guards_) {
      if (guard->turn_ != ForkGuard::Turn::kNone) guard->in_parent();
    }
    get().mutex_.unlock();
  }
  static void in_child() {
    for (ForkGuard* guard : get().guards_) guard->in_child();
    get().mutex_.unlock();
  }

  std::mutex mutex_;
  std::unordered_set<ForkGuard*> guards_;
};

ForkGuard::ForkGuard(Turn turn) : turn_(turn) { ForkGuards::get().add(this); }

ForkGuard::~ForkGuard() { ForkGuards::get().remove(this); }

}  // namespace fastdraft

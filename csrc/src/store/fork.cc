#include "store/fork.h"

#include <pthread.h>

namespace fastdraft {

// All guards of the process, in a list.
class ForkGuards {
 public:
  // Never destroyed: guards may outlive what is static.
  static ForkGuards& get() {
    static auto* const guards = new ForkGuards;
    return *guards;
  }

  void add(ForkGuard* guard) {
    const std::scoped_lock lock(mutex_);
    guard->next_ = first_;
    if (first_ != nullptr) first_->previous_ = guard;
    first_ = guard;
  }

  void remove(const ForkGuard* guard) {
    const std::scoped_lock lock(mutex_);
    (guard->previous_ == nullptr ? first_ : guard->previous_->next_) = guard->next_;
    if (guard->next_ != nullptr) guard->next_->previous_ = guard->previous_;
  }

 private:
  ForkGuards() { pthread_atfork(&before, &in_parent, &in_child); }

  static void before() {
    ForkGuards& all = get();
    all.mutex_.lock();
    for (const auto turn :
         {ForkGuard::Turn::kRunningTexts, ForkGuard::Turn::kStore, ForkGuard::Turn::kLast}) {
      for (ForkGuard* guard = all.first_; guard != nullptr; guard = guard->next_) {
        if (guard->turn_ == turn) guard->before_fork();
      }
    }
  }
  static void in_parent() {
    for (ForkGuard* guard = get().first_; guard != nullptr; guard = guard->next_) {
      if (guard->turn_ != ForkGuard::Turn::kNone) guard->in_parent();
    }
    get().mutex_.unlock();
  }
  static void in_child() {
    for (ForkGuard* guard = get().first_; guard != nullptr; guard = guard->next_) guard->in_child();
    get().mutex_.unlock();
  }

  std::mutex mutex_;
  ForkGuard* first_ = nullptr;
};

ForkGuard::ForkGuard(Turn turn) : turn_(turn) { ForkGuards::get().add(this); }

ForkGuard::~ForkGuard() { ForkGuards::get().remove(this); }

}  // namespace fastdraft

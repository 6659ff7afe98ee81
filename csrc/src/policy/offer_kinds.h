// The kinds of offers that an engine knows, by name, with what it learned of each.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fastdraft/offers.h"
#include "index/fork.h"
#include "policy/back_off.h"
#include "policy/offer_model.h"

namespace fastdraft {

// Thread-safe. Kinds are never removed.
class OfferKinds {
 public:
  // The kind of this name, added if it is new. Throws InvalidValueError for a name that is empty or
  // longer than 64 bytes, and for one kind too many.
  OfferKind add(std::string_view name);

  // The names, in the order of the kinds.
  std::vector<std::string> names() const;

  OfferKind size() const noexcept { return size_.load(std::memory_order_acquire); }
  OfferModel& model(OfferKind kind) const noexcept { return at(kind).model; }
  // When to ask for offers of a kind that do not seem to pay.
  BackOff& back_off(OfferKind kind) const noexcept { return at(kind).back_off; }

  // The outcomes of steps without offers.
  StepPromises& plain_steps() noexcept { return plain_steps_; }
  const StepPromises& plain_steps() const noexcept { return plain_steps_; }

 private:
  struct Kind {
    OfferModel model;
    BackOff back_off{16, 512};
  };
  Kind& at(OfferKind kind) const noexcept { return *kinds_[static_cast<std::size_t>(kind)]; }

  mutable Mutex mutex_;
  std::vector<std::string> names_;
  // A kind is written before `size_` counts it, and stays.
  std::array<std::unique_ptr<Kind>, static_cast<std::size_t>(kMostOfferKinds)> kinds_;
  std::atomic<OfferKind> size_{0};
  StepPromises plain_steps_{0.0f, 0.0f};
};

}  // namespace fastdraft

#include "policy/offer_kinds.h"

#include <algorithm>
#include <mutex>

#include "fastdraft/error.h"

namespace fastdraft {

OfferKind OfferKinds::add(std::string_view name) {
  constexpr std::size_t kLongest = 64;
  if (name.empty() || name.size() > kLongest) {
    throw InvalidValueError("the name of a kind of offers must have 1 to " +
                            std::to_string(kLongest) + " bytes, got " +
                            std::to_string(name.size()));
  }
  const std::scoped_lock guard(mutex_);
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found != names_.end()) return static_cast<OfferKind>(found - names_.begin());
  const auto kind = static_cast<OfferKind>(names_.size());
  if (kind == kMostOfferKinds) {
    throw InvalidValueError("an engine takes offers of at most " + std::to_string(kMostOfferKinds) +
                            " kinds, got one more, \"" + std::string(name) + "\"");
  }
  // The name last: a kind that has one is never without what it learns.
  kinds_[static_cast<std::size_t>(kind)] = std::make_unique<Kind>();
  names_.emplace_back(name);
  size_.store(kind + 1, std::memory_order_release);
  return kind;
}

std::vector<std::string> OfferKinds::names() const {
  const std::scoped_lock guard(mutex_);
  return names_;
}

}  // namespace fastdraft

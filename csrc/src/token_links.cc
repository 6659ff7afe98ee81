#include "token_links.h"

#include <utility>

namespace fastdraft {

namespace {

constexpr std::int64_t kFirstPlaces = 64;

}  // namespace

TokenLinks::Latest& TokenLinks::place_of(Table& table, Token token) noexcept {
  const auto mask = static_cast<std::uint64_t>(table.size() - 1);
  std::uint64_t hash = static_cast<std::uint64_t>(token) * 0x9E3779B97F4A7C15u;
  hash ^= hash >> 32;
  for (;; ++hash) {
    Latest& place = table[static_cast<std::int64_t>(hash & mask)];
    if (place.position < 0 || place.token == token) return place;
  }
}

void TokenLinks::grow() {
  const std::int64_t places = latest_ ? latest_->size() * 2 : kFirstPlaces;
  auto table = std::make_unique<Table>(budget_);
  table->reserve(places);
  for (std::int64_t i = 0; i < places; ++i) table->push_back({0, -1});
  for (std::int64_t i = 0; latest_ && i < latest_->size(); ++i) {
    const Latest& old = (*latest_)[i];
    if (old.position >= 0) place_of(*table, old.token) = old;
  }
  latest_ = std::move(table);
}

void TokenLinks::append(Token token) {
  // Two thirds full at most.
  if (!latest_ || tokens_ * 3 >= latest_->size() * 2) grow();
  previous_.reserve(previous_.size() + 1);
  Latest& place = place_of(*latest_, token);
  tokens_ += place.position < 0 ? 1 : 0;
  const std::int32_t before = place.position;
  place = {token, static_cast<std::int32_t>(previous_.size())};
  previous_.push_back(before);
}

}  // namespace fastdraft

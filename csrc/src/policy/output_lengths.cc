#include "policy/output_lengths.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace fastdraft {

namespace {

// The rest of an output that is longer than all before it, as a part of its length.
constexpr double kRestOfLongest = 0.3;

}  // namespace

OutputLengths::Key OutputLengths::key_of(const Token* prompt, std::int64_t size) noexcept {
  auto key = static_cast<Key>(size);
  for (std::int64_t i = 0; i < size; ++i) {
    key = (key ^ static_cast<Key>(prompt[i])) * 0x9E3779B97F4A7C15u;
    key ^= key >> 32;
  }
  return key;
}

std::size_t OutputLengths::bucket_of(std::int64_t length) noexcept {
  return static_cast<std::size_t>(kBucketsOfOctave * std::log2(static_cast<double>(length) + 1.0));
}

void OutputLengths::add(Key prompt, std::int64_t length) {
  const std::scoped_lock guard(mutex_);
  Bucket& bucket = all_[bucket_of(length)];
  bucket.count += 1.0;
  bucket.tokens += static_cast<double>(length);
  const auto [found, is_new] = by_prompt_.try_emplace(prompt);
  std::vector<std::int64_t>& lengths = found->second;
  if (lengths.size() == kNewest) lengths.erase(lengths.begin());
  lengths.push_back(length);
  if (!is_new) return;
  prompts_.push_back(prompt);
  if (prompts_.size() > kPrompts) {
    by_prompt_.erase(prompts_.front());
    prompts_.pop_front();
  }
}

double OutputLengths::rest(const Bucket& others, Key prompt, std::int64_t emitted) const {
  const auto so_far = static_cast<double>(emitted);
  // The mean of a few samples is noisy: the mean of all longer outputs counts as one more sample.
  Bucket longer;
  if (others.count > 0.0) longer = {1.0, others.tokens / others.count};
  if (const auto found = by_prompt_.find(prompt); found != by_prompt_.end()) {
    for (const std::int64_t length : found->second) {
      if (length <= emitted) continue;
      longer.count += 1.0;
      longer.tokens += static_cast<double>(length);
    }
  }
  const double left =
      longer.count > 0.0 ? longer.tokens / longer.count - so_far : kRestOfLongest * so_far;
  return std::max(left, 1.0);
}

std::vector<double> OutputLengths::rests(const std::vector<Running>& rows) const {
  const std::scoped_lock guard(mutex_);
  // At i the outputs of the buckets after the i-th: those of an output's own bucket are about as
  // long as it is already.
  Buckets longer{};
  for (std::size_t i = all_.size() - 1; i > 0; --i) {
    longer[i - 1] = {longer[i].count + all_[i].count, longer[i].tokens + all_[i].tokens};
  }
  std::vector<double> found(rows.size());
  std::transform(rows.begin(), rows.end(), found.begin(), [&](const Running& row) {
    return rest(longer[bucket_of(row.emitted)], row.prompt, row.emitted);
  });
  return found;
}

std::vector<float> OutputLengths::weights(const std::vector<Running>& rows) const {
  std::vector<double> worth = rests(rows);
  double sum = 0.0;
  double running = 0.0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    worth[r] = rows[r].rate > 0.0 ? worth[r] / rows[r].rate : 0.0;
    sum += worth[r];
    running += rows[r].rate > 0.0 ? 1.0 : 0.0;
  }
  std::vector<float> weights(rows.size());
  if (sum == 0.0) return weights;
  std::transform(worth.begin(), worth.end(), weights.begin(),
                 [&](double each) { return static_cast<float>(each * running / sum); });
  return weights;
}

}  // namespace fastdraft

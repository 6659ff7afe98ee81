// Which documents of a live datastore are samples of one prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>

namespace fastdraft {

// The documents that have a prompt, in the log's order, and how many each prompt has. A prompt is
// known by its hash, so two of 2^32 might count as one.
//
// Not thread-safe.
class Samples {
 public:
  using Prompt = std::uint32_t;
  static constexpr Prompt kNone = 0;  // of a document that has no prompt

  struct Sample {
    std::int64_t start;  // the position of its mark
    std::int32_t size;   // the tokens behind that
    Prompt prompt;
  };

  // Bytes of a document and a prompt, with the allocator's headers, and bytes taken at first.
  static constexpr std::int64_t kSampleBytes = 20;
  static constexpr std::int64_t kPromptBytes = 56;
  static constexpr std::int64_t kFirstBytes = 640;

  bool empty() const noexcept { return samples_.empty(); }
  const Sample& oldest() const noexcept { return samples_.front(); }
  // Those whose mark is before `begin` have left.
  void drop_before(std::int64_t begin) noexcept {
    while (!empty() && oldest().start < begin) {
      const auto found = counts_.find(oldest().prompt);
      // It is there. Without this, GCC sees a null pointer under the thread sanitizer.
      if (found != counts_.end() && --found->second == 0) counts_.erase(found);
      samples_.pop_front();
    }
  }
  // How many samples of the prompt there are. Of kNone: 0.
  std::int64_t count(Prompt prompt) const {
    const auto found = counts_.find(prompt);
    return found == counts_.end() ? 0 : found->second;
  }
  // How many samples the prompts have on average, rounded.
  std::int64_t average() const noexcept {
    const std::size_t prompts = counts_.size();
    return empty() ? 0 : static_cast<std::int64_t>((samples_.size() + prompts / 2) / prompts);
  }
  // Beyond kFirstBytes.
  std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(samples_.size()) * kSampleBytes +
           static_cast<std::int64_t>(counts_.size()) * kPromptBytes;
  }
  // Adds the newest, whose prompt is not kNone. Throws std::bad_alloc, and then nothing has
  // changed.
  void add(const Sample& sample) {
    const auto [count, is_new] = counts_.try_emplace(sample.prompt, 0);
    try {
      samples_.push_back(sample);
    } catch (...) {
      if (is_new) counts_.erase(count);
      throw;
    }
    ++count->second;
  }
  void close() noexcept {
    samples_.clear();
    std::unordered_map<Prompt, std::int64_t>().swap(counts_);
  }

 private:
  std::deque<Sample> samples_;
  std::unordered_map<Prompt, std::int64_t> counts_;
};

}  // namespace fastdraft

// Which documents of a live datastore are samples of one prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastdraft {

// The documents that have a prompt, in the log's order, and how many each prompt has. A prompt is
// known by its hash, so two of 2^32 might count as one. It takes 16 bytes a document and 8 a
// prompt, up to twice as many after growth.
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

  bool empty() const noexcept { return size_ == 0; }
  const Sample& oldest() const noexcept { return ring_[slot(first_)]; }
  void drop_oldest() noexcept;
  // Those whose mark is before `begin` have left.
  void drop_before(std::int64_t begin) noexcept {
    while (!empty() && oldest().start < begin) drop_oldest();
  }
  // How many samples of the prompt there are. Of kNone: 0.
  std::int64_t count(Prompt prompt) const noexcept;

  // How many samples the prompts have on average, rounded.
  std::int64_t average() const noexcept {
    return empty() ? 0 : static_cast<std::int64_t>((size_ + num_prompts_ / 2) / num_prompts_);
  }

  std::int64_t bytes() const noexcept { return bytes_of(ring_.size(), counts_.size()); }
  // The bytes of arrays that have room for one more; 0: these have.
  std::int64_t wanted_bytes() const noexcept;
  // Takes those. Throws std::bad_alloc, and then nothing has changed.
  void grow();
  // Adds the newest, whose prompt is not kNone; there is room.
  void add(const Sample& sample) noexcept;
  void close() noexcept;

 private:
  struct Count {
    Prompt prompt;  // kNone: free
    std::uint32_t samples;
  };
  static constexpr std::size_t kFirst = 16;

  static std::int64_t bytes_of(std::size_t samples, std::size_t counts) noexcept {
    return static_cast<std::int64_t>(samples * sizeof(Sample) + counts * sizeof(Count));
  }
  std::size_t slot(std::size_t number) const noexcept { return number & (ring_.size() - 1); }
  std::size_t wanted_samples() const noexcept {
    return size_ < ring_.size() ? ring_.size() : size_ == 0 ? kFirst : 2 * size_;
  }
  // A search ends at a free count, so a quarter stays free.
  std::size_t wanted_counts() const noexcept {
    if (4 * (num_prompts_ + 1) <= 3 * counts_.size()) return counts_.size();
    return counts_.empty() ? kFirst : 2 * counts_.size();
  }
  // The slot that counts the prompt, or the free slot for it.
  static std::size_t find(const std::vector<Count>& counts, Prompt prompt) noexcept;

  std::vector<Sample> ring_;   // as many as a power of two
  std::vector<Count> counts_;  // a hash table with linear probing, as many
  std::size_t first_ = 0;      // the number of the oldest
  std::size_t size_ = 0;
  std::size_t num_prompts_ = 0;
};

}  // namespace fastdraft

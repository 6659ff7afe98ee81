#include "store/samples.h"

namespace fastdraft {

std::size_t Samples::find(const std::vector<Count>& counts, Prompt prompt) noexcept {
  const std::size_t mask = counts.size() - 1;
  std::size_t at = prompt & mask;
  while (counts[at].prompt != prompt && counts[at].prompt != kNone) at = (at + 1) & mask;
  return at;
}

std::int64_t Samples::count(Prompt prompt) const noexcept {
  return prompt == kNone || counts_.empty() ? 0 : counts_[find(counts_, prompt)].samples;
}

void Samples::drop_oldest() noexcept {
  const std::size_t mask = counts_.size() - 1;
  std::size_t at = find(counts_, oldest().prompt);
  ++first_;
  --size_;
  if (--counts_[at].samples > 0) return;
  // The ones behind it move up (Knuth, The Art of Computer Programming, volume 3, algorithm 6.4R).
  --num_prompts_;
  for (std::size_t next = (at + 1) & mask; counts_[next].prompt != kNone;
       next = (next + 1) & mask) {
    const std::size_t home = counts_[next].prompt & mask;
    if (((next - home) & mask) >= ((next - at) & mask)) {
      counts_[at] = counts_[next];
      at = next;
    }
  }
  counts_[at] = {kNone, 0};
}

std::int64_t Samples::wanted_bytes() const noexcept {
  const std::size_t samples = wanted_samples();
  const std::size_t counts = wanted_counts();
  return samples == ring_.size() && counts == counts_.size() ? 0 : bytes_of(samples, counts);
}

void Samples::grow() {
  std::vector<Sample> ring(wanted_samples());
  std::vector<Count> counts(wanted_counts());
  for (std::size_t i = first_; i != first_ + size_; ++i) {
    ring[i & (ring.size() - 1)] = ring_[slot(i)];
  }
  for (const Count& count : counts_) {
    if (count.prompt != kNone) counts[find(counts, count.prompt)] = count;
  }
  ring_.swap(ring);
  counts_.swap(counts);
}

void Samples::add(const Sample& sample) noexcept {
  ring_[slot(first_ + size_++)] = sample;
  Count& count = counts_[find(counts_, sample.prompt)];
  if (count.prompt == kNone) ++num_prompts_;
  count.prompt = sample.prompt;
  ++count.samples;
}

void Samples::close() noexcept {
  ring_ = {};
  counts_ = {};
  size_ = num_prompts_ = 0;
}

}  // namespace fastdraft

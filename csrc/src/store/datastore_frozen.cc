#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/error.h"
#include "policy/token_weights.h"
#include "store/datastore_file.h"
#include "store/datastore_index.h"
#include "store/phase_fair_mutex.h"

namespace fastdraft {
namespace {

// The writer makes none but the last shorter.
constexpr std::int64_t kLeastSegment = DatastoreWriter::kLeastSegmentTokens - kLeastRoom;

// The last tokens of the text that is looked up, as a segment codes its own.
class CodedTail {
 public:
  CodedTail(const Token* text, std::int64_t size) noexcept : text_end_(text + size), most_(size) {
    most_ = std::min<std::int64_t>(most_, Datastore::kLongestMatch);
  }

  // Codes the text in tokens of `width` bytes. It is cut where a token does not fit, since no
  // segment of that width holds it.
  void code_in(std::int64_t width) noexcept {
    if (width == width_) return;
    width_ = width;
    size_ = 0;
    while (size_ < most_ && text_end_[-1 - size_] <= TokenCode::largest(width)) ++size_;
    TokenCode::encode(text_end_ - size_, size_, width, bytes_.data());
  }

  std::int64_t size() const noexcept { return size_; }
  const std::uint8_t* end() const noexcept { return bytes_.data() + size_ * width_; }
  // How many of the tokens before `stored` are the text's last ones, `most` at most.
  std::int64_t common(const std::uint8_t* stored, std::int64_t most) const noexcept {
    constexpr std::int64_t kStep = 8;  // bytes compared at once
    const std::int64_t bytes = std::min(most, size_) * width_;
    const std::uint8_t* text = end();
    std::int64_t same = 0;
    while (same + kStep <= bytes &&
           std::memcmp(stored - same - kStep, text - same - kStep, kStep) == 0) {
      same += kStep;
    }
    while (same < bytes && stored[-1 - same] == text[-1 - same]) ++same;
    return same / width_;
  }

 private:
  const Token* text_end_;
  std::int64_t most_;
  std::int64_t width_ = 0;
  std::int64_t size_ = 0;
  std::array<std::uint8_t, sizeof(Token) * Datastore::kLongestMatch> bytes_;
};

// A part of a store with an index of its own. A number in the file may have
// any value: unnoticed damage must not lead outside.
struct Segment {
  std::int64_t base;  // the position of its first token
  std::int64_t size;
  std::int64_t width;  // bytes of a token
  const std::uint8_t* tokens;
  const std::uint8_t* outputs;  // a bit a token
  std::array<const std::uint32_t*, kNumOrders> postings;
  std::array<std::int64_t, kNumOrders> num_postings;
  std::array<const Bucket*, kNumOrders> buckets;
  std::array<std::int64_t, kNumOrders> num_buckets;

  const Bucket* home(std::size_t order, std::uint64_t hash) const noexcept {
    return buckets[order] + Bucket::home(hash, num_buckets[order]);
  }
  const std::uint8_t* token(std::int64_t at) const noexcept { return tokens + at * width; }
  bool output(std::int64_t at) const noexcept { return (outputs[at / 8] >> (at % 8) & 1) != 0; }

  // For `walk`: the postings of an n-gram, the latest first.
  class Postings {
   public:
    Postings() = default;
    Postings(const Segment& segment, const std::uint32_t* first, const std::uint32_t* end,
             const CodedTail& text) noexcept
        : segment_(&segment), text_(&text), at_(first), end_(end) {
      for (int ahead = 0; ahead < kAhead; ++ahead) prefetch_text(ahead);
    }

    bool valid() const noexcept { return at_ != end_; }
    Occurrence take() noexcept {
      prefetch_text(kAhead);
      const Posting posting(*at_);
      at_ = posting.last() ? end_ : at_ + 1;
      const std::int64_t at = posting.position();
      if (at >= segment_->size) return {0, 0, false};
      const std::int64_t most = std::min(std::int64_t{Datastore::kLongestMatch}, at);
      return {segment_->base + at,
              static_cast<std::int32_t>(text_->common(segment_->token(at), most)),
              posting.output()};
    }

   private:
    static constexpr int kAhead = 4;

    void prefetch_text(int ahead) const noexcept {
      if (end_ - at_ <= ahead) return;
      const std::int64_t at = Posting(at_[ahead]).position();
      if (at > 0 && at < segment_->size) prefetch(segment_->token(at) - 1);
    }

    const Segment* segment_ = nullptr;
    const CodedTail* text_ = nullptr;
    const std::uint32_t* at_ = nullptr;
    const std::uint32_t* end_ = nullptr;
  };

  // Returns the postings of the n-gram of this order that ends the text. The text has the same
  // coding as the stored tokens.
  Postings find(std::size_t order, std::uint64_t hash, const CodedTail& text) const noexcept {
    const std::int32_t length = Datastore::kOrders[order];
    if (text.size() < length) return {};
    const std::uint8_t tag = Bucket::tag(hash);
    const Bucket* bucket = home(order, hash);
    const std::int64_t most = std::min(num_buckets[order], Bucket::kMostLooked);
    int compared = 0;
    for (std::int64_t looked = 0; looked < most; ++looked) {
      for (int i = 0; i < Bucket::kEntries; ++i) {
        if (bucket->tags[i] != tag) continue;
        if (++compared > Bucket::kMostCompared) return {};
        const std::uint32_t* first = &bucket->positions[i];
        const std::uint32_t* end = first + 1;
        if (const Posting entry(*first); entry.is_list()) {
          if (entry.first() >= num_postings[order]) continue;
          first = postings[order] + entry.first();
          end = postings[order] + num_postings[order];
        }
        const std::int64_t at = Posting(*first).position();
        if (at >= length && at < size && text.common(token(at), length) == length) {
          return {*this, first, end, text};
        }
      }
      if (!bucket->full()) return {};
      ++bucket;
      if (bucket == buckets[order] + num_buckets[order]) bucket = buckets[order];
    }
    return {};
  }
};

class FrozenDatastore final : public Datastore {
 public:
  FrozenDatastore(const std::string& path, const std::optional<Fingerprint>& expected, bool verify)
      : Datastore(std::nullopt), path_(path), file_(std::make_unique<MappedFile>(path)) {
    read_header(expected);
    read_directory();
    if (verify &&
        header_.segments_checksum != crc32(file_->data() + FileHeader::kBytes,
                                           header_.directory_offset - FileHeader::kBytes)) {
      refuse("the checksum of its segments is wrong: damaged");
    }
  }

  void add(const Token*, std::int64_t, std::int64_t, const Grow&, std::int64_t) override {
    throw DatastoreError("a frozen datastore takes no more text: " + path_);
  }

  void close() override {
    const std::unique_lock<PhaseFairMutex> lock(*mutex_);
    closed_.store(true, std::memory_order_relaxed);
    segments_.clear();
    end_ = 0;
    file_.reset();
  }

  bool frozen() const noexcept override { return true; }
  std::int64_t num_tokens() const override { return closed() ? 0 : header_.num_tokens; }
  std::int64_t num_documents() const override { return closed() ? 0 : header_.num_documents; }
  std::int64_t bytes() const override { return closed() ? 0 : header_.file_bytes; }
  std::int64_t max_bytes() const noexcept override { return header_.file_bytes; }
  std::shared_ptr<const TokenWeights> learned_weights() const override { return weights_; }
  std::int64_t limit(std::int64_t) override {
    throw DatastoreError("a frozen datastore has the size of its file: " + path_);
  }

 protected:
  void begin(Lookup& lookup) const override {
    for (std::size_t order = lookup.first; order < lookup.end; ++order) {
      const std::int32_t length = kOrders[order];
      lookup.hashes[order] = hash_tokens(lookup.text + lookup.size - length, length, 0);
      // If there are many segments, each is prefetched when its turn comes.
      if (!segments_.empty()) prefetch(segments_.back().home(order, lookup.hashes[order]));
    }
  }
  void go_on(const Lookup&) const override {}
  int find(const Lookup& lookup, Occurrence* out, int most, int links) const override {
    if (most <= 0) return 0;
    BestOccurrences best(out, most);
    CodedTail tail(lookup.text, lookup.size);
    for (std::size_t order = lookup.first; order < lookup.end; ++order) {
      if (best.full() || links == 0) break;
      const std::uint64_t hash = lookup.hashes[order];
      for (const Segment& segment : segments_) prefetch(segment.home(order, hash));
      for (auto segment = segments_.rbegin(); segment != segments_.rend() && links > 0; ++segment) {
        tail.code_in(segment->width);
        walk(segment->find(order, hash, tail), order, &links, &best);
      }
    }
    return best.count();
  }

  std::int64_t read(std::int64_t position, Token* out, std::int64_t most) const override {
    if (position < 0 || position >= end_) return 0;
    const Segment& segment = segment_of(position);
    const std::int64_t at = position - segment.base;
    const std::int64_t count = std::min(most, segment.size - at);
    TokenCode::decode(segment.token(at), count, segment.width, out);
    return count;
  }

  bool output(std::int64_t position) const override {
    const Segment& segment = segment_of(position);
    return segment.output(position - segment.base);
  }
  std::int64_t begin() const override { return 0; }
  std::int64_t end() const override { return end_; }

 private:
  // For a position that is held.
  const Segment& segment_of(std::int64_t position) const {
    const auto after =
        std::upper_bound(segments_.begin(), segments_.end(), position,
                         [](std::int64_t at, const Segment& segment) { return at < segment.base; });
    return *(after - 1);
  }

  [[noreturn]] void refuse(const std::string& what) const { refuse_file(path_, what); }

  void read_header(const std::optional<Fingerprint>& expected) {
    header_ = fastdraft::read_header<FileHeader>(*file_, path_, "a datastore");
    std::array<std::int32_t, 8> orders{};
    std::copy(kOrders.begin(), kOrders.end(), orders.begin());
    if (header_.num_orders != kNumOrders || header_.orders != orders) {
      refuse("indexed for n-grams of other lengths than this fastdraft's: build it again");
    }
    check_file_bytes(*file_, path_, header_.file_bytes);
    fingerprint_ = fingerprint_in(header_, path_, expected);
    largest_token_ = header_.largest_token;
  }

  void read_directory() {
    const std::int64_t offset = header_.directory_offset;
    const auto entry_bytes = static_cast<std::int64_t>(sizeof(SegmentEntry));
    if (offset < FileHeader::kBytes || offset > file_->bytes()) refuse("its directory is damaged");
    const std::int64_t room = file_->bytes() - offset;
    const std::int64_t count = header_.num_segments;
    if (room % entry_bytes != 0 || count != room / entry_bytes ||
        header_.directory_checksum != crc32(file_->data() + offset, room)) {
      refuse("its directory is damaged");
    }
    // As the writer leaves them, none inside another: else a small file could ask for many lookups.
    std::int64_t at = FileHeader::kBytes;
    for (std::int64_t i = 0; i < count; ++i) {
      SegmentEntry entry;
      std::memcpy(&entry, file_->data() + offset + i * entry_bytes, sizeof(entry));
      if (entry.offset != SegmentLayout::aligned(at) ||
          (i + 1 < count && entry.size < kLeastSegment)) {
        refuse("its directory is damaged");
      }
      at = add_segment(entry);
    }
    read_weights(SegmentLayout::aligned(at));
    if (header_.num_tokens < 0 || header_.num_tokens > end_ || header_.num_documents < 0 ||
        header_.num_documents > header_.num_tokens || (header_.largest_token < 0 && end_ > 0)) {
      refuse("its header is damaged");
    }
  }

  // Returns where its sections end.
  std::int64_t add_segment(const SegmentEntry& entry) {
    // Nothing in a file is larger than the file, so the sums below cannot overflow.
    bool fits = entry.offset <= header_.directory_offset && entry.size > 0 &&
                entry.size <= header_.directory_offset / 2 && TokenCode::valid(entry.token_bytes);
    for (std::size_t order = 0; order < kNumOrders; ++order) {
      fits = fits && entry.postings[order] >= 0 &&
             entry.postings[order] <= header_.directory_offset / 4 && entry.buckets[order] > 0 &&
             entry.buckets[order] <= header_.directory_offset / 64;
    }
    const SegmentLayout layout(fits ? entry : SegmentEntry{});
    if (!fits || layout.end > header_.directory_offset) refuse("its directory is damaged");
    Segment segment{};
    segment.base = end_;
    segment.size = entry.size;
    segment.width = entry.token_bytes;
    segment.tokens = section<std::uint8_t>(layout.tokens);
    segment.outputs = section<std::uint8_t>(layout.outputs);
    for (std::size_t order = 0; order < kNumOrders; ++order) {
      segment.postings[order] = section<std::uint32_t>(layout.postings[order]);
      segment.num_postings[order] = entry.postings[order];
      segment.buckets[order] = section<Bucket>(layout.buckets[order]);
      segment.num_buckets[order] = entry.buckets[order];
    }
    segments_.push_back(segment);
    end_ += entry.size;
    return layout.end;
  }

  void read_weights(std::int64_t offset) {
    const std::size_t count = header_.num_weights;
    if (count == 0) return;
    const bool is_size = count == TokenWeights::kLeast || count == TokenWeights::kMost;
    if (!is_size || offset + TokenWeights::bytes_of(count) > header_.directory_offset) {
      refuse("its header is damaged");
    }
    weights_ = std::make_shared<TokenWeights>(count, section<TokenWeights::Weight>(offset));
  }

  template <typename T>
  const T* section(std::int64_t offset) const noexcept {
    return reinterpret_cast<const T*>(file_->data() + offset);
  }

  const std::string path_;
  std::unique_ptr<MappedFile> file_;
  FileHeader header_{};
  std::vector<Segment> segments_;
  std::int64_t end_ = 0;
  std::shared_ptr<const TokenWeights> weights_;  // null: none
};

}  // namespace

std::shared_ptr<Datastore> Datastore::open(const std::string& path,
                                           const std::optional<Fingerprint>& expected,
                                           bool verify) {
  return std::make_shared<FrozenDatastore>(path, expected, verify);
}

}  // namespace fastdraft

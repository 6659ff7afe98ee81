#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/error.h"
#include "policy/token_weights.h"
#include "store/datastore_file.h"
#include "store/datastore_index.h"
#include "store/documents.h"

namespace fastdraft {
namespace {

// How many tokens ahead the memory of an n-gram's bucket is asked for.
constexpr std::int64_t kAhead = 16;

// Room for n entries: four fifths full, so that a search rarely leaves its
// first bucket.
std::int64_t buckets_for(std::int64_t entries) noexcept {
  return entries * 5 / (4 * Bucket::kEntries) + 1;
}

// The index of one order over a segment: the postings of its n-grams, and the table.
class OrderIndex {
 public:
  OrderIndex(const std::vector<Token>& tokens, const std::vector<bool>& outputs, std::int32_t order)
      : tokens_(tokens), order_(order) {
    const std::vector<std::uint32_t> numbers = number();
    const std::vector<std::uint32_t> entries = list(numbers, outputs);
    enter(numbers, entries);
  }

  const std::vector<std::uint32_t>& postings() const noexcept { return postings_; }
  const std::vector<Bucket>& buckets() const noexcept { return buckets_; }

 private:
  std::int64_t size() const noexcept { return static_cast<std::int64_t>(tokens_.size()); }

  // Calls visit(position) for each position that the index knows, ascending.
  template <typename Visit>
  void for_each_position(Visit visit) const {
    std::int64_t first = 0;
    for (std::int64_t position = 0; position < size(); ++position) {
      const Token token = tokens_[static_cast<std::size_t>(position)];
      if (token < 0) {
        first = position + 1 + std::max<std::int64_t>(order_, mark_context(token));
      } else if (position >= first) {
        visit(position);
      }
    }
  }

  // Calls visit(position, hash) for those that are wanted(position), when the bucket of their
  // n-gram has had time to come.
  template <typename Wanted, typename Visit>
  void for_each_hash(const std::vector<Bucket>& table, Wanted wanted, Visit visit) const {
    const auto buckets = static_cast<std::int64_t>(table.size());
    std::int64_t positions[kAhead] = {};
    std::uint64_t hashes[kAhead] = {};
    std::int64_t count = 0;
    for_each_position([&](std::int64_t position) {
      if (!wanted(position)) return;
      const std::int64_t i = count % kAhead;
      if (count >= kAhead) visit(positions[i], hashes[i]);
      positions[i] = position;
      hashes[i] = hash_tokens(tokens_.data() + position - order_, order_, 0);
      prefetch(table.data() + Bucket::home(hashes[i], buckets));
      ++count;
    });
    for (auto i = std::max<std::int64_t>(0, count - kAhead); i < count; ++i) {
      visit(positions[i % kAhead], hashes[i % kAhead]);
    }
  }

  // Numbers the n-grams in the order of their first occurrences. Returns the number of the one
  // before each position.
  std::vector<std::uint32_t> number() {
    std::vector<std::uint32_t> numbers(tokens_.size(), kNone);
    // It has room for an n-gram at each position. Its entries are first occurrences.
    std::vector<Bucket> table(static_cast<std::size_t>(buckets_for(size())));
    for_each_hash(
        table, [](std::int64_t) { return true; },
        [&](std::int64_t position, std::uint64_t hash) {
          const std::int64_t first = first_of(position, hash, &table);
          numbers[static_cast<std::size_t>(position)] =
              first == position ? distinct_++ : numbers[static_cast<std::size_t>(first)];
        });
    return numbers;
  }

  // The first occurrence of the n-gram before `position`; that position, if it is new.
  std::int64_t first_of(std::int64_t position, std::uint64_t hash,
                        std::vector<Bucket>* table) const {
    const std::uint8_t tag = Bucket::tag(hash);
    const Token* last = tokens_.data() + position;
    for (auto at =
             static_cast<std::size_t>(Bucket::home(hash, static_cast<std::int64_t>(table->size())));
         ; at = at + 1 == table->size() ? 0 : at + 1) {
      Bucket& bucket = (*table)[at];
      for (std::uint32_t same = bucket.with_tag(tag); same != 0; same &= same - 1) {
        const std::int64_t known = bucket.positions[lowest_bit(same)];
        if (std::equal(last - order_, last, tokens_.data() + known - order_)) return known;
      }
      if (!bucket.full()) {
        bucket.enter(hash, position);
        return position;
      }
    }
  }

  // Writes the postings of n-grams that occur more than once. Returns the table's entries by the
  // n-gram's number.
  std::vector<std::uint32_t> list(const std::vector<std::uint32_t>& numbers,
                                  const std::vector<bool>& outputs) {
    std::vector<std::uint8_t> kept(distinct_);
    for_each_position([&](std::int64_t position) {
      std::uint8_t& count = kept[numbers[static_cast<std::size_t>(position)]];
      if (count < Posting::kMost) ++count;
    });
    std::vector<std::uint32_t> entries(distinct_);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < distinct_; ++i) {
      if (kept[i] == 1) continue;
      entries[i] = Posting::list(first).bits();
      first += kept[i];
    }
    postings_.resize(static_cast<std::size_t>(first));
    std::vector<std::uint8_t> missing = kept;  // of each list
    for (std::int64_t position = size() - 1; position >= 0; --position) {
      const std::uint32_t number = numbers[static_cast<std::size_t>(position)];
      if (number == kNone || missing[number] == 0) continue;
      const bool output = outputs[static_cast<std::size_t>(position)];
      --missing[number];
      const std::uint32_t posting = Posting(position, output, missing[number] == 0).bits();
      if (kept[number] == 1) {
        entries[number] = posting;
      } else {
        const std::int64_t slot =
            Posting(entries[number]).first() + kept[number] - missing[number] - 1;
        postings_[static_cast<std::size_t>(slot)] = posting;
      }
    }
    return entries;
  }

  // Makes the table, for as many n-grams as there are.
  void enter(const std::vector<std::uint32_t>& numbers, const std::vector<std::uint32_t>& entries) {
    buckets_ = std::vector<Bucket>(static_cast<std::size_t>(buckets_for(distinct_)));
    std::uint32_t found = 0;
    std::uint32_t entered = 0;
    for_each_hash(
        buckets_,
        [&](std::int64_t position) {
          const bool first = numbers[static_cast<std::size_t>(position)] == found;
          if (first) ++found;
          return first;
        },
        [&](std::int64_t, std::uint64_t hash) {
          auto at = static_cast<std::size_t>(
              Bucket::home(hash, static_cast<std::int64_t>(buckets_.size())));
          while (buckets_[at].full()) at = at + 1 == buckets_.size() ? 0 : at + 1;
          buckets_[at].enter(hash, entries[entered++]);
        });
  }

  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;  // the number of a position that is unknown

  const std::vector<Token>& tokens_;
  const std::int32_t order_;
  std::uint32_t distinct_ = 0;
  std::vector<std::uint32_t> postings_;
  std::vector<Bucket> buckets_;
};

template <typename T>
std::int64_t bytes_of(const std::vector<T>& values) noexcept {
  return static_cast<std::int64_t>(values.size() * sizeof(T));
}

}  // namespace

class DatastoreWriter::FileWriter {
 public:
  FileWriter(const std::string& path, const std::optional<Fingerprint>& fingerprint,
             std::int64_t segment_tokens)
      : file_(path), segment_tokens_(segment_tokens) {
    header_.magic = FileHeader::kMagic;
    header_.version = FileHeader::kVersion;
    header_.byte_order = FileHeader::kByteOrder;
    header_.most_postings = Posting::kMost;
    header_.num_orders = static_cast<std::uint32_t>(Datastore::kOrders.size());
    std::copy(Datastore::kOrders.begin(), Datastore::kOrders.end(), header_.orders.begin());
    header_.has_fingerprint = fingerprint ? 1 : 0;
    header_.fingerprint = fingerprint.value_or(Fingerprint{});
    header_.largest_token = -1;
    // Until it is complete the file is no datastore.
    const std::vector<std::byte> nothing(FileHeader::kBytes);
    file_.write(nothing.data(), bytes_of(nothing));
    offset_ = FileHeader::kBytes;
  }

  void begin_document(std::int64_t context) noexcept {
    context_ = context;
    in_document_ = false;
  }

  void append(const Token* tokens, std::int64_t size, bool output) {
    if (size == 0) return;
    header_.num_tokens += size;
    header_.largest_token =
        std::max(header_.largest_token, *std::max_element(tokens, tokens + size));
    if (!in_document_) {
      header_.num_documents += 1;
      in_document_ = true;
      if (room() < kLeastRoom) end_segment();
      mark(context_);
    }
    while (size > 0) {
      if (room() == 0) go_on_in_another_segment();
      const std::int64_t count = std::min(size, room());
      tokens_.insert(tokens_.end(), tokens, tokens + count);
      outputs_.resize(tokens_.size(), output);
      tokens += count;
      size -= count;
    }
  }

  void set_weights(std::vector<TokenWeights::Weight> weights) { weights_ = std::move(weights); }

  void finish() {
    end_segment();
    if (!weights_.empty()) write_aligned(weights_.data(), bytes_of(weights_));
    header_.num_weights = static_cast<std::uint32_t>(weights_.size());
    header_.num_segments = static_cast<std::int64_t>(segments_.size());
    header_.directory_offset = offset_;
    header_.directory_checksum = crc32(segments_.data(), bytes_of(segments_));
    header_.file_bytes = offset_ + bytes_of(segments_);
    header_.checksum = crc32(&header_, offsetof(FileHeader, checksum));
    file_.write(segments_.data(), bytes_of(segments_));
    file_.complete(&header_, sizeof(header_));
  }

  const FileHeader& header() const noexcept { return header_; }

 private:
  std::int64_t room() const noexcept {
    return segment_tokens_ - static_cast<std::int64_t>(tokens_.size());
  }

  void mark(std::int64_t context) {
    mark_at_ = tokens_.size();
    tokens_.push_back(document_mark(context));
    outputs_.push_back(false);
  }

  // The document's last tokens are repeated as context.
  void go_on_in_another_segment() {
    const auto written = static_cast<std::ptrdiff_t>(tokens_.size() - mark_at_ - 1);
    const std::vector<Token> context(
        tokens_.end() - std::min<std::ptrdiff_t>(written, kContextTokens), tokens_.end());
    end_segment();
    mark(static_cast<std::int64_t>(context.size()));
    tokens_.insert(tokens_.end(), context.begin(), context.end());
    outputs_.resize(tokens_.size());  // which nobody asks of context
  }

  void end_segment() {
    if (tokens_.empty()) return;
    SegmentEntry entry{};
    write_aligned(tokens_.data(), 0);
    entry.offset = offset_;
    entry.size = static_cast<std::int64_t>(tokens_.size());
    entry.token_bytes = TokenCode::width_for(*std::max_element(tokens_.begin(), tokens_.end()));
    write_tokens(entry.token_bytes);
    write_outputs();
    for (std::size_t i = 0; i < Datastore::kOrders.size(); ++i) {
      const OrderIndex index(tokens_, outputs_, Datastore::kOrders[i]);
      write_aligned(index.postings().data(), bytes_of(index.postings()));
      write_aligned(index.buckets().data(), bytes_of(index.buckets()));
      entry.postings[i] = static_cast<std::int64_t>(index.postings().size());
      entry.buckets[i] = static_cast<std::int64_t>(index.buckets().size());
    }
    segments_.push_back(entry);
    tokens_.clear();
    outputs_.clear();
  }

  void write_tokens(std::int64_t width) {
    std::vector<std::uint8_t> coded(static_cast<std::size_t>(kStep * width));
    for (std::int64_t at = 0; at < static_cast<std::int64_t>(tokens_.size()); at += kStep) {
      const std::int64_t count = std::min(kStep, static_cast<std::int64_t>(tokens_.size()) - at);
      TokenCode::encode(tokens_.data() + at, count, width, coded.data());
      write(coded.data(), count * width);
    }
  }

  void write_outputs() {
    std::vector<std::uint8_t> bits((outputs_.size() + 7) / 8);
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      bits[i / 8] = static_cast<std::uint8_t>(bits[i / 8] | (outputs_[i] ? 1 : 0) << (i % 8));
    }
    write_aligned(bits.data(), bytes_of(bits));
  }

  void write_aligned(const void* data, std::int64_t bytes) {
    static constexpr std::byte kNothing[64] = {};
    write(kNothing, SegmentLayout::aligned(offset_) - offset_);
    write(data, bytes);
  }

  void write(const void* data, std::int64_t bytes) {
    file_.write(data, bytes);
    header_.segments_checksum = crc32(data, bytes, header_.segments_checksum);
    offset_ += bytes;
  }

  static constexpr std::int64_t kStep = 4096;  // tokens coded at once

  OutputFile file_;
  const std::int64_t segment_tokens_;
  FileHeader header_{};
  std::int64_t offset_ = 0;
  std::vector<SegmentEntry> segments_;
  std::vector<TokenWeights::Weight> weights_;

  std::vector<Token> tokens_;  // of the segment
  std::vector<bool> outputs_;  // which of them are a model's output
  std::size_t mark_at_ = 0;    // the last document's mark
  std::int64_t context_ = 0;   // the next document's
  bool in_document_ = false;   // whether the document has been marked
};

DatastoreWriter::DatastoreWriter(const std::string& path,
                                 const std::optional<Fingerprint>& fingerprint,
                                 std::int64_t segment_tokens) {
  if (segment_tokens < kLeastSegmentTokens || segment_tokens > kSegmentTokens) {
    throw InvalidValueError("segment_tokens must be " + std::to_string(kLeastSegmentTokens) +
                            " to " + std::to_string(kSegmentTokens) + ", got " +
                            std::to_string(segment_tokens));
  }
  writer_ = std::make_unique<FileWriter>(path, fingerprint, segment_tokens);
}

DatastoreWriter::~DatastoreWriter() = default;

DatastoreWriter::FileWriter& DatastoreWriter::writer() const {
  if (writer_ == nullptr) throw DatastoreClosedError("the file has been written or discarded");
  return *writer_;
}

void DatastoreWriter::begin_document(std::int64_t context) {
  const std::scoped_lock lock(mutex_);
  writer().begin_document(context);
}

void DatastoreWriter::append(const Token* tokens, std::int64_t size, bool output) {
  check_tokens(tokens, size, "token_ids");
  const std::scoped_lock lock(mutex_);
  writer();
  // A half-written file must not be completed.
  std::unique_ptr<FileWriter> writing = std::move(writer_);
  writing->append(tokens, size, output);
  writer_ = std::move(writing);
}

void DatastoreWriter::append_all(const Datastore& source) {
  begin_document();
  const std::int64_t end = Datastore::Reader(source).end();
  for (std::int64_t position = 0; position < end;) {
    const LogPart part(source, position, end - position);
    if (source.closed()) break;
    // Earlier text has left since, or never was held.
    if (part.begin() > position) begin_document();
    for (std::int64_t i = 0; i < part.size();) {
      const Token* token = part.tokens() + i;
      if (const std::int64_t run = part.run(i); run > 0) {
        append(token, run, part.outputs()[static_cast<std::size_t>(i)] == '\1');
        i += run;
      } else {
        begin_document(*token < 0 ? std::min(mark_context(*token), kContextTokens) : 0);
        ++i;
      }
    }
    position = std::max(part.end(), position + 1);
  }
  if (source.closed()) throw DatastoreClosedError("the datastore is closed");
}

void DatastoreWriter::set_weights(const Datastore& source) {
  const std::shared_ptr<const TokenWeights> weights = source.learned_weights();
  const std::scoped_lock lock(mutex_);
  if (weights != nullptr) writer().set_weights(weights->values());
}

void DatastoreWriter::finish() {
  const std::scoped_lock lock(mutex_);
  writer();
  const std::unique_ptr<FileWriter> writing = std::move(writer_);
  writing->finish();
}

void DatastoreWriter::discard() noexcept {
  const std::scoped_lock lock(mutex_);
  writer_.reset();
}

std::int64_t DatastoreWriter::num_tokens() const {
  const std::scoped_lock lock(mutex_);
  return writer().header().num_tokens;
}

std::int64_t DatastoreWriter::num_documents() const {
  const std::scoped_lock lock(mutex_);
  return writer().header().num_documents;
}

}  // namespace fastdraft

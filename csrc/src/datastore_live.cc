#include <algorithm>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <new>
#include <random>
#include <shared_mutex>
#include <string>
#include <vector>

#include "datastore_index.h"
#include "fastdraft/datastore.h"
#include "fastdraft/error.h"
#include "memory.h"
#include "phase_fair_mutex.h"

namespace fastdraft {
namespace {

constexpr std::size_t kNumOrders = Datastore::kOrders.size();
constexpr std::int64_t kChunkTokens = 1024;
// Readers wait for so many tokens at most: microseconds.
constexpr std::int64_t kSliceTokens = 128;
// The beginnings of documents are known at every so many tokens.
constexpr std::int64_t kPrefixStep = kContextTokens / 2;

// A stretch of the log. For the n-gram of each order that ends before a token, how
// far back the token lies that followed it the time before; 0: nowhere.
struct alignas(64) Chunk {
  Token tokens[kChunkTokens];
  Link previous[kNumOrders][kChunkTokens];
};

// A part of a hash table, of a chunk's size: whatever a store gives up fits
// whatever it needs, so memory is reused without ever falling into pieces.
struct alignas(64) Page {
  static constexpr std::int64_t kBuckets = sizeof(Chunk) / sizeof(Bucket) - 1;
  static constexpr std::int64_t kEntries = kBuckets * Bucket::kEntries;
  // Searches end at a bucket with a free entry: there must be some.
  static constexpr std::int64_t kFull = kEntries * 7 / 8;
  // With fewer entries than this of use, a full page is cleaned instead of split.
  static constexpr std::int64_t kCrowded = kEntries * 3 / 4;

  int depth;  // how many bits of their hashes all entries share
  std::int64_t used;
  alignas(64) Bucket buckets[kBuckets];
};
static_assert(sizeof(Page) == sizeof(Chunk));

// What an aligned block takes besides itself: the allocator's header, and the
// tokens lost to alignment.
constexpr std::int64_t kBlockBytes = sizeof(Chunk) + alignof(Chunk);

constexpr std::int64_t bytes_of(std::size_t pointers) noexcept {
  return static_cast<std::int64_t>(pointers * sizeof(void*));
}

// The log is a ring of chunks. An index for each order finds the latest
// occurrence of an n-gram, and each occurrence tells how far back the one before
// lies. A hit is compared with the log, so an entry that outlived its text does no
// harm; it is cleared away when its place is needed.
//
// The indexes are extendible hash tables (Fagin et al., 1979): a full page is split in two,
// so growth never stops the store for longer than a page takes.
class LiveDatastore final : public Datastore {
 public:
  LiveDatastore(std::int64_t max_bytes, const std::optional<Fingerprint>& fingerprint)
      : Datastore(fingerprint), max_bytes_(max_bytes), ring_(kFirstPointers) {
    bytes_ = static_cast<std::int64_t>(sizeof(*this)) + bytes_of(ring_.size());
    const std::int64_t least =
        bytes_ +
        static_cast<std::int64_t>(kNumOrders + 1) * (kBlockBytes + bytes_of(kFirstPointers)) +
        kBlockBytes;
    if (max_bytes < least) {
      throw InvalidValueError("max_bytes must be at least " + std::to_string(least) + ", got " +
                              std::to_string(max_bytes));
    }
    std::random_device seeds;
    for (std::size_t i = 0; i < kNumOrders; ++i) {
      orders_[i].open(*this, kOrders[i], (std::uint64_t{seeds()} << 32) | seeds());
    }
    prefixes_.open(*this, 0, (std::uint64_t{seeds()} << 32) | seeds());
  }

  ~LiveDatastore() override { release(); }

  void add(const Token* tokens, std::int64_t size, std::int64_t prompt_size) override;
  void close() override {
    const std::unique_lock<PhaseFairMutex> lock(*mutex_);
    closed_.store(true, std::memory_order_relaxed);
    release();
  }

  bool frozen() const noexcept override { return false; }
  std::int64_t num_tokens() const override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return num_tokens_;
  }
  std::int64_t num_documents() const override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return end_ - begin_ - num_tokens_;
  }
  std::int64_t bytes() const override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return bytes_;
  }
  std::int64_t max_bytes() const noexcept override { return max_bytes_; }

  // For `walk`.
  std::int32_t common(std::int64_t position, const Token* text, std::int64_t size) const noexcept;
  bool output(std::size_t order, std::int64_t position) const noexcept {
    return link(order, position).output();
  }
  std::int64_t previous(std::size_t order, std::int64_t position) const noexcept {
    const std::int64_t distance = link(order, position).distance();
    const std::int64_t before = position - distance;
    return distance == 0 || before - kOrders[order] < begin_ ? -1 : before;
  }

 protected:
  int find(const Token* text, std::int64_t size, Occurrence* out, int most, int links,
           std::int32_t least) const override;
  const Token* run(std::int64_t position, std::int64_t* count) const override {
    if (position < begin_ || position >= end_) {
      *count = 0;
      return nullptr;
    }
    *count = std::min(end_, (position / kChunkTokens + 1) * kChunkTokens) - position;
    return chunk(position).tokens + position % kChunkTokens;
  }
  bool output(std::int64_t position) const override { return output(0, position); }
  std::int64_t begin() const override { return begin_; }
  std::int64_t end() const override { return end_; }

 private:
  static constexpr std::size_t kFirstPointers = 16;

  // From the hash of the tokens before a position to the latest such position.
  class Table {
   public:
    Table() = default;
    Table(const Table&) = delete;
    Table& operator=(const Table&) = delete;
    ~Table() { close(); }

    // Of the `window` tokens before a position; 0: as many as prefix_window says.
    void open(LiveDatastore& store, std::int64_t window, std::uint64_t seed) {
      store_ = &store;
      window_ = window;
      reach_ = window > 0 ? window : kPrefixStep + 1;
      seed_ = seed;
      store.bytes_ += bytes_of(kFirstPointers);
      directory_.assign(kFirstPointers, add_page(0));
    }

    void close() noexcept {
      for (std::size_t i = 0; i < directory_.size();) {
        Page* page = directory_[i];
        i += std::size_t{1} << (depth_ - page->depth);
        free_block(page);
      }
      directory_ = {};
    }

    std::uint64_t hash(const Token* tokens, std::int64_t count) const noexcept {
      return hash_tokens(tokens, count, seed_);
    }

    void prefetch(std::uint64_t hash) const noexcept {
#if defined(__GNUC__)
      const Page& page = *directory_[hash >> (64 - depth_)];
      __builtin_prefetch(page.buckets + Bucket::home(hash, Page::kBuckets));
#else
      (void)hash;
#endif
    }

    // The position of the tokens with this hash for which `matches(position)`
    // holds, or -1.
    template <typename Matches>
    std::int64_t find(std::uint64_t hash, Matches matches) const {
      const Page& page = *directory_[hash >> (64 - depth_)];
      const std::uint8_t tag = Bucket::tag(hash);
      for (std::int64_t at = Bucket::home(hash, Page::kBuckets);; at = after(at)) {
        const Bucket& bucket = page.buckets[at];
        for (int i = 0; i < Bucket::kEntries; ++i) {
          if (bucket.tags[i] != tag) continue;
          const std::int64_t position = store_->expand(bucket.positions[i]);
          if (is_held(position) && matches(position)) return position;
        }
        if (bucket.tags[Bucket::kEntries - 1] == 0) return -1;
      }
    }

    // Enters `position` and returns the one that it takes the place of, or -1.
    template <typename Matches>
    std::int64_t put(std::uint64_t hash, std::int64_t position, Matches matches) {
      const std::uint8_t tag = Bucket::tag(hash);
      Page* page = directory_[hash >> (64 - depth_)];
      if (page->used >= Page::kFull) page = make_room(page, hash);
      std::uint8_t* free_tag = nullptr;
      std::uint32_t* free_position = nullptr;
      for (std::int64_t at = Bucket::home(hash, Page::kBuckets);; at = after(at)) {
        Bucket& bucket = page->buckets[at];
        for (int i = 0; i < Bucket::kEntries; ++i) {
          if (bucket.tags[i] == 0) {
            if (free_tag == nullptr) {
              free_tag = bucket.tags + i;
              free_position = bucket.positions + i;
              ++page->used;
            }
            *free_tag = tag;
            *free_position = static_cast<std::uint32_t>(position);
            return -1;
          }
          const std::int64_t known = store_->expand(bucket.positions[i]);
          if (!is_held(known)) {
            if (free_tag == nullptr) {
              free_tag = bucket.tags + i;
              free_position = bucket.positions + i;
            }
          } else if (bucket.tags[i] == tag && matches(known)) {
            bucket.positions[i] = static_cast<std::uint32_t>(position);
            return known;
          }
        }
      }
    }

   private:
    static std::int64_t after(std::int64_t bucket) noexcept {
      return bucket + 1 == Page::kBuckets ? 0 : bucket + 1;
    }

    bool is_held(std::int64_t position) const noexcept {
      return position - reach_ >= store_->begin_;
    }

    Page* add_page(int depth) {
      Page* page = new (store_->take_block(1)) Page;
      std::memset(page->buckets, 0, sizeof(page->buckets));
      page->depth = depth;
      page->used = 0;
      return page;
    }

    // Clears a full page of entries that are of no use and, where too few go, splits
    // it. Returns the page that is the hash's now.
    Page* make_room(Page* page, std::uint64_t hash);

    // Enters a position that is not in the table, in a page with room.
    void enter(std::int64_t position) noexcept;

    LiveDatastore* store_ = nullptr;
    std::int64_t window_ = 0;
    std::int64_t reach_ = 0;  // an entry is of use while so many tokens before it are held
    std::uint64_t seed_ = 0;
    int depth_ = 4;
    std::vector<Page*> directory_;  // by the first depth_ bits of the hash
  };

  static void free_block(void* block) noexcept {
    ::operator delete(block, std::align_val_t{alignof(Chunk)});
  }

  // Memory for a chunk or a page; the oldest chunk's where the limit is reached and
  // there are more than `keep`.
  void* take_block(std::int64_t keep);
  // The oldest chunk leaves the log. Its memory is the caller's.
  void* drop_oldest() noexcept;
  // Counts `bytes` more, when there is room for them.
  void charge(std::int64_t bytes);
  // An array of twice as many pointers, counted in the place of the one it follows.
  template <typename T>
  std::vector<T*> wider(const std::vector<T*>& pointers);

  Chunk& chunk(std::int64_t position) const noexcept {
    return *ring_[static_cast<std::size_t>(position / kChunkTokens) & (ring_.size() - 1)];
  }
  const Link& link(std::size_t order, std::int64_t position) const noexcept {
    return chunk(position).previous[order][position % kChunkTokens];
  }
  Token token(std::int64_t position) const noexcept {
    return chunk(position).tokens[position % kChunkTokens];
  }
  // The latest position with these low bits.
  std::int64_t expand(std::uint32_t position) const noexcept {
    return end_ - (static_cast<std::uint32_t>(end_) - position);
  }

  // The `count` tokens before `position`, where they lie or, where a chunk ends between
  // them, in `copy`.
  const Token* before(std::int64_t position, std::int64_t count, Token* copy) const noexcept {
    const std::int64_t first = position - count;
    if (first / kChunkTokens == (position - 1) / kChunkTokens) {
      return chunk(first).tokens + first % kChunkTokens;
    }
    for (std::int64_t i = 0; i < count; ++i) copy[i] = token(first + i);
    return copy;
  }
  void prefetch(std::int64_t position, std::int64_t count) const noexcept {
#if defined(__GNUC__)
    constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(Token));
    for (std::int64_t at = std::max(begin_, position - count); at < position; at += kLine) {
      __builtin_prefetch(chunk(at).tokens + at % kChunkTokens);
    }
#else
    (void)position;
    (void)count;
#endif
  }

  // Whether the `count` tokens before `position` are held and those before `last`.
  bool matches(std::int64_t position, const Token* last, std::int64_t count) const noexcept;
  // How many tokens before `position` the prefix table hashes; 0: they are not held.
  std::int64_t prefix_window(std::int64_t position) const noexcept;

  void check_open() const {
    if (closed()) throw DatastoreClosedError("the datastore is closed");
  }
  std::int64_t stored_prefix(const Token* tokens, std::int64_t size) const;
  std::int64_t find_prefix(const Token* tokens, std::int64_t size) const;
  void append(Token token, bool output);
  std::int64_t add_slice(const Token* tokens, std::int64_t first, std::int64_t last,
                         std::int64_t common, std::int64_t prompt_size);
  void release() noexcept;

  const std::int64_t max_bytes_;
  PhaseFairMutex adding_;  // one document after another, as they come
  std::int64_t bytes_ = 0;
  std::int64_t num_tokens_ = 0;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  std::vector<Chunk*> ring_;  // by the chunk's number, modulo the size, a power of two
  std::int64_t num_chunks_ = 0;
  std::int64_t pages_rebuilt_ = 0;
  std::array<Table, kNumOrders> orders_;
  Table prefixes_;
};

Page* LiveDatastore::Table::make_room(Page* page, std::uint64_t hash) {
  ++store_->pages_rebuilt_;
  std::int64_t held = 0;
  for (const Bucket& bucket : page->buckets) {
    for (int i = 0; i < Bucket::kEntries; ++i) {
      held += bucket.tags[i] != 0 && is_held(store_->expand(bucket.positions[i])) ? 1 : 0;
    }
  }
  if (held > Page::kCrowded) {
    if (page->depth == depth_) {
      std::vector<Page*> wider = store_->wider(directory_);
      for (std::size_t i = 0; i < wider.size(); ++i) wider[i] = directory_[i / 2];
      directory_.swap(wider);
      ++depth_;
    }
    Page* upper = add_page(page->depth + 1);
    ++page->depth;
    const std::size_t pages = std::size_t{1} << (depth_ - page->depth);
    const std::size_t first = static_cast<std::size_t>(hash >> (64 - depth_)) & ~(2 * pages - 1);
    std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first + pages), pages, upper);
  }
  const Page full = *page;
  std::memset(page->buckets, 0, sizeof(page->buckets));
  page->used = 0;
  for (const Bucket& bucket : full.buckets) {
    const Bucket& next = *(&bucket + (&bucket + 1 < full.buckets + Page::kBuckets ? 1 : 0));
    for (int i = 0; i < Bucket::kEntries && next.tags[i] != 0; ++i) {
      store_->prefetch(store_->expand(next.positions[i]), window_ > 0 ? window_ : kContextTokens);
    }
    for (int i = 0; i < Bucket::kEntries && bucket.tags[i] != 0; ++i) {
      const std::int64_t position = store_->expand(bucket.positions[i]);
      if (is_held(position)) enter(position);
    }
  }
  return directory_[hash >> (64 - depth_)];
}

void LiveDatastore::Table::enter(std::int64_t position) noexcept {
  const std::int64_t window = window_ > 0 ? window_ : store_->prefix_window(position);
  if (window == 0) return;
  Token copy[kContextTokens];
  const std::uint64_t hash = this->hash(store_->before(position, window, copy), window);
  Page& page = *directory_[hash >> (64 - depth_)];
  std::int64_t at = Bucket::home(hash, Page::kBuckets);
  while (page.buckets[at].tags[Bucket::kEntries - 1] != 0) at = after(at);
  Bucket& bucket = page.buckets[at];
  int i = 0;
  while (bucket.tags[i] != 0) ++i;
  bucket.tags[i] = Bucket::tag(hash);
  bucket.positions[i] = static_cast<std::uint32_t>(position);
  ++page.used;
}

void* LiveDatastore::take_block(std::int64_t keep) {
  if (bytes_ + kBlockBytes > max_bytes_ && num_chunks_ > keep) return drop_oldest();
  charge(kBlockBytes);
  void* block = ::operator new(sizeof(Chunk), std::align_val_t{alignof(Chunk)}, std::nothrow);
  if (block == nullptr) {
    bytes_ -= kBlockBytes;
    throw_out_of_memory(kBlockBytes);
  }
  return block;
}

void* LiveDatastore::drop_oldest() noexcept {
  Chunk* oldest = &chunk(begin_);
  const std::int64_t next = std::min(end_, (begin_ / kChunkTokens + 1) * kChunkTokens);
  num_tokens_ -= std::count_if(oldest->tokens, oldest->tokens + (next - begin_),
                               [](Token token) { return token >= 0; });
  begin_ = next;
  --num_chunks_;
  return oldest;
}

void LiveDatastore::charge(std::int64_t bytes) {
  // The last chunk is being written.
  while (bytes_ + bytes > max_bytes_ && num_chunks_ > 1) {
    free_block(drop_oldest());
    bytes_ -= kBlockBytes;
  }
  if (bytes_ + bytes > max_bytes_) {
    throw MemoryLimitError("max_bytes is " + std::to_string(max_bytes_) + ": " +
                           std::to_string(bytes_) + " bytes are in use and " +
                           std::to_string(bytes) + " more are needed");
  }
  bytes_ += bytes;
}

template <typename T>
std::vector<T*> LiveDatastore::wider(const std::vector<T*>& pointers) {
  // Both are held until the new one is filled.
  charge(bytes_of(pointers.size() * 2));
  std::vector<T*> twice;
  try {
    twice.resize(pointers.size() * 2);
  } catch (const std::bad_alloc&) {
    bytes_ -= bytes_of(pointers.size() * 2);
    throw_out_of_memory(bytes_of(pointers.size() * 2));
  }
  bytes_ -= bytes_of(pointers.size());
  return twice;
}

bool LiveDatastore::matches(std::int64_t position, const Token* last,
                            std::int64_t count) const noexcept {
  if (position - count < begin_) return false;
  Token copy[kContextTokens];
  const Token* tokens = before(position, count, copy);
  std::int64_t i = 0;
  while (i < count && tokens[i] == last[i - count]) ++i;
  return i == count;
}

std::int32_t LiveDatastore::common(std::int64_t position, const Token* text,
                                   std::int64_t size) const noexcept {
  const std::int64_t most = std::min({std::int64_t{kLongest}, size, position - begin_});
  Token copy[kLongest];
  const Token* end = before(position, most, copy) + most;
  return static_cast<std::int32_t>(common_suffix(end, text + size, most));
}

int LiveDatastore::find(const Token* text, std::int64_t size, Occurrence* out, int most, int links,
                        std::int32_t least) const {
  if (most <= 0 || num_chunks_ == 0) return 0;
  const Token* last = text + size;
  std::array<std::uint64_t, kNumOrders> hashes{};
  for (std::size_t order = 0; order < kNumOrders && kOrders[order] >= least; ++order) {
    if (size < kOrders[order]) continue;
    hashes[order] = orders_[order].hash(last - kOrders[order], kOrders[order]);
    orders_[order].prefetch(hashes[order]);
  }
  BestOccurrences best(out, most);
  for (std::size_t order = 0; order < kNumOrders && kOrders[order] >= least; ++order) {
    if (best.full() || links == 0) break;
    if (size < kOrders[order]) continue;
    const std::int64_t latest = orders_[order].find(
        hashes[order], [&](std::int64_t at) { return matches(at, last, kOrders[order]); });
    walk(*this, order, latest, text, size, &links, &best);
  }
  return best.count();
}

std::int64_t LiveDatastore::prefix_window(std::int64_t position) const noexcept {
  if (position - kPrefixStep - 1 < begin_) return 0;
  if (token(position - kPrefixStep - 1) < 0) return kPrefixStep;
  return position - kContextTokens < begin_ ? 0 : kContextTokens;
}

// The latest position, or -1, before which the first `size` tokens of a document
// stand as they do here; of more than kContextTokens, the last so many.
std::int64_t LiveDatastore::find_prefix(const Token* tokens, std::int64_t size) const {
  const std::int64_t window = std::min(size, kContextTokens);
  const Token* last = tokens + size;
  return prefixes_.find(prefixes_.hash(last - window, window), [&](std::int64_t at) {
    return matches(at, last, window) && prefix_window(at) == window;
  });
}

// How many of a document's first tokens stand in the store already: every run of up to
// kLongest + 1 of them, which is all that readers can see of it.
std::int64_t LiveDatastore::stored_prefix(const Token* tokens, std::int64_t size) const {
  const std::shared_lock<PhaseFairMutex> lock(*mutex_);
  if (num_chunks_ == 0) return 0;
  std::int64_t length = 0;
  std::int64_t position = -1;
  while (length + kPrefixStep <= size) {
    const std::int64_t found = find_prefix(tokens, length + kPrefixStep);
    if (found < 0) break;
    position = found;
    length += kPrefixStep;
  }
  if (length == 0) return 0;
  while (length < size && position < end_ && token(position) == tokens[length]) {
    ++length;
    ++position;
  }
  return length;
}

void LiveDatastore::append(Token token, bool output) {
  if (end_ % kChunkTokens == 0) {
    if (num_chunks_ == static_cast<std::int64_t>(ring_.size())) {
      std::vector<Chunk*> wider = this->wider(ring_);
      for (std::int64_t i = 0; i < num_chunks_; ++i) {
        const auto number = static_cast<std::size_t>(begin_ / kChunkTokens + i);
        wider[number & (wider.size() - 1)] = ring_[number & (ring_.size() - 1)];
      }
      ring_.swap(wider);
    }
    auto* chunk = new (take_block(0)) Chunk;
    ring_[static_cast<std::size_t>(end_ / kChunkTokens) & (ring_.size() - 1)] = chunk;
    ++num_chunks_;
  }
  const std::int64_t at = end_ % kChunkTokens;
  Chunk& chunk = this->chunk(end_);
  chunk.tokens[at] = token;
  for (auto& previous : chunk.previous) previous[at] = Link(output);
  ++end_;
  num_tokens_ += token >= 0 ? 1 : 0;
}

// Appends a document's tokens from tokens[first] on, up to tokens[last - 1], and indexes what
// comes from tokens[common] on; under the lock. Returns how far it came: where a page had to be
// rebuilt, readers have waited long enough.
std::int64_t LiveDatastore::add_slice(const Token* tokens, std::int64_t first, std::int64_t last,
                                      std::int64_t common, std::int64_t prompt_size) {
  std::uint64_t hashes[kNumOrders][kSliceTokens];
  for (std::size_t order = 0; order < kNumOrders; ++order) {
    const std::int32_t length = kOrders[order];
    for (auto i = std::max<std::int64_t>({first, common, length}); i < last; ++i) {
      hashes[order][i - first] = orders_[order].hash(tokens + i - length, length);
      orders_[order].prefetch(hashes[order][i - first]);
    }
  }
  const std::int64_t rebuilt = pages_rebuilt_;
  for (std::int64_t i = first; i < last; ++i) {
    if (pages_rebuilt_ != rebuilt) return i;
    append(tokens[i], i >= prompt_size);
    if (i < common) continue;
    const std::int64_t position = end_ - 1;
    for (std::size_t order = 0; order < kNumOrders; ++order) {
      const std::int32_t length = kOrders[order];
      if (i < length) continue;
      const std::int64_t before =
          orders_[order].put(hashes[order][i - first], position,
                             [&](std::int64_t at) { return matches(at, tokens + i, length); });
      const std::int64_t distance = position - before;
      if (before >= 0 && distance <= Link::kFarthest) {
        chunk(position).previous[order][position % kChunkTokens].set_distance(distance);
      }
    }
    if ((i + 1) % kPrefixStep == 0) {
      const std::int64_t window = std::min(i + 1, kContextTokens);
      prefixes_.put(prefixes_.hash(tokens + i + 1 - window, window), end_, [&](std::int64_t at) {
        return matches(at, tokens + i + 1, window) && prefix_window(at) == window;
      });
    }
  }
  return last;
}

void LiveDatastore::add(const Token* tokens, std::int64_t size, std::int64_t prompt_size) {
  check_tokens(tokens, size, "token_ids");
  const std::scoped_lock adding(adding_);
  const std::int64_t common = stored_prefix(tokens, size);
  if (common == size && !closed()) return;
  const std::int64_t start = std::max<std::int64_t>(0, common - kContextTokens);
  const std::unique_lock<PhaseFairMutex> lock(*mutex_);
  check_open();
  append(document_mark(common - start), false);
  for (std::int64_t first = start; first < size;) {
    if (first > start) {
      mutex_->pass();
      check_open();
    }
    first = add_slice(tokens, first, std::min(size, first + kSliceTokens), common, prompt_size);
  }
}

void LiveDatastore::release() noexcept {
  while (num_chunks_ > 0) free_block(drop_oldest());
  for (Table& table : orders_) table.close();
  prefixes_.close();
  ring_ = {};
  bytes_ = 0;
}

}  // namespace

std::shared_ptr<Datastore> Datastore::live(std::int64_t max_bytes,
                                           const std::optional<Fingerprint>& fingerprint) {
  return std::make_shared<LiveDatastore>(max_bytes, fingerprint);
}

}  // namespace fastdraft

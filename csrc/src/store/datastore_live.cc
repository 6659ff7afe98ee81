#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/error.h"
#include "fastdraft/interrupt.h"
#include "policy/token_weights.h"
#include "store/datastore_index.h"
#include "store/live_lists.h"
#include "store/live_log.h"
#include "store/live_table.h"
#include "store/phase_fair_mutex.h"
#include "store/running_texts.h"
#include "store/samples.h"

namespace fastdraft {
namespace {

// Largest piece added under the lock (about 0.1 s).
constexpr std::int64_t kPieceTokens = std::int64_t{1} << 16;
// Readers wait for this many tokens at most: microseconds.
constexpr std::int64_t kSliceTokens = 128;
// At most this many tokens are re-appended per added document.
constexpr std::int64_t kMostMoved = kPieceTokens + kContextTokens;
// The largest share of the limit for the list of samples: a sixty-fourth.
constexpr std::int64_t kSamplesPart = 64;
// A slice's memory is prefetched this many tokens at a time: what is not used soon leaves the
// nearest cache again.
constexpr std::int64_t kStepTokens = 16;
constexpr int kNumTables = static_cast<int>(kNumOrders) + 1;

// For `walk`: the postings of an n-gram in the log.
class LivePostings {
 public:
  LivePostings() = default;
  // The caller takes `most` at most.
  LivePostings(const LiveLog& log, const LiveLists::Postings& postings, std::int64_t length,
               const Token* text, std::int64_t size, int most) noexcept
      : log_(&log),
        postings_(postings),
        length_(length),
        text_(text),
        size_(size),
        more_(std::min(postings.left(), most)) {
    const int ahead = std::min(more_, kAhead);
    for (int i = 0; i < ahead; ++i) prefetch_text(i);
    more_ -= ahead;
  }

  bool valid() const noexcept {
    return postings_.left() > 0 && postings_[0].position(*log_) - length_ >= log_->begin();
  }
  Occurrence take() noexcept {
    if (more_ > 0) {
      prefetch_text(kAhead);
      --more_;
    }
    const LiveLists::Posting posting = postings_[0];
    postings_.next();
    const std::int64_t position = posting.position(*log_);
    return {position, log_->common(position, text_, size_), posting.output()};
  }

 private:
  static constexpr int kAhead = 7;

  void prefetch_text(int ahead) const noexcept {
    log_->prefetch_from(postings_[ahead].position(*log_) - length_);
  }

  const LiveLog* log_ = nullptr;
  LiveLists::Postings postings_;
  std::int64_t length_ = 0;
  const Token* text_ = nullptr;
  std::int64_t size_ = 0;
  int more_ = 0;  // texts that are still to be asked for
};

// A log, and an index for each order, which finds the latest occurrences of an n-gram. One more
// index knows the beginnings of documents.
class LiveDatastore final : public Datastore {
 public:
  LiveDatastore(std::int64_t max_bytes, const std::optional<Fingerprint>& fingerprint)
      : Datastore(fingerprint),
        log_(max_bytes, static_cast<std::int64_t>(sizeof(*this)) + Samples::kFirstBytes),
        running_([this](std::int64_t bytes) { return charge_running(bytes); }) {
    const std::int64_t least =
        log_.bytes() + LiveLog::kBlockBytes +
        (kNumTables + 1) * (LiveLog::kBlockBytes + LiveLog::bytes_of(LiveLog::kFirstPointers));
    check_range("max_bytes", max_bytes, least, std::numeric_limits<std::int64_t>::max());
    largest_token_ = LiveLog::kLargestToken;
    lists_.open(log_);
    for (std::size_t i = 0; i < kNumOrders; ++i) {
      tables_[i].open(log_, kOrders[i], random_seed(), &lists_, i);
    }
    prefixes_.open(log_, 0, random_seed());
  }

  void add(const Token* tokens, std::int64_t size, std::int64_t prompt_size, const Grow& grow,
           std::int64_t context) override;
  void close() override {
    {
      const std::unique_lock<PhaseFairMutex> lock(*mutex_);
      closed_.store(true, std::memory_order_relaxed);
      log_.release();
      for (LiveTable& table : tables_) table.close();
      lists_.close();
      samples_.close();
      running_bytes_ = 0;
      weights_.reset();
    }
    running_.clear();
  }

  bool frozen() const noexcept override { return false; }
  std::int64_t num_tokens() const override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return log_.num_tokens();
  }
  std::int64_t num_documents() const override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return log_.end() - log_.begin() - log_.num_tokens();
  }
  std::int64_t bytes() const override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return log_.bytes();
  }
  std::int64_t max_bytes() const noexcept override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return log_.max_bytes();
  }
  std::int64_t limit(std::int64_t max_bytes) override;
  RunningTexts* running() noexcept override { return &running_; }
  std::shared_ptr<TokenWeights> token_weights(const TokenWeights* saved) override;
  std::shared_ptr<const TokenWeights> learned_weights() const override {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    return weights_;
  }

 protected:
  void begin(Lookup& lookup) const override;
  void go_on(const Lookup& lookup) const override;
  int find(const Lookup& lookup, Occurrence* out, int most, int links) const override;
  std::int64_t read(std::int64_t position, Token* out, std::int64_t most) const override {
    if (position < log_.begin() || position >= log_.end()) return 0;
    const std::int64_t count = std::min(most, log_.end() - position);
    log_.copy(position, count, out);
    return count;
  }
  bool output(std::int64_t position) const override { return log_.output(position); }
  std::int64_t begin() const override { return log_.begin(); }
  std::int64_t end() const override { return log_.end(); }

 private:
  void check_open() const {
    if (closed()) throw DatastoreClosedError("the datastore is closed");
  }
  std::int64_t pages_rebuilt() const noexcept {
    std::int64_t rebuilt = 0;
    for (const LiveTable& table : tables_) rebuilt += table.rebuilt();
    return rebuilt;
  }
  std::int64_t stored_prefix(const Token* tokens, std::int64_t size, std::int64_t from) const;
  std::int64_t find_prefix(const Token* tokens, std::int64_t size) const;
  std::int64_t most_slice_bytes() const noexcept;
  // A sample that enters again.
  struct Moved {
    Samples::Prompt prompt;
    std::int64_t prompt_size;
    std::int64_t context;
    std::vector<Token> tokens;
  };
  Samples::Prompt prompt_of(const Token* tokens, std::int64_t common, std::int64_t prompt_size);
  bool make_way(Samples::Prompt prompt, std::int64_t size, const Grow& grow,
                std::vector<Moved>* moved);
  bool copy(const Samples::Sample& sample, std::vector<Moved>* moved) const noexcept;
  void drop_samples() noexcept;
  void note(Samples::Prompt prompt, std::int64_t size) noexcept;
  void ask_for_room(std::unique_lock<PhaseFairMutex>& lock, const Grow& grow);
  void append(const Token* tokens, std::int64_t start, std::int64_t size, std::int64_t common,
              std::int64_t prompt_size, Samples::Prompt prompt, const Grow& grow);
  void append_pieces(std::unique_lock<PhaseFairMutex>& adding, const Token* tokens,
                     std::int64_t size, std::int64_t common, std::int64_t prompt_size,
                     Samples::Prompt prompt, const Grow& grow);
  std::int64_t add_slice(const Token* tokens, std::int64_t first, std::int64_t last,
                         std::int64_t common, std::int64_t prompt_size);

  bool charge_running(std::int64_t bytes);
  bool lists_left() const noexcept;
  void clean_lists() noexcept;
  bool merge_pages() noexcept;
  template <typename Put>
  void enter(Put put);

  // One document after another, as they come; long ones in pieces. It may be held long.
  PhaseFairMutex adding_{ForkGuard::Turn::kNone};
  LiveLog log_;
  std::array<LiveTable, kNumTables> tables_;  // of the orders, and of documents' beginnings
  LiveTable& prefixes_ = tables_.back();
  LiveLists lists_;
  Samples samples_;  // none before the first prompt that comes again
  bool prompts_repeat_ = false;
  std::int64_t may_move_ = 0;  // in tokens
  double cleaned_ = 0.0;       // the bytes of left text for which lists have been cleaned
  std::array<double, kNumTables> merged_{};  // and pages of each table looked at
  std::int64_t running_bytes_ = 0;           // of those that the log counts
  RunningTexts running_;
  std::shared_ptr<TokenWeights> weights_;
};

// Running texts take a quarter of the limit at most, that of the oldest text as need be.
bool LiveDatastore::charge_running(std::int64_t bytes) {
  constexpr std::int64_t kPart = 4;
  const std::unique_lock<PhaseFairMutex> lock(*mutex_);
  if (closed()) return false;
  if (bytes > 0) {
    if (running_bytes_ + bytes > log_.max_bytes() / kPart) return false;
    while (log_.bytes() + bytes > log_.max_bytes()) {
      if (lists_left()) {
        clean_lists();
      } else if (!log_.drop_block()) {
        break;
      }
    }
    try {
      log_.charge(bytes);
    } catch (const MemoryLimitError&) {
      return false;
    }
  } else {
    log_.refund(-bytes);
  }
  running_bytes_ += bytes;
  return true;
}

// A table of n weights from n / 12 tokens of text on, which are more than a chunk: a store of
// little text takes no more memory than it did. A larger table has what the smaller one learned;
// requests that hold that go on with it. It replaces the oldest text as need be. What was saved
// needs its own size from the start, a quarter of the memory at most.
std::shared_ptr<TokenWeights> LiveDatastore::token_weights(const TokenWeights* saved) {
  const std::unique_lock<PhaseFairMutex> lock(*mutex_);
  if (closed()) return nullptr;
  std::size_t size = TokenWeights::kMost;
  const auto most = static_cast<std::size_t>(12 * log_.num_tokens());
  while (size > most) size /= 4;
  const TokenWeights* from = weights_.get();
  if (from == nullptr && saved != nullptr && 4 * saved->bytes() <= log_.max_bytes()) {
    from = saved;
    size = std::max(size, saved->size());
  }
  if (size < TokenWeights::kLeast || (weights_ != nullptr && size <= weights_->size())) {
    return weights_;
  }
  try {
    auto larger = std::make_shared<TokenWeights>(size, from);
    log_.charge(larger->bytes() - (weights_ == nullptr ? 0 : weights_->bytes()));
    weights_ = std::move(larger);
  } catch (const MemoryLimitError&) {
    return weights_;  // the smaller table serves as well
  } catch (const std::bad_alloc&) {
    return weights_;
  }
  return weights_;
}

// Asks for the buckets of the n-grams that end the text.
void LiveDatastore::begin(Lookup& lookup) const {
  if (log_.empty()) return;
  const Token* last = lookup.text + lookup.size;
  for (std::size_t order = lookup.first; order < lookup.end; ++order) {
    lookup.hashes[order] = tables_[order].hash(last - kOrders[order], kOrders[order]);
    tables_[order].prefetch(lookup.hashes[order]);
  }
}

// Asks for what the buckets lead to.
void LiveDatastore::go_on(const Lookup& lookup) const {
  if (log_.empty()) return;
  for (std::size_t order = lookup.first; order < lookup.end; ++order) {
    tables_[order].prefetch_entries(lookup.hashes[order]);
  }
}

int LiveDatastore::find(const Lookup& lookup, Occurrence* out, int most, int links) const {
  if (most <= 0 || log_.empty()) return 0;
  std::array<LivePostings, kNumOrders> postings;
  std::array<LiveLists::Posting, kNumOrders> singles;
  const auto look_up = [&](std::size_t order, int most_postings) {
    const LiveLists::Postings found = tables_[order].find_postings(
        lookup.hashes[order], lookup.text + lookup.size, &singles[order]);
    postings[order] =
        LivePostings(log_, found, kOrders[order], lookup.text, lookup.size, most_postings);
    return found.left();
  };
  // The texts that are read if none has left are all asked for before the first is read.
  std::size_t ahead = lookup.first;
  for (int found = 0; ahead < lookup.end && found < links; ++ahead) {
    found += look_up(ahead, links - found);
  }
  BestOccurrences best(out, most);
  for (std::size_t order = lookup.first; order < lookup.end; ++order) {
    if (best.full() || links == 0) break;
    if (order >= ahead) look_up(order, links);
    walk(postings[order], order, &links, &best);
  }
  return best.count();
}

// The latest position, or -1, before which the first `size` tokens of a document
// occur as they do here; of more than kContextTokens, the last ones.
std::int64_t LiveDatastore::find_prefix(const Token* tokens, std::int64_t size) const {
  const std::int64_t window = std::min(size, kContextTokens);
  const Token* last = tokens + size;
  return prefixes_.find(prefixes_.hash(last - window, window), [&](std::int64_t at) {
    return log_.matches(at, last, window) && log_.prefix_window(at) == window;
  });
}

// How many of a document's first tokens are stored already: every run of up to
// kLongestMatch + 1 of them, which is all that readers can see of it. The first `from`, none or
// kContextTokens, are context, which is stored.
std::int64_t LiveDatastore::stored_prefix(const Token* tokens, std::int64_t size,
                                          std::int64_t from) const {
  constexpr int kStepsAtOnce = 64;
  std::int64_t length = from;
  for (;;) {
    const std::shared_lock<PhaseFairMutex> lock(*mutex_);
    if (log_.empty()) return from;
    int steps = 0;
    while (steps < kStepsAtOnce && length + LiveLog::kPrefixStep <= size &&
           find_prefix(tokens, length + LiveLog::kPrefixStep) >= 0) {
      length += LiveLog::kPrefixStep;
      ++steps;
    }
    if (steps == kStepsAtOnce) continue;
    if (length == from) return from;
    std::int64_t position = find_prefix(tokens, length);
    if (position < 0) return length;  // it has left since
    while (length < size && position < log_.end() && log_.token(position) == tokens[length]) {
      ++length;
      ++position;
    }
    return length;
  }
}

// Returns whether less of the lists has been cleaned than text has left.
bool LiveDatastore::lists_left() const noexcept {
  return lists_.num_blocks() > 0 &&
         (log_.left() - cleaned_) * static_cast<double>(lists_.num_blocks()) >= 1.0;
}

// Cleans the oldest block of lists: what has left goes, and the others move together. Readers wait
// about as long as for a page that is rebuilt.
void LiveDatastore::clean_lists() noexcept {
  constexpr int kAtOnce = 64;
  std::array<LiveLists::Leaving, kAtOnce> leaving;
  std::array<std::uint64_t, kAtOnce> hashes;
  const auto latest = [&](const LiveLists::Leaving& list) {
    return list.postings[0].position(log_);
  };
  const auto is_held = [&](const LiveLists::Leaving& list) {
    return latest(list) - kOrders[list.order] >= log_.begin();
  };
  cleaned_ += 1.0 / static_cast<double>(lists_.num_blocks());
  LiveLists::Block oldest;
  lists_.begin_cleaning(&oldest);
  while (const int count = lists_.next_leaving(leaving.data(), kAtOnce)) {
    const auto* end = leaving.begin() + count;
    for (const auto* list = leaving.begin(); list != end; ++list) {
      log_.prefetch_around(latest(*list), kOrders[list->order]);
    }
    auto* hash = hashes.begin();
    for (const auto* list = leaving.begin(); list != end; ++list, ++hash) {
      if (!is_held(*list)) continue;
      const std::int64_t length = kOrders[list->order];
      Token tokens[kContextTokens];
      log_.copy(latest(*list) - length, length, tokens);
      *hash = tables_[list->order].hash(tokens, length);
      tables_[list->order].prefetch(*hash);
    }
    hash = hashes.begin();
    for (const auto* list = leaving.begin(); list != end; ++list, ++hash) {
      if (!is_held(*list)) continue;
      LiveLists::Posting live[LiveLists::kMostPostings];
      const int postings = lists_.copy_live(list->postings, live);
      tables_[list->order].move_list(*hash, list->address, live, postings, [&] {
        return lists_.make(list->order, list->check, live, postings);
      });
    }
  }
  lists_.end_cleaning();
}

// Looks at a page that may be given up, of the tables' as many as text has left. Returns whether
// there was one to look at.
bool LiveDatastore::merge_pages() noexcept {
  for (std::size_t i = 0; i < merged_.size(); ++i) {
    LiveTable& table = tables_[i];
    const double part = 1.0 / static_cast<double>(table.num_pages());
    merged_[i] = std::max(merged_[i], log_.left() - 1.0);
    if (log_.left() - merged_[i] < part) continue;
    merged_[i] += part;
    table.merge_next();
    return true;
  }
  return false;
}

// Calls put(), again and again where it needs memory and none is left but the last chunk's: each
// time the oldest quarter of the text leaves.
template <typename Put>
void LiveDatastore::enter(Put put) {
  for (;;) {
    try {
      return put();
    } catch (const MemoryLimitError&) {
      if (log_.end() - log_.begin() < 2) throw;
      log_.forget_quarter();
    }
  }
}

// Appends a document's tokens from tokens[first] on, up to tokens[last - 1], and indexes what
// comes from tokens[common] on; under the lock. Returns how far it went: where a page had to be
// rebuilt, readers have waited long enough.
std::int64_t LiveDatastore::add_slice(const Token* tokens, std::int64_t first, std::int64_t last,
                                      std::int64_t common, std::int64_t prompt_size) {
  std::uint64_t hashes[kNumOrders][kSliceTokens];
  LiveTable::Page* pages[kNumOrders][kSliceTokens];
  const auto ask_for_buckets = [&](std::int64_t from) {
    for (std::size_t order = 0; order < kNumOrders; ++order) {
      const std::int32_t length = kOrders[order];
      const std::int64_t end = std::min(last, from + kStepTokens);
      for (auto i = std::max<std::int64_t>({from, common, length}); i < end; ++i) {
        hashes[order][i - first] = tables_[order].hash(tokens + i - length, length);
        pages[order][i - first] = tables_[order].prefetched(hashes[order][i - first]);
      }
    }
  };
  const auto ask_for_texts = [&](std::int64_t from) {
    for (std::size_t order = 0; order < kNumOrders; ++order) {
      const std::int64_t end = std::min(last, from + kStepTokens);
      for (auto i = std::max<std::int64_t>({from, common, kOrders[order]}); i < end; ++i) {
        tables_[order].prefetch_text(pages[order][i - first], hashes[order][i - first]);
      }
    }
  };
  ask_for_buckets(first);
  ask_for_buckets(first + kStepTokens);
  ask_for_texts(first);
  const std::int64_t rebuilt = pages_rebuilt();
  for (std::int64_t i = first; i < last; ++i) {
    if (pages_rebuilt() != rebuilt) return i;
    if ((i - first) % kStepTokens == 0) {
      ask_for_texts(i + kStepTokens);
      ask_for_buckets(i + 2 * kStepTokens);
    }
    if (!lists_.has_room()) {
      if (i > first) return i;
      enter([&] {
        while (!lists_.has_room()) lists_left() ? clean_lists() : lists_.add_block();
      });
    }
    const bool output = i >= prompt_size;
    log_.append(tokens[i], output);
    if (i < common) continue;
    const std::int64_t position = log_.end() - 1;
    const auto posting = static_cast<std::size_t>(i - first);
    for (std::size_t order = 0; order < kNumOrders; ++order) {
      const std::int32_t length = kOrders[order];
      if (i < length) continue;
      enter([&] {
        tables_[order].put(pages[order][posting], hashes[order][posting], position, output,
                           [&](std::int64_t at) { return log_.matches(at, tokens + i, length); });
      });
    }
    if ((i + 1) % LiveLog::kPrefixStep == 0) {
      const std::int64_t window = std::min(i + 1, kContextTokens);
      const std::uint64_t hash = prefixes_.hash(tokens + i + 1 - window, window);
      enter([&] {
        prefixes_.put(prefixes_.prefetched(hash), hash, log_.end(), false, [&](std::int64_t at) {
          return log_.matches(at, tokens + i + 1, window) && log_.prefix_window(at) == window;
        });
      });
    }
  }
  return last;
}

std::int64_t LiveDatastore::limit(std::int64_t max_bytes) {
  check_range("max_bytes", max_bytes, 0, std::numeric_limits<std::int64_t>::max());
  const auto shrink = [&] {
    const std::unique_lock<PhaseFairMutex> lock(*mutex_);
    check_open();
    if (weights_ != nullptr && 2 * weights_->bytes() > max_bytes) {
      log_.refund(weights_->bytes());
      weights_.reset();
    }
    while (log_.bytes() > max_bytes) {
      if (lists_left()) {
        clean_lists();
      } else if (!merge_pages() && !log_.drop_block()) {
        break;
      }
      mutex_->pass();
      check_open();
    }
    log_.limit(max_bytes);
    return std::pair{log_.max_bytes(), running_bytes_ > 0};
  };
  auto [limit, shared] = shrink();
  if (limit > max_bytes && shared) {
    running_.clear();
    limit = shrink().first;
  }
  return limit;
}

void LiveDatastore::add(const Token* tokens, std::int64_t size, std::int64_t prompt_size,
                        const Grow& grow, std::int64_t context) {
  check_tokens(tokens, size, "token_ids");
  if (prompt_size < 0 || prompt_size > size) {
    throw InvalidValueError("prompt_size must be 0 to the number of token_ids, " +
                            std::to_string(size) + ", got " + std::to_string(prompt_size));
  }
  if (size <= context) return check_open();  // what is context alone is held elsewhere
  std::vector<Token> known;
  if (*std::max_element(tokens, tokens + size) > LiveLog::kLargestToken) {
    known.assign(tokens, tokens + size);
    for (Token& token : known) token = std::min(token, LiveLog::kUnknown);
    tokens = known.data();
  }
  std::unique_lock<PhaseFairMutex> adding(adding_);
  if (context >= kContextTokens) {
    // A store that moves samples gives them again.
    if (stored_prefix(tokens, size, kContextTokens) < size) {
      append_pieces(adding, tokens, size, kContextTokens, prompt_size, Samples::kNone, grow);
    }
    return;
  }
  // The repeated part of a beginning is here too.
  const std::int64_t common = stored_prefix(tokens, size, 0);
  if (common == size && !closed()) return;
  const Samples::Prompt prompt = prompt_of(tokens, common, std::min(prompt_size, size));
  std::vector<Moved> moved;
  const std::int64_t entering =
      std::min(size - std::max<std::int64_t>(0, common - kContextTokens), kMostMoved);
  const bool enters = make_way(prompt, entering, grow, &moved);
  for (const Moved& each : moved) {
    append(each.tokens.data(), 0, static_cast<std::int64_t>(each.tokens.size()), each.context,
           each.prompt_size, each.prompt, grow);
  }
  if (enters) append_pieces(adding, tokens, size, common, prompt_size, prompt, grow);
}

// The prompt whose sample a document is that begins with `common` tokens of another. Samples are
// distinguished from the first prompt on that comes again: before that there is nothing to decide
// on.
Samples::Prompt LiveDatastore::prompt_of(const Token* tokens, std::int64_t common,
                                         std::int64_t prompt_size) {
  if (prompt_size <= 0 || (!prompts_repeat_ && common < prompt_size)) return Samples::kNone;
  prompts_repeat_ = true;
  const auto hash = static_cast<Samples::Prompt>(prefixes_.hash(tokens, prompt_size) >> 32);
  return hash == Samples::kNone ? hash + 1 : hash;
}

// Decides what leaves for `size` tokens of a sample, so that all prompts keep about as many. The
// oldest sample leaves if its prompt is the same, or has more samples than the new one's and no
// fewer than the average. Else it enters again: it is copied to `moved`, as long as no more tokens
// are moved than were added. Where that is no longer possible it leaves all the same, unless its
// prompt has fewer samples than the new one's: then that does not enter, and this returns false.
bool LiveDatastore::make_way(Samples::Prompt prompt, std::int64_t size, const Grow& grow,
                             std::vector<Moved>* moved) {
  if (!prompts_repeat_) return true;
  std::unique_lock<PhaseFairMutex> lock(*mutex_);
  ask_for_room(lock, grow);
  may_move_ = std::min(may_move_ + size, kMostMoved);
  while (!closed() && log_.begin() > 0 && !log_.has_room(size)) {
    drop_samples();
    if (samples_.empty()) return true;
    const Samples::Sample oldest = samples_.oldest();
    // Text without a prompt goes first, or the newest would leave.
    const std::int64_t end = oldest.start + 1 + oldest.size;
    if (oldest.start - log_.begin() > size + LiveLog::kLeastRoom || end >= log_.end()) return true;
    const std::int64_t count = samples_.count(prompt);
    const std::int64_t others = samples_.count(oldest.prompt);
    if (oldest.prompt != prompt && (others <= count || others < samples_.average())) {
      if (oldest.size <= may_move_ && copy(oldest, moved)) {
        may_move_ -= oldest.size;
        size += oldest.size;
      } else if (others < count) {
        return false;
      }
    }
    log_.forget_before(end);
    mutex_->pass();
  }
  return true;
}

// Under the lock. Returns whether there was memory for it.
bool LiveDatastore::copy(const Samples::Sample& sample, std::vector<Moved>* moved) const noexcept {
  const std::int64_t begin = sample.start + 1;
  const std::int64_t most = std::min<std::int64_t>(sample.size, log_.end() - begin);
  try {
    std::vector<Token> tokens(static_cast<std::size_t>(most));
    log_.copy(begin, most, tokens.data());
    // It is shorter where memory ran out.
    const auto is_mark = [](Token token) { return token < 0; };
    tokens.erase(std::find_if(tokens.begin(), tokens.end(), is_mark), tokens.end());
    const auto size = static_cast<std::int64_t>(tokens.size());
    std::int64_t prompt_size = 0;
    while (prompt_size < size && !log_.output(begin + prompt_size)) ++prompt_size;
    const std::int64_t context = mark_context(log_.token(sample.start));
    moved->push_back({sample.prompt, prompt_size, context, std::move(tokens)});
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// The samples whose text has left the log are no more.
void LiveDatastore::drop_samples() noexcept {
  const std::int64_t held = samples_.bytes();
  samples_.drop_before(log_.begin());
  log_.refund(held - samples_.bytes());
}

// Lists a sample that begins at the log's end, if there is memory for it.
void LiveDatastore::note(Samples::Prompt prompt, std::int64_t size) noexcept {
  if (prompt == Samples::kNone) return;
  drop_samples();
  constexpr std::int64_t kMost = Samples::kSampleBytes + Samples::kPromptBytes;
  const std::int64_t held = samples_.bytes();
  if (held + kMost > log_.max_bytes() / kSamplesPart) return;
  try {
    log_.charge(kMost);
  } catch (const MemoryLimitError&) {
    return;
  }
  try {
    samples_.add({log_.end(), static_cast<std::int32_t>(size), prompt});
  } catch (const std::bad_alloc&) {
    log_.refund(kMost);
    return;
  }
  log_.refund(held + kMost - samples_.bytes());
}

// Appends what comes from tokens[common] on, in pieces. Each begins with context, as a document
// does whose beginning is stored elsewhere, so others may enter in between.
void LiveDatastore::append_pieces(std::unique_lock<PhaseFairMutex>& adding, const Token* tokens,
                                  std::int64_t size, std::int64_t common, std::int64_t prompt_size,
                                  Samples::Prompt prompt, const Grow& grow) {
  for (;;) {
    const std::int64_t end = std::min(size, common + kPieceTokens);
    append(tokens, std::max<std::int64_t>(0, common - kContextTokens), end, common, prompt_size,
           prompt, grow);
    if (end == size) return;
    common = end;
    prompt = Samples::kNone;
    adding.unlock();
    check_interrupt();
    adding.lock();
  }
}

// The most memory that adding a slice takes: a chunk, a block of lists, a page of each table and
// new directories. There is one page of each, since a slice ends where a page was rebuilt.
std::int64_t LiveDatastore::most_slice_bytes() const noexcept {
  std::int64_t directories = log_.directory_bytes() + lists_.directory_bytes();
  for (const LiveTable& table : tables_) directories += table.directory_bytes();
  return (2 + kNumTables) * LiveLog::kBlockBytes + 2 * directories;
}

// Calls `grow` without the lock where the store is too full for a slice. Throws where it is closed.
void LiveDatastore::ask_for_room(std::unique_lock<PhaseFairMutex>& lock, const Grow& grow) {
  check_open();
  if (!grow || log_.max_bytes() - log_.bytes() >= most_slice_bytes()) return;
  lock.unlock();
  grow();
  lock.lock();
  check_open();
}

// Appends a document's tokens from tokens[start] on, of which those before tokens[common] are
// context. One thread at a time.
void LiveDatastore::append(const Token* tokens, std::int64_t start, std::int64_t size,
                           std::int64_t common, std::int64_t prompt_size, Samples::Prompt prompt,
                           const Grow& grow) {
  std::unique_lock<PhaseFairMutex> lock(*mutex_);
  ask_for_room(lock, grow);
  note(prompt, size - start);
  log_.append(document_mark(common - start), false);
  for (std::int64_t first = start; first < size;) {
    if (first > start) {
      mutex_->pass();
      ask_for_room(lock, grow);
    }
    if (lists_left()) clean_lists();
    if (log_.wants_slab()) {
      lock.unlock();
      LiveLog::Slab slab = LiveLog::allocate_slab();
      lock.lock();
      check_open();
      log_.add_slab(std::move(slab));
    }
    first = add_slice(tokens, first, std::min(size, first + kSliceTokens), common, prompt_size);
  }
}

}  // namespace

std::shared_ptr<Datastore> Datastore::live(std::int64_t max_bytes,
                                           const std::optional<Fingerprint>& fingerprint) {
  return std::make_shared<LiveDatastore>(max_bytes, fingerprint);
}

}  // namespace fastdraft

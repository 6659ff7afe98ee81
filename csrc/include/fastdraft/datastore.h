// Text that requests share: a live store of earlier requests, or a frozen
// corpus in a file. See docs/explanation/core.md for the layout of both.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fastdraft/export.h"
#include "fastdraft/token.h"

namespace fastdraft {

class PhaseFairMutex;
class RunningTexts;
class TokenWeights;

// A position in a store where the last tokens of some text occur.
struct Occurrence {
  std::int64_t next;    // position of the token that followed
  std::int32_t length;  // how many of the text's last tokens precede it
  bool output;          // whether that token was a model's output
};

// The SHA-256 of a tokenizer's vocabulary; token ids mean nothing without it.
using Fingerprint = std::array<std::uint8_t, 32>;

// Its digits, two a byte.
FASTDRAFT_EXPORT std::string to_hex(const Fingerprint& fingerprint);

// A mark precedes each document in a log. It tells how many of the first tokens are
// only context: the store also holds them elsewhere, and no n-gram that ends
// before or within them is indexed.
constexpr Token document_mark(std::int64_t context) noexcept {
  return static_cast<Token>(-1 - context);
}
constexpr std::int64_t mark_context(Token mark) noexcept { return -1 - std::int64_t{mark}; }

// A log of documents and an index of its n-grams. Positions count the tokens
// that ever entered, and one more before each document, from 0; the oldest
// leave a live store when its bytes are used up.
//
// Thread-safe; engines share one through a shared_ptr. Readers overlap.
class FASTDRAFT_EXPORT Datastore {
 public:
  // The lengths of the n-grams that are indexed, longest first.
  //
  // On the recorded requests the short ones are worth the most: without {2, 1},
  // drafts of earlier requests lose 3 % of their speed, without {4} 1 %.
  static constexpr std::array<std::int32_t, 3> kOrders{4, 2, 1};
  // How many occurrences are looked at where a caller has no other wish: more
  // gain less than a thousandth.
  static constexpr int kLinks = 7;
  // The most tokens that an occurrence is compared over.
  static constexpr std::int32_t kLongestMatch = 32;

  static constexpr std::int64_t kDefaultMaxBytes = std::int64_t{2} << 30;

  // Makes room in a live store that is nearly full.
  using Grow = std::function<void()>;

  // An empty live store, which holds at most `max_bytes` at all times. Throws
  // InvalidValueError where that is too little to hold anything.
  static std::shared_ptr<Datastore> live(std::int64_t max_bytes,
                                         const std::optional<Fingerprint>& fingerprint = {});

  // The frozen store in a file, mapped read-only. Milliseconds, whatever its size, unless `verify`
  // reads all of it and compares its checksums. Throws DatastoreError for what is no store, or a
  // newer, truncated or damaged one, or one whose fingerprint is not the `expected` one. Undetected
  // damage gives wrong tokens, never an access outside the file.
  static std::shared_ptr<Datastore> open(const std::string& path,
                                         const std::optional<Fingerprint>& expected = {},
                                         bool verify = false);

  Datastore(const Datastore&) = delete;
  Datastore& operator=(const Datastore&) = delete;
  virtual ~Datastore();

  // The arguments of `find`.
  struct Lookup {
    const Token* text;
    std::int64_t size;
    std::size_t first = 0;  // of the orders that are looked up
    std::size_t end = kOrders.size();
    std::array<std::uint64_t, kOrders.size()> hashes{};  // of their n-grams, where a store has them

    // By the orders that the text has and that are no shorter than `least`.
    Lookup(const Token* tokens, std::int64_t count, std::int32_t least) noexcept
        : text(tokens), size(count) {
      while (first < end && kOrders[first] > size) ++first;
      while (end > first && kOrders[end - 1] < least) --end;
    }
  };

  // A lock on the store: its text stays as it is while the reader lives. A closed store
  // looks empty. Keep a reader briefly: `add` and `close` wait for it, and later
  // readers wait for them. So its thread must not call the store meanwhile, nor make a
  // second reader; readers of several stores at once might wait for each other.
  class FASTDRAFT_EXPORT Reader {
   public:
    explicit Reader(const Datastore& store);
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    ~Reader();

    // Writes to `out` where the text's longest suffixes occur: the longest first,
    // of equally long ones the latest first, `most` at most, each position once.
    // Returns how many. From the longest order n on, it looks at the latest
    // occurrences of the text's last n tokens that a token of the same document
    // follows, `links` of them over all orders, of which those below `least` are left
    // out. A segment of a frozen store knows the latest 64 occurrences of an n-gram, a live store
    // the latest 31. O(links), and for a frozen store O(segments).
    int find(const Token* text, std::int64_t size, Occurrence* out, int most, int links = kLinks,
             std::int32_t least = 1) const {
      Lookup lookup(text, size, least);
      begin(lookup);
      go_on(lookup);
      return find(lookup, out, most, links);
    }

    // The same in three steps, for a caller that has other work to do in between: each of the first
    // two asks for the memory that the next one reads. The text must stay as it is.
    void begin(Lookup& lookup) const { store_->begin(lookup); }
    void go_on(const Lookup& lookup) const { store_->go_on(lookup); }
    int find(const Lookup& lookup, Occurrence* out, int most, int links) const {
      return store_->find(lookup, out, most, links);
    }

    // Copies the tokens from `position` on, `most` at most, and returns how many: fewer where
    // they do not lie side by side, 0 where the position is not in the store. A negative one is a
    // document's end, and in a damaged file there may be any.
    std::int64_t read(std::int64_t position, Token* out, std::int64_t most) const {
      return store_->read(position, out, most);
    }

    // The token at `position`; -1 at a document's end and where the position is not
    // in the store.
    Token at(std::int64_t position) const;

    // Copies the tokens from `position` on, to the document's end, `most` at most.
    // Returns how many.
    std::int64_t copy(std::int64_t position, Token* out, std::int64_t most) const;

    // No token is greater; what is, is damage.
    Token largest_token() const { return store_->largest_token_; }

    // Returns whether the token at `position`, one that is held, was a model's output.
    bool output(std::int64_t position) const { return store_->output(position); }

    // The positions held: begin() .. end() - 1.
    std::int64_t begin() const { return store_->begin(); }
    std::int64_t end() const { return store_->end(); }

   private:
    const Datastore* store_;
  };

  // Adds a document to a live store; the oldest text leaves as needed. But once a prompt has come
  // again, all prompts keep about as many samples of those that do: a sample of a prompt that has
  // few enters again instead of leaving, at most a token for each that is added, or the document
  // itself is left out. Prompts of fewer than 32 tokens count from then on too. The tokens from
  // tokens[prompt_size] on are a model's output, which resembles other outputs more than prompts
  // do. A beginning of 32 tokens or more that the store holds already, as the beginning of a
  // document, is not stored again: each turn of a chat repeats the turns before, which are thus
  // stored once. Readers cannot tell, since they compare kLongestMatch tokens, and each run of
  // kLongestMatch + 1 tokens left out is held elsewhere. O(1) amortised a token; readers wait for
  // 128 tokens at a time. Tokens must not be negative; one of 2^22 - 1 or more, as no vocabulary
  // has, ends what is drafted. Throws DatastoreError for a frozen store, DatastoreClosedError, or
  // MemoryLimitError where the system has no memory, and then the document's first tokens have been
  // added.
  //
  // `grow` is called each time the store is too full for the next tokens, before its oldest text
  // leaves. It may raise the limit; then nothing leaves. The store's lock is not held meanwhile.
  // Its exceptions are passed on.
  //
  // The first `context` tokens, kLongestMatch * 2 at most, are held elsewhere too, as the marks of
  // a log tell of its documents: no n-gram that ends there is indexed.
  virtual void add(const Token* tokens, std::int64_t size, std::int64_t prompt_size,
                   const Grow& grow, std::int64_t context) = 0;
  void add(const Token* tokens, std::int64_t size, std::int64_t prompt_size,
           const Grow& grow = nullptr) {
    add(tokens, size, prompt_size, grow, 0);
  }

  // Writes the store as a frozen one, replacing the file at `path` if there is
  // one, at once: an error or an interrupt leaves that as it was. Text that is added
  // or leaves meanwhile may or may not be in it. Needs about 20 bytes a token of memory, for 2^25
  // tokens at most. Throws DatastoreError or DatastoreClosedError.
  void save(const std::string& path) const;

  // Frees what the store holds. To readers it is an empty store from now on, and
  // requests go on without it.
  virtual void close() = 0;
  bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }

  virtual bool frozen() const noexcept = 0;
  // The tokens held, the documents that begin there, and the memory or the file that
  // holds them and their index.
  virtual std::int64_t num_tokens() const = 0;
  virtual std::int64_t num_documents() const = 0;
  virtual std::int64_t bytes() const = 0;
  // The limit of a live store, the file's size of a frozen one.
  virtual std::int64_t max_bytes() const noexcept = 0;
  // Sets the limit of a live store; the oldest text leaves as needed. The index keeps its memory,
  // and the latest 1,364 tokens stay: where that is more than `max_bytes`, it is the limit.
  // Returns the limit. Readers wait for one chunk of 1,364 tokens at a time. Throws
  // InvalidValueError below 0, DatastoreError for a frozen store, or DatastoreClosedError.
  virtual std::int64_t limit(std::int64_t max_bytes) = 0;
  const std::optional<Fingerprint>& fingerprint() const noexcept { return fingerprint_; }

  // For engines: what the requests that run have written so far and will enter a live store when
  // they finish. Its bytes are the store's, a quarter of the limit at most. It is not among the
  // documents, and is not saved. Null for a frozen store.
  virtual RunningTexts* running() noexcept { return nullptr; }

  // For engines: weights of particular tokens, learned from the requests whose text enters this
  // live store. The table counts among the store's bytes, takes 128 KB at most, and is replaced by
  // a larger one as the text grows; a request keeps the table that it was given. The first begins
  // with what `saved` has learned, if that is not null. Null for a frozen store, and for one with
  // little memory, or with little text and nothing saved.
  virtual std::shared_ptr<TokenWeights> token_weights(const TokenWeights* /*saved*/) {
    return nullptr;
  }
  // The weights that a live store's table has learned so far, or those in a frozen store's file.
  // Null: none.
  virtual std::shared_ptr<const TokenWeights> learned_weights() const = 0;

 protected:
  explicit Datastore(const std::optional<Fingerprint>& fingerprint);

  // Under the lock, shared or exclusive.
  virtual void begin(Lookup& lookup) const = 0;
  virtual void go_on(const Lookup& lookup) const = 0;
  virtual int find(const Lookup& lookup, Occurrence* out, int most, int links) const = 0;
  virtual std::int64_t read(std::int64_t position, Token* out, std::int64_t most) const = 0;
  virtual bool output(std::int64_t position) const = 0;
  virtual std::int64_t begin() const = 0;
  virtual std::int64_t end() const = 0;

  const std::unique_ptr<PhaseFairMutex> mutex_;
  std::atomic<bool> closed_{false};
  std::optional<Fingerprint> fingerprint_;
  // Greater ones are damage, which must not reach a model's embedding.
  Token largest_token_ = std::numeric_limits<Token>::max();
};

using Stores = std::vector<std::shared_ptr<Datastore>>;

// Writes a frozen store from documents, one after another, in bounded memory.
//
// Calls wait for each other. After finish(), discard() or an error of the file, which
// removes what was written, they throw DatastoreClosedError, but for discard(). The file is the
// process's that began it: a fork of it that writes gets a DatastoreError, and leaves the file
// alone.
class FASTDRAFT_EXPORT DatastoreWriter {
 public:
  // The number of tokens of a segment, which has an index of its own. Indexing one takes
  // about 20 bytes a token of memory.
  static constexpr std::int64_t kSegmentTokens = std::int64_t{1} << 25;
  static constexpr std::int64_t kLeastSegmentTokens = 1024;

  // Begins the temporary file `path`.tmp, replacing one whose writer was killed. Throws
  // DatastoreError, also while another writer has it, and InvalidValueError for a `segment_tokens`
  // outside kLeastSegmentTokens .. kSegmentTokens.
  DatastoreWriter(const std::string& path, const std::optional<Fingerprint>& fingerprint,
                  std::int64_t segment_tokens = kSegmentTokens);
  DatastoreWriter(const DatastoreWriter&) = delete;
  DatastoreWriter& operator=(const DatastoreWriter&) = delete;
  ~DatastoreWriter();

  // The next tokens are another document. The first `context` tokens of it,
  // kLongestMatch * 2 at most, are stored elsewhere too, and only tell how far
  // an occurrence reaches back.
  void begin_document(std::int64_t context = 0);

  // Appends tokens to the document, a model's `output` or not. They must not be negative.
  // O(1) a token. Throws DatastoreError.
  void append(const Token* tokens, std::int64_t size, bool output = false);

  // Appends the documents of a store. One that goes on in another segment of a file is two, the
  // second with context. Throws DatastoreError or DatastoreClosedError.
  void append_all(const Datastore& source);

  // Writes the store's token weights into the file too. Throws DatastoreClosedError.
  void set_weights(const Datastore& source);

  // Completes the file and puts it at `path`. Throws DatastoreError.
  void finish();

  // Removes the temporary file, as does the destructor.
  void discard() noexcept;

  // The counts of what was appended so far.
  std::int64_t num_tokens() const;
  std::int64_t num_documents() const;

 private:
  class FileWriter;
  FileWriter& writer() const;

  mutable std::mutex mutex_;
  std::unique_ptr<FileWriter> writer_;
};

}  // namespace fastdraft

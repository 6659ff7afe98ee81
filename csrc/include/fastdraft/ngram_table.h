// A table of n-grams: which tokens often follow the last one, two or three of a text.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/export.h"
#include "fastdraft/token.h"

namespace fastdraft {

class MappedFile;
class OutputFile;

// A file of n-grams that was counted beforehand, mapped read-only. The drafter takes its likeliest
// tokens as candidates where nothing that a request can copy from reaches far.
//
// Immutable, so thread-safe; engines share one through a shared_ptr, and processes its memory.
class FASTDRAFT_EXPORT NgramTable {
 public:
  static constexpr int kOrders = 3;      // a context has 1 to kOrders tokens
  static constexpr int kSuccessors = 8;  // the most of a context
  // Probabilities in half bits: 2^(-n / 2), n below kHalfBits.
  static constexpr int kHalfBits = 12;
  static constexpr double kLeastProbability = 0.02;
  static constexpr Token kLargestToken = (Token{1} << 20) - 1;

  // A token that may follow a text.
  struct Guess {
    Token token;
    int order;      // the length of the context that it follows
    int half_bits;  // of its probability there
  };

  // The tokens that follow a context, the likeliest first; none where the table has no such one.
  class Successors {
   public:
    Successors() = default;
    Successors(const std::uint8_t* words, int size) noexcept : words_(words), size_(size) {}

    int size() const noexcept { return size_; }
    Token token(int i) const noexcept { return static_cast<Token>(read_word(words_, i) >> 4); }
    // The context has `order` tokens. In a damaged file a probability may be any.
    Guess guess(int i, int order) const noexcept {
      const auto half_bits = static_cast<int>(read_word(words_, i) & 15);
      return {token(i), order, std::min(half_bits, kHalfBits - 1)};
    }

   private:
    const std::uint8_t* words_ = nullptr;
    int size_ = 0;
  };

  // The tokens that follow the last token of a text, the last two, and so on.
  struct Behind {
    std::array<Successors, kOrders> contexts;
    int orders = 0;  // how many of these contexts the table has, the shortest first

    // Writes the likeliest tokens to `out`, at most `most`, and returns their number. The tokens
    // that follow the longest context come first, the likeliest of them first. Then come those that
    // follow only a shorter context.
    int likeliest(Guess* out, int most) const noexcept;
  };

  // Throws DatastoreError, in a sentence, for what is no table, or a newer, truncated or damaged
  // one, or one whose fingerprint is not the `expected` one. Reads all of it once: milliseconds.
  static std::shared_ptr<const NgramTable> open(const std::string& path,
                                                const std::optional<Fingerprint>& expected = {});

  NgramTable(const NgramTable&) = delete;
  NgramTable& operator=(const NgramTable&) = delete;
  ~NgramTable();

  // The successors of a context. Its hash is made token by token, from the last one backwards:
  // longer(longer(0, last), second) for two. A table that has a context has all shorter ones.
  static std::uint64_t longer(std::uint64_t hash, Token before) noexcept {
    const std::uint64_t mixed =
        (hash ^ (static_cast<std::uint64_t>(before) + 1)) * 0x9E3779B97F4A7C15u;
    return mixed ^ mixed >> 32;
  }
  // About a cache line of the file's index, and one of its words.
  Successors find(std::uint64_t hash) const noexcept {
    const std::uint64_t bucket = bucket_of(hash, num_buckets_);
    std::uint32_t at = buckets_[bucket];
    const std::uint32_t end = buckets_[bucket + 1];
    // The file may be damaged after it was opened.
    if (end > num_words_) return {};
    while (at < end) {
      const std::uint32_t head = read_word(words_, at);
      const std::uint32_t size = (head & 7) + 1;
      if (size >= end - at) break;
      if (head >> 3 == check_of(hash)) {
        return {words_ + kWordBytes * (std::size_t{at} + 1), static_cast<int>(size)};
      }
      at += 1 + size;
    }
    return {};
  }

  // `before`: the text's last tokens, from the last one backwards; -1: there is none.
  Behind behind(const std::array<Token, kOrders>& before) const noexcept;

  // Behind::likeliest after a text.
  int guess(const Token* text, std::int64_t size, Guess* out, int most) const noexcept;

  // How many tokens of a text, but for its first one, are among the `most` likeliest there.
  std::int64_t count_known(const Token* text, std::int64_t size, int most) const;

  const std::optional<Fingerprint>& fingerprint() const noexcept { return fingerprint_; }
  Token largest_token() const noexcept { return largest_token_; }  // -1: it is empty
  std::int64_t num_contexts() const noexcept { return num_contexts_; }
  std::int64_t num_successors() const noexcept { return num_successors_; }
  std::int64_t bytes() const noexcept;

 private:
  friend class NgramTableWriter;

  explicit NgramTable(const std::string& path, const std::optional<Fingerprint>& expected);

  static constexpr std::size_t kWordBytes = 3;
  // Three bytes, the lowest first. A byte more is read.
  static std::uint32_t read_word(const std::uint8_t* words, std::int64_t i) noexcept {
    std::uint32_t bits;
    std::memcpy(&bits, words + static_cast<std::ptrdiff_t>(kWordBytes) * i, sizeof(bits));
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    bits = __builtin_bswap32(bits);
#endif
    return bits & 0xFFFFFFu;
  }
  static std::uint64_t bucket_of(std::uint64_t hash, std::uint32_t buckets) noexcept {
    return (hash >> 32) * buckets >> 32;
  }
  static std::uint32_t check_of(std::uint64_t hash) noexcept {
    return static_cast<std::uint32_t>(hash & 0x1FFFFFu);
  }

  std::unique_ptr<MappedFile> file_;
  const std::uint32_t* buckets_ = nullptr;  // where the words of each begin, and the last one's end
  const std::uint8_t* words_ = nullptr;
  std::uint32_t num_buckets_ = 0;
  std::uint32_t num_words_ = 0;
  std::optional<Fingerprint> fingerprint_;
  Token largest_token_ = -1;
  std::int64_t num_contexts_ = 0;
  std::int64_t num_successors_ = 0;
};

// Counts the n-grams of texts and writes their table.
//
// Not thread-safe.
class FASTDRAFT_EXPORT NgramTableWriter {
 public:
  // A token's probability after a context is by absolute discounting: what each n-gram gives up
  // goes to what the shorter context has (H. Ney, U. Essen and R. Kneser, 1994).
  static constexpr double kDiscount = 0.75;
  // N-grams of one text alone are not in the table.
  static constexpr std::uint32_t kLeastTexts = 2;

  // Throws as OutputFile: the folder must be there, and no other writer at the path.
  explicit NgramTableWriter(const std::string& path,
                            const std::optional<Fingerprint>& fingerprint = {});
  NgramTableWriter(const NgramTableWriter&) = delete;
  NgramTableWriter& operator=(const NgramTableWriter&) = delete;
  ~NgramTableWriter();  // removes what was not finished

  // Counts a text. Texts of one `group`, 0 or greater, such as answers to one question, count as
  // one: an n-gram counts once for each group that has it. Throws InvalidValueError for a token
  // outside 0 .. kLargestToken, or a group below 0 or beyond 2^32 - 1.
  void add(const Token* tokens, std::int64_t count, std::int64_t group);

  // Writes the table and moves it to its path. Takes about 50 bytes a token of memory. Throws
  // DatastoreError where it cannot be written, and for the second call.
  void finish();

  std::int64_t num_tokens() const noexcept { return static_cast<std::int64_t>(tokens_.size()); }

 private:
  struct Text {
    std::size_t end;  // in tokens_
    std::uint32_t group;
  };

  std::unique_ptr<OutputFile> file_;  // null: finished
  const std::optional<Fingerprint> fingerprint_;
  std::vector<Token> tokens_;
  std::vector<Text> texts_;
};

}  // namespace fastdraft

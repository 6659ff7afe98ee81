#include "fastdraft/ngram_table.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "fastdraft/error.h"
#include "fastdraft/interrupt.h"
#include "store/datastore_file.h"

namespace fastdraft {
namespace {

// The file: this header, where each bucket's words begin and where the last one's end, and the
// words, of three bytes each. A context is a word with 21 bits of its hash and the number of its
// successors, less one, and a word for each of them: 20 bits of token, 4 of probability.
struct TableHeader {
  static constexpr std::array<std::uint8_t, 8> kMagic{0x89, 'F', 'D', 'N', '\r', '\n', 0x1A, '\n'};
  static constexpr std::uint32_t kVersion = 1;
  static constexpr std::uint32_t kByteOrder = 0x01020304;
  static constexpr std::int64_t kBytes = 96;

  std::array<std::uint8_t, 8> magic;
  std::uint32_t version;
  std::uint32_t byte_order;
  Fingerprint fingerprint;
  std::uint32_t has_fingerprint;
  Token largest_token;
  std::int64_t num_contexts;
  std::int64_t num_successors;
  std::int64_t file_bytes;
  std::uint32_t num_buckets;
  std::uint32_t num_words;
  std::uint32_t contents_checksum;  // of all behind the header
  std::uint32_t checksum;           // of all fields before this one
};
static_assert(sizeof(TableHeader) == TableHeader::kBytes);

// Bytes that a word's read goes beyond it.
constexpr std::int64_t kPadding = 1;
constexpr std::int64_t kContextsPerBucket = 2;

// The tokens of a context, the last one in the highest bits: sorted, those with a shorter context
// in common lie together.
using Context = std::uint64_t;
constexpr int kTokenBits = 20;
static_assert(NgramTable::kLargestToken == (Token{1} << kTokenBits) - 1);
static_assert(NgramTable::kOrders * kTokenBits <= 64);

// An n-gram of a group of texts.
struct Occurring {
  Context context;
  Token successor;
  std::uint32_t group;

  bool operator<(const Occurring& other) const noexcept {
    if (context != other.context) return context < other.context;
    return successor != other.successor ? successor < other.successor : group < other.group;
  }
  bool operator==(const Occurring& other) const noexcept {
    return context == other.context && successor == other.successor && group == other.group;
  }
};

// An n-gram of any text, and its probability after its context.
struct Counted {
  Context context;
  Token successor;
  std::uint32_t groups;
  double probability;
};

std::uint64_t hash_of(Context context, int order) noexcept {
  std::uint64_t hash = 0;
  for (int i = order; i-- > 0;) {
    hash = NgramTable::longer(
        hash, static_cast<Token>(context >> (i * kTokenBits)) & NgramTable::kLargestToken);
  }
  return hash;
}

// A context that the table will have.
struct Entry {
  std::uint64_t hash;
  std::vector<std::uint32_t> successors;  // as words
};

// The words of the likeliest of a context's n-grams.
std::vector<std::uint32_t> likeliest(const Counted* first, const Counted* last) {
  std::vector<const Counted*> kept;
  for (; first != last; ++first) {
    if (first->probability < NgramTable::kLeastProbability) continue;
    if (first->groups >= NgramTableWriter::kLeastTexts) kept.push_back(first);
  }
  std::stable_sort(kept.begin(), kept.end(), [](const Counted* one, const Counted* other) {
    return one->probability > other->probability;
  });
  if (kept.size() > NgramTable::kSuccessors) kept.resize(NgramTable::kSuccessors);
  std::vector<std::uint32_t> words;
  for (const Counted* each : kept) {
    const auto half_bits = std::clamp<long>(std::lround(-2.0 * std::log2(each->probability)), 0,
                                            NgramTable::kHalfBits - 1);
    words.push_back(static_cast<std::uint32_t>(each->successor) << 4 |
                    static_cast<std::uint32_t>(half_bits));
  }
  return words;
}

}  // namespace

NgramTable::NgramTable(const std::string& path, const std::optional<Fingerprint>& expected)
    : file_(std::make_unique<MappedFile>(path)) {
  const auto header = read_header<TableHeader>(*file_, path, "a table of n-grams");
  check_file_bytes(*file_, path, header.file_bytes);
  const std::byte* data = file_->data();
  const std::int64_t bytes = file_->bytes();
  const std::int64_t index_bytes =
      (std::int64_t{header.num_buckets} + 1) * std::int64_t{sizeof(std::uint32_t)};
  const std::int64_t word_bytes = std::int64_t{header.num_words} * std::int64_t{kWordBytes};
  const auto begin = static_cast<std::int64_t>(sizeof(header));
  if (header.num_buckets == 0 || bytes != begin + index_bytes + word_bytes + kPadding ||
      header.contents_checksum != crc32(data + begin, bytes - begin)) {
    refuse_file(path, "the checksum of its n-grams is wrong: damaged");
  }
  fingerprint_ = fingerprint_in(header, path, expected);
  buckets_ = reinterpret_cast<const std::uint32_t*>(data + begin);
  words_ = reinterpret_cast<const std::uint8_t*>(data + begin + index_bytes);
  num_buckets_ = header.num_buckets;
  num_words_ = header.num_words;
  largest_token_ = header.largest_token;
  num_contexts_ = header.num_contexts;
  num_successors_ = header.num_successors;
}

NgramTable::~NgramTable() = default;

std::shared_ptr<const NgramTable> NgramTable::open(const std::string& path,
                                                   const std::optional<Fingerprint>& expected) {
  return std::shared_ptr<const NgramTable>(new NgramTable(path, expected));
}

std::int64_t NgramTable::bytes() const noexcept { return file_->bytes(); }

int NgramTable::Behind::likeliest(Guess* out, int most) const noexcept {
  int count = 0;
  for (int order = orders; order > 0; --order) {
    const Successors& successors = contexts[static_cast<std::size_t>(order) - 1];
    for (int i = 0; i < successors.size() && count < most; ++i) {
      const Token token = successors.token(i);
      const bool is_new =
          std::none_of(out, out + count, [&](const Guess& each) { return each.token == token; });
      if (is_new) out[count++] = successors.guess(i, order);
    }
  }
  return count;
}

NgramTable::Behind NgramTable::behind(const std::array<Token, kOrders>& before) const noexcept {
  Behind found;
  std::uint64_t hash = 0;
  for (const Token token : before) {
    if (token < 0) break;
    hash = longer(hash, token);
    const Successors successors = find(hash);
    if (successors.size() == 0) break;
    found.contexts[static_cast<std::size_t>(found.orders++)] = successors;
  }
  return found;
}

int NgramTable::guess(const Token* text, std::int64_t size, Guess* out, int most) const noexcept {
  std::array<Token, kOrders> before;
  before.fill(-1);
  for (std::int64_t back = 0; back < std::min<std::int64_t>(size, kOrders); ++back) {
    before[static_cast<std::size_t>(back)] = text[size - 1 - back];
  }
  return behind(before).likeliest(out, most);
}

std::int64_t NgramTable::count_known(const Token* text, std::int64_t size, int most) const {
  std::array<Guess, kOrders * kSuccessors> guesses;
  most = std::min(most, static_cast<int>(guesses.size()));
  std::int64_t known = 0;
  for (std::int64_t i = 1; i < size; ++i) {
    const int count = guess(text, i, guesses.data(), most);
    known += std::any_of(guesses.data(), guesses.data() + count,
                         [&](const Guess& each) { return each.token == text[i]; })
                 ? 1
                 : 0;
  }
  return known;
}

NgramTableWriter::NgramTableWriter(const std::string& path,
                                   const std::optional<Fingerprint>& fingerprint)
    : file_(std::make_unique<OutputFile>(path)), fingerprint_(fingerprint) {}

NgramTableWriter::~NgramTableWriter() = default;

void NgramTableWriter::add(const Token* tokens, std::int64_t count, std::int64_t group) {
  check_range("group", group, 0, std::numeric_limits<std::uint32_t>::max());
  check_each("token_ids must be from 0 to 1048575", tokens, count,
             [](Token token) { return token >= 0 && token <= NgramTable::kLargestToken; });
  tokens_.insert(tokens_.end(), tokens, tokens + count);
  texts_.push_back({tokens_.size(), static_cast<std::uint32_t>(group)});
}

void NgramTableWriter::finish() {
  if (file_ == nullptr) throw DatastoreError("the table is finished");
  // How likely each token is after nothing: its share of all.
  std::vector<Counted> shorter;
  {
    std::vector<std::uint32_t> counts;
    for (const Token token : tokens_) {
      const auto at = static_cast<std::size_t>(token);
      if (at >= counts.size()) counts.resize(at + 1);
      ++counts[at];
    }
    for (std::size_t token = 0; token < counts.size(); ++token) {
      if (counts[token] == 0) continue;
      shorter.push_back({0, static_cast<Token>(token), 0,
                         static_cast<double>(counts[token]) / static_cast<double>(tokens_.size())});
    }
  }
  TableHeader header{};
  header.largest_token = shorter.empty() ? -1 : shorter.back().successor;

  std::vector<Entry> entries;
  std::vector<Context> kept_shorter{0};
  std::vector<Occurring> occurring;
  occurring.reserve(tokens_.size());
  for (int order = 1; order <= NgramTable::kOrders; ++order) {
    check_interrupt();
    occurring.clear();
    std::size_t begin = 0;
    for (const Text& text : texts_) {
      for (std::size_t i = begin + static_cast<std::size_t>(order); i < text.end; ++i) {
        Context context = 0;
        for (std::size_t back = 1; back <= static_cast<std::size_t>(order); ++back) {
          context = context << kTokenBits | static_cast<Context>(tokens_[i - back]);
        }
        occurring.push_back({context, tokens_[i], text.group});
      }
      begin = text.end;
    }
    std::sort(occurring.begin(), occurring.end());
    occurring.erase(std::unique(occurring.begin(), occurring.end()), occurring.end());
    check_interrupt();

    std::vector<Counted> counted;
    std::vector<Context> kept;
    // Those of the shorter context.
    auto below = shorter.cbegin();
    auto end = below;
    for (std::size_t i = 0; i < occurring.size();) {
      const Context context = occurring[i].context;
      const std::size_t first = counted.size();
      std::uint32_t total = 0;
      for (; i < occurring.size() && occurring[i].context == context; ++i) {
        if (counted.size() == first || counted.back().successor != occurring[i].successor) {
          counted.push_back({context, occurring[i].successor, 0, 0.0});
        }
        ++counted.back().groups;
        ++total;
      }
      const auto kinds = static_cast<double>(counted.size() - first);
      const double left = kDiscount * kinds / total;
      while (below->context != context >> kTokenBits) ++below;
      if (end <= below) {
        end = std::find_if(below, shorter.cend(),
                           [&](const Counted& each) { return each.context != below->context; });
      }
      auto at = below;
      for (std::size_t k = first; k < counted.size(); ++k) {
        Counted& each = counted[k];
        // A token that follows a context follows the shorter one too.
        at = std::lower_bound(at, end, each.successor, [](const Counted& other, Token successor) {
          return other.successor < successor;
        });
        each.probability = (each.groups - kDiscount) / total + left * at->probability;
      }
      if (!std::binary_search(kept_shorter.begin(), kept_shorter.end(), context >> kTokenBits)) {
        continue;
      }
      std::vector<std::uint32_t> words =
          likeliest(counted.data() + first, counted.data() + counted.size());
      if (words.empty()) continue;
      header.num_successors += static_cast<std::int64_t>(words.size());
      kept.push_back(context);
      entries.push_back({hash_of(context, order), std::move(words)});
    }
    shorter = std::move(counted);
    kept_shorter = std::move(kept);
  }

  const auto num_contexts = static_cast<std::int64_t>(entries.size());
  header.num_contexts = num_contexts;
  header.num_buckets = static_cast<std::uint32_t>(num_contexts / kContextsPerBucket + 1);
  const auto bucket = [&](const Entry& entry) {
    return NgramTable::bucket_of(entry.hash, header.num_buckets);
  };
  std::stable_sort(entries.begin(), entries.end(), [&](const Entry& one, const Entry& other) {
    return bucket(one) < bucket(other);
  });
  std::vector<std::uint32_t> buckets;
  std::vector<std::uint8_t> words;
  const auto add_word = [&](std::uint32_t word) {
    for (int byte = 0; byte < 3; ++byte) {
      words.push_back(static_cast<std::uint8_t>(word >> (8 * byte)));
    }
    ++header.num_words;
  };
  for (const Entry& entry : entries) {
    while (buckets.size() <= bucket(entry)) buckets.push_back(header.num_words);
    add_word(NgramTable::check_of(entry.hash) << 3 |
             static_cast<std::uint32_t>(entry.successors.size() - 1));
    for (const std::uint32_t successor : entry.successors) add_word(successor);
  }
  while (buckets.size() <= header.num_buckets) buckets.push_back(header.num_words);
  words.resize(words.size() + kPadding);

  header.magic = TableHeader::kMagic;
  header.version = TableHeader::kVersion;
  header.byte_order = TableHeader::kByteOrder;
  if (fingerprint_) header.fingerprint = *fingerprint_;
  header.has_fingerprint = fingerprint_ ? 1 : 0;
  const auto index_bytes = static_cast<std::int64_t>(buckets.size() * sizeof(std::uint32_t));
  const auto word_bytes = static_cast<std::int64_t>(words.size());
  header.file_bytes = static_cast<std::int64_t>(sizeof(header)) + index_bytes + word_bytes;
  header.contents_checksum = crc32(words.data(), word_bytes, crc32(buckets.data(), index_bytes));
  header.checksum = crc32(&header, offsetof(TableHeader, checksum));
  file_->write(&header, static_cast<std::int64_t>(sizeof(header)));
  file_->write(buckets.data(), index_bytes);
  file_->write(words.data(), word_bytes);
  file_->complete(&header, static_cast<std::int64_t>(sizeof(header)));
  file_.reset();
}

}  // namespace fastdraft

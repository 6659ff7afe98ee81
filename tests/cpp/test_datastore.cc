// Memory. What is found is compared with lists in tests/core and in fuzz/.
#include "fastdraft/datastore.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fastdraft/error.h"
#include "folder.h"
#include "store/datastore_file.h"
#include "store/datastore_index.h"
#include "stores.h"
#include "texts.h"

namespace fastdraft {
namespace {

using testing::add_text;
using testing::Tokens;

constexpr std::int64_t kLeastBytes = 40 << 10;

TEST(Datastore, LimitHoldsWhileEveryKindOfGrowthHappens) {
  constexpr std::int64_t kLimit = 4 << 20;
  const auto store = Datastore::live(kLimit);
  std::int64_t most = 0;
  for (std::uint32_t round = 0; round < 200; ++round) {
    add_text(*store, testing::random_text(3000, round % 3 == 0 ? 4 : (1 << 22) - 1, round));
    most = std::max(most, store->bytes());
  }
  EXPECT_LE(most, kLimit);
  EXPECT_GT(most, kLimit * 19 / 20);
  EXPECT_GT(store->num_tokens(), kLimit / 60);
}

TEST(Datastore, ALowerLimitLetsTextGo) {
  // Small, and large enough for slabs.
  for (const std::int64_t tokens : {std::int64_t{20'000}, std::int64_t{2'000'000}}) {
    const auto store = Datastore::live(std::int64_t{128} << 20);
    Tokens text;
    for (Token i = 0; i < tokens; ++i) text.push_back(i % 5000);
    add_text(*store, text);
    const std::int64_t held = store->bytes();
    for (const std::int64_t limit : {held - held / 8, held - held / 4, held - held / 2}) {
      const std::int64_t before = store->num_tokens();
      EXPECT_EQ(store->limit(limit), limit);
      EXPECT_LE(store->bytes(), limit);
      EXPECT_LT(store->num_tokens(), before);
      add_text(*store, Tokens(text.begin(), text.begin() + 4000));
      EXPECT_LE(store->bytes(), limit);
      const Tokens query{1, 2, 3, 4};
      Occurrence found[4];
      const auto expected = testing::look_everywhere(*store, query, 4, 16);
      const Datastore::Reader reader(*store);
      ASSERT_EQ(reader.find(query.data(), 4, found, 4, 16), static_cast<int>(expected.size()));
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(found[i].next, expected[i].next);
      }
    }
    const std::int64_t least = store->limit(0);
    EXPECT_EQ(store->bytes(), least);
    EXPECT_GT(store->num_tokens(), 0);
    EXPECT_EQ(store->limit(held), held);
    add_text(*store, text);
    EXPECT_LE(store->bytes(), held);
    EXPECT_GT(store->bytes(), held - held / 4);
  }
}

// Samples of a few prompts, which enter again or not at all, while the limit moves.
TEST(Datastore, SamplesMoveWithinTheLimit) {
  for (const std::int64_t limit : {kLeastBytes, std::int64_t{300} << 10}) {
    const auto store = Datastore::live(limit);
    // A prompt comes again, which is known by its text from 32 tokens on.
    Tokens text(40, 7);
    for (const Token last : {8, 9}) {
      text.push_back(last);
      store->add(text.data(), 41, 40);
      text.pop_back();
    }
    std::int64_t added = 0;
    for (std::uint32_t round = 0; round < 300; ++round) {
      const auto prompt = static_cast<Token>(round * 7 % 5);
      text =
          testing::random_text(100 + round * 31 % 800, round % 3 == 0 ? 4 : (1 << 22) - 1, round);
      text.insert(text.begin(), 9, 100 + prompt);
      const auto size = static_cast<std::int64_t>(text.size());
      store->add(text.data(), size, 9);
      added += 1 + size;
      if (round % 50 == 49) store->limit(limit - (round % 100 == 49 ? limit / 3 : 0));
      ASSERT_LE(store->bytes(), store->max_bytes());
    }
    EXPECT_LE(Datastore::Reader(*store).end(), 2 * added + 100);
    EXPECT_GT(Datastore::Reader(*store).begin(), 0);
    store->close();
    EXPECT_EQ(store->bytes(), 0);
  }
}

// A file of one segment, whose content is changed.
struct DamagedFile {
  DamagedFile() {
    DatastoreWriter writer(path, {});
    for (Token i = 0; i < 4000; ++i) writer.append(&i, 1);
    writer.finish();
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    whole.resize(static_cast<std::size_t>(file.tellg()));
    file.seekg(0).read(whole.data(), static_cast<std::streamsize>(whole.size()));
    std::memcpy(&header, whole.data(), sizeof(header));
    std::memcpy(&entry, whole.data() + header.directory_offset, sizeof(entry));
  }
  std::shared_ptr<Datastore> open(const std::vector<char>& content) const {
    std::ofstream(path, std::ios::binary)
        .write(content.data(), static_cast<std::streamsize>(content.size()));
    return Datastore::open(path);
  }

  testing::Folder folder;
  std::string path = folder.file("store.fds");
  std::vector<char> whole;
  FileHeader header;
  SegmentEntry entry;
};

// A damaged file may say that its buckets are full. A search still looks at a bounded number of
// buckets and n-grams, and reads nothing outside the file.
TEST(Datastore, ASearchOfADamagedFileEnds) {
  const DamagedFile file;
  const Token token = 2000;
  const std::uint64_t hash = hash_tokens(&token, 1, 0);
  constexpr std::size_t kOrder = kNumOrders - 1;
  const auto table = static_cast<std::size_t>(SegmentLayout(file.entry).buckets[kOrder]);
  const std::int64_t count = file.entry.buckets[kOrder];
  ASSERT_GT(count, 2 * Bucket::kMostLooked);
  // Returns whether the token is found behind n entries, of another tag or of its own, which lead
  // elsewhere.
  const auto is_found = [&](std::int64_t entries, bool same_tag, Posting elsewhere) {
    std::vector<char> content = file.whole;
    std::int64_t left = entries;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = (Bucket::home(hash, count) + i) % count;
      Bucket bucket{};
      for (int position = 0; position < Bucket::kEntries; ++position, --left) {
        const std::uint8_t tag = Bucket::tag(hash);
        bucket.tags[position] =
            left == 0 || same_tag ? tag : static_cast<std::uint8_t>((tag ^ 1u) | 2u);
        // Behind the mark and the token, or behind another one.
        bucket.positions[position] =
            (left == 0 ? Posting(token + 2, false, true) : elsewhere).bits();
      }
      std::memcpy(content.data() + table + static_cast<std::size_t>(at) * sizeof(bucket), &bucket,
                  sizeof(bucket));
    }
    const auto store = file.open(content);
    Occurrence found{};
    return Datastore::Reader(*store).find(&token, 1, &found, 1) == 1 && found.next == token + 2;
  };
  constexpr std::int64_t kReached = Bucket::kMostLooked * Bucket::kEntries;
  for (const auto& [most, same_tag] :
       {std::pair{kReached, false}, std::pair{std::int64_t{Bucket::kMostCompared}, true}}) {
    EXPECT_TRUE(is_found(most - 1, same_tag, Posting(7, false, true)));
    EXPECT_FALSE(is_found(most, same_tag, Posting(7, false, true)));
  }
  constexpr std::int64_t kFar = 0x1FFFFFFF;
  for (const Posting outside : {Posting(kFar, false, true), Posting::list(kFar)}) {
    EXPECT_TRUE(is_found(3, true, outside));
  }
}

// Each number of the directory: less than 0, beyond the file's end, or so large that sums overflow.
TEST(Datastore, SectionsOutsideTheFileAreRefused) {
  const DamagedFile file;
  const std::int64_t directory = file.header.directory_offset;
  for (std::size_t field = 0; field < sizeof(SegmentEntry) / sizeof(std::int64_t); ++field) {
    for (const std::int64_t number :
         {std::int64_t{-1}, directory / 4, directory / 2, std::int64_t{1} << 61}) {
      std::vector<char> content = file.whole;
      char* at = content.data() + directory;
      std::memcpy(at + field * sizeof(number), &number, sizeof(number));
      FileHeader header = file.header;
      header.directory_checksum = crc32(at, sizeof(SegmentEntry));
      header.checksum = crc32(&header, offsetof(FileHeader, checksum));
      std::memcpy(content.data(), &header, sizeof(header));
      EXPECT_THROW(file.open(content), DatastoreError) << field << " " << number;
    }
  }
}

}  // namespace
}  // namespace fastdraft

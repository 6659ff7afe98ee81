#include "store/live_lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "fastdraft/error.h"

namespace fastdraft {
namespace {

using Posting = LiveLists::Posting;

// The oracle of a list: all postings ever added. The lists and the log show the latest 31 of them
// whose text is held.
struct Known {
  LiveLists::Address address;
  std::size_t order;
  std::uint32_t check;
  std::vector<std::pair<std::int64_t, bool>> postings;
};

void expect_postings(const LiveLists& lists, const LiveLog& log, const Known& known) {
  ASSERT_TRUE(lists.is_of(known.address, known.check));
  EXPECT_FALSE(lists.is_of(known.address, known.check ^ 1));
  LiveLists::Postings postings = lists.postings(known.address);
  int seen = 0;
  for (auto posting = known.postings.rbegin(); posting != known.postings.rend();
       ++posting, ++seen) {
    if (seen == LiveLists::kMostPostings || posting->first <= log.begin()) break;
    ASSERT_GT(postings.left(), 0);
    ASSERT_EQ(postings[0].position(log), posting->first);
    ASSERT_EQ(postings[0].output(), posting->second);
    postings.next();
  }
  // Any later posting has left.
  EXPECT_TRUE(postings.left() == 0 || seen == LiveLists::kMostPostings ||
              postings[0].position(log) <= log.begin());
}

void clean(LiveLists& lists, std::vector<Known>& all) {
  LiveLists::Block oldest;
  lists.begin_cleaning(&oldest);
  LiveLists::Leaving leaving[5];
  while (const int count = lists.next_leaving(leaving, 5)) {
    for (int i = 0; i < count; ++i) {
      const auto known = std::find_if(all.begin(), all.end(), [&](const Known& one) {
        return one.address == leaving[i].address;
      });
      if (known == all.end()) continue;
      ASSERT_EQ(leaving[i].order, known->order);
      ASSERT_EQ(leaving[i].check, known->check);
      Posting live[LiveLists::kMostPostings];
      const int postings = lists.copy_live(leaving[i].postings, live);
      if (postings == 0) {
        all.erase(known);
      } else {
        known->address = lists.make(known->order, known->check, live, postings);
      }
    }
  }
  lists.end_cleaning();
}

// Lists grow, are left behind and are cleaned while text leaves, and stay what they should be; also
// where addresses begin again.
TEST(LiveLists, HoldTheLatestPostingsWhoseTextIsHeld) {
  for (const std::uint32_t first_block : {0U, (1U << 24) - 5}) {
    LiveLog log(std::int64_t{3} << 20, 0);
    LiveLists lists;
    lists.open(log, first_block);
    std::mt19937 random(first_block);
    std::vector<Known> all;
    int cleaned = 0;
    for (int step = 0; step < 60'000; ++step) {
      log.append(1, false);
      const std::int64_t position = log.end() - 1;
      if (!lists.has_room()) {
        if (lists.num_blocks() > 24) {
          if (log.end() - log.begin() > 2 * LiveLog::kChunkTokens) log.drop_block();
          ASSERT_NO_FATAL_FAILURE(clean(lists, all));
          ++cleaned;
        }
        if (!lists.has_room()) lists.add_block();
      }
      const bool output = random() % 2 == 0;
      // Few lists are long.
      const std::size_t which = random() % (1 + random() % 3000);
      if (which >= all.size()) {
        const auto check = static_cast<std::uint32_t>(random() % (1U << 20));
        const Posting postings[] = {{position - 1, !output}, {position, output}};
        const std::size_t order = random() % kNumOrders;
        all.push_back({lists.make(order, check, postings, 2),
                       order,
                       check,
                       {{position - 1, !output}, {position, output}}});
      } else {
        all[which].address = lists.add(all[which].address, {position, output});
        all[which].postings.emplace_back(position, output);
      }
      if (step % 997 == 0) {
        for (const Known& known : all) {
          ASSERT_NO_FATAL_FAILURE(expect_postings(lists, log, known));
        }
      }
    }
    EXPECT_GT(log.begin(), 0);
    EXPECT_GT(cleaned, 10);
    EXPECT_EQ(lists.wrapped(), first_block > 0);
  }
}

// An address of long ago leads nowhere, or to what is no list, and neither is read.
TEST(LiveLists, RefusesAddressesWithoutAList) {
  LiveLog log(std::int64_t{1} << 20, 0);
  LiveLists lists;
  lists.open(log, 7);
  const LiveLists::Address first = 7 << 8;
  log.append(1, false);
  const Posting postings[] = {{0, false}, {1, true}};
  ASSERT_EQ(lists.make(0, 5, postings, 2), first);
  EXPECT_TRUE(lists.is_of(first, 5));
  EXPECT_FALSE(lists.is_list(first - 1));
  EXPECT_FALSE(lists.is_list(first + (1 << 8)));
  EXPECT_FALSE(lists.is_list(first + 1));  // what is left of the first 256 bytes
  EXPECT_TRUE(lists.has_room());
  lists.close();
  EXPECT_FALSE(lists.held(first));
}

// More would share numbers, which are parts of addresses.
TEST(LiveLists, NoMoreBlocksThanHaveNumbers) {
  LiveLog log(std::int64_t{1} << 20, 0);
  LiveLists lists;
  lists.open(log, LiveLists::kMostBlocks - 2, 3);
  const Posting posting(1, true);
  log.append(7, true);
  for (int blocks = 1; blocks < 3; ++blocks) lists.add_block();
  EXPECT_THROW(lists.add_block(), MemoryLimitError);
  LiveLists::Block oldest;
  lists.begin_cleaning(&oldest);
  lists.end_cleaning();
  lists.make(0, 0, &posting, 1);
  EXPECT_LE(lists.num_blocks(), 3);
}

}  // namespace
}  // namespace fastdraft

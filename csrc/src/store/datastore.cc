#include "fastdraft/datastore.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "fastdraft/error.h"
#include "store/datastore_index.h"
#include "store/phase_fair_mutex.h"

namespace fastdraft {

std::string to_hex(const Fingerprint& fingerprint) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const std::uint8_t byte : fingerprint) {
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

std::uint64_t random_seed() {
  std::random_device seeds;
  return (std::uint64_t{seeds()} << 32) | seeds();
}

Datastore::Datastore(const std::optional<Fingerprint>& fingerprint)
    : mutex_(std::make_unique<PhaseFairMutex>()), fingerprint_(fingerprint) {}

Datastore::~Datastore() = default;

Datastore::Reader::Reader(const Datastore& store) : store_(&store) { store.mutex_->lock_shared(); }

Datastore::Reader::~Reader() { store_->mutex_->unlock_shared(); }

Token Datastore::Reader::at(std::int64_t position) const {
  Token token = -1;
  return copy(position, &token, 1) == 1 ? token : Token{-1};
}

std::int64_t Datastore::Reader::copy(std::int64_t position, Token* out, std::int64_t most) const {
  std::int64_t copied = 0;
  while (copied < most) {
    const std::int64_t wanted = most - copied;
    const std::int64_t count =
        std::clamp<std::int64_t>(read(position + copied, out + copied, wanted), 0, wanted);
    // Negative ones are marks.
    const Token largest = store_->largest_token_;
    if (count > 0 && all_below(out + copied, count, std::int64_t{largest} + 1)) {
      copied += count;
      continue;
    }
    std::int64_t sound = copied;
    while (sound < copied + count && out[sound] >= 0 && out[sound] <= largest) ++sound;
    return sound;
  }
  return copied;
}

void Datastore::save(const std::string& path) const {
  DatastoreWriter writer(path, fingerprint());
  writer.append_all(*this);
  writer.set_weights(*this);
  writer.finish();
}

}  // namespace fastdraft

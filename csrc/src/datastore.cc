#include "fastdraft/datastore.h"

#include <algorithm>
#include <string>
#include <vector>

#include "datastore_index.h"
#include "fastdraft/error.h"
#include "phase_fair_mutex.h"

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
    const std::int64_t count = std::min(read(position + copied, out + copied, wanted), wanted);
    const std::int64_t end = copied + count;
    while (copied < end && out[copied] >= 0 && out[copied] <= store_->largest_token_) ++copied;
    if (count == 0 || copied != end) break;
  }
  return copied;
}

std::int64_t Datastore::save(const std::string& path, std::int64_t first) const {
  // So much is copied while text that is added has to wait.
  constexpr std::int64_t kStep = 4096;
  DatastoreWriter writer(path, fingerprint());
  std::vector<Token> step;
  bool output = false;  // of all tokens of the step
  std::int64_t position = std::max<std::int64_t>(first, 0);
  const std::int64_t end = Reader(*this).end();
  while (position < end) {
    {
      const Reader reader(*this);
      if (closed()) throw DatastoreClosedError("the datastore is closed");
      if (position < reader.begin()) {
        // What came before has left since, or never was held.
        writer.begin_document();
        position = reader.begin();
        continue;
      }
      step.resize(static_cast<std::size_t>(std::min(kStep, end - position)));
      const std::int64_t count =
          reader.read(position, step.data(), static_cast<std::int64_t>(step.size()));
      output = reader.output(position);
      std::int64_t alike = 1;
      while (alike < count && reader.output(position + alike) == output) ++alike;
      step.resize(static_cast<std::size_t>(alike));
    }
    position += static_cast<std::int64_t>(step.size());
    for (auto at = step.begin(); at != step.end();) {
      // What is no token is damage, which ends a document too.
      const auto mark = std::find_if(
          at, step.end(), [this](Token token) { return token < 0 || token > largest_token_; });
      writer.append(step.data() + (at - step.begin()), mark - at, output);
      if (mark != step.end()) {
        writer.begin_document(*mark < 0 ? std::min(mark_context(*mark), kContextTokens)
                                        : std::int64_t{0});
      }
      at = mark == step.end() ? mark : mark + 1;
    }
  }
  if (closed()) throw DatastoreClosedError("the datastore is closed");
  writer.finish();
  return end;
}

}  // namespace fastdraft

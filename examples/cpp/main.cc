// A decoding loop over the C++ core. The target here is a text that is known in advance: a real
// host runs its model on the draft and passes what the model emitted.
#include <fastdraft/draft.h>
#include <fastdraft/engine.h>
#include <fastdraft/error.h>
#include <fastdraft/version.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  constexpr int kPeriod = 40;
  constexpr int kPrompt = 80;
  std::vector<fastdraft::Token> text(400);
  for (std::size_t i = 0; i < text.size(); ++i) {
    text[i] = static_cast<fastdraft::Token>(i % kPeriod);
  }
  try {
    fastdraft::Engine engine{fastdraft::EngineConfig{}};
    const fastdraft::RequestId request = engine.add_request({{text.data(), kPrompt}});

    const std::int32_t most = engine.most_drafted();
    std::vector<std::byte> memory(static_cast<std::size_t>(fastdraft::DraftColumns::bytes(most)));
    const auto draft = fastdraft::DraftColumns::in(memory.data(), most);
    std::size_t position = kPrompt;
    while (position + static_cast<std::size_t>(most) < text.size()) {
      const std::int32_t drafted = engine.propose(request, {}, draft);
      const fastdraft::Token* next = text.data() + position;
      // The target accepts the draft's tokens as long as they are what it would have emitted, and
      // emits one token more.
      const std::int32_t emitted = draft.accepted(drafted, next, drafted).tokens + 1;
      engine.observe(request, next, emitted);
      position += static_cast<std::size_t>(emitted);
    }
    const fastdraft::DraftCounts counts = engine.finish(request);
    std::printf("fastdraft %s from C++: %lld tokens in %lld steps\n", FASTDRAFT_VERSION,
                static_cast<long long>(counts.emitted), static_cast<long long>(counts.steps));
    return counts.steps < counts.emitted ? 0 : 1;
  } catch (const fastdraft::Error& error) {
    std::fprintf(stderr, "fastdraft: %s\n", error.what());
    return 1;
  }
}

/* A decoding loop over the C interface. The target here is a text that is known in advance: a real
 * host runs its model on the draft and passes what the model emitted. */
#include <fastdraft/c.h>
#include <stdio.h>
#include <stdlib.h>

/* Ends the program with the library's message if a call failed. */
static void check(fastdraft_status status) {
  if (status == FASTDRAFT_OK) return;
  fprintf(stderr, "fastdraft: %s\n", fastdraft_error_message());
  exit(1);
}

enum { PERIOD = 40, PROMPT = 80, TOKENS = 400, CAPACITY = 64 };

int main(void) {
  int32_t text[TOKENS];
  for (int i = 0; i < TOKENS; ++i) text[i] = i % PERIOD;

  fastdraft_engine* engine = NULL;
  fastdraft_request request = 0;
  check(fastdraft_engine_create(NULL, NULL, 0, &engine));
  check(fastdraft_add_request(engine, text, PROMPT, NULL, &request));

  int32_t token_ids[CAPACITY];
  fastdraft_draft draft = {.size = sizeof draft, .capacity = CAPACITY, .token_ids = token_ids};
  int64_t position = PROMPT;
  while (position + CAPACITY < TOKENS) {
    check(fastdraft_propose(engine, request, NULL, &draft));
    /* The target accepts the draft's tokens as long as they are what it would have emitted, and
     * emits one token more. */
    int64_t emitted = 0;
    while (emitted < draft.count && token_ids[emitted] == text[position + emitted]) ++emitted;
    ++emitted;
    check(fastdraft_observe(engine, request, text + position, emitted));
    position += emitted;
  }

  fastdraft_stats stats = {.size = sizeof stats};
  check(fastdraft_finish(engine, request, &stats));
  fastdraft_engine_destroy(engine);
  printf("fastdraft %s from C: %lld tokens in %lld steps\n", fastdraft_version(),
         (long long)stats.emitted, (long long)stats.steps);
  return stats.steps < stats.emitted ? 0 : 1;
}

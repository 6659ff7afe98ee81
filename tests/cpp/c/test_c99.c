/* Drives the C interface as a C99 program: one request on a text that repeats itself, one that
 * drafts from a datastore, and the errors of wrong calls. */
#include <stdio.h>
#include <string.h>

#include "fastdraft/c.h"
#include "fastdraft/version.h"

#define EXPECT(condition)                                                                     \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "%s:%d: expected %s; last error: %s\n", __FILE__, __LINE__, #condition, \
              fastdraft_error_message());                                                     \
      return 1;                                                                               \
    }                                                                                         \
  } while (0)

enum { PERIOD = 50, TOKENS = 2000, CAPACITY = 64 };

int main(void) {
  int32_t text[TOKENS];
  int32_t tokens[CAPACITY];
  int32_t parents[CAPACITY];
  int64_t position = 100;
  int step;
  int i;
  fastdraft_engine* engine = NULL;
  fastdraft_request request = -1;
  fastdraft_stats stats = {.size = sizeof stats};
  fastdraft_draft draft = {.size = sizeof draft};
  fastdraft_config config = {.size = sizeof config};

  for (i = 0; i < TOKENS; ++i) text[i] = i % PERIOD;
  draft.capacity = CAPACITY;
  draft.token_ids = tokens;
  draft.parents = parents;

  EXPECT(strcmp(fastdraft_version(), FASTDRAFT_VERSION) == 0);
  EXPECT(strcmp(fastdraft_error_message(), "") == 0);
  EXPECT(fastdraft_config_init(&config) == FASTDRAFT_OK);
  EXPECT(config.lookahead == CAPACITY);
  EXPECT(fastdraft_engine_create(&config, NULL, 0, &engine) == FASTDRAFT_OK);
  EXPECT(fastdraft_add_request(engine, text, position, NULL, &request) == FASTDRAFT_OK);
  for (step = 0; step < 20; ++step) {
    EXPECT(fastdraft_propose(engine, request, NULL, &draft) == FASTDRAFT_OK);
    for (i = 0; i < draft.count; ++i) {
      EXPECT(tokens[i] == text[position + i]);
      EXPECT(parents[i] == i - 1);
    }
    EXPECT(fastdraft_observe(engine, request, text + position, draft.count + 1) == FASTDRAFT_OK);
    position += draft.count + 1;
  }
  EXPECT(fastdraft_finish(engine, request, &stats) == FASTDRAFT_OK);
  EXPECT(stats.steps == 20);
  EXPECT(stats.emitted == position - 100);
  EXPECT(stats.accepted == stats.drafted);
  EXPECT(stats.accepted > 0);

  EXPECT(fastdraft_finish(engine, request, &stats) == FASTDRAFT_UNKNOWN_REQUEST);
  EXPECT(strstr(fastdraft_error_message(), "unknown request") != NULL);
  EXPECT(fastdraft_cancel(NULL, request) == FASTDRAFT_INVALID_VALUE);
  fastdraft_engine_destroy(engine);
  fastdraft_engine_destroy(NULL);
  return 0;
}

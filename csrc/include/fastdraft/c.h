/* The C interface of fastdraft, for hosts in other languages.
 *
 *   fastdraft_engine* engine = NULL;
 *   fastdraft_request request = 0;
 *   fastdraft_engine_create(NULL, NULL, 0, &engine);
 *   fastdraft_add_request(engine, prompt, prompt_size, NULL, &request);
 *   while (...) {
 *     fastdraft_propose(engine, request, NULL, &draft);   the draft; the target verifies it
 *     fastdraft_observe(engine, request, emitted, count); the tokens that the target emitted
 *   }
 *   fastdraft_finish(engine, request, NULL);
 *   fastdraft_engine_destroy(engine);
 *
 * Status. Functions that can fail return a fastdraft_status. After a failure
 * fastdraft_error_message() says what was wrong. A failed call changes nothing, unless its comment
 * says otherwise. No C++ exception leaves the library.
 *
 * Structs. Each begins with `size`: set it to sizeof the struct and the rest to 0, as in
 * `fastdraft_propose_options options = {.size = sizeof options};`, so that 0 or NULL is each
 * member's default. Later versions only add members at the end: programs that were compiled against
 * an earlier or a later header work as long as they set no member that the library does not know.
 *
 * Handles. An engine and a datastore may be used by several threads at once. Destroy a handle when
 * no other call uses it. NULL handles are refused with FASTDRAFT_INVALID_VALUE.
 *
 * Arrays. An array of length 0 may be NULL. The library copies what it needs: no pointer has to
 * stay valid after the call. Token ids are 0 or greater. */
#ifndef FASTDRAFT_C_H
#define FASTDRAFT_C_H

#include <stddef.h>
#include <stdint.h>

#define FASTDRAFT_C_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* NOLINTBEGIN(readability-identifier-naming): C names. */

typedef int32_t fastdraft_status;
enum {
  FASTDRAFT_OK = 0,
  FASTDRAFT_INVALID_VALUE = 1,    /* an argument is out of its range */
  FASTDRAFT_UNKNOWN_REQUEST = 2,  /* the request never began, or has ended */
  FASTDRAFT_REQUEST_LIMIT = 3,    /* more tokens than one request may hold */
  FASTDRAFT_MEMORY_LIMIT = 4,     /* the engine's max_bytes or the system's memory is used up */
  FASTDRAFT_DATASTORE_ERROR = 5,  /* a file is no datastore, or no table of n-grams, is damaged, or
                                     cannot be written */
  FASTDRAFT_DATASTORE_CLOSED = 6, /* the datastore was closed */
  FASTDRAFT_INTERNAL_ERROR = 7    /* a bug of fastdraft */
};

/* What the last failed call of this thread said, until the thread's next failed call: UTF-8, at
 * most 1023 bytes; empty if none failed. */
FASTDRAFT_C_API const char* fastdraft_error_message(void);

/* The library's version, "major.minor.patch". */
FASTDRAFT_C_API const char* fastdraft_version(void);

/* Datastores: text that requests share. */

typedef struct fastdraft_datastore fastdraft_datastore;

#define FASTDRAFT_FINGERPRINT_BYTES 32
#define FASTDRAFT_DATASTORE_DEFAULT_BYTES ((int64_t)1 << 31)

/* Creates an empty store that learns from finished requests and holds at most `max_bytes`.
 * `fingerprint` is the SHA-256 of the tokenizer's vocabulary, or NULL: a program that passes it
 * cannot mix up datastores of two tokenizers. */
FASTDRAFT_C_API fastdraft_status fastdraft_datastore_live(int64_t max_bytes,
                                                          const uint8_t* fingerprint,
                                                          fastdraft_datastore** datastore);

/* Opens a file that fastdraft_datastore_save or the Python package wrote; it is mapped read-only.
 * A `fingerprint` other than NULL must be that of the file. */
FASTDRAFT_C_API fastdraft_status fastdraft_datastore_open(const char* path,
                                                          const uint8_t* fingerprint,
                                                          fastdraft_datastore** datastore);

/* Adds a document to a live store. Its tokens from token_ids[prompt_size] on are a model's output;
 * the ones before are not. The oldest documents leave if the store is full. */
FASTDRAFT_C_API fastdraft_status fastdraft_datastore_add(fastdraft_datastore* datastore,
                                                         const int32_t* token_ids, int64_t count,
                                                         int64_t prompt_size);

/* Writes the store to a file, and replaces an earlier file at `path` only once it is complete. */
FASTDRAFT_C_API fastdraft_status fastdraft_datastore_save(const fastdraft_datastore* datastore,
                                                          const char* path);

/* Frees the memory or the file. The handle stays valid; to engines the store is empty. */
FASTDRAFT_C_API fastdraft_status fastdraft_datastore_close(fastdraft_datastore* datastore);

typedef struct fastdraft_datastore_stats {
  size_t size;
  int64_t num_tokens;
  int64_t num_documents;
  int64_t num_bytes;
  int64_t max_bytes; /* of a file: its size */
  int32_t frozen;    /* 1: a file, to which nothing can be added */
  int32_t closed;
} fastdraft_datastore_stats;

FASTDRAFT_C_API fastdraft_status fastdraft_datastore_get_stats(const fastdraft_datastore* datastore,
                                                               fastdraft_datastore_stats* stats);

/* Ends the handle; NULL is ignored. Engines that use the store keep it open. */
FASTDRAFT_C_API void fastdraft_datastore_destroy(fastdraft_datastore* datastore);

/* Tables of n-grams: which tokens often follow others, counted beforehand. */

typedef struct fastdraft_ngrams fastdraft_ngrams;

/* Opens a file that the Python package wrote; it is mapped read-only. A `fingerprint` other than
 * NULL must be that of the file. */
FASTDRAFT_C_API fastdraft_status fastdraft_ngrams_open(const char* path, const uint8_t* fingerprint,
                                                       fastdraft_ngrams** ngrams);

/* Ends the handle; NULL is ignored. Engines that use the table keep it. */
FASTDRAFT_C_API void fastdraft_ngrams_destroy(fastdraft_ngrams* ngrams);

/* Engines. */

typedef struct fastdraft_engine fastdraft_engine;

/* How an engine drafts. The Python class fastdraft.DraftConfig describes the drafters. */
typedef int32_t fastdraft_drafter;
enum {
  FASTDRAFT_CALIBRATED = 0, /* the default: what is likely enough to pay, from all sources */
  FASTDRAFT_PROMPT_LOOKUP = 1,
  FASTDRAFT_NGRAM = 2,
  FASTDRAFT_PREDICTED_OUTPUTS = 3
};

/* The defaults are not all 0: fastdraft_config_init sets them. Members of drafters other than the
 * selected one are ignored. */
typedef struct fastdraft_config {
  size_t size;
  fastdraft_drafter drafter;
  int32_t lookahead;      /* the longest draft, or the depth of the tree */
  double token_cost;      /* of a further token in a forward, as a fraction of a forward */
  int32_t tree_budget;    /* calibrated: the most tokens of a draft tree; 0: chains */
  int32_t max_ngram;      /* prompt lookup: the longest n-gram that is looked up */
  int32_t ngram_order;    /* n-gram: the order of its model */
  int32_t recovery;       /* predicted outputs: how many tokens must match again */
  double min_probability; /* n-gram: of a draft */
  int64_t max_request_tokens;
  int64_t max_bytes;              /* of all running requests together */
  int64_t vocabulary;             /* of the target: ids from here on are never drafted */
  const fastdraft_ngrams* ngrams; /* calibrated: drafts where nothing can be copied; NULL: none */
  int32_t threads; /* that share a large batch, the caller's included; 0: half the processors */
} fastdraft_config;

/* Sets the members of a config, whose `size` must be set, to their defaults. */
FASTDRAFT_C_API fastdraft_status fastdraft_config_init(fastdraft_config* config);

/* Creates an engine. `config` may be NULL for the defaults. Requests draft from `datastores`, an
 * array of `num_datastores` handles, unless they bring their own. */
FASTDRAFT_C_API fastdraft_status fastdraft_engine_create(const fastdraft_config* config,
                                                         fastdraft_datastore* const* datastores,
                                                         int64_t num_datastores,
                                                         fastdraft_engine** engine);

/* Ends the engine and all its requests; NULL is ignored. */
FASTDRAFT_C_API void fastdraft_engine_destroy(fastdraft_engine* engine);

typedef struct fastdraft_engine_stats {
  size_t size;
  int64_t num_requests; /* that are running */
  int64_t num_bytes;    /* that the indexes of the running requests hold */
  int64_t num_foreign;  /* datastore tokens not drafted, since they are outside the vocabulary */
  int64_t most_drafted; /* the most tokens that one draft can have */
} fastdraft_engine_stats;

FASTDRAFT_C_API fastdraft_status fastdraft_engine_get_stats(const fastdraft_engine* engine,
                                                            fastdraft_engine_stats* stats);

/* Requests. Ids are never given out twice. */

typedef int64_t fastdraft_request;

typedef struct fastdraft_request_options {
  size_t size;
  const int32_t* prediction; /* text that the caller expects in the output */
  int64_t prediction_size;
  /* The datastores that the request may draft from. NULL: those of the engine; to use none, pass
   * any other pointer and num_datastores 0. */
  fastdraft_datastore* const* datastores;
  int64_t num_datastores;
} fastdraft_request_options;

/* Starts a request with a prompt and writes its id to `request`. `options` may be NULL. */
FASTDRAFT_C_API fastdraft_status fastdraft_add_request(fastdraft_engine* engine,
                                                       const int32_t* prompt, int64_t prompt_size,
                                                       const fastdraft_request_options* options,
                                                       fastdraft_request* request);

typedef struct fastdraft_propose_options {
  size_t size;
  const int32_t* limits; /* for each request the most tokens to draft; NULL: the config's limits */
  const double* cost;    /* cost[n - 1]: the time of a forward over n tokens, in any unit */
  int64_t cost_size;     /* 0: the config's token_cost counts */
  int32_t padded;        /* 1: the forward pads each row of a batch to the longest draft */
} fastdraft_propose_options;

/* Where a draft token was found. */
enum {
  FASTDRAFT_SOURCE_CONTEXT = 0,
  FASTDRAFT_SOURCE_PREDICTION = 1,
  FASTDRAFT_SOURCE_DATASTORE = 2, /* one that the request's text enters */
  FASTDRAFT_SOURCE_READ_ONLY = 3, /* a frozen one */
  FASTDRAFT_SOURCE_RUNNING = 4,   /* what another running request has written */
  FASTDRAFT_SOURCE_NGRAMS = 6     /* the engine's table of n-grams */
};

/* Where a proposal is written: arrays of the caller's with room for `capacity` tokens each. That
 * must be the most that can be drafted: for each request `most_drafted` of fastdraft_engine_stats,
 * or its limit where that is less. */
typedef struct fastdraft_draft {
  size_t size;
  int64_t capacity;
  int64_t count; /* the number of tokens that were written */
  int32_t* token_ids;
  /* These may be NULL. */
  int32_t* parents;     /* a token's parent is the one with this index in the same request's draft;
                           -1: the last token of the request's text. A chain is -1, 0, 1, ... */
  float* probabilities; /* that the token and all before it on its path are accepted */
  uint8_t* sources;     /* FASTDRAFT_SOURCE_... */
} fastdraft_draft;

/* Proposes the draft for a request's next step: no tokens if nothing matches or nothing pays.
 * Call fastdraft_observe before the next proposal. `options` may be NULL. */
FASTDRAFT_C_API fastdraft_status fastdraft_propose(fastdraft_engine* engine,
                                                   fastdraft_request request,
                                                   const fastdraft_propose_options* options,
                                                   fastdraft_draft* draft);

/* Proposes the drafts of `rows` requests, which are chosen together: row r's tokens are
 * offsets[r] to offsets[r + 1] - 1, so `offsets` has room for rows + 1 entries. A request that is
 * not running gets no tokens. */
FASTDRAFT_C_API fastdraft_status fastdraft_propose_batch(fastdraft_engine* engine,
                                                         const fastdraft_request* requests,
                                                         int64_t rows,
                                                         const fastdraft_propose_options* options,
                                                         fastdraft_draft* draft, int64_t* offsets);

/* Passes the tokens that the target emitted in a step: the accepted draft tokens and the one
 * after them. No tokens mean that the step was given up. On FASTDRAFT_MEMORY_LIMIT the request
 * holds, and has counted, the tokens that still fitted. */
FASTDRAFT_C_API fastdraft_status fastdraft_observe(fastdraft_engine* engine,
                                                   fastdraft_request request,
                                                   const int32_t* emitted, int64_t count);

/* The same for a batch: row r emitted emitted[offsets[r]] to emitted[offsets[r + 1] - 1], where
 * `offsets` has rows + 1 entries. A row that fails does not stop the others. Returns the status of
 * the first row that failed, and writes the status of each row to `statuses` unless that is NULL.
 * If the arguments are invalid as a whole, nothing changes and `statuses` is not written. */
FASTDRAFT_C_API fastdraft_status fastdraft_observe_batch(fastdraft_engine* engine,
                                                         const fastdraft_request* requests,
                                                         int64_t rows, const int32_t* emitted,
                                                         int64_t count, const int64_t* offsets,
                                                         fastdraft_status* statuses);

/* Counts over a request's life. The Python class fastdraft.DraftStats describes them. */
typedef struct fastdraft_stats {
  size_t size;
  int64_t steps;
  int64_t emitted;
  int64_t drafts;
  int64_t drafted;
  int64_t accepted;
  int64_t accepted_prediction;
  int64_t rejected_prediction;
} fastdraft_stats;

/* Ends a request and frees its memory. Its text enters its live datastores. `stats` may be NULL. */
FASTDRAFT_C_API fastdraft_status fastdraft_finish(fastdraft_engine* engine,
                                                  fastdraft_request request,
                                                  fastdraft_stats* stats);

/* Ends a request and frees its memory. Its text enters no datastore. */
FASTDRAFT_C_API fastdraft_status fastdraft_cancel(fastdraft_engine* engine,
                                                  fastdraft_request request);

/* NOLINTEND(readability-identifier-naming) */

#ifdef __cplusplus
}
#endif

#endif

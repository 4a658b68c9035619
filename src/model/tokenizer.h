/* model/tokenizer.h - text to token ids and back, from a tokenizer.json.
 *
 * The pipeline: added tokens taken from the raw text, normalizer, added tokens in normalised form,
 * pre-tokenizer, byte-pair encoding, post-processor; backwards: ids, token strings, decoder. A part
 * that weft does not know is refused by its name at load, never skipped.
 *
 * A tokenizer does not change once loaded; any number of threads may use one at the same time. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/object.h"
#include "base/status.h"

typedef struct weft_tokenizer weft_tokenizer; /* begins with a weft_object */

/* path: a tokenizer.json, or the folder that holds one. IO: it cannot be read; FORMAT: it is not
 * what it should be; UNSUPPORTED: it asks for a part that weft does not have. */
weft_status weft_tokenizer_load(weft_tokenizer **out, const char *path);
/* The same from memory; `name` stands for the file in messages. */
weft_status weft_tokenizer_parse(weft_tokenizer **out, const char *name, const char *json, size_t bytes);
weft_object *weft_tokenizer_object(weft_tokenizer *tokenizer);

/* A growing list of ids; zero-initialise, free with weft_token_ids_free. */
typedef struct weft_token_ids {
    int32_t *ids;
    size_t count, capacity;
} weft_token_ids;
void weft_token_ids_free(weft_token_ids *ids);

enum {
    WEFT_ENCODE_ADD_SPECIAL = 1,   /* apply the post-processor (BOS and the like) */
    WEFT_ENCODE_MATCH_SPECIAL = 2, /* "<|eot_id|>" in the text becomes the control token */
    WEFT_ENCODE_CONTINUES = 4,     /* the text stands behind a special token, not at the start of the input */
};
/* Appends the ids of text[0, bytes). Without MATCH_SPECIAL a special token's text is encoded as
 * plain text, which is what text that a user wrote needs. Bytes that are not UTF-8 are encoded as
 * single bytes. On failure nothing is appended. */
weft_status weft_tokenizer_encode(const weft_tokenizer *tokenizer, const char *text, size_t bytes, unsigned flags,
                                  weft_token_ids *out);

/* A growing text; zero-initialise, free with weft_text_free. Not closed by a NUL. */
typedef struct weft_text {
    char *data;
    size_t length, capacity;
} weft_text;
void weft_text_free(weft_text *text);

/* Appends the text of ids. Unknown ids give nothing; skip_special leaves special tokens out.
 * Bytes that are no UTF-8 become U+FFFD: one for each maximal bad part (byte-level decoders), or
 * one for each byte of the run (byte fallback). */
weft_status weft_tokenizer_decode(const weft_tokenizer *tokenizer, const int32_t *ids, size_t count, int skip_special,
                                  weft_text *out);

/* Decoding one id at a time: the pieces joined are what weft_tokenizer_decode gives for all ids.
 * A piece never ends within a character: unfinished bytes wait for the next id (with byte fallback
 * the whole run of byte tokens does, because its last byte decides how the others read). */
typedef struct weft_token_stream weft_token_stream; /* begins with a weft_object; one user at a time */
weft_status weft_token_stream_create(weft_token_stream **out, weft_tokenizer *tokenizer, int skip_special);
weft_object *weft_token_stream_object(weft_token_stream *stream);
weft_status weft_token_stream_push(weft_token_stream *stream, int32_t id, weft_text *out); /* appends; may add nothing */
/* Appends what was held back; the stream is then as new. */
weft_status weft_token_stream_finish(weft_token_stream *stream, weft_text *out);

/* One more than the largest id. */
int32_t weft_tokenizer_vocab_size(const weft_tokenizer *tokenizer);
/* -1 when there is no such token. */
int32_t weft_tokenizer_id(const weft_tokenizer *tokenizer, const char *token, size_t bytes);
/* The string as written in the file; NULL for an unknown id. */
const char *weft_tokenizer_token(const weft_tokenizer *tokenizer, int32_t id, size_t *bytes);
int weft_tokenizer_is_special(const weft_tokenizer *tokenizer, int32_t id);

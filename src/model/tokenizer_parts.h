/* model/tokenizer_parts.h - what a tokenizer is made of; seen by the tokenizer's own files only. */
#pragma once

#include <jansson.h>

#include "model/regex.h"
#include "model/tokenizer.h"

enum { WEFT__MAX_ID = 1 << 22, WEFT__MAX_STEPS = 64 };

/* ---- growing memory (tokenizer.c) ---- */

/* Room for `need` elements of `size` bytes in *memory; doubles. */
weft_status weft__grow(void *memory, size_t *capacity, size_t need, size_t size);
weft_status weft__text_append(weft_text *text, const char *data, size_t length);
weft_status weft__ids_append(weft_token_ids *ids, int32_t id);
/* A copy of a JSON string; *out is freed by its owner. */
typedef struct weft__string {
    char *data;
    size_t length;
} weft__string;
weft_status weft__string_copy(weft__string *out, const char *data, size_t length);

/* ---- vocabulary (vocab.c): id <-> string, both the model's and the added tokens' ---- */

typedef struct weft__token {
    uint32_t start, length; /* in `text`; a token may be empty, so `known` says whether it is one */
    uint8_t known, special;
    uint8_t model; /* one of model.vocab: the encoding of text gives no other */
} weft__token;

typedef struct weft__vocab {
    weft_text text;
    weft__token *tokens; /* [size] */
    size_t size, capacity;
    uint32_t *slots; /* hash of the string -> id + 1; a power of two, at most half full */
    size_t num_slots, used;
} weft__vocab;

weft_status weft__vocab_reserve(weft__vocab *vocab, size_t tokens);
/* INVALID when the id or the string is taken by another token. */
weft_status weft__vocab_add(weft__vocab *vocab, const char *string, size_t length, int32_t id);
int32_t weft__vocab_find(const weft__vocab *vocab, const char *string, size_t length); /* -1: none */
int32_t weft__vocab_find_model(const weft__vocab *vocab, const char *string, size_t length); /* no added tokens */
void weft__vocab_free(weft__vocab *vocab);

/* ---- byte-pair encoding (bpe.c) ---- */

typedef struct weft__merge {
    uint64_t pair; /* left id << 32 | right id; all ones: an empty slot */
    uint32_t rank;
    int32_t result;
} weft__merge;

typedef struct weft__bpe {
    weft__merge *merges; /* hash table of num_slots, a power of two, at most half full */
    size_t num_slots;
    int32_t unk;             /* -1: unknown characters without byte tokens vanish, as in the reference */
    int fuse_unk, byte_fallback, ignore_merges;
    int32_t short_ids[0x800]; /* ids of the tokens that are one character of one or two bytes; -1 */
    int32_t byte_ids[256];    /* ids of <0x00> to <0xFF>; -1 */
} weft__bpe;

/* Ids of one piece; scratch of a call. */
typedef struct weft__bpe_scratch {
    struct weft__symbol *symbols;
    size_t symbols_capacity;
    struct weft__candidate *heap;
    size_t heap_capacity, heap_count;
} weft__bpe_scratch;

weft_status weft__bpe_reserve(weft__bpe *bpe, size_t merges);
void weft__bpe_add_merge(weft__bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t result);
void weft__bpe_index(weft__bpe *bpe, const weft__vocab *vocab); /* fills short_ids and byte_ids */
weft_status weft__bpe_encode(const weft__bpe *bpe, const weft__vocab *vocab, const char *piece, size_t length,
                             weft__bpe_scratch *scratch, weft_token_ids *out);

/* ---- added tokens (added_tokens.c) ---- */

typedef struct weft__added {
    weft__string content;
    int32_t id;
    uint8_t special, single_word, lstrip, rstrip, normalized;
} weft__added;

typedef struct weft__trie_node {
    int32_t child, sibling; /* -1: none */
    int32_t token;          /* index of the added token that ends here; -1 */
    uint8_t byte;
} weft__trie_node;

typedef struct weft__trie {
    weft__trie_node *nodes; /* nodes[0] is the root */
    size_t count, capacity;
    int32_t first[256]; /* the root's children by byte; -1 */
} weft__trie;

typedef struct weft__added_tokens {
    weft__added *tokens;
    size_t count, capacity;
    weft__trie raw, normalized;
    weft__regex *word; /* one word character; NULL unless a token asks for single_word */
} weft__added_tokens;

void weft__trie_init(weft__trie *trie);
weft_status weft__trie_add(weft__trie *trie, const char *string, size_t length, int32_t token);
void weft__added_tokens_free(weft__added_tokens *added);

/* A stretch of text: an added token, or (token -1) text between them. */
typedef struct weft__stretch {
    size_t start, end;
    int32_t token; /* index in added->tokens */
} weft__stretch;
/* The stretch at or behind *at; moves *at behind it. 0 at the end of the text. *next holds a match
 * that was found behind the text that was just returned; begin with next->token = -1. */
int weft__added_next(const weft__added_tokens *added, const weft__trie *trie, weft__regex_match *match, int match_special,
                     const char *text, size_t length, size_t *at, weft__stretch *next, weft__stretch *out);

/* ---- normalizer and pre-tokenizer: flat lists of steps (normalize.c, pretokenize.c) ---- */

/* What a Replace or Split looks for: a literal string or an expression. */
typedef struct weft__pattern {
    weft__string literal;
    weft__regex *regex;
} weft__pattern;
void weft__pattern_free(weft__pattern *pattern);
/* The first non-empty match in text[from, length), which must be valid UTF-8 for an expression. */
weft_status weft__pattern_next(const weft__pattern *pattern, weft__regex_match *match, const char *text, size_t length,
                               size_t from, size_t *start, size_t *end, int *found);

typedef enum weft__step_kind {
    WEFT__STEP_NFC,          /* normalizer */
    WEFT__STEP_PREPEND,      /* normalizer: content in front of what is not empty */
    WEFT__STEP_REPLACE,      /* normalizer and decoder: pattern -> content */
    WEFT__STEP_SPLIT,        /* pre-tokenizer */
    WEFT__STEP_PREFIX_SPACE, /* pre-tokenizer: a space in front of a piece without one */
    WEFT__STEP_BYTES,        /* pre-tokenizer: each byte becomes its printable character */
    WEFT__STEP_METASPACE,    /* pre-tokenizer: space -> content, and content in front by `scheme` */
} weft__step_kind;

typedef enum weft__behavior {
    WEFT__REMOVED,
    WEFT__ISOLATED,
    WEFT__MERGED_WITH_PREVIOUS,
    WEFT__MERGED_WITH_NEXT,
    WEFT__CONTIGUOUS,
} weft__behavior;

typedef enum weft__prepend { WEFT__PREPEND_ALWAYS, WEFT__PREPEND_FIRST, WEFT__PREPEND_NEVER } weft__prepend;

typedef struct weft__step {
    weft__step_kind kind;
    weft__pattern pattern;
    weft__string content;
    weft__behavior behavior;
    int invert;
    weft__prepend scheme;
} weft__step;

typedef struct weft__steps {
    weft__step *steps;
    size_t count, capacity;
} weft__steps;
weft_status weft__steps_add(weft__steps *steps, weft__step **out); /* a new zeroed step */
void weft__steps_free(weft__steps *steps);

/* text -> out, which is replaced; `other` is scratch. */
weft_status weft__normalize(const weft__steps *steps, weft__regex_match *match, const char *text, size_t length,
                            weft_text *out, weft_text *other);

typedef struct weft__piece {
    size_t start, length;
} weft__piece;

typedef struct weft__pieces {
    weft_text text, other;
    weft__piece *pieces, *next;
    size_t count, capacity, next_count, next_capacity;
    struct weft__mark *marks;
    size_t marks_capacity;
} weft__pieces;
/* text -> pieces->pieces[0, count), ranges of pieces->text, none empty. at_start: the text begins the input. */
weft_status weft__pretokenize(const weft__steps *steps, weft__regex_match *match, const char *text, size_t length,
                              int at_start, weft__pieces *pieces);
void weft__pieces_free(weft__pieces *pieces);

/* The printable character that stands for each byte in byte-level vocabularies: 33-126, 161-172 and
 * 174-255 are themselves, the other 68 are U+0100 upward in byte order. */
uint32_t weft__byte_to_char(unsigned byte);
int weft__char_to_byte(uint32_t cp); /* -1: stands for no byte */

/* ---- decoder (decode.c) ---- */

typedef enum weft__decoder_kind {
    WEFT__DECODE_SPACED, /* no decoder: tokens joined by spaces */
    WEFT__DECODE_BYTES,  /* byte level */
    WEFT__DECODE_TEXT,   /* replace*, byte fallback, fuse, strip* */
    WEFT__DECODE_METASPACE,
} weft__decoder_kind;

typedef struct weft__decoder {
    weft__decoder_kind kind;
    int stage; /* while loading: how far in the order of parts */
    weft__steps replaces;
    int byte_fallback;
    int has_strip;
    weft__string strip; /* one character */
    size_t strip_start, strip_stop;
    weft__string metaspace;
    int metaspace_prefix; /* the first token loses its marks */
} weft__decoder;
void weft__decoder_free(weft__decoder *decoder);

/* ---- the whole ---- */

struct weft_tokenizer {
    weft_object object;
    weft__vocab vocab;
    weft__bpe bpe;
    weft__added_tokens added;
    weft__steps normalizer, pretokenizer;
    weft_token_ids prefix, suffix; /* post-processor: ids in front of and behind the text's */
    weft__decoder decoder;
};

weft_status weft__tokenizer_new(weft_tokenizer **out); /* empty, to be filled by the loader */

/* ---- reading the file (tokenizer_load.c, tokenizer_steps.c) ---- */

/* "FILE: FIELD: wanted W, found F"; found may be NULL (missing). */
weft_status weft__json_bad(const char *file, const char *field, const char *wanted, const json_t *found);
weft_status weft__load_normalizer(weft_tokenizer *tokenizer, const char *file, const json_t *root);
weft_status weft__load_pretokenizer(weft_tokenizer *tokenizer, const char *file, const json_t *root);
weft_status weft__load_decoder(weft_tokenizer *tokenizer, const char *file, const json_t *root);
weft_status weft__load_post_processor(weft_tokenizer *tokenizer, const char *file, const json_t *root);

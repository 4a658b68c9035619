/* model/tokenizer.c - encoding: the pipeline from text to ids, and the tokenizer's life. */
#include "model/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_parts.h"

/* What one call of encode works with. */
typedef struct {
    const weft_tokenizer *tokenizer;
    int match_special, continues;
    weft__regex_match *match;
    weft_text normal, other;
    weft__pieces pieces;
    weft__bpe_scratch scratch;
    weft_token_ids *out;
} encoder;

static weft_status encode_pieces(encoder *e, const char *text, size_t length, int at_start)
{
    const weft_tokenizer *t = e->tokenizer;
    WEFT_TRY(weft__pretokenize(&t->pretokenizer, e->match, text, length, at_start, &e->pieces));
    for (size_t i = 0; i < e->pieces.count; i++) {
        const weft__piece *piece = &e->pieces.pieces[i];
        WEFT_TRY(weft__bpe_encode(&t->bpe, &t->vocab, e->pieces.text.data + piece->start, piece->length, &e->scratch, e->out));
    }
    return WEFT_OK;
}

static weft_status encode_normalized(encoder *e, const char *text, size_t length, int at_start)
{
    const weft__added_tokens *added = &e->tokenizer->added;
    weft__stretch next = {.token = -1}, stretch;
    size_t at = 0;
    while (weft__added_next(added, &added->normalized, e->match, e->match_special, text, length, &at, &next, &stretch)) {
        if (stretch.token >= 0) WEFT_TRY(weft__ids_append(e->out, added->tokens[stretch.token].id));
        else WEFT_TRY(encode_pieces(e, text + stretch.start, stretch.end - stretch.start, at_start && stretch.start == 0));
    }
    return WEFT_OK;
}

static weft_status encode_text(encoder *e, const char *text, size_t length)
{
    const weft_tokenizer *t = e->tokenizer;
    weft__stretch next = {.token = -1}, stretch;
    size_t at = 0;
    while (weft__added_next(&t->added, &t->added.raw, e->match, e->match_special, text, length, &at, &next, &stretch)) {
        if (stretch.token >= 0) {
            WEFT_TRY(weft__ids_append(e->out, t->added.tokens[stretch.token].id));
            continue;
        }
        const char *part = text + stretch.start;
        size_t bytes = stretch.end - stretch.start;
        if (t->normalizer.count > 0) {
            WEFT_TRY(weft__normalize(&t->normalizer, e->match, part, bytes, &e->normal, &e->other));
            part = e->normal.data;
            bytes = e->normal.length;
        }
        WEFT_TRY(encode_normalized(e, part, bytes, !e->continues && stretch.start == 0));
    }
    return WEFT_OK;
}

static weft_status append_all(weft_token_ids *out, const weft_token_ids *ids)
{
    for (size_t i = 0; i < ids->count; i++) WEFT_TRY(weft__ids_append(out, ids->ids[i]));
    return WEFT_OK;
}

static weft_status encode(encoder *e, const char *text, size_t bytes, int add_special)
{
    WEFT_TRY(weft__regex_match_create(&e->match));
    if (add_special) WEFT_TRY(append_all(e->out, &e->tokenizer->prefix));
    WEFT_TRY(encode_text(e, text, bytes));
    return add_special ? append_all(e->out, &e->tokenizer->suffix) : WEFT_OK;
}

weft_status weft_tokenizer_encode(const weft_tokenizer *tokenizer, const char *text, size_t bytes, unsigned flags,
                                  weft_token_ids *out)
{
    /* Symbols are numbered by 32-bit integers, and a normalizer may make a text longer. */
    if (bytes > INT32_MAX / 8) return weft_fail(WEFT_INVALID, "a text of %zu bytes (at most %d)", bytes, INT32_MAX / 8);
    encoder e = {.tokenizer = tokenizer,
                 .match_special = (flags & WEFT_ENCODE_MATCH_SPECIAL) != 0,
                 .continues = (flags & WEFT_ENCODE_CONTINUES) != 0,
                 .out = out};
    size_t before = out->count;
    weft_status status = encode(&e, text, bytes, (flags & WEFT_ENCODE_ADD_SPECIAL) != 0);
    if (status != WEFT_OK) out->count = before;
    weft__regex_match_destroy(e.match);
    weft_text_free(&e.normal);
    weft_text_free(&e.other);
    weft__pieces_free(&e.pieces);
    free(e.scratch.symbols);
    free(e.scratch.heap);
    return status;
}

static void destroy(weft_object *object)
{
    weft_tokenizer *t = (weft_tokenizer *)object;
    weft__vocab_free(&t->vocab);
    free(t->bpe.merges);
    weft__added_tokens_free(&t->added);
    weft__steps_free(&t->normalizer);
    weft__steps_free(&t->pretokenizer);
    weft_token_ids_free(&t->prefix);
    weft_token_ids_free(&t->suffix);
    weft__decoder_free(&t->decoder);
    free(t);
}

weft_status weft__tokenizer_new(weft_tokenizer **out)
{
    weft_tokenizer *t = calloc(1, sizeof *t);
    if (t == NULL) return weft_fail(WEFT_MEMORY, "no memory for a tokenizer");
    weft_object_init(&t->object, destroy);
    weft__trie_init(&t->added.raw);
    weft__trie_init(&t->added.normalized);
    t->bpe.unk = -1;
    *out = t;
    return WEFT_OK;
}

weft_object *weft_tokenizer_object(weft_tokenizer *tokenizer)
{
    return &tokenizer->object;
}

int32_t weft_tokenizer_vocab_size(const weft_tokenizer *tokenizer)
{
    return (int32_t)tokenizer->vocab.size;
}

int32_t weft_tokenizer_id(const weft_tokenizer *tokenizer, const char *token, size_t bytes)
{
    return weft__vocab_find(&tokenizer->vocab, token, bytes);
}

static const weft__token *find_token(const weft_tokenizer *tokenizer, int32_t id)
{
    if (id < 0 || (size_t)id >= tokenizer->vocab.size || !tokenizer->vocab.tokens[id].known) return NULL;
    return &tokenizer->vocab.tokens[id];
}

const char *weft_tokenizer_token(const weft_tokenizer *tokenizer, int32_t id, size_t *bytes)
{
    const weft__token *token = find_token(tokenizer, id);
    if (token == NULL) return NULL;
    *bytes = token->length;
    return tokenizer->vocab.text.data + token->start;
}

int weft_tokenizer_is_special(const weft_tokenizer *tokenizer, int32_t id)
{
    const weft__token *token = find_token(tokenizer, id);
    return token != NULL && token->special;
}

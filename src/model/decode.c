/* model/decode.c - ids back to text, one at a time; a whole list is a stream that ends at once. */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_parts.h"
#include "model/utf8.h"

struct weft_token_stream {
    weft_object object;
    weft_tokenizer *tokenizer;
    int skip_special;
    int begun;          /* a token was pushed */
    size_t strip_left;  /* characters that Strip may still take off the start */
    weft_text bytes;    /* an unfinished character, or a run of byte tokens */
    weft_text tail;     /* characters at the end that Strip may take off */
    weft_text a, b;     /* scratch */
};

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

void weft__decoder_free(weft__decoder *decoder)
{
    weft__steps_free(&decoder->replaces);
    free(decoder->strip.data);
    free(decoder->metaspace.data);
}

/* ---- bytes ---- */

/* The whole characters of s->bytes go to out, broken ones as U+FFFD. Unless `all`, what may yet
 * become a character stays. */
static weft_status flush_bytes(weft_token_stream *s, int all, weft_text *out)
{
    const char *bytes = s->bytes.data;
    size_t length = s->bytes.length, at = 0, good = 0;
    while (at < length) {
        uint32_t cp;
        size_t part = 0, size = weft__utf8_read(bytes + at, length - at, &cp, &part);
        if (size > 0) {
            at += size;
            continue;
        }
        WEFT_TRY(weft__text_append(out, bytes + good, at - good));
        good = at;
        if (!all && weft__utf8_unfinished(bytes + at, length - at)) break;
        WEFT_TRY(weft__text_append(out, replacement, 3));
        good = at += part;
    }
    WEFT_TRY(weft__text_append(out, bytes + good, at - good));
    if (at < length) memmove(s->bytes.data, bytes + at, length - at);
    s->bytes.length = length - at;
    return WEFT_OK;
}

/* A token of characters that all stand for bytes gives these bytes, any other one its own text. */
static weft_status push_byte_level(weft_token_stream *s, const char *token, size_t length, weft_text *out)
{
    size_t before = s->bytes.length;
    for (size_t at = 0; at < length;) {
        uint32_t cp = 0;
        size_t size = weft__utf8_read(token + at, length - at, &cp, NULL);
        int byte = size == 0 ? -1 : weft__char_to_byte(cp);
        if (byte < 0) {
            s->bytes.length = before;
            WEFT_TRY(weft__text_append(&s->bytes, token, length));
            break;
        }
        char one = (char)byte;
        WEFT_TRY(weft__text_append(&s->bytes, &one, 1));
        at += size;
    }
    return flush_bytes(s, 0, out);
}

/* ---- text ---- */

static int begins_with(const char *text, size_t length, const weft__string *what)
{
    return length >= what->length && memcmp(text, what->data, what->length) == 0;
}

/* Holds back the strip characters at the end of `tail`, at most strip_stop of them. */
static weft_status emit_tail(weft_token_stream *s, weft_text *out)
{
    const weft__decoder *d = &s->tokenizer->decoder;
    size_t keep = 0, unit = d->strip.length;
    while (keep < d->strip_stop && s->tail.length >= (keep + 1) * unit &&
           memcmp(s->tail.data + s->tail.length - (keep + 1) * unit, d->strip.data, unit) == 0)
        keep++;
    size_t give = s->tail.length - keep * unit;
    WEFT_TRY(weft__text_append(out, s->tail.data, give));
    if (give > 0) memmove(s->tail.data, s->tail.data + give, keep * unit);
    s->tail.length = keep * unit;
    return WEFT_OK;
}

static weft_status emit(weft_token_stream *s, const char *text, size_t length, weft_text *out)
{
    const weft__decoder *d = &s->tokenizer->decoder;
    if (!d->has_strip) return weft__text_append(out, text, length);
    while (s->strip_left > 0 && begins_with(text, length, &d->strip)) {
        text += d->strip.length;
        length -= d->strip.length;
        s->strip_left--;
    }
    if (length == 0) return WEFT_OK;
    s->strip_left = 0;
    if (d->strip_stop == 0) return weft__text_append(out, text, length);
    WEFT_TRY(weft__text_append(&s->tail, text, length));
    return emit_tail(s, out);
}

/* The byte of "<0x0A>", or -1. */
static int byte_token(const char *token, size_t length)
{
    static const char digits[] = "0123456789ABCDEF0123456789abcdef";
    if (length != 6 || memcmp(token, "<0x", 3) != 0 || token[5] != '>') return -1;
    const char *high = memchr(digits, token[3], 32), *low = memchr(digits, token[4], 32);
    if (high == NULL || low == NULL) return -1;
    return (int)((high - digits) % 16 * 16 + (low - digits) % 16);
}

/* A run of byte tokens is UTF-8, or one U+FFFD for each byte. */
static weft_status end_byte_run(weft_token_stream *s, weft_text *out)
{
    size_t length = s->bytes.length, at = 0, size = 1;
    uint32_t cp;
    while (at < length && size > 0) at += size = weft__utf8_read(s->bytes.data + at, length - at, &cp, NULL);
    s->bytes.length = 0;
    if (at == length && size > 0) return length == 0 ? WEFT_OK : emit(s, s->bytes.data, length, out);
    for (size_t i = 0; i < length; i++) WEFT_TRY(emit(s, replacement, 3, out));
    return WEFT_OK;
}

static weft_status push_text(weft_token_stream *s, const char *token, size_t length, weft_text *out)
{
    const weft__decoder *d = &s->tokenizer->decoder;
    if (d->replaces.count > 0) {
        WEFT_TRY(weft__normalize(&d->replaces, NULL, token, length, &s->a, &s->b));
        token = s->a.data;
        length = s->a.length;
    }
    int byte = d->byte_fallback ? byte_token(token, length) : -1;
    if (byte >= 0) {
        char one = (char)byte;
        return weft__text_append(&s->bytes, &one, 1);
    }
    WEFT_TRY(end_byte_run(s, out));
    return emit(s, token, length, out);
}

static weft_status push_metaspace(weft_token_stream *s, const char *token, size_t length, weft_text *out)
{
    const weft__decoder *d = &s->tokenizer->decoder;
    while (length > 0) {
        size_t size = begins_with(token, length, &d->metaspace) ? d->metaspace.length : 0;
        if (size == 0) WEFT_TRY(weft__text_append(out, token, size = 1));
        else if (s->begun || !d->metaspace_prefix) WEFT_TRY(weft__text_append(out, " ", 1));
        token += size;
        length -= size;
    }
    return WEFT_OK;
}

/* ---- streams ---- */

static void reset(weft_token_stream *s)
{
    s->begun = 0;
    s->strip_left = s->tokenizer->decoder.strip_start;
    s->bytes.length = s->tail.length = 0;
}

static void free_texts(weft_token_stream *s)
{
    weft_text_free(&s->bytes);
    weft_text_free(&s->tail);
    weft_text_free(&s->a);
    weft_text_free(&s->b);
}

weft_status weft_token_stream_push(weft_token_stream *s, int32_t id, weft_text *out)
{
    size_t length;
    const char *token = weft_tokenizer_token(s->tokenizer, id, &length);
    if (token == NULL || (s->skip_special && weft_tokenizer_is_special(s->tokenizer, id))) return WEFT_OK;
    switch (s->tokenizer->decoder.kind) {
    case WEFT__DECODE_BYTES: WEFT_TRY(push_byte_level(s, token, length, out)); break;
    case WEFT__DECODE_TEXT: WEFT_TRY(push_text(s, token, length, out)); break;
    case WEFT__DECODE_METASPACE: WEFT_TRY(push_metaspace(s, token, length, out)); break;
    default:
        if (s->begun) WEFT_TRY(weft__text_append(out, " ", 1));
        WEFT_TRY(weft__text_append(out, token, length));
    }
    s->begun = 1;
    return WEFT_OK;
}

weft_status weft_token_stream_finish(weft_token_stream *s, weft_text *out)
{
    weft_status status = s->tokenizer->decoder.kind == WEFT__DECODE_BYTES ? flush_bytes(s, 1, out) : end_byte_run(s, out);
    reset(s);
    return status;
}

static void destroy_stream(weft_object *object)
{
    weft_token_stream *s = (weft_token_stream *)object;
    free_texts(s);
    WEFT_RELEASE(s->tokenizer);
    free(s);
}

weft_status weft_token_stream_create(weft_token_stream **out, weft_tokenizer *tokenizer, int skip_special)
{
    weft_token_stream *s = calloc(1, sizeof *s);
    if (s == NULL) return weft_fail(WEFT_MEMORY, "no memory for a token stream");
    weft_object_init(&s->object, destroy_stream);
    s->tokenizer = WEFT_RETAIN(tokenizer);
    s->skip_special = skip_special;
    reset(s);
    *out = s;
    return WEFT_OK;
}

weft_object *weft_token_stream_object(weft_token_stream *stream)
{
    return &stream->object;
}

weft_status weft_tokenizer_decode(const weft_tokenizer *tokenizer, const int32_t *ids, size_t count, int skip_special,
                                  weft_text *out)
{
    /* Never counted and never released: it only borrows the tokenizer for this call. */
    weft_token_stream stream = {.tokenizer = (weft_tokenizer *)tokenizer, .skip_special = skip_special};
    size_t before = out->length;
    reset(&stream);
    weft_status status = WEFT_OK;
    for (size_t i = 0; i < count && status == WEFT_OK; i++) status = weft_token_stream_push(&stream, ids[i], out);
    if (status == WEFT_OK) status = weft_token_stream_finish(&stream, out);
    if (status != WEFT_OK) out->length = before;
    free_texts(&stream);
    return status;
}

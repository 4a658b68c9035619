/* model/normalize.c - steps of the normalizer: NFC, Prepend, Replace. */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_parts.h"
#include "model/utf8.h"

#ifdef WEFT_HAVE_UTF8PROC
#include <utf8proc.h>
#endif

void weft__pattern_free(weft__pattern *pattern)
{
    free(pattern->literal.data);
    weft__regex_destroy(pattern->regex);
}

weft_status weft__pattern_next(const weft__pattern *pattern, weft__regex_match *match, const char *text, size_t length,
                               size_t from, size_t *start, size_t *end, int *found)
{
    *found = 0;
    if (pattern->regex == NULL) {
        const weft__string *literal = &pattern->literal;
        const char *at = from < length ? memmem(text + from, length - from, literal->data, literal->length) : NULL;
        if (at == NULL) return WEFT_OK;
        *start = (size_t)(at - text);
        *end = *start + literal->length;
        *found = 1;
        return WEFT_OK;
    }
    while (from < length) {
        WEFT_TRY(weft__regex_find(pattern->regex, match, text, length, from, start, end, found));
        if (!*found || *end > *start) return WEFT_OK;
        /* An empty match cuts nothing off: look on behind the next character. */
        uint32_t cp;
        from = *start;
        if (from < length) from += weft__utf8_read(text + from, length - from, &cp, NULL);
        *found = 0;
    }
    return WEFT_OK;
}

weft_status weft__steps_add(weft__steps *steps, weft__step **out)
{
    if (steps->count >= WEFT__MAX_STEPS) return weft_fail(WEFT_UNSUPPORTED, "more than %d steps", WEFT__MAX_STEPS);
    WEFT_TRY(weft__grow(&steps->steps, &steps->capacity, steps->count + 1, sizeof *steps->steps));
    *out = &steps->steps[steps->count++];
    memset(*out, 0, sizeof **out);
    return WEFT_OK;
}

void weft__steps_free(weft__steps *steps)
{
    for (size_t i = 0; i < steps->count; i++) {
        weft__pattern_free(&steps->steps[i].pattern);
        free(steps->steps[i].content.data);
    }
    free(steps->steps);
}

static weft_status replace_run(const weft__step *step, weft__regex_match *match, const char *text, size_t length, weft_text *out)
{
    size_t at = 0, start = 0, end = 0;
    int found = 0;
    for (;; at = end) {
        WEFT_TRY(weft__pattern_next(&step->pattern, match, text, length, at, &start, &end, &found));
        if (!found) return weft__text_append(out, text + at, length - at);
        WEFT_TRY(weft__text_append(out, text + at, start - at));
        WEFT_TRY(weft__text_append(out, step->content.data, step->content.length));
    }
}

/* Canonical composition. Every character below U+0300 is composed already. */
static weft_status compose_run(const char *text, size_t length, weft_text *out)
{
    size_t plain = 0;
    while (plain < length && (unsigned char)text[plain] < 0xcc) plain++; /* 0xcc leads U+0300 */
    if (plain == length) return weft__text_append(out, text, length);
#ifdef WEFT_HAVE_UTF8PROC
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t size = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)length, &composed,
                                         UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (size < 0) return weft_fail(WEFT_MEMORY, "NFC: %s", utf8proc_errmsg(size));
    weft_status status = weft__text_append(out, (const char *)composed, (size_t)size);
    free(composed);
    return status;
#else
    return weft_fail(WEFT_UNSUPPORTED, "this text needs Unicode normalisation (NFC), for which weft is built with utf8proc");
#endif
}

/* The runs of valid UTF-8 pass through the step; other bytes are copied. */
static weft_status step_on_runs(const weft__step *step, weft__regex_match *match, const char *text, size_t length, weft_text *out)
{
    size_t run = 0, at = 0;
    while (run < length) {
        uint32_t cp;
        size_t bytes;
        while (at < length && (bytes = weft__utf8_read(text + at, length - at, &cp, NULL)) > 0) at += bytes;
        if (at > run)
            WEFT_TRY(step->kind == WEFT__STEP_NFC ? compose_run(text + run, at - run, out)
                                                  : replace_run(step, match, text + run, at - run, out));
        if (at < length) WEFT_TRY(weft__text_append(out, text + at++, 1));
        run = at;
    }
    return WEFT_OK;
}

static weft_status apply(const weft__step *step, weft__regex_match *match, const weft_text *in, weft_text *out)
{
    out->length = 0;
    switch (step->kind) {
    case WEFT__STEP_PREPEND:
        if (in->length > 0) WEFT_TRY(weft__text_append(out, step->content.data, step->content.length));
        return weft__text_append(out, in->data, in->length);
    case WEFT__STEP_REPLACE:
        if (step->pattern.regex == NULL) return replace_run(step, match, in->data, in->length, out);
        return step_on_runs(step, match, in->data, in->length, out);
    default: return step_on_runs(step, match, in->data, in->length, out);
    }
}

weft_status weft__normalize(const weft__steps *steps, weft__regex_match *match, const char *text, size_t length,
                            weft_text *out, weft_text *other)
{
    out->length = 0;
    WEFT_TRY(weft__text_append(out, text, length));
    for (size_t i = 0; i < steps->count; i++) {
        WEFT_TRY(apply(&steps->steps[i], match, out, other));
        weft_text swap = *out;
        *out = *other;
        *other = swap;
    }
    return WEFT_OK;
}

/* model/regex.c - matching; the translation of expressions is in regex_translate.c. */
#include "model/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "model/regex_translate.h"

struct weft__regex {
    pcre2_code *code;
};

struct weft__regex_match {
    pcre2_match_data *data;
    pcre2_match_context *context;
};

enum { MAX_PATTERN = 1 << 16, MATCH_LIMIT = 20000000, HEAP_LIMIT_KIB = 256 * 1024 };

weft_status weft__regex_create(weft__regex **out, const char *pattern, size_t length)
{
    if (length > MAX_PATTERN) return weft_fail(WEFT_UNSUPPORTED, "an expression of %zu bytes (at most %d)", length, MAX_PATTERN);
    if (memchr(pattern, 0, length) != NULL) return weft_fail(WEFT_UNSUPPORTED, "an expression with a NUL in it");
    weft_text text = {0};
    weft_status status = weft__regex_translate(pattern, length, &text);
    pcre2_compile_context *context = NULL;
    weft__regex *regex = NULL;
    if (status != WEFT_OK) goto out;
    regex = calloc(1, sizeof *regex);
    context = pcre2_compile_context_create(NULL);
    if (regex == NULL || context == NULL) {
        status = weft_fail(WEFT_MEMORY, "no memory for an expression");
        goto out;
    }
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    int error = 0;
    PCRE2_SIZE offset = 0;
    regex->code = pcre2_compile((PCRE2_SPTR)text.data, text.length,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &offset, context);
    if (regex->code == NULL) {
        PCRE2_UCHAR message[160];
        pcre2_get_error_message(error, message, sizeof message);
        status = weft_fail(WEFT_FORMAT, "%s", (const char *)message);
        goto out;
    }
    pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE); /* without it matching is slower, nothing else */
    *out = regex;
    regex = NULL;
out:
    pcre2_compile_context_free(context);
    free(regex);
    weft_text_free(&text);
    return status;
}

void weft__regex_destroy(weft__regex *regex)
{
    if (regex == NULL) return;
    pcre2_code_free(regex->code);
    free(regex);
}

weft_status weft__regex_match_create(weft__regex_match **out)
{
    weft__regex_match *match = calloc(1, sizeof *match);
    if (match != NULL) {
        match->data = pcre2_match_data_create(1, NULL);
        match->context = pcre2_match_context_create(NULL);
    }
    if (match == NULL || match->data == NULL || match->context == NULL) {
        weft__regex_match_destroy(match);
        return weft_fail(WEFT_MEMORY, "no memory to match an expression");
    }
    pcre2_set_match_limit(match->context, MATCH_LIMIT);
    pcre2_set_heap_limit(match->context, HEAP_LIMIT_KIB);
    *out = match;
    return WEFT_OK;
}

void weft__regex_match_destroy(weft__regex_match *match)
{
    if (match == NULL) return;
    pcre2_match_data_free(match->data);
    pcre2_match_context_free(match->context);
    free(match);
}

weft_status weft__regex_find(const weft__regex *regex, weft__regex_match *match, const char *text, size_t length, size_t from,
                             size_t *start, size_t *end, int *found)
{
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int rc = pcre2_match(regex->code, subject, length, from, PCRE2_NO_UTF_CHECK, match->data, match->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its state on the heap */
        rc = pcre2_match(regex->code, subject, length, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match->data, match->context);
    if (rc == PCRE2_ERROR_NOMATCH) {
        *found = 0;
        return WEFT_OK;
    }
    if (rc < 0) {
        PCRE2_UCHAR message[160];
        pcre2_get_error_message(rc, message, sizeof message);
        return weft_fail(rc == PCRE2_ERROR_NOMEMORY ? WEFT_MEMORY : WEFT_UNSUPPORTED,
                         "the tokenizer's expression gave up on this text: %s", (const char *)message);
    }
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match->data);
    *start = range[0];
    *end = range[1] < range[0] ? range[0] : range[1];
    *found = 1;
    return WEFT_OK;
}

int weft__is_space(uint32_t cp)
{
    return (cp >= 0x09 && cp <= 0x0d) || cp == 0x20 || cp == 0x85 || cp == 0xa0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 || cp == 0x202f || cp == 0x205f || cp == 0x3000;
}

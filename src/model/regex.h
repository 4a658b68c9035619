/* model/regex.h - the regular expressions of tokenizer files, on PCRE2.
 *
 * The files are written for Oniguruma in Ruby's syntax. An expression is translated: \s, \w, \d and
 * \p{..} get the code points that Oniguruma gives them (PCRE2's own tables may be older), ^ and $
 * work per line, and forms that PCRE2 would read otherwise are refused. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct weft__regex weft__regex;
typedef struct weft__regex_match weft__regex_match; /* a caller's scratch; one thread at a time */

/* FORMAT or UNSUPPORTED with a text that says why; the caller adds the place. */
weft_status weft__regex_create(weft__regex **out, const char *pattern, size_t length);
void weft__regex_destroy(weft__regex *regex); /* NULL is allowed */

weft_status weft__regex_match_create(weft__regex_match **out);
void weft__regex_match_destroy(weft__regex_match *match);

/* The leftmost match in text[from, length), text being valid UTF-8. *found is 0 when there is none. */
weft_status weft__regex_find(const weft__regex *regex, weft__regex_match *match, const char *text, size_t length, size_t from,
                             size_t *start, size_t *end, int *found);

int weft__is_space(uint32_t cp); /* the 25 white space characters of Unicode */

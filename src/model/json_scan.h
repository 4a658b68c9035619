/* model/json_scan.h - reads JSON in place, for headers of a hundred megabytes that nobody trusts.
 *
 * A scanner walks the text once and keeps no tree, so what a hostile file can make it spend is
 * bounded by the file. Unsigned integers keep all 64 bits. Strings must be valid UTF-8 without a
 * NUL. Every failure is FORMAT with the byte where it happened. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct weft_json_scan {
    const unsigned char *begin, *at, *end;
} weft_json_scan;

/* The next character behind white space, or 0 at the end. */
int weft__json_peek(weft_json_scan *scan);
/* Takes `character`; else "expected 'x', found 'y' at byte n". */
weft_status weft__json_take(weft_json_scan *scan, int character);
/* A string, unescaped, into text with a 0 behind it; at most size - 1 bytes. `what` names it. */
weft_status weft__json_string(weft_json_scan *scan, const char *what, char *text, size_t size);
/* Digits only: no sign, fraction or exponent. */
weft_status weft__json_u64(weft_json_scan *scan, const char *what, uint64_t *value);
/* Any value, checked and dropped; at most `depth` levels. */
weft_status weft__json_skip(weft_json_scan *scan, int depth);
/* For loops over the members of an object or array: behind a member, takes ',' and sets *more, or
 * takes `close` and clears it. */
weft_status weft__json_more(weft_json_scan *scan, int close, int *more);
/* "... at byte n" */
weft_status weft__json_refuse(const weft_json_scan *scan, const char *what);

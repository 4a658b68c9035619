/* model/utf8.h - reading UTF-8 that may be broken. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* The character at s[0, n), n >= 1. Returns its bytes and sets *cp; 0 when s does not begin with a
 * whole character. Overlong forms, surrogates and values past U+10FFFF are not characters.
 * *part (may be NULL) is then the length, at least 1, of the longest beginning of a character that
 * is there: what a lossy reader replaces by one U+FFFD. */
static inline size_t weft__utf8_read(const char *s, size_t n, uint32_t *cp, size_t *part)
{
    const unsigned char *b = (const unsigned char *)s;
    if (b[0] < 0x80) {
        *cp = b[0];
        return 1;
    }
    size_t need = b[0] >= 0xf0 ? 4 : b[0] >= 0xe0 ? 3 : 2, at = 1;
    unsigned low = 0x80, high = 0xbf; /* what the second byte may be */
    if (b[0] == 0xe0) low = 0xa0;
    if (b[0] == 0xed) high = 0x9f;
    if (b[0] == 0xf0) low = 0x90;
    if (b[0] == 0xf4) high = 0x8f;
    if (b[0] >= 0xc2 && b[0] <= 0xf4) {
        uint32_t value = b[0] & (0xff >> (need + 1));
        for (; at < need && at < n && b[at] >= low && b[at] <= high; at++) {
            value = value << 6 | (b[at] & 0x3f);
            low = 0x80;
            high = 0xbf;
        }
        if (at == need) {
            *cp = value;
            return need;
        }
    }
    if (part != NULL) *part = at;
    return 0;
}

/* 1 when s[0, n) is the beginning of a character, all of it, and more bytes may complete it. */
static inline int weft__utf8_unfinished(const char *s, size_t n)
{
    uint32_t cp;
    size_t part = 0;
    if (n == 0 || weft__utf8_read(s, n, &cp, &part) != 0) return 0;
    unsigned char lead = (unsigned char)s[0];
    return part == n && lead >= 0xc2 && lead <= 0xf4;
}

/* Writes cp (a valid character) to out[4]; returns the number of bytes. */
static inline size_t weft__utf8_write(uint32_t cp, char *out)
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

/* model/json_scan.c - reads JSON in place. */
#include "model/json_scan.h"

#include <stdio.h>
#include <string.h>

weft_status weft__json_refuse(const weft_json_scan *scan, const char *what)
{
    return weft_fail(WEFT_FORMAT, "%s at byte %zu", what, (size_t)(scan->at - scan->begin));
}

int weft__json_peek(weft_json_scan *scan)
{
    while (scan->at < scan->end && (*scan->at == ' ' || *scan->at == '\t' || *scan->at == '\n' || *scan->at == '\r'))
        scan->at++;
    return scan->at < scan->end ? *scan->at : 0;
}

weft_status weft__json_take(weft_json_scan *scan, int character)
{
    int found = weft__json_peek(scan);
    if (scan->at < scan->end && found == character) {
        scan->at++;
        return WEFT_OK;
    }
    char text[64];
    if (scan->at == scan->end) snprintf(text, sizeof text, "expected '%c', found the end", character);
    else if (found > 32 && found < 127) snprintf(text, sizeof text, "expected '%c', found '%c'", character, found);
    else snprintf(text, sizeof text, "expected '%c', found byte %d", character, found);
    return weft__json_refuse(scan, text);
}

weft_status weft__json_more(weft_json_scan *scan, int close, int *more)
{
    if (weft__json_peek(scan) == ',') {
        scan->at++;
        *more = 1;
        return WEFT_OK;
    }
    *more = 0;
    return weft__json_take(scan, close);
}

/* Bytes of the well-formed UTF-8 character at `at`, or 0. */
static size_t utf8_length(const unsigned char *at, size_t left)
{
    unsigned char lead = at[0];
    size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (length == 0 || length > left) return 0;
    for (size_t i = 1; i < length; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    if ((lead == 0xe0 && at[1] < 0xa0) || (lead == 0xed && at[1] > 0x9f) || (lead == 0xf0 && at[1] < 0x90) ||
        (lead == 0xf4 && at[1] > 0x8f))
        return 0;
    return length;
}

static int hex4(weft_json_scan *scan, uint32_t *value)
{
    *value = 0;
    if (scan->end - scan->at < 4) return 0;
    for (int i = 0; i < 4; i++) {
        int c = *scan->at++, digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit < 0) return 0;
        *value = *value << 4 | (uint32_t)digit;
    }
    return 1;
}

/* What stands behind a backslash, as UTF-8 into out; returns its bytes, 0 for a bad escape. */
static size_t escape(weft_json_scan *scan, char out[4])
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    int c = scan->at < scan->end ? *scan->at++ : 0;
    const char *simple = c != 0 ? strchr(from, c) : NULL;
    if (simple != NULL) {
        out[0] = to[simple - from];
        return 1;
    }
    uint32_t code, low;
    if (c != 'u' || !hex4(scan, &code) || code == 0 || (code >= 0xdc00 && code < 0xe000)) return 0;
    if (code >= 0xd800 && code < 0xdc00) {
        if (scan->end - scan->at < 6 || scan->at[0] != '\\' || scan->at[1] != 'u') return 0;
        scan->at += 2;
        if (!hex4(scan, &low) || low < 0xdc00 || low >= 0xe000) return 0;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length; --i > 0; code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)((length == 2 ? 0xc0 : length == 3 ? 0xe0 : 0xf0) | code);
    return length;
}

/* text NULL: the string is checked and dropped. */
static weft_status scan_string(weft_json_scan *scan, const char *what, char *text, size_t size)
{
    char message[96], unescaped[4];
    size_t used = 0;
    if (weft__json_peek(scan) != '"') {
        snprintf(message, sizeof message, "expected %s as a string", what);
        return weft__json_refuse(scan, message);
    }
    scan->at++;
    for (;;) {
        if (scan->at == scan->end) return weft__json_refuse(scan, "a string without an end");
        if (*scan->at == '"') break;
        if (*scan->at < 32) return weft__json_refuse(scan, "a control character in a string");
        const char *piece = (const char *)scan->at;
        size_t length = 1;
        if (*scan->at == '\\') {
            scan->at++;
            length = escape(scan, unescaped);
            if (length == 0) return weft__json_refuse(scan, "a bad escape in a string");
            piece = unescaped;
        } else if (*scan->at < 0x80) {
            scan->at++;
        } else {
            length = utf8_length(scan->at, (size_t)(scan->end - scan->at));
            if (length == 0) return weft__json_refuse(scan, "a string that is not UTF-8");
            scan->at += length;
        }
        if (text == NULL) continue;
        if (size - used <= length) {
            snprintf(message, sizeof message, "%s is longer than %zu bytes", what, size - 1);
            return weft__json_refuse(scan, message);
        }
        memcpy(text + used, piece, length);
        used += length;
    }
    scan->at++;
    if (text != NULL) text[used] = 0;
    return WEFT_OK;
}

weft_status weft__json_string(weft_json_scan *scan, const char *what, char *text, size_t size)
{
    return scan_string(scan, what, text, size);
}

static int is_digit(const weft_json_scan *scan)
{
    return scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9';
}

weft_status weft__json_u64(weft_json_scan *scan, const char *what, uint64_t *value)
{
    char message[96];
    uint64_t total = 0;
    (void)weft__json_peek(scan);
    const unsigned char *first = scan->at;
    int fits = is_digit(scan);
    for (; fits && is_digit(scan); scan->at++)
        fits = !__builtin_mul_overflow(total, (uint64_t)10, &total) && !__builtin_add_overflow(total, (uint64_t)(*scan->at - '0'), &total);
    int next = scan->at < scan->end ? *scan->at : 0;
    if (!fits || next == '.' || next == 'e' || next == 'E' || (*first == '0' && scan->at - first > 1)) {
        scan->at = first;
        snprintf(message, sizeof message, "expected %s as an integer from 0 to 2^64-1", what);
        return weft__json_refuse(scan, message);
    }
    *value = total;
    return WEFT_OK;
}

static weft_status skip_number(weft_json_scan *scan)
{
    if (*scan->at == '-') scan->at++;
    int leading_zero = scan->at < scan->end && *scan->at == '0', digits = 0;
    for (; is_digit(scan); scan->at++) digits++;
    int good = digits > 0 && !(leading_zero && digits > 1);
    if (good && scan->at < scan->end && *scan->at == '.') {
        scan->at++;
        good = is_digit(scan);
        while (is_digit(scan)) scan->at++;
    }
    if (good && scan->at < scan->end && (*scan->at | 32) == 'e') {
        scan->at++;
        if (scan->at < scan->end && (*scan->at == '+' || *scan->at == '-')) scan->at++;
        good = is_digit(scan);
        while (is_digit(scan)) scan->at++;
    }
    return good ? WEFT_OK : weft__json_refuse(scan, "a bad number");
}

weft_status weft__json_skip(weft_json_scan *scan, int depth)
{
    int c = weft__json_peek(scan), more = 1;
    if (c == '"') return scan_string(scan, "a string", NULL, 0);
    if (c == '-' || (c >= '0' && c <= '9')) return skip_number(scan);
    if (c == '{' || c == '[') {
        int close = c == '{' ? '}' : ']';
        if (depth <= 0) return weft__json_refuse(scan, "nested too deeply");
        scan->at++;
        if (weft__json_peek(scan) == close) {
            scan->at++;
            return WEFT_OK;
        }
        while (more) {
            if (c == '{') {
                WEFT_TRY(scan_string(scan, "a key", NULL, 0));
                WEFT_TRY(weft__json_take(scan, ':'));
            }
            WEFT_TRY(weft__json_skip(scan, depth - 1));
            WEFT_TRY(weft__json_more(scan, close, &more));
        }
        return WEFT_OK;
    }
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(words[i]);
        if ((size_t)(scan->end - scan->at) >= length && memcmp(scan->at, words[i], length) == 0) {
            scan->at += length;
            return WEFT_OK;
        }
    }
    return weft__json_refuse(scan, scan->at == scan->end ? "expected a value, found the end" : "expected a value");
}

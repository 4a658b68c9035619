/* model/regex_translate.c - an Oniguruma expression (Ruby's syntax) in PCRE2's words.
 *
 * A named set of characters is written out as the inside of a class. A class that holds the
 * complement of a set, as [^\r\n\P{L}], becomes alternatives: PCRE2 has no complement of our sets. */
#include "model/regex_translate.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "model/tokenizer_parts.h"
#include "model/unicode_extra.h"

#define SPACE_SET                                                                                                    \
    "\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}\\x09-\\x0D"
#define DIGIT_SET "\\p{Nd}" WEFT__EXTRA_ND
/* Alphabetic is letters, letter numbers, marks and the circled letters (which are symbols). */
#define WORD_SET                                                                          \
    "\\p{L}" WEFT__EXTRA_L "\\p{M}" WEFT__EXTRA_M "\\p{Nl}" DIGIT_SET "\\p{Pc}"           \
    "\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}"
#define HEX_SET "0-9a-fA-F"

static const struct {
    const char *name, *set;
} properties[] = {
    {"L", "\\p{L}" WEFT__EXTRA_L},    {"Letter", "\\p{L}" WEFT__EXTRA_L},
    {"N", "\\p{N}" WEFT__EXTRA_N},    {"Number", "\\p{N}" WEFT__EXTRA_N},
    {"M", "\\p{M}" WEFT__EXTRA_M},    {"Mark", "\\p{M}" WEFT__EXTRA_M},
    {"P", "\\p{P}" WEFT__EXTRA_P},    {"Punctuation", "\\p{P}" WEFT__EXTRA_P},
    {"S", "\\p{S}" WEFT__EXTRA_S},    {"Symbol", "\\p{S}" WEFT__EXTRA_S},
    {"Lu", "\\p{Lu}" WEFT__EXTRA_LU}, {"Ll", "\\p{Ll}" WEFT__EXTRA_LL},
    {"Lm", "\\p{Lm}" WEFT__EXTRA_LM}, {"Lo", "\\p{Lo}" WEFT__EXTRA_LO},
    {"Nd", DIGIT_SET},                {"No", "\\p{No}" WEFT__EXTRA_NO},
    {"Space", SPACE_SET},             {"Word", WORD_SET},
    {"Han", "\\p{Han}\\x{2EBF0}-\\x{2EE5D}\\x{31350}-\\x{323AF}"},
};
/* What PCRE2's own tables are asked for. */
static const char *const known[] = {"Lt", "Nl", "Mn", "Mc", "Me", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk",
                                    "So", "Z", "Zs", "Zl", "Zp", "Cc", "Cf", "Co", "Arabic", "Armenian", "Bengali", "Cyrillic",
                                    "Devanagari", "Greek", "Hangul", "Hebrew", "Hiragana", "Katakana", "Khmer", "Lao", "Latin",
                                    "Tamil", "Thai", "Tibetan"};

typedef struct {
    const char *text;
    size_t length, at;
    weft_text *out;
} translation;

/* An escape: a set of characters (perhaps its complement), or text to pass on. */
typedef struct {
    char set[4096];
    int is_set, negated;
} escape;

static weft_status put(translation *t, const char *text)
{
    return weft__text_append(t->out, text, strlen(text));
}

static weft_status refuse(const translation *t, const char *what)
{
    return weft_fail(WEFT_UNSUPPORTED, "%s at byte %zu of the expression is not supported", what, t->at);
}

static weft_status property(translation *t, escape *e)
{
    const char *open = t->text + t->at, *stop = t->text + t->length;
    const char *close = open < stop && *open == '{' ? memchr(open, '}', (size_t)(stop - open)) : NULL;
    char name[32];
    if (close == NULL || close - open - 1 >= (long)sizeof name) return refuse(t, "\\p without {Name}");
    open++;
    if (*open == '^') {
        e->negated = !e->negated;
        open++;
    }
    memcpy(name, open, (size_t)(close - open));
    name[close - open] = 0;
    t->at = (size_t)(close + 1 - t->text);
    e->is_set = 1;
    for (size_t i = 0; i < sizeof properties / sizeof *properties; i++)
        if (strcasecmp(name, properties[i].name) == 0) return snprintf(e->set, sizeof e->set, "%s", properties[i].set), WEFT_OK;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcasecmp(name, known[i]) == 0) return snprintf(e->set, sizeof e->set, "\\p{%s}", known[i]), WEFT_OK;
    return weft_fail(WEFT_UNSUPPORTED, "the character property \\p{%s} is not supported", name);
}

/* \xHH, \x{H..} and \uHHHH: one character. */
static weft_status hex_character(translation *t, char kind, escape *e)
{
    size_t at = t->at, digits = 0, limit = kind == 'u' ? 4 : 2;
    int braced = kind == 'x' && at < t->length && t->text[at] == '{';
    unsigned long value = 0;
    if (braced) at++, limit = 8;
    for (; digits < limit && at < t->length && isxdigit((unsigned char)t->text[at]); digits++, at++) {
        char digit[2] = {t->text[at], 0};
        unsigned long one = 0;
        sscanf(digit, "%lx", &one);
        value = value << 4 | one;
    }
    int ends = braced ? at < t->length && t->text[at] == '}' : digits == limit;
    /* \x80 and up is a byte in Oniguruma, a character in PCRE2. */
    if (!ends || digits == 0 || value > 0x10ffff || (kind == 'x' && !braced && value > 0x7f))
        return refuse(t, "this character code");
    t->at = at + (size_t)braced;
    snprintf(e->set, sizeof e->set, "\\x{%lX}", value);
    return WEFT_OK;
}

/* Reads the escape whose backslash was just passed. */
static weft_status read_escape(translation *t, int in_class, escape *e)
{
    e->is_set = e->negated = 0;
    if (t->at >= t->length) return refuse(t, "a lone backslash");
    char c = t->text[t->at++];
    const char *set = c == 's' || c == 'S' ? SPACE_SET
                    : c == 'd' || c == 'D' ? DIGIT_SET
                    : c == 'w' || c == 'W' ? WORD_SET
                    : c == 'h' || c == 'H' ? HEX_SET
                                           : NULL;
    if (set != NULL) {
        e->is_set = 1;
        e->negated = isupper((unsigned char)c) != 0;
        snprintf(e->set, sizeof e->set, "%s", set);
        return WEFT_OK;
    }
    if (c == 'p' || c == 'P') {
        e->negated = c == 'P';
        return property(t, e);
    }
    if (c == 'x' || c == 'u') return hex_character(t, c, e);
    const char *plain = in_class ? "rntfae" : "rntfaebBAzZG";
    if (c == 'v') snprintf(e->set, sizeof e->set, "\\x0B");
    else if (strchr(plain, c) != NULL || !isalnum((unsigned char)c)) snprintf(e->set, sizeof e->set, "\\%c", c);
    else {
        char what[8];
        snprintf(what, sizeof what, "\\%c", c);
        return refuse(t, what);
    }
    return WEFT_OK;
}

/* Copies one character of a class, so that bytes of UTF-8 pass unharmed. */
static weft_status class_item(translation *t, weft_text *inside, weft_text *complements)
{
    char c = t->text[t->at];
    if (c == '[') return refuse(t, "a class within a class");
    if (c == '&' && t->at + 1 < t->length && t->text[t->at + 1] == '&') return refuse(t, "&& in a class");
    t->at++;
    if (c != '\\') return weft__text_append(inside, &c, 1);
    escape e;
    WEFT_TRY(read_escape(t, 1, &e));
    if (!e.is_set || !e.negated) return weft__text_append(inside, e.set, strlen(e.set));
    WEFT_TRY(weft__text_append(complements, "|[^", 3));
    WEFT_TRY(weft__text_append(complements, e.set, strlen(e.set)));
    return weft__text_append(complements, "]", 1);
}

static weft_status put_class(translation *t, int negated, const weft_text *inside, const weft_text *complements)
{
    if (complements->length == 0) {
        WEFT_TRY(put(t, negated ? "[^" : "["));
        WEFT_TRY(weft__text_append(t->out, inside->data, inside->length));
        return put(t, "]");
    }
    WEFT_TRY(put(t, negated ? "(?:(?!" : "(?:"));
    if (inside->length > 0) {
        WEFT_TRY(put(t, "["));
        WEFT_TRY(weft__text_append(t->out, inside->data, inside->length));
        WEFT_TRY(put(t, "]"));
        WEFT_TRY(weft__text_append(t->out, complements->data, complements->length));
    } else {
        WEFT_TRY(weft__text_append(t->out, complements->data + 1, complements->length - 1));
    }
    return put(t, negated ? ")(?s:.))" : ")");
}

/* t->at is behind '['. */
static weft_status translate_class(translation *t)
{
    weft_text inside = {0}, complements = {0};
    weft_status status = WEFT_OK;
    int negated = t->at < t->length && t->text[t->at] == '^';
    t->at += (size_t)negated;
    size_t first = t->at;
    while (status == WEFT_OK && t->at < t->length && (t->text[t->at] != ']' || t->at == first))
        status = class_item(t, &inside, &complements);
    if (status == WEFT_OK && t->at >= t->length) status = weft_fail(WEFT_FORMAT, "a class of the expression has no closing ]");
    t->at++;
    if (status == WEFT_OK) status = put_class(t, negated, &inside, &complements);
    weft_text_free(&inside);
    weft_text_free(&complements);
    return status;
}

/* t->at is behind '('. Ruby's m is PCRE2's s. */
static weft_status translate_group(translation *t)
{
    if (t->at < t->length && t->text[t->at] == '*') return refuse(t, "(*");
    WEFT_TRY(put(t, "("));
    if (t->at >= t->length || t->text[t->at] != '?') return WEFT_OK;
    t->at++;
    WEFT_TRY(put(t, "?"));
    static const char *const plain[] = {":", "=", "!", ">", "<=", "<!"};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
        size_t n = strlen(plain[i]);
        if (t->length - t->at < n || memcmp(t->text + t->at, plain[i], n) != 0) continue;
        t->at += n;
        return put(t, plain[i]);
    }
    while (t->at < t->length && strchr("imx-", t->text[t->at]) != NULL) {
        char flag[2] = {t->text[t->at] == 'm' ? 's' : t->text[t->at], 0};
        WEFT_TRY(put(t, flag));
        t->at++;
    }
    if (t->at < t->length && (t->text[t->at] == ':' || t->text[t->at] == ')')) {
        char end[2] = {t->text[t->at++], 0};
        return put(t, end);
    }
    return refuse(t, "this kind of group");
}

/* t->at is at '{'. {,n} means {0,n}; a + behind is a repeat in Ruby, possessive in PCRE2. */
static weft_status translate_braces(translation *t)
{
    size_t at = t->at + 1, digits = at;
    while (at < t->length && isdigit((unsigned char)t->text[at])) at++;
    int low = at > digits, comma = at < t->length && t->text[at] == ',';
    size_t upper = at += (size_t)comma;
    while (at < t->length && isdigit((unsigned char)t->text[at])) at++;
    if (at >= t->length || t->text[at] != '}' || (!low && at == upper)) {
        t->at++;
        return put(t, "\\{");
    }
    WEFT_TRY(put(t, low ? "{" : "{0"));
    WEFT_TRY(weft__text_append(t->out, t->text + t->at + 1, at - t->at));
    t->at = at + 1;
    if (t->at < t->length && t->text[t->at] == '+') return refuse(t, "+ behind {..}");
    return WEFT_OK;
}

weft_status weft__regex_translate(const char *pattern, size_t length, weft_text *out)
{
    translation t = {.text = pattern, .length = length, .out = out};
    while (t.at < t.length) {
        char c = t.text[t.at];
        if (c == '{') {
            WEFT_TRY(translate_braces(&t));
            continue;
        }
        t.at++;
        if (c == '[') WEFT_TRY(translate_class(&t));
        else if (c == '(') WEFT_TRY(translate_group(&t));
        else if (c != '\\') WEFT_TRY(weft__text_append(out, &c, 1));
        else {
            escape e;
            WEFT_TRY(read_escape(&t, 0, &e));
            if (e.is_set) WEFT_TRY(put(&t, e.negated ? "[^" : "["));
            WEFT_TRY(put(&t, e.set));
            if (e.is_set) WEFT_TRY(put(&t, "]"));
        }
    }
    return WEFT_OK;
}

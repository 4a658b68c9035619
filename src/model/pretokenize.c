/* model/pretokenize.c - cutting a text into the pieces that byte-pair encoding sees one by one.
 *
 * All pieces are ranges of one text. A step either cuts pieces smaller or rewrites the text. Bytes
 * that are no UTF-8 are shown to no expression: a run of them is a piece of its own. */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_parts.h"
#include "model/utf8.h"

typedef struct weft__mark {
    size_t start, end;
    int match;
} weft__mark;

void weft__pieces_free(weft__pieces *pieces)
{
    weft_text_free(&pieces->text);
    weft_text_free(&pieces->other);
    free(pieces->pieces);
    free(pieces->next);
    free(pieces->marks);
}

static int is_own_byte(unsigned byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

uint32_t weft__byte_to_char(unsigned byte)
{
    if (is_own_byte(byte)) return byte;
    /* 0-32, then 127-160, then 173, in this order from U+0100 */
    return 0x100 + (byte <= 32 ? byte : byte <= 160 ? byte - 127 + 33 : 67);
}

int weft__char_to_byte(uint32_t cp)
{
    if (cp < 0x100) return is_own_byte(cp) ? (int)cp : -1;
    if (cp >= 0x144) return -1;
    unsigned place = cp - 0x100;
    return (int)(place < 33 ? place : place < 67 ? place - 33 + 127 : 173);
}

static weft_status add_piece(weft__pieces *p, size_t start, size_t end)
{
    if (end == start) return WEFT_OK;
    WEFT_TRY(weft__grow(&p->next, &p->next_capacity, p->next_count + 1, sizeof *p->next));
    p->next[p->next_count++] = (weft__piece){start, end - start};
    return WEFT_OK;
}

static void take_next(weft__pieces *p)
{
    weft__piece *pieces = p->pieces;
    size_t capacity = p->capacity;
    p->pieces = p->next;
    p->count = p->next_count;
    p->capacity = p->next_capacity;
    p->next = pieces;
    p->next_capacity = capacity;
    p->next_count = 0;
}

static void take_other(weft__pieces *p)
{
    weft_text text = p->text;
    p->text = p->other;
    p->other = text;
    take_next(p);
}

/* ---- Split ---- */

static weft_status add_mark(weft__pieces *p, size_t *count, size_t start, size_t end, int match)
{
    if (start == end) return WEFT_OK;
    WEFT_TRY(weft__grow(&p->marks, &p->marks_capacity, *count + 1, sizeof *p->marks));
    p->marks[(*count)++] = (weft__mark){start, end, match};
    return WEFT_OK;
}

/* Matches and the gaps between them, in order. */
static weft_status mark_run(const weft__step *step, weft__regex_match *match, weft__pieces *p, size_t start, size_t end,
                            size_t *count)
{
    const char *text = p->text.data + start;
    size_t length = end - start, at = 0, from = 0, to = 0;
    int found = 0;
    *count = 0;
    for (;; at = to) {
        WEFT_TRY(weft__pattern_next(&step->pattern, match, text, length, at, &from, &to, &found));
        if (!found) return add_mark(p, count, start + at, end, step->invert);
        WEFT_TRY(add_mark(p, count, start + at, start + from, step->invert));
        WEFT_TRY(add_mark(p, count, start + from, start + to, !step->invert));
    }
}

/* What a mark joins: its left neighbour (-1), its right one (+1) or none. */
static int joins(const weft__step *step, const weft__mark *marks, size_t i, size_t count)
{
    switch (step->behavior) {
    case WEFT__CONTIGUOUS: return i > 0 && marks[i].match == marks[i - 1].match ? -1 : 0;
    case WEFT__MERGED_WITH_PREVIOUS: return i > 0 && marks[i].match && !marks[i - 1].match ? -1 : 0;
    case WEFT__MERGED_WITH_NEXT: return i + 1 < count && marks[i].match && !marks[i + 1].match ? 1 : 0;
    default: return 0;
    }
}

static weft_status split_run(const weft__step *step, weft__regex_match *match, weft__pieces *p, size_t start, size_t end)
{
    size_t count = 0;
    WEFT_TRY(mark_run(step, match, p, start, end, &count));
    const weft__mark *marks = p->marks;
    for (size_t i = 0; i < count;) {
        size_t last = i;
        if (step->behavior == WEFT__REMOVED && marks[i].match) {
            i++;
            continue;
        }
        while (last + 1 < count && (joins(step, marks, last, count) > 0 || joins(step, marks, last + 1, count) < 0)) last++;
        WEFT_TRY(add_piece(p, marks[i].start, marks[last].end));
        i = last + 1;
    }
    return WEFT_OK;
}

static weft_status split(const weft__step *step, weft__regex_match *match, weft__pieces *p)
{
    const char *text = p->text.data;
    for (size_t i = 0; i < p->count; i++) {
        size_t at = p->pieces[i].start, end = at + p->pieces[i].length;
        while (at < end) {
            uint32_t cp;
            size_t start = at, bytes;
            while (at < end && (bytes = weft__utf8_read(text + at, end - at, &cp, NULL)) > 0) at += bytes;
            if (at > start) WEFT_TRY(split_run(step, match, p, start, at));
            start = at;
            while (at < end && weft__utf8_read(text + at, end - at, &cp, NULL) == 0) at++;
            WEFT_TRY(add_piece(p, start, at));
        }
    }
    take_next(p);
    return WEFT_OK;
}

/* ---- rewriting steps ---- */

static weft_status prefix_space(weft__pieces *p)
{
    p->other.length = 0;
    for (size_t i = 0; i < p->count; i++) {
        const char *piece = p->text.data + p->pieces[i].start;
        size_t start = p->other.length;
        if (piece[0] != ' ') WEFT_TRY(weft__text_append(&p->other, " ", 1));
        WEFT_TRY(weft__text_append(&p->other, piece, p->pieces[i].length));
        WEFT_TRY(add_piece(p, start, p->other.length));
    }
    take_other(p);
    return WEFT_OK;
}

static weft_status map_bytes(weft__pieces *p)
{
    p->other.length = 0;
    for (size_t i = 0; i < p->count; i++) {
        const unsigned char *piece = (const unsigned char *)p->text.data + p->pieces[i].start;
        size_t length = p->pieces[i].length, start = p->other.length;
        WEFT_TRY(weft__grow(&p->other.data, &p->other.capacity, start + 2 * length + 4, 1));
        char *out = p->other.data + start;
        for (size_t k = 0; k < length; k++) out += weft__utf8_write(weft__byte_to_char(piece[k]), out);
        p->other.length = (size_t)(out - p->other.data);
        WEFT_TRY(add_piece(p, start, p->other.length));
    }
    take_other(p);
    return WEFT_OK;
}

static weft_status metaspace(const weft__step *step, weft__pieces *p, int at_start)
{
    const weft__string *mark = &step->content;
    p->other.length = 0;
    for (size_t i = 0; i < p->count; i++) {
        const char *piece = p->text.data + p->pieces[i].start;
        size_t length = p->pieces[i].length, start = p->other.length;
        int has = piece[0] == ' ' || (length >= mark->length && memcmp(piece, mark->data, mark->length) == 0);
        int wanted = step->scheme == WEFT__PREPEND_ALWAYS || (step->scheme == WEFT__PREPEND_FIRST && at_start && i == 0);
        if (wanted && !has) WEFT_TRY(weft__text_append(&p->other, mark->data, mark->length));
        for (size_t k = 0; k < length; k++)
            WEFT_TRY(piece[k] == ' ' ? weft__text_append(&p->other, mark->data, mark->length)
                                     : weft__text_append(&p->other, piece + k, 1));
        WEFT_TRY(add_piece(p, start, p->other.length));
    }
    take_other(p);
    return WEFT_OK;
}

weft_status weft__pretokenize(const weft__steps *steps, weft__regex_match *match, const char *text, size_t length,
                              int at_start, weft__pieces *p)
{
    p->text.length = 0;
    p->next_count = 0;
    WEFT_TRY(weft__text_append(&p->text, text, length));
    WEFT_TRY(add_piece(p, 0, length));
    take_next(p);
    for (size_t i = 0; i < steps->count; i++) {
        const weft__step *step = &steps->steps[i];
        switch (step->kind) {
        case WEFT__STEP_SPLIT: WEFT_TRY(split(step, match, p)); break;
        case WEFT__STEP_PREFIX_SPACE: WEFT_TRY(prefix_space(p)); break;
        case WEFT__STEP_BYTES: WEFT_TRY(map_bytes(p)); break;
        default: WEFT_TRY(metaspace(step, p, at_start)); break;
        }
    }
    return WEFT_OK;
}

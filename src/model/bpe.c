/* model/bpe.c - byte-pair encoding of one piece: merge the pair of lowest rank, leftmost first.
 *
 * The symbols of a piece are a linked list; the pairs that may merge wait in a heap, so a piece of
 * n characters costs n log n. A pair in the heap may be out of date: it counts only if its two
 * symbols still make the token that it promised. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_parts.h"
#include "model/utf8.h"

#define NO_PAIR UINT64_MAX

typedef struct weft__symbol {
    int32_t id; /* -1: merged into its left neighbour */
    int32_t prev, next;
} weft__symbol;

typedef struct weft__candidate {
    uint64_t order; /* rank << 32 | position of the left symbol */
    int32_t result;
} weft__candidate;

static inline uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static inline weft__merge *find_merge(const weft__bpe *bpe, uint64_t pair)
{
    uint64_t h = pair * 0x9e3779b97f4a7c15u;
    size_t mask = bpe->num_slots - 1, at = (h ^ h >> 32) & mask;
    while (bpe->merges[at].pair != pair && bpe->merges[at].pair != NO_PAIR) at = (at + 1) & mask;
    return &bpe->merges[at];
}

weft_status weft__bpe_reserve(weft__bpe *bpe, size_t merges)
{
    size_t slots = 64;
    while (slots < merges * 2) slots *= 2;
    bpe->merges = malloc(slots * sizeof *bpe->merges);
    if (bpe->merges == NULL) return weft_fail(WEFT_MEMORY, "no memory for %zu merges", merges);
    bpe->num_slots = slots;
    memset(bpe->merges, 0xff, slots * sizeof *bpe->merges);
    return WEFT_OK;
}

void weft__bpe_add_merge(weft__bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t result)
{
    uint64_t pair = pair_of(left, right);
    *find_merge(bpe, pair) = (weft__merge){.pair = pair, .rank = rank, .result = result};
}

void weft__bpe_index(weft__bpe *bpe, const weft__vocab *vocab)
{
    char text[8];
    for (uint32_t cp = 0; cp < 0x800; cp++) bpe->short_ids[cp] = weft__vocab_find_model(vocab, text, weft__utf8_write(cp, text));
    for (unsigned byte = 0; byte < 256; byte++) {
        int length = snprintf(text, sizeof text, "<0x%02X>", byte);
        bpe->byte_ids[byte] = weft__vocab_find_model(vocab, text, (size_t)length);
    }
}

/* ---- the heap: smallest order on top ---- */

static void sift_down(weft__candidate *heap, size_t count, size_t at)
{
    weft__candidate moving = heap[at];
    for (size_t child; (child = at * 2 + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1].order < heap[child].order) child++;
        if (moving.order <= heap[child].order) break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
}

static weft_status push(weft__bpe_scratch *s, weft__candidate candidate)
{
    WEFT_TRY(weft__grow(&s->heap, &s->heap_capacity, s->heap_count + 1, sizeof *s->heap));
    size_t at = s->heap_count++;
    for (; at > 0 && candidate.order < s->heap[(at - 1) / 2].order; at = (at - 1) / 2) s->heap[at] = s->heap[(at - 1) / 2];
    s->heap[at] = candidate;
    return WEFT_OK;
}

static weft__candidate pop(weft__bpe_scratch *s)
{
    weft__candidate top = s->heap[0];
    s->heap[0] = s->heap[--s->heap_count];
    if (s->heap_count > 1) sift_down(s->heap, s->heap_count, 0);
    return top;
}

/* The pair of `left` and its right neighbour joins the heap if it can merge. */
static weft_status offer(const weft__bpe *bpe, weft__bpe_scratch *s, int32_t left)
{
    const weft__symbol *symbols = s->symbols;
    if (left < 0 || symbols[left].next < 0) return WEFT_OK;
    const weft__merge *merge = find_merge(bpe, pair_of(symbols[left].id, symbols[symbols[left].next].id));
    if (merge->pair == NO_PAIR) return WEFT_OK;
    return push(s, (weft__candidate){(uint64_t)merge->rank << 32 | (uint32_t)left, merge->result});
}

/* ---- characters to first symbols ---- */

typedef struct {
    weft__bpe_scratch *scratch;
    size_t count;
    int32_t unk; /* an unknown token that waits for its neighbour; -1 */
} symbol_list;

static weft_status add_symbol(symbol_list *list, int32_t id)
{
    weft__bpe_scratch *s = list->scratch;
    WEFT_TRY(weft__grow(&s->symbols, &s->symbols_capacity, list->count + 1, sizeof *s->symbols));
    s->symbols[list->count] = (weft__symbol){id, (int32_t)list->count - 1, (int32_t)list->count + 1};
    list->count++;
    return WEFT_OK;
}

static weft_status add_unknown(const weft__bpe *bpe, symbol_list *list, const char *character, size_t length)
{
    int covered = bpe->byte_fallback;
    for (size_t i = 0; i < length && covered; i++) covered = bpe->byte_ids[(unsigned char)character[i]] >= 0;
    if (covered) {
        for (size_t i = 0; i < length; i++) WEFT_TRY(add_symbol(list, bpe->byte_ids[(unsigned char)character[i]]));
        return WEFT_OK;
    }
    if (bpe->unk < 0) return WEFT_OK;
    if (list->unk >= 0 && !bpe->fuse_unk) WEFT_TRY(add_symbol(list, list->unk));
    list->unk = bpe->unk;
    return WEFT_OK;
}

static weft_status read_symbols(const weft__bpe *bpe, const weft__vocab *vocab, const char *piece, size_t length,
                                symbol_list *list)
{
    for (size_t at = 0; at < length;) {
        uint32_t cp = 0;
        size_t bytes = weft__utf8_read(piece + at, length - at, &cp, NULL);
        int32_t id = -1;
        if (bytes == 0) bytes = 1; /* no UTF-8: this byte alone, known to no vocabulary */
        else id = cp < 0x800 ? bpe->short_ids[cp] : weft__vocab_find_model(vocab, piece + at, bytes);
        if (id < 0) {
            WEFT_TRY(add_unknown(bpe, list, piece + at, bytes));
        } else {
            if (list->unk >= 0) WEFT_TRY(add_symbol(list, list->unk));
            list->unk = -1;
            WEFT_TRY(add_symbol(list, id));
        }
        at += bytes;
    }
    if (list->unk >= 0) WEFT_TRY(add_symbol(list, list->unk));
    if (list->count > 0) list->scratch->symbols[list->count - 1].next = -1;
    return WEFT_OK;
}

static weft_status merge_all(const weft__bpe *bpe, weft__bpe_scratch *s, size_t count)
{
    s->heap_count = 0;
    for (size_t i = 0; i + 1 < count; i++) WEFT_TRY(offer(bpe, s, (int32_t)i));
    while (s->heap_count > 0) {
        weft__candidate top = pop(s);
        int32_t at = (int32_t)(uint32_t)top.order;
        weft__symbol *left = &s->symbols[at];
        if (left->id < 0 || left->next < 0) continue;
        weft__symbol *right = &s->symbols[left->next];
        const weft__merge *merge = find_merge(bpe, pair_of(left->id, right->id));
        if (merge->pair == NO_PAIR || merge->result != top.result) continue;
        left->id = top.result;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0) s->symbols[left->next].prev = at;
        WEFT_TRY(offer(bpe, s, left->prev));
        WEFT_TRY(offer(bpe, s, at));
    }
    return WEFT_OK;
}

weft_status weft__bpe_encode(const weft__bpe *bpe, const weft__vocab *vocab, const char *piece, size_t length,
                             weft__bpe_scratch *scratch, weft_token_ids *out)
{
    if (length == 0) return WEFT_OK;
    if (length > INT32_MAX) return weft_fail(WEFT_INVALID, "a piece of %zu bytes", length);
    if (bpe->ignore_merges) {
        int32_t whole = weft__vocab_find_model(vocab, piece, length);
        if (whole >= 0) return weft__ids_append(out, whole);
    }
    symbol_list list = {.scratch = scratch, .unk = -1};
    WEFT_TRY(read_symbols(bpe, vocab, piece, length, &list));
    WEFT_TRY(merge_all(bpe, scratch, list.count));
    for (int32_t at = list.count > 0 ? 0 : -1; at >= 0; at = scratch->symbols[at].next)
        WEFT_TRY(weft__ids_append(out, scratch->symbols[at].id));
    return WEFT_OK;
}

/* model/vocab.c - token strings and their ids, and the memory that the tokenizer's parts grow. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "model/tokenizer_parts.h"

weft_status weft__grow(void *memory, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity) return WEFT_OK;
    size_t room = *capacity < 16 ? 16 : *capacity, bytes;
    while (room < need && weft_mul_size(room, 2, &room)) {}
    if (room < need || !weft_mul_size(room, size, &bytes)) return weft_fail(WEFT_MEMORY, "%zu elements do not fit", need);
    void *old, *grown;
    memcpy(&old, memory, sizeof old);
    grown = realloc(old, bytes);
    if (grown == NULL) return weft_fail(WEFT_MEMORY, "no memory for %zu bytes", bytes);
    memcpy(memory, &grown, sizeof grown);
    *capacity = room;
    return WEFT_OK;
}

weft_status weft__text_append(weft_text *text, const char *data, size_t length)
{
    WEFT_TRY(weft__grow(&text->data, &text->capacity, text->length + length, 1));
    if (length > 0) memcpy(text->data + text->length, data, length);
    text->length += length;
    return WEFT_OK;
}

void weft_text_free(weft_text *text)
{
    free(text->data);
    *text = (weft_text){0};
}

weft_status weft__ids_append(weft_token_ids *ids, int32_t id)
{
    WEFT_TRY(weft__grow(&ids->ids, &ids->capacity, ids->count + 1, sizeof *ids->ids));
    ids->ids[ids->count++] = id;
    return WEFT_OK;
}

void weft_token_ids_free(weft_token_ids *ids)
{
    free(ids->ids);
    *ids = (weft_token_ids){0};
}

weft_status weft__string_copy(weft__string *out, const char *data, size_t length)
{
    char *copy = malloc(length + 1);
    if (copy == NULL) return weft_fail(WEFT_MEMORY, "no memory for a string of %zu bytes", length);
    memcpy(copy, data, length);
    copy[length] = 0;
    free(out->data);
    *out = (weft__string){copy, length};
    return WEFT_OK;
}

/* ---- the vocabulary ---- */

static uint64_t hash(const char *string, size_t length)
{
    uint64_t h = 0x9e3779b97f4a7c15u ^ length;
    for (; length >= 8; string += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, string, 8);
        h = (h ^ word) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    uint64_t tail = 0;
    memcpy(&tail, string, length);
    h = (h ^ tail) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 29;
}

/* The slot that holds the string, or the empty one where it would go. */
static size_t find_slot(const weft__vocab *vocab, const char *string, size_t length)
{
    size_t mask = vocab->num_slots - 1, at = hash(string, length) & mask;
    while (vocab->slots[at] != 0) {
        const weft__token *token = &vocab->tokens[vocab->slots[at] - 1];
        if (token->length == length && memcmp(vocab->text.data + token->start, string, length) == 0) break;
        at = (at + 1) & mask;
    }
    return at;
}

weft_status weft__vocab_reserve(weft__vocab *vocab, size_t tokens)
{
    size_t slots = 64;
    while (slots < tokens * 2) slots *= 2;
    if (slots <= vocab->num_slots) return WEFT_OK;
    WEFT_TRY(weft__grow(&vocab->text.data, &vocab->text.capacity, tokens, 1)); /* never NULL: tokens may be empty */
    uint32_t *fresh = calloc(slots, sizeof *fresh);
    if (fresh == NULL) return weft_fail(WEFT_MEMORY, "no memory for a vocabulary of %zu", tokens);
    free(vocab->slots);
    vocab->slots = fresh;
    vocab->num_slots = slots;
    for (size_t id = 0; id < vocab->size; id++) {
        const weft__token *token = &vocab->tokens[id];
        if (token->known) fresh[find_slot(vocab, vocab->text.data + token->start, token->length)] = (uint32_t)id + 1;
    }
    return WEFT_OK;
}

weft_status weft__vocab_add(weft__vocab *vocab, const char *string, size_t length, int32_t id)
{
    WEFT_TRY(weft__vocab_reserve(vocab, vocab->used + 1));
    size_t slot = find_slot(vocab, string, length);
    if (vocab->slots[slot] == (uint32_t)id + 1) return WEFT_OK;
    if (vocab->slots[slot] != 0)
        return weft_fail(WEFT_INVALID, "'%.*s' has the ids %d and %d", (int)(length > 60 ? 60 : length), string,
                         (int)vocab->slots[slot] - 1, id);
    if ((size_t)id < vocab->size && vocab->tokens[id].known)
        return weft_fail(WEFT_INVALID, "id %d is both '%.*s' and '%.*s'", id,
                         (int)(vocab->tokens[id].length > 60 ? 60 : vocab->tokens[id].length),
                         vocab->text.data + vocab->tokens[id].start, (int)(length > 60 ? 60 : length), string);
    if (vocab->text.length + length > UINT32_MAX) return weft_fail(WEFT_INVALID, "the tokens are longer than 4 GiB");
    size_t before = vocab->capacity;
    WEFT_TRY(weft__grow(&vocab->tokens, &vocab->capacity, (size_t)id + 1, sizeof *vocab->tokens));
    memset(vocab->tokens + before, 0, (vocab->capacity - before) * sizeof *vocab->tokens);
    uint32_t start = (uint32_t)vocab->text.length;
    WEFT_TRY(weft__text_append(&vocab->text, string, length));
    vocab->tokens[id] = (weft__token){.start = start, .length = (uint32_t)length, .known = 1};
    if ((size_t)id >= vocab->size) vocab->size = (size_t)id + 1;
    vocab->slots[slot] = (uint32_t)id + 1;
    vocab->used++;
    return WEFT_OK;
}

int32_t weft__vocab_find(const weft__vocab *vocab, const char *string, size_t length)
{
    if (vocab->num_slots == 0) return -1;
    return (int32_t)vocab->slots[find_slot(vocab, string, length)] - 1;
}

int32_t weft__vocab_find_model(const weft__vocab *vocab, const char *string, size_t length)
{
    int32_t id = weft__vocab_find(vocab, string, length);
    return id >= 0 && vocab->tokens[id].model ? id : -1;
}

void weft__vocab_free(weft__vocab *vocab)
{
    weft_text_free(&vocab->text);
    free(vocab->tokens);
    free(vocab->slots);
}

/* model/added_tokens.c - finding added tokens in a text: leftmost first, then the longest. */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_parts.h"
#include "model/utf8.h"

void weft__trie_init(weft__trie *trie)
{
    memset(trie->first, 0xff, sizeof trie->first);
}

static int32_t find_child(const weft__trie *trie, int32_t node, unsigned char byte)
{
    if (node < 0) return trie->first[byte];
    int32_t child = trie->nodes[node].child;
    while (child >= 0 && trie->nodes[child].byte != byte) child = trie->nodes[child].sibling;
    return child;
}

weft_status weft__trie_add(weft__trie *trie, const char *string, size_t length, int32_t token)
{
    int32_t node = -1;
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)string[i];
        int32_t child = find_child(trie, node, byte);
        if (child < 0) {
            if (trie->count >= INT32_MAX) return weft_fail(WEFT_MEMORY, "too many added tokens");
            WEFT_TRY(weft__grow(&trie->nodes, &trie->capacity, trie->count + 1, sizeof *trie->nodes));
            child = (int32_t)trie->count++;
            trie->nodes[child] = (weft__trie_node){.child = -1, .sibling = -1, .token = -1, .byte = byte};
            if (node < 0) {
                trie->first[byte] = child;
            } else {
                trie->nodes[child].sibling = trie->nodes[node].child;
                trie->nodes[node].child = child;
            }
        }
        node = child;
    }
    if (node >= 0 && trie->nodes[node].token < 0) trie->nodes[node].token = token; /* of equal ones the first */
    return WEFT_OK;
}

void weft__added_tokens_free(weft__added_tokens *added)
{
    for (size_t i = 0; i < added->count; i++) free(added->tokens[i].content.data);
    free(added->tokens);
    free(added->raw.nodes);
    free(added->normalized.nodes);
    weft__regex_destroy(added->word);
}

/* The longest token that begins at text[at]; returns its end, or 0. */
static size_t longest_at(const weft__trie *trie, const char *text, size_t length, size_t at, int32_t *token)
{
    size_t end = 0;
    int32_t node = trie->first[(unsigned char)text[at]];
    while (node >= 0) {
        at++;
        if (trie->nodes[node].token >= 0) {
            *token = trie->nodes[node].token;
            end = at;
        }
        if (at >= length) break;
        node = find_child(trie, node, (unsigned char)text[at]);
    }
    return end;
}

/* The start of the character that ends at text[end). */
static size_t character_before(const char *text, size_t end, uint32_t *cp)
{
    for (size_t back = 1; back <= 4 && back <= end; back++)
        if (weft__utf8_read(text + end - back, back, cp, NULL) == back) return end - back;
    *cp = 0xfffd;
    return end - 1;
}

static int is_word(const weft__added_tokens *added, weft__regex_match *match, const char *character, size_t length)
{
    size_t start, end;
    int found = 0;
    return weft__regex_find(added->word, match, character, length, 0, &start, &end, &found) == WEFT_OK && found;
}

static int stands_alone(const weft__added_tokens *added, weft__regex_match *match, const char *text, size_t length,
                        size_t start, size_t end)
{
    uint32_t cp;
    size_t bytes;
    if (start > 0) {
        size_t before = character_before(text, start, &cp);
        if (cp != 0xfffd && is_word(added, match, text + before, start - before)) return 0;
    }
    if (end < length && (bytes = weft__utf8_read(text + end, length - end, &cp, NULL)) > 0)
        if (is_word(added, match, text + end, bytes)) return 0;
    return 1;
}

static size_t spaces_left(const char *text, size_t start, size_t floor)
{
    uint32_t cp;
    while (start > floor) {
        size_t before = character_before(text, start, &cp);
        if (before < floor || !weft__is_space(cp)) break;
        start = before;
    }
    return start;
}

static size_t spaces_right(const char *text, size_t length, size_t end)
{
    uint32_t cp;
    while (end < length) {
        size_t bytes = weft__utf8_read(text + end, length - end, &cp, NULL);
        if (bytes == 0 || !weft__is_space(cp)) break;
        end += bytes;
    }
    return end;
}

/* The first match at or behind `from`; white space is swallowed back to `floor` only. */
static int find_match(const weft__added_tokens *added, const weft__trie *trie, weft__regex_match *match, int match_special,
                      const char *text, size_t length, size_t from, weft__stretch *out)
{
    for (size_t at = from; at < length;) {
        int32_t index = -1;
        size_t end = longest_at(trie, text, length, at, &index);
        if (end == 0) {
            at++;
            continue;
        }
        const weft__added *token = &added->tokens[index];
        if ((token->special && !match_special) ||
            (token->single_word && !stands_alone(added, match, text, length, at, end))) {
            at = end; /* its text is ordinary text, and matches do not overlap */
            continue;
        }
        out->token = index;
        out->start = token->lstrip ? spaces_left(text, at, from) : at;
        out->end = token->rstrip ? spaces_right(text, length, end) : end;
        return 1;
    }
    return 0;
}

int weft__added_next(const weft__added_tokens *added, const weft__trie *trie, weft__regex_match *match, int match_special,
                     const char *text, size_t length, size_t *at, weft__stretch *next, weft__stretch *out)
{
    if (next->token >= 0) {
        *out = *next;
        next->token = -1;
        *at = out->end;
        return 1;
    }
    if (*at >= length) return 0;
    if (trie->count == 0 || !find_match(added, trie, match, match_special, text, length, *at, next)) {
        *out = (weft__stretch){*at, length, -1};
        *at = length;
        return 1;
    }
    if (next->start > *at) {
        *out = (weft__stretch){*at, next->start, -1};
        *at = next->start;
        return 1;
    }
    *out = *next;
    next->token = -1;
    *at = out->end;
    return 1;
}

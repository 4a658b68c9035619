/* model/tokenizer_load.c - reading a tokenizer.json: the vocabulary, the merges, the added tokens.
 *
 * The file may come from anywhere: every type, size and id is checked, and the parts that hold each
 * other (Sequence) are followed to a fixed depth. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "model/tokenizer_parts.h"

enum { MAX_FILE = 512 << 20 };

weft_status weft__json_bad(const char *file, const char *field, const char *wanted, const json_t *found)
{
    static const char *const names[] = {"an object", "an array", "a string", "an integer", "a number", "true", "false", "null"};
    char text[96];
    if (found == NULL) snprintf(text, sizeof text, "nothing");
    else if (json_is_string(found)) snprintf(text, sizeof text, "\"%.60s\"", json_string_value(found));
    else if (json_is_integer(found)) snprintf(text, sizeof text, "%lld", (long long)json_integer_value(found));
    else snprintf(text, sizeof text, "%s", names[json_typeof(found)]);
    return weft_fail(WEFT_FORMAT, "%s: %s: wanted %s, found %s", file, field, wanted, text);
}

/* "FILE: FIELD: " in front of the text of a failure below. */
static weft_status at_field(weft_status status, const char *file, const char *field)
{
    if (status == WEFT_OK || status == WEFT_MEMORY) return status;
    return weft_fail(status == WEFT_INVALID ? WEFT_FORMAT : status, "%s: %s: %s", file, field, weft_error_message());
}

/* ---- model.vocab ---- */

static weft_status load_vocab(weft_tokenizer *t, const char *file, json_t *model)
{
    json_t *vocab = json_object_get(model, "vocab"), *value;
    const char *key;
    if (!json_is_object(vocab)) return weft__json_bad(file, "model.vocab", "an object of token: id", vocab);
    WEFT_TRY(weft__vocab_reserve(&t->vocab, json_object_size(vocab)));
    json_object_foreach(vocab, key, value) {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= WEFT__MAX_ID) {
            char field[128];
            snprintf(field, sizeof field, "model.vocab[\"%.60s\"]", key);
            return weft__json_bad(file, field, "an id from 0 to 4194303", value);
        }
        WEFT_TRY(at_field(weft__vocab_add(&t->vocab, key, strlen(key), (int32_t)id), file, "model.vocab"));
        t->vocab.tokens[id].model = 1;
    }
    return WEFT_OK;
}

/* ---- model.merges ---- */

/* The two parts of a merge: ["a", "b"], or "a b" with one space. */
static int merge_parts(const json_t *merge, const char **part, size_t *length)
{
    if (json_is_string(merge)) {
        const char *text = json_string_value(merge);
        size_t size = json_string_length(merge);
        const char *space = memchr(text, ' ', size);
        if (space == NULL || memchr(space + 1, ' ', size - (size_t)(space + 1 - text)) != NULL) return 0;
        part[0] = text;
        length[0] = (size_t)(space - text);
        part[1] = space + 1;
        length[1] = size - length[0] - 1;
        return 1;
    }
    if (json_array_size(merge) != 2) return 0; /* 0 for what is no array */
    for (int i = 0; i < 2; i++) {
        const json_t *text = json_array_get(merge, (size_t)i);
        if (!json_is_string(text)) return 0;
        part[i] = json_string_value(text);
        length[i] = json_string_length(text);
    }
    return 1;
}

static weft_status load_merge(weft_tokenizer *t, const char *file, size_t index, const json_t *merge, uint32_t rank,
                              weft_text *joined)
{
    char field[48];
    const char *part[3];
    size_t length[3];
    int32_t id[3];
    snprintf(field, sizeof field, "model.merges[%zu]", index);
    if (!merge_parts(merge, part, length)) return weft__json_bad(file, field, "\"a b\" or [\"a\", \"b\"]", merge);
    joined->length = 0;
    WEFT_TRY(weft__text_append(joined, part[0], length[0]));
    WEFT_TRY(weft__text_append(joined, part[1], length[1]));
    part[2] = joined->data;
    length[2] = joined->length;
    for (int i = 0; i < 3; i++) {
        id[i] = length[i] == 0 ? -1 : weft__vocab_find(&t->vocab, part[i], length[i]);
        if (id[i] < 0)
            return weft_fail(WEFT_FORMAT, "%s: %s: its %s '%.*s' is not in model.vocab", file, field,
                             i == 2 ? "result" : "part", (int)(length[i] > 60 ? 60 : length[i]), length[i] > 0 ? part[i] : "");
    }
    weft__bpe_add_merge(&t->bpe, id[0], id[1], rank, id[2]);
    return WEFT_OK;
}

static weft_status load_merges(weft_tokenizer *t, const char *file, json_t *model)
{
    json_t *merges = json_object_get(model, "merges");
    if (!json_is_array(merges)) return weft__json_bad(file, "model.merges", "an array", merges);
    size_t count = json_array_size(merges);
    uint32_t rank = 0;
    WEFT_TRY(weft__bpe_reserve(&t->bpe, count));
    weft_text joined = {0};
    weft_status status = WEFT_OK;
    for (size_t i = 0; i < count && status == WEFT_OK; i++) {
        const json_t *merge = json_array_get(merges, i);
        /* Old files keep the heading of merges.txt. */
        if (json_is_string(merge) && strncmp(json_string_value(merge), "#version", 8) == 0) continue;
        status = load_merge(t, file, i, merge, rank++, &joined);
    }
    weft_text_free(&joined);
    return status;
}

/* ---- the other fields of model ---- */

static weft_status load_flag(const char *file, const char *name, const json_t *object, const char *field, int *out)
{
    const json_t *value = json_object_get(object, field);
    if (value != NULL && !json_is_null(value) && !json_is_boolean(value)) {
        char where[96];
        snprintf(where, sizeof where, "%s.%s", name, field);
        return weft__json_bad(file, where, "true or false", value);
    }
    *out = json_is_true(value);
    return WEFT_OK;
}

static int is_empty(const json_t *value)
{
    return value == NULL || json_is_null(value) || (json_is_string(value) && json_string_length(value) == 0);
}

static weft_status refuse_unknown_bpe(const char *file, const json_t *model)
{
    const json_t *type = json_object_get(model, "type"), *dropout = json_object_get(model, "dropout");
    if (type != NULL && !json_is_string(type)) return weft__json_bad(file, "model.type", "a string", type);
    if (type != NULL && strcmp(json_string_value(type), "BPE") != 0)
        return weft_fail(WEFT_UNSUPPORTED, "%s: model.type: weft encodes with BPE, this file wants '%.60s'", file,
                         json_string_value(type));
    if (dropout != NULL && !json_is_null(dropout) && json_number_value(dropout) != 0)
        return weft_fail(WEFT_UNSUPPORTED, "%s: model.dropout: wanted null, dropout is for training", file);
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++)
        if (!is_empty(json_object_get(model, affixes[i])))
            return weft_fail(WEFT_UNSUPPORTED, "%s: model.%s: not supported", file, affixes[i]);
    return WEFT_OK;
}

static weft_status load_model(weft_tokenizer *t, const char *file, json_t *model)
{
    if (!json_is_object(model)) return weft__json_bad(file, "model", "an object", model);
    WEFT_TRY(refuse_unknown_bpe(file, model));
    WEFT_TRY(load_flag(file, "model", model, "fuse_unk", &t->bpe.fuse_unk));
    WEFT_TRY(load_flag(file, "model", model, "byte_fallback", &t->bpe.byte_fallback));
    WEFT_TRY(load_flag(file, "model", model, "ignore_merges", &t->bpe.ignore_merges));
    WEFT_TRY(load_vocab(t, file, model));
    WEFT_TRY(load_merges(t, file, model));
    weft__bpe_index(&t->bpe, &t->vocab);
    const json_t *unk = json_object_get(model, "unk_token");
    if (unk == NULL || json_is_null(unk)) return WEFT_OK;
    if (!json_is_string(unk)) return weft__json_bad(file, "model.unk_token", "a string or null", unk);
    t->bpe.unk = weft__vocab_find(&t->vocab, json_string_value(unk), json_string_length(unk));
    return t->bpe.unk >= 0 ? WEFT_OK : weft__json_bad(file, "model.unk_token", "a token of model.vocab", unk);
}

/* ---- added_tokens ---- */

static weft_status load_added_token(weft_tokenizer *t, const char *file, size_t index, const json_t *entry)
{
    char name[48], where[80];
    snprintf(name, sizeof name, "added_tokens[%zu]", index);
    if (!json_is_object(entry)) return weft__json_bad(file, name, "an object", entry);
    const json_t *id = json_object_get(entry, "id"), *content = json_object_get(entry, "content");
    json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
    snprintf(where, sizeof where, "%s.id", name);
    if (value < 0 || value >= WEFT__MAX_ID) return weft__json_bad(file, where, "an id from 0 to 4194303", id);
    snprintf(where, sizeof where, "%s.content", name);
    if (!json_is_string(content)) return weft__json_bad(file, where, "a string", content);
    if (json_string_length(content) == 0) return WEFT_OK; /* matches nothing, as in the reference */

    static const char *const flags[] = {"special", "single_word", "lstrip", "rstrip", "normalized"};
    int flag[5];
    for (int i = 0; i < 5; i++) WEFT_TRY(load_flag(file, name, entry, flags[i], &flag[i]));
    weft__added_tokens *added = &t->added;
    WEFT_TRY(weft__grow(&added->tokens, &added->capacity, added->count + 1, sizeof *added->tokens));
    weft__added *token = &added->tokens[added->count++];
    *token = (weft__added){.id = (int32_t)value,
                           .special = (uint8_t)flag[0],
                           .single_word = (uint8_t)flag[1],
                           .lstrip = (uint8_t)flag[2],
                           .rstrip = (uint8_t)flag[3],
                           .normalized = (uint8_t)flag[4]};
    WEFT_TRY(weft__string_copy(&token->content, json_string_value(content), json_string_length(content)));
    WEFT_TRY(at_field(weft__vocab_add(&t->vocab, token->content.data, token->content.length, token->id), file, name));
    t->vocab.tokens[token->id].special |= token->special;
    return WEFT_OK;
}

/* Tokens with normalized=true are looked for in their own normalised form. */
static weft_status index_added_token(weft_tokenizer *t, weft__regex_match *match, int32_t index, weft_text *normal, weft_text *other)
{
    const weft__added *token = &t->added.tokens[index];
    if (!token->normalized) return weft__trie_add(&t->added.raw, token->content.data, token->content.length, index);
    WEFT_TRY(weft__normalize(&t->normalizer, match, token->content.data, token->content.length, normal, other));
    return weft__trie_add(&t->added.normalized, normal->data, normal->length, index);
}

static weft_status index_added_tokens(weft_tokenizer *t)
{
    weft_text normal = {0}, other = {0};
    weft__regex_match *match = NULL;
    weft_status status = weft__regex_match_create(&match);
    int single_word = 0;
    for (size_t i = 0; i < t->added.count && status == WEFT_OK; i++) {
        single_word |= t->added.tokens[i].single_word;
        status = index_added_token(t, match, (int32_t)i, &normal, &other);
    }
    /* The two joiners count as parts of a word. */
    static const char word[] = "[\\w\\x{200C}\\x{200D}]";
    if (status == WEFT_OK && single_word) status = weft__regex_create(&t->added.word, word, sizeof word - 1);
    weft__regex_match_destroy(match);
    weft_text_free(&normal);
    weft_text_free(&other);
    return status;
}

static weft_status load_added_tokens(weft_tokenizer *t, const char *file, json_t *root)
{
    const json_t *list = json_object_get(root, "added_tokens");
    if (list == NULL || json_is_null(list)) return WEFT_OK;
    if (!json_is_array(list)) return weft__json_bad(file, "added_tokens", "an array", list);
    for (size_t i = 0; i < json_array_size(list); i++)
        WEFT_TRY(load_added_token(t, file, i, json_array_get(list, i)));
    return at_field(index_added_tokens(t), file, "added_tokens");
}

/* ---- the file ---- */

static weft_status load_root(weft_tokenizer *t, const char *file, json_t *root)
{
    if (!json_is_object(root)) return weft__json_bad(file, "the file", "an object", root);
    WEFT_TRY(load_model(t, file, json_object_get(root, "model")));
    WEFT_TRY(weft__load_normalizer(t, file, json_object_get(root, "normalizer")));
    WEFT_TRY(load_added_tokens(t, file, root));
    WEFT_TRY(weft__load_pretokenizer(t, file, json_object_get(root, "pre_tokenizer")));
    WEFT_TRY(weft__load_post_processor(t, file, json_object_get(root, "post_processor")));
    return weft__load_decoder(t, file, json_object_get(root, "decoder"));
}

/* Messages quote the file, and are one line whatever it holds. */
static weft_status on_one_line(weft_status status)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", weft_error_message());
    for (char *c = text; *c != 0; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return weft_fail(status, "%s", text);
}

weft_status weft_tokenizer_parse(weft_tokenizer **out, const char *name, const char *json, size_t bytes)
{
    json_error_t error;
    if (bytes >= 3 && memcmp(json, "\xEF\xBB\xBF", 3) == 0) json += 3, bytes -= 3; /* the mark of UTF-8 that some editors write */
    errno = 0; /* jansson takes a string that it has no memory for for a bad one */
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (root == NULL && errno == ENOMEM) return weft_fail(WEFT_MEMORY, "no memory to read %s", name);
    if (root == NULL) return on_one_line(weft_fail(WEFT_FORMAT, "%s: not JSON: line %d: %s", name, error.line, error.text));
    weft_tokenizer *t = NULL;
    weft_status status = weft__tokenizer_new(&t);
    if (status == WEFT_OK) status = load_root(t, name, root);
    json_decref(root);
    if (status == WEFT_OK) {
        *out = t;
        return WEFT_OK;
    }
    WEFT_RELEASE(t);
    return on_one_line(status);
}

static weft_status read_file(const char *path, char **out, size_t *bytes)
{
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) return weft_fail(WEFT_IO, "%s is not a file", path); /* a pipe: opening waits */
    FILE *file = fopen(path, "rb");
    if (file == NULL) return weft_fail(WEFT_IO, "cannot read %s: %s", path, strerror(errno));
    weft_status status = WEFT_OK;
    char *data = NULL;
    if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode)) status = weft_fail(WEFT_IO, "%s is not a file", path);
    else if (info.st_size > MAX_FILE) status = weft_fail(WEFT_FORMAT, "%s: %lld bytes, a tokenizer has at most %d", path,
                                                         (long long)info.st_size, MAX_FILE);
    else if ((data = malloc((size_t)info.st_size + 1)) == NULL) status = weft_fail(WEFT_MEMORY, "no memory to read %s", path);
    else if (fread(data, 1, (size_t)info.st_size, file) != (size_t)info.st_size)
        status = weft_fail(WEFT_IO, "cannot read all of %s", path);
    fclose(file);
    if (status == WEFT_OK) {
        *out = data;
        *bytes = (size_t)info.st_size;
    } else {
        free(data);
    }
    return status;
}

weft_status weft_tokenizer_load(weft_tokenizer **out, const char *path)
{
    char named[4096], *data = NULL;
    struct stat info;
    size_t bytes = 0;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        if (snprintf(named, sizeof named, "%s/tokenizer.json", path) >= (int)sizeof named)
            return weft_fail(WEFT_IO, "the path of the tokenizer is too long");
        path = named;
    }
    WEFT_TRY(read_file(path, &data, &bytes));
    weft_status status = weft_tokenizer_parse(out, path, data, bytes);
    free(data);
    return status;
}

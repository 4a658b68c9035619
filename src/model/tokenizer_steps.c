/* model/tokenizer_steps.c - reading normalizer, pre_tokenizer, post_processor and decoder.
 *
 * Each is one part or a Sequence of parts. `field` is where a part stands in the file, for messages. */
#include <stdio.h>
#include <string.h>

#include "model/tokenizer_parts.h"
#include "model/utf8.h"

enum { MAX_DEPTH = 8 };

#define GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

typedef struct {
    weft_tokenizer *tokenizer;
    const char *file;
} loader;

typedef weft_status (*load_part)(loader *l, const char *field, const char *type, const json_t *part);

static weft_status refuse(const loader *l, const char *field, const char *kind, const char *type)
{
    return weft_fail(WEFT_UNSUPPORTED, "%s: %s: the %s '%.60s' is not supported", l->file, field, kind, type);
}

/* Calls `load` for the part, or for each part of a Sequence, which lists them under `list`. */
static weft_status each_part(loader *l, const char *field, const json_t *part, const char *list, load_part load, int depth)
{
    char inner[160];
    if (part == NULL || json_is_null(part)) return WEFT_OK;
    if (!json_is_object(part)) return weft__json_bad(l->file, field, "an object or null", part);
    const json_t *type = json_object_get(part, "type");
    snprintf(inner, sizeof inner, "%s.type", field);
    if (!json_is_string(type)) return weft__json_bad(l->file, inner, "a string", type);
    if (strcmp(json_string_value(type), "Sequence") != 0) return load(l, field, json_string_value(type), part);
    const json_t *parts = json_object_get(part, list);
    snprintf(inner, sizeof inner, "%s.%s", field, list);
    if (!json_is_array(parts)) return weft__json_bad(l->file, inner, "an array", parts);
    if (depth >= MAX_DEPTH) return weft_fail(WEFT_FORMAT, "%s: %s: Sequences nested more than %d deep", l->file, field, MAX_DEPTH);
    for (size_t i = 0; i < json_array_size(parts); i++) {
        snprintf(inner, sizeof inner, "%s[%zu]", field, i);
        WEFT_TRY(each_part(l, inner, json_array_get(parts, i), list, load, depth + 1));
    }
    return WEFT_OK;
}

/* ---- fields of a part ---- */

static weft_status get_string(const loader *l, const char *field, const json_t *part, const char *name, weft__string *out)
{
    const json_t *value = json_object_get(part, name);
    char where[200];
    snprintf(where, sizeof where, "%s.%s", field, name);
    if (!json_is_string(value)) return weft__json_bad(l->file, where, "a string", value);
    return weft__string_copy(out, json_string_value(value), json_string_length(value));
}

static weft_status get_flag(const loader *l, const char *field, const json_t *part, const char *name, int fallback, int *out)
{
    const json_t *value = json_object_get(part, name);
    char where[200];
    *out = fallback;
    if (value == NULL) return WEFT_OK;
    snprintf(where, sizeof where, "%s.%s", field, name);
    if (!json_is_boolean(value)) return weft__json_bad(l->file, where, "true or false", value);
    *out = json_is_true(value);
    return WEFT_OK;
}

static weft_status get_count(const loader *l, const char *field, const json_t *part, const char *name, size_t *out)
{
    const json_t *value = json_object_get(part, name);
    char where[200];
    snprintf(where, sizeof where, "%s.%s", field, name);
    json_int_t count = json_is_integer(value) ? json_integer_value(value) : -1;
    if (count < 0 || count > 1000000) return weft__json_bad(l->file, where, "a count", value);
    *out = (size_t)count;
    return WEFT_OK;
}

static weft_status set_regex(const loader *l, const char *field, weft__pattern *pattern, const char *text, size_t length)
{
    weft_status status = weft__regex_create(&pattern->regex, text, length);
    if (status == WEFT_OK || status == WEFT_MEMORY) return status;
    return weft_fail(status, "%s: %s.pattern: %s", l->file, field, weft_error_message());
}

/* {"String": "a"}, {"Regex": "a+"} */
static weft_status get_pattern(const loader *l, const char *field, const json_t *part, weft__pattern *out)
{
    const json_t *pattern = json_object_get(part, "pattern");
    const json_t *literal = json_object_get(pattern, "String"), *regex = json_object_get(pattern, "Regex");
    char where[200];
    snprintf(where, sizeof where, "%s.pattern", field);
    if (json_is_string(literal) && json_string_length(literal) > 0)
        return weft__string_copy(&out->literal, json_string_value(literal), json_string_length(literal));
    if (json_is_string(regex)) return set_regex(l, field, out, json_string_value(regex), json_string_length(regex));
    return weft__json_bad(l->file, where, "{\"String\": text that is not empty} or {\"Regex\": text}", pattern);
}

/* ---- normalizer ---- */

static weft_status load_normalizer_part(loader *l, const char *field, const char *type, const json_t *part)
{
    weft__step *step = NULL;
    WEFT_TRY(weft__steps_add(&l->tokenizer->normalizer, &step));
    if (strcmp(type, "NFC") == 0) {
        step->kind = WEFT__STEP_NFC;
        return WEFT_OK;
    }
    if (strcmp(type, "Prepend") == 0) {
        step->kind = WEFT__STEP_PREPEND;
        return get_string(l, field, part, "prepend", &step->content);
    }
    if (strcmp(type, "Replace") == 0) {
        step->kind = WEFT__STEP_REPLACE;
        WEFT_TRY(get_pattern(l, field, part, &step->pattern));
        return get_string(l, field, part, "content", &step->content);
    }
    return refuse(l, field, "normalizer", type);
}

weft_status weft__load_normalizer(weft_tokenizer *tokenizer, const char *file, const json_t *root)
{
    loader l = {tokenizer, file};
    return each_part(&l, "normalizer", root, "normalizers", load_normalizer_part, 0);
}

/* ---- pre-tokenizer ---- */

static weft_status add_split(loader *l, const char *field, const char *pattern, weft__behavior behavior, int invert)
{
    weft__step *step = NULL;
    WEFT_TRY(weft__steps_add(&l->tokenizer->pretokenizer, &step));
    step->kind = WEFT__STEP_SPLIT;
    step->behavior = behavior;
    step->invert = invert;
    return set_regex(l, field, &step->pattern, pattern, strlen(pattern));
}

static weft_status load_split(loader *l, const char *field, const json_t *part)
{
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    const json_t *behavior = json_object_get(part, "behavior");
    weft__step *step = NULL;
    WEFT_TRY(weft__steps_add(&l->tokenizer->pretokenizer, &step));
    step->kind = WEFT__STEP_SPLIT;
    WEFT_TRY(get_pattern(l, field, part, &step->pattern));
    WEFT_TRY(get_flag(l, field, part, "invert", 0, &step->invert));
    for (int i = 0; i < 5; i++)
        if (json_is_string(behavior) && strcmp(json_string_value(behavior), names[i]) == 0) {
            step->behavior = (weft__behavior)i;
            return WEFT_OK;
        }
    char where[200];
    snprintf(where, sizeof where, "%s.behavior", field);
    return weft__json_bad(l->file, where, "Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous", behavior);
}

static weft_status load_byte_level(loader *l, const char *field, const json_t *part)
{
    int add_prefix_space = 0, use_regex = 0;
    weft__step *step = NULL;
    WEFT_TRY(get_flag(l, field, part, "add_prefix_space", 0, &add_prefix_space));
    WEFT_TRY(get_flag(l, field, part, "use_regex", 1, &use_regex));
    if (add_prefix_space) {
        WEFT_TRY(weft__steps_add(&l->tokenizer->pretokenizer, &step));
        step->kind = WEFT__STEP_PREFIX_SPACE;
    }
    if (use_regex) WEFT_TRY(add_split(l, field, GPT2_PATTERN, WEFT__ISOLATED, 0));
    WEFT_TRY(weft__steps_add(&l->tokenizer->pretokenizer, &step));
    step->kind = WEFT__STEP_BYTES;
    return WEFT_OK;
}

/* "always", "first", "never"; older files say add_prefix_space. */
static weft_status get_scheme(loader *l, const char *field, const json_t *part, weft__prepend *out)
{
    const json_t *scheme = json_object_get(part, "prepend_scheme");
    int add_prefix_space = 1;
    WEFT_TRY(get_flag(l, field, part, "add_prefix_space", 1, &add_prefix_space));
    *out = add_prefix_space ? WEFT__PREPEND_ALWAYS : WEFT__PREPEND_NEVER;
    if (scheme == NULL) return WEFT_OK;
    const char *name = json_is_string(scheme) ? json_string_value(scheme) : "";
    if (strcmp(name, "always") == 0) *out = WEFT__PREPEND_ALWAYS;
    else if (strcmp(name, "first") == 0) *out = WEFT__PREPEND_FIRST;
    else if (strcmp(name, "never") == 0) *out = WEFT__PREPEND_NEVER;
    else {
        char where[200];
        snprintf(where, sizeof where, "%s.prepend_scheme", field);
        return weft__json_bad(l->file, where, "always, first or never", scheme);
    }
    return WEFT_OK;
}

static weft_status load_metaspace(loader *l, const char *field, const json_t *part)
{
    weft__step *step = NULL;
    int cut = 1;
    WEFT_TRY(get_flag(l, field, part, "split", 1, &cut));
    WEFT_TRY(weft__steps_add(&l->tokenizer->pretokenizer, &step));
    step->kind = WEFT__STEP_METASPACE;
    WEFT_TRY(get_string(l, field, part, "replacement", &step->content));
    if (step->content.length == 0) return weft_fail(WEFT_FORMAT, "%s: %s.replacement is empty", l->file, field);
    WEFT_TRY(get_scheme(l, field, part, &step->scheme));
    if (!cut) return WEFT_OK;
    WEFT_TRY(weft__steps_add(&l->tokenizer->pretokenizer, &step));
    step->kind = WEFT__STEP_SPLIT;
    step->behavior = WEFT__MERGED_WITH_NEXT;
    return get_string(l, field, part, "replacement", &step->pattern.literal);
}

static weft_status load_pretokenizer_part(loader *l, const char *field, const char *type, const json_t *part)
{
    if (strcmp(type, "Split") == 0) return load_split(l, field, part);
    if (strcmp(type, "ByteLevel") == 0) return load_byte_level(l, field, part);
    if (strcmp(type, "Metaspace") == 0) return load_metaspace(l, field, part);
    if (strcmp(type, "Whitespace") == 0) return add_split(l, field, "\\w+|[^\\w\\s]+", WEFT__REMOVED, 1);
    if (strcmp(type, "WhitespaceSplit") == 0) return add_split(l, field, "\\s+", WEFT__REMOVED, 0);
    if (strcmp(type, "Digits") == 0) {
        int individual = 0;
        WEFT_TRY(get_flag(l, field, part, "individual_digits", 0, &individual));
        return add_split(l, field, individual ? "\\p{N}" : "\\p{N}+", WEFT__ISOLATED, 0);
    }
    return refuse(l, field, "pre-tokenizer", type);
}

weft_status weft__load_pretokenizer(weft_tokenizer *tokenizer, const char *file, const json_t *root)
{
    loader l = {tokenizer, file};
    return each_part(&l, "pre_tokenizer", root, "pretokenizers", load_pretokenizer_part, 0);
}

/* ---- post-processor ---- */

/* The ids of one special token of a template. */
static weft_status template_ids(loader *l, const char *field, const json_t *part, const char *name, weft_token_ids *out)
{
    char where[320];
    snprintf(where, sizeof where, "%s.special_tokens[\"%.60s\"].ids", field, name);
    const json_t *ids = json_object_get(json_object_get(json_object_get(part, "special_tokens"), name), "ids");
    if (!json_is_array(ids)) return weft__json_bad(l->file, where, "an array of ids", ids);
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *id = json_array_get(ids, i);
        json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
        if (value < 0 || value >= weft_tokenizer_vocab_size(l->tokenizer))
            return weft__json_bad(l->file, where, "ids of the vocabulary", id);
        WEFT_TRY(weft__ids_append(out, (int32_t)value));
    }
    return WEFT_OK;
}

static weft_status read_template(loader *l, const char *field, const json_t *part, weft_token_ids *front, weft_token_ids *back)
{
    const json_t *items = json_object_get(part, "single");
    char where[200];
    int seen = 0;
    snprintf(where, sizeof where, "%s.single", field);
    if (!json_is_array(items)) return weft__json_bad(l->file, where, "an array", items);
    for (size_t i = 0; i < json_array_size(items); i++) {
        const json_t *item = json_array_get(items, i);
        const json_t *token = json_object_get(json_object_get(item, "SpecialToken"), "id");
        const json_t *text = json_object_get(json_object_get(item, "Sequence"), "id");
        snprintf(where, sizeof where, "%s.single[%zu]", field, i);
        if (json_is_string(token)) WEFT_TRY(template_ids(l, field, part, json_string_value(token), seen ? back : front));
        else if (json_is_string(text) && strcmp(json_string_value(text), "A") == 0 && !seen) seen = 1;
        else return weft__json_bad(l->file, where, "a SpecialToken, or the Sequence A once", item);
    }
    if (!seen) return weft_fail(WEFT_FORMAT, "%s: %s.single: it has no Sequence A", l->file, field);
    return WEFT_OK;
}

/* A template around what earlier ones made: its front goes in front of theirs. */
static weft_status load_template(loader *l, const char *field, const json_t *part)
{
    weft_token_ids front = {0}, back = {0};
    weft_tokenizer *t = l->tokenizer;
    weft_status status = read_template(l, field, part, &front, &back);
    for (size_t i = 0; i < t->prefix.count && status == WEFT_OK; i++) status = weft__ids_append(&front, t->prefix.ids[i]);
    for (size_t i = 0; i < back.count && status == WEFT_OK; i++) status = weft__ids_append(&t->suffix, back.ids[i]);
    if (status == WEFT_OK) {
        weft_token_ids old = t->prefix;
        t->prefix = front;
        front = old;
    }
    weft_token_ids_free(&front);
    weft_token_ids_free(&back);
    return status;
}

static weft_status load_post_processor_part(loader *l, const char *field, const char *type, const json_t *part)
{
    if (strcmp(type, "TemplateProcessing") == 0) return load_template(l, field, part);
    if (strcmp(type, "ByteLevel") == 0) return WEFT_OK; /* it only moves offsets */
    return refuse(l, field, "post-processor", type);
}

weft_status weft__load_post_processor(weft_tokenizer *tokenizer, const char *file, const json_t *root)
{
    loader l = {tokenizer, file};
    return each_part(&l, "post_processor", root, "processors", load_post_processor_part, 0);
}

/* ---- decoder ---- */

/* Decoders are accepted in the order Replace*, ByteFallback, Fuse, Strip: what files use, and what can stream. */
static weft_status load_replace_decoder(loader *l, const char *field, const json_t *part)
{
    weft__decoder *d = &l->tokenizer->decoder;
    weft__step *step = NULL;
    WEFT_TRY(weft__steps_add(&d->replaces, &step));
    step->kind = WEFT__STEP_REPLACE;
    WEFT_TRY(get_pattern(l, field, part, &step->pattern));
    if (step->pattern.regex != NULL) return refuse(l, field, "decoder", "Replace with a Regex");
    return get_string(l, field, part, "content", &step->content);
}

static weft_status load_strip_decoder(loader *l, const char *field, const json_t *part)
{
    weft__decoder *d = &l->tokenizer->decoder;
    uint32_t cp;
    d->has_strip = 1;
    WEFT_TRY(get_string(l, field, part, "content", &d->strip));
    if (d->strip.length == 0 || weft__utf8_read(d->strip.data, d->strip.length, &cp, NULL) != d->strip.length)
        return weft_fail(WEFT_FORMAT, "%s: %s.content: wanted one character, found '%.60s'", l->file, field, d->strip.data);
    WEFT_TRY(get_count(l, field, part, "start", &d->strip_start));
    return get_count(l, field, part, "stop", &d->strip_stop);
}

static weft_status load_metaspace_decoder(loader *l, const char *field, const json_t *part)
{
    weft__decoder *d = &l->tokenizer->decoder;
    weft__prepend scheme;
    WEFT_TRY(get_string(l, field, part, "replacement", &d->metaspace));
    if (d->metaspace.length == 0) return weft_fail(WEFT_FORMAT, "%s: %s.replacement is empty", l->file, field);
    WEFT_TRY(get_scheme(l, field, part, &scheme));
    d->metaspace_prefix = scheme != WEFT__PREPEND_NEVER;
    return WEFT_OK;
}

static weft_status load_decoder_part(loader *l, const char *field, const char *type, const json_t *part)
{
    static const char *const order[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
    weft__decoder *d = &l->tokenizer->decoder;
    int alone = d->stage == 0;
    if (strcmp(type, "ByteLevel") == 0 || strcmp(type, "Metaspace") == 0) {
        if (!alone) return refuse(l, field, "decoder behind others", type);
        d->stage = 3; /* only Fuse may follow, and changes nothing */
        d->kind = type[0] == 'B' ? WEFT__DECODE_BYTES : WEFT__DECODE_METASPACE;
        return type[0] == 'B' ? WEFT_OK : load_metaspace_decoder(l, field, part);
    }
    int stage = 0;
    while (stage < 4 && strcmp(type, order[stage]) != 0) stage++;
    if (stage == 4) return refuse(l, field, "decoder", type);
    int again = stage == 0 || stage == 2 ? d->stage > stage + 1 : d->stage > stage;
    if (again || (stage == 3 && d->stage != 3) || (d->kind != WEFT__DECODE_SPACED && d->kind != WEFT__DECODE_TEXT && stage != 2))
        return refuse(l, field, "decoder in this place", type);
    if (d->kind == WEFT__DECODE_SPACED) d->kind = WEFT__DECODE_TEXT;
    d->stage = stage + 1;
    if (stage == 0) return load_replace_decoder(l, field, part);
    if (stage == 1) d->byte_fallback = 1;
    return stage == 3 ? load_strip_decoder(l, field, part) : WEFT_OK;
}

weft_status weft__load_decoder(weft_tokenizer *tokenizer, const char *file, const json_t *root)
{
    loader l = {tokenizer, file};
    WEFT_TRY(each_part(&l, "decoder", root, "decoders", load_decoder_part, 0));
    weft__decoder *d = &tokenizer->decoder;
    if (json_is_object(root) && d->kind == WEFT__DECODE_SPACED) d->kind = WEFT__DECODE_TEXT; /* an empty Sequence only joins */
    return WEFT_OK;
}

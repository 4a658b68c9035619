/* comm/group_threads.c - what the members of a group share when ranks are threads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"

/* ---- finding each other ---- */

void weft__key_free(weft__key *key)
{
    free(key->ranks);
    free(key->created);
    free(key->name);
    free(key);
}

void weft__shared_free(weft__shared *shared)
{
    free(shared->slots);
    free(shared->staging);
    free(shared);
}

/* "context {0,1,2,3}"; long lists are cut in the middle of a word by nobody: 6 bytes a rank. */
static char *key_name(const char *label, const int *ranks, int size)
{
    size_t room = strlen(label) + 4 + (size_t)size * 6, used;
    char *name = malloc(room);
    if (name == NULL) return NULL;
    used = (size_t)snprintf(name, room, "%s {", label);
    for (int i = 0; i < size; i++) used += (size_t)snprintf(name + used, room - used, "%s%d", i > 0 ? "," : "", ranks[i]);
    snprintf(name + used, room - used, "}");
    return name;
}

static weft__key *find_key(weft_world *world, weft_group_type type, const int *ranks, int size, const char *label)
{
    size_t label_length = strlen(label);
    for (weft__key *key = world->keys; key != NULL; key = key->next)
        if (key->type == type && key->size == size && memcmp(key->ranks, ranks, (size_t)size * sizeof *ranks) == 0 &&
            strncmp(key->name, label, label_length) == 0 && key->name[label_length] == ' ')
            return key;
    weft__key *key = calloc(1, sizeof *key);
    if (key == NULL) return NULL;
    key->type = type;
    key->size = size;
    key->ranks = malloc((size_t)size * sizeof *ranks);
    key->created = calloc((size_t)size, sizeof *key->created);
    key->name = key_name(label, ranks, size);
    if (key->ranks == NULL || key->created == NULL || key->name == NULL) {
        weft__key_free(key);
        return NULL;
    }
    memcpy(key->ranks, ranks, (size_t)size * sizeof *ranks);
    key->next = world->keys;
    world->keys = key;
    return key;
}

static weft__shared *find_shared(weft_world *world, const weft__key *key, unsigned nth)
{
    for (weft__shared *s = world->shared; s != NULL; s = s->next)
        if (s->key == key && s->nth == nth) return s;
    weft__shared *s = aligned_alloc(WEFT__CACHE_LINE, sizeof *s);
    if (s == NULL) return NULL;
    memset(s, 0, sizeof *s);
    size_t slots = 2 * (size_t)key->size;
    s->slots = aligned_alloc(WEFT__CACHE_LINE, slots * sizeof *s->slots);
    s->staging = aligned_alloc(WEFT__CACHE_LINE, slots * WEFT__STAGE_BYTES);
    if (s->slots == NULL || s->staging == NULL) {
        weft__shared_free(s);
        return NULL;
    }
    memset(s->slots, 0, slots * sizeof *s->slots);
    s->key = key;
    s->nth = nth;
    s->size = key->size;
    s->next = world->shared;
    world->shared = s;
    return s;
}

weft_status weft__shared_join(weft_group *group, weft_group_type type, const int *ranks, int size, const char *label)
{
    weft_world *world = group->world;
    pthread_mutex_lock(&world->lock);
    weft__key *key = find_key(world, type, ranks, size, label);
    weft__shared *shared = NULL;
    if (key != NULL && size > 1) {
        shared = find_shared(world, key, key->created[group->rank]);
        if (shared != NULL) {
            key->created[group->rank]++;
            shared->joined++;
        }
    }
    pthread_mutex_unlock(&world->lock);
    if (key == NULL || (size > 1 && shared == NULL)) return weft_fail(WEFT_MEMORY, "no memory for a group of %d ranks", size);
    group->ranks = key->ranks;
    group->name = key->name;
    group->shared = shared;
    return WEFT_OK;
}

void weft__shared_leave(weft_group *group)
{
    weft__shared *shared = group->shared;
    if (shared == NULL) return;
    group->shared = NULL;
    weft_world *world = group->world;
    pthread_mutex_lock(&world->lock);
    int last = ++shared->left == shared->size;
    if (last) {
        weft__shared **link = &world->shared;
        while (*link != shared) link = &(*link)->next;
        *link = shared->next;
    }
    pthread_mutex_unlock(&world->lock);
    if (last) weft__shared_free(shared);
}

/* ---- the barrier ---- */

static uint32_t completed(uint32_t word)
{
    return word >> 16;
}

static int is_over(uint32_t word, uint32_t barrier)
{
    return completed(word) != barrier;
}

/* Returns the number of the barrier that we wait for, or of the one we completed (*over). */
static uint32_t arrive(weft__shared *shared, int *over)
{
    uint32_t word = atomic_load_explicit(&shared->gate.word, memory_order_relaxed), next;
    do {
        uint32_t arrived = (word & 0xffff) + 1;
        *over = arrived == (uint32_t)shared->size;
        next = *over ? (completed(word) + 1) << 16 : word + 1;
    } while (!atomic_compare_exchange_weak(&shared->gate.word, &word, next));
    if (*over) weft__wake(&shared->gate);
    return completed(word);
}

/* Takes our arrival back; 0 when the barrier is over after all. */
static int withdraw(weft__shared *shared, uint32_t barrier)
{
    uint32_t word = atomic_load(&shared->gate.word);
    do {
        if (completed(word) != barrier) return 0;
    } while (!atomic_compare_exchange_weak(&shared->gate.word, &word, word - 1));
    return 1;
}

/* The first member whose posted sequence number is behind ours. */
static int silent_member(void *context)
{
    const weft_group *group = context;
    const weft__presence *presence = group->world->presence;
    for (int m = 0; m < group->size; m++) {
        const weft__presence *p = &presence[group->ranks[m]];
        if (m == group->rank) continue;
        /* It is here when its last call is this one. */
        if (atomic_load_explicit(&p->group_name, memory_order_relaxed) != group->name ||
            atomic_load_explicit(&p->sequence, memory_order_relaxed) != group->sequence)
            return group->ranks[m];
    }
    return -1;
}

static weft_status barrier(weft_group *group, int certain)
{
    weft__shared *shared = group->shared;
    int over, me = group->owner->rank, silent = -1;
    uint32_t number = arrive(shared, &over);
    if (over) return WEFT_OK;
    weft__wait wait = {.gate = &shared->gate, .ready = is_over, .argument = number, .silent = silent_member, .context = group, .certain = certain};
    weft__waited how = weft__wait_for(group->world, me, &wait, &silent);
    if (how == WEFT__READY || !withdraw(shared, number)) return WEFT_OK;
    return weft__wait_failed(group->world, me, how, silent);
}

/* ---- exchange ---- */

static int same_call(const weft__call *a, const weft__call *b)
{
    return a->sequence == b->sequence && a->op == b->op && a->reduce == b->reduce && a->dtype == b->dtype &&
           a->count == b->count && a->rows == b->rows && a->root == b->root;
}

const weft__slot *weft__peer(const weft_group *group, int member)
{
    return &group->shared->slots[(group->sequence & 1) * (uint64_t)group->size + (uint64_t)member];
}

/* Every member compares all with the first, so all see the same difference. */
static weft_status compare_calls(weft_group *group)
{
    const weft__call *first = &weft__peer(group, 0)->call;
    for (int m = 1; m < group->size; m++) {
        const weft__call *other = &weft__peer(group, m)->call;
        if (same_call(first, other)) continue;
        char a[160], b[160];
        return weft_fail(WEFT_INVALID, "collective %llu of %s does not match: rank %d calls %s, rank %d calls %s",
                         (unsigned long long)group->sequence, group->name, group->ranks[0],
                         weft__describe_call(first, a, sizeof a), group->ranks[m], weft__describe_call(other, b, sizeof b));
    }
    return WEFT_OK;
}

weft_status weft__exchange_begin(weft_group *group, weft__call *call, const void *in, size_t in_bytes, void *out, int direct)
{
    WEFT_TRY(weft_world_check(group->world));
    call->sequence = ++group->sequence;
    size_t index = (size_t)(group->sequence & 1) * (size_t)group->size + (size_t)group->rank;
    weft__slot *slot = &group->shared->slots[index];
    slot->call = *call;
    slot->in = in;
    slot->out = out;
    slot->cuda = group->owner->cuda;
    if (!direct) {
        slot->in = group->shared->staging + index * WEFT__STAGE_BYTES;
        if (in_bytes > 0) memcpy(group->shared->staging + index * WEFT__STAGE_BYTES, in, in_bytes);
    }
    weft__note_call(group->world, group->owner->rank, call, group->name);
    WEFT_TRY(barrier(group, 0));
    return compare_calls(group);
}

void weft__exchange_end(weft_group *group, int direct)
{
    if (direct) barrier(group, 1);
}

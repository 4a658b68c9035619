/* comm/registry.c - the groups of a rank, found by (type, world_size). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"

struct weft_group_list {
    int count, capacity;
    weft_group **groups;
};

static weft_status append(weft_rank *rank, weft_group *group)
{
    struct weft_group_list *list = rank->groups;
    if (list == NULL) list = rank->groups = calloc(1, sizeof *list);
    if (list == NULL) return weft_fail(WEFT_MEMORY, "no memory for the list of groups");
    if (list->count == list->capacity) {
        int capacity = list->capacity > 0 ? 2 * list->capacity : 8;
        weft_group **larger = realloc(list->groups, (size_t)capacity * sizeof *larger);
        if (larger == NULL) return weft_fail(WEFT_MEMORY, "no memory for the list of groups");
        list->groups = larger;
        list->capacity = capacity;
    }
    list->groups[list->count++] = weft_group_retain(group);
    return WEFT_OK;
}

static weft_group *find(const weft_rank *rank, weft_group_type type, int world_size)
{
    const struct weft_group_list *list = rank->groups;
    for (int i = 0; list != NULL && i < list->count; i++)
        if (list->groups[i]->type == type && list->groups[i]->size == world_size) return list->groups[i];
    return NULL;
}

static void drop(struct weft_group_list *list, const weft_group *group)
{
    for (int i = 0; i < list->count; i++) {
        if (list->groups[i] != group) continue;
        weft_group *gone = list->groups[i];
        memmove(&list->groups[i], &list->groups[i + 1], (size_t)(list->count - i - 1) * sizeof *list->groups);
        list->count--;
        weft_group_release(gone);
        return;
    }
}

weft_status weft_rank_add_group(weft_rank *rank, weft_group *group)
{
    WEFT_TRY(weft__group_usable(group));
    weft_group *old = find(rank, group->type, group->size);
    if (old == group) return WEFT_OK;
    if (old != NULL && !old->closed && group->size > 1)
        return weft_fail(WEFT_INVALID, "%s is already the %s group of %d; close it before %s takes its place", old->name,
                         weft_group_type_name(group->type), group->size, group->name);
    if (old != NULL) drop(rank->groups, old);
    return append(rank, group);
}

/* "tensor 8, attention_tensor 2" */
static void list_groups(const weft_rank *rank, char *text, size_t size)
{
    const struct weft_group_list *list = rank->groups;
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; list != NULL && i < list->count && used < size; i++) {
        const weft_group *g = list->groups[i];
        if (g->size > 1)
            used += (size_t)snprintf(text + used, size - used, "%s%s %d", used > 0 ? ", " : "", weft_group_type_name(g->type), g->size);
    }
    if (used == 0) snprintf(text, size, "none");
}

weft_status weft_rank_group(weft_rank *rank, weft_group_type type, int world_size, weft_group **out)
{
    if ((unsigned)type >= WEFT_GROUP_TYPE_COUNT) return weft_fail(WEFT_INVALID, "unknown group type %d", (int)type);
    weft_group *group = find(rank, type, world_size);
    if (group != NULL) {
        *out = group;
        return WEFT_OK;
    }
    if (world_size != 1) {
        char known[600];
        list_groups(rank, known, sizeof known);
        return weft_fail(WEFT_INVALID, "rank %d has no %s group of %d ranks (it has: %s)", rank->rank, weft_group_type_name(type),
                         world_size, known);
    }
    WEFT_TRY(weft_group_create(&group, rank, type, &rank->rank, 1));
    weft_status status = append(rank, group);
    weft_group_release(group);
    if (status != WEFT_OK) return status;
    *out = group;
    return WEFT_OK;
}

weft_status weft_rank_only_group(weft_rank *rank, weft_group_type type, weft_group **out)
{
    const struct weft_group_list *list = rank->groups;
    int size = 1, several = 0;
    for (int i = 0; list != NULL && i < list->count; i++) {
        const weft_group *g = list->groups[i];
        if (g->type != type || g->size == 1) continue;
        several = size > 1;
        size = g->size;
    }
    if (several) {
        char known[600];
        list_groups(rank, known, sizeof known);
        return weft_fail(WEFT_INVALID, "rank %d has several %s groups, say of which size (it has: %s)", rank->rank,
                         weft_group_type_name(type), known);
    }
    return weft_rank_group(rank, type, size, out);
}

weft_status weft_group_list_close(weft_group_list *list)
{
    weft_status first = WEFT_OK;
    char text[WEFT__MESSAGE_BYTES];
    for (int i = 0; list != NULL && i < list->count; i++) {
        weft_status status = weft_group_close(list->groups[i]);
        if (status != WEFT_OK && first == WEFT_OK) {
            first = status;
            snprintf(text, sizeof text, "%s", weft_error_message());
        }
    }
    weft_group_list_free(list);
    return first == WEFT_OK ? WEFT_OK : weft_fail(first, "%s", text);
}

weft_status weft__check_groups(const weft_rank *rank)
{
    const struct weft_group_list *list = rank->groups;
    for (int i = 0; list != NULL && i < list->count; i++)
        if (list->groups[i]->nccl != NULL) WEFT_TRY(weft__nccl_check(list->groups[i]));
    return WEFT_OK;
}

weft_status weft__renew_groups(weft_rank *rank)
{
    const struct weft_group_list *list = rank->groups;
    for (int i = 0; list != NULL && i < list->count; i++) {
        weft_group *group = list->groups[i];
        if (group->nccl == NULL) continue;
        weft__nccl_leave(group);
        WEFT_TRY(weft__nccl_join(group));
    }
    return WEFT_OK;
}

void weft_group_list_free(weft_group_list *list)
{
    if (list == NULL) return;
    for (int i = 0; i < list->count; i++) weft_group_release(list->groups[i]);
    free(list->groups);
    free(list);
}

weft_group_list *weft_rank_take_groups(weft_rank *rank)
{
    weft_group_list *list = rank->groups;
    rank->groups = NULL;
    return list;
}

void weft_rank_put_groups(weft_rank *rank, weft_group_list *groups)
{
    weft_group_list_free(weft_rank_take_groups(rank));
    rank->groups = groups;
}

weft_status weft_rank_close_groups(weft_rank *rank)
{
    weft_status status = weft_group_list_close(weft_rank_take_groups(rank));
    weft__nccl_clear(rank, status == WEFT_OK);
    return status;
}

void weft__forget_groups(weft_rank *rank)
{
    weft_group_list_free(weft_rank_take_groups(rank));
}

/* comm/fault.c - WEFT_FAULT: failures on demand, for specs.
 *
 *     rank=2,step=5,at=exchange,kind=raise|stall|exit
 *
 * step and at may be left out: any. WEFT_FAULT_MARK=FILE: the file is made as it strikes, for those who
 * take the time from there. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/internal.h"

static int parse_count(const char *text, long long high, long long *out)
{
    char *end;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != 0 || value < 0 || value > high) return 0;
    *out = value;
    return 1;
}

static weft_status set_field(weft__fault *fault, const char *key, const char *value, int world_size, int *has_kind)
{
    long long number = 0;
    if (strcmp(key, "rank") == 0) {
        if (!parse_count(value, world_size - 1, &number))
            return weft_fail(WEFT_INVALID, "WEFT_FAULT: rank must be 0 to %d, got '%s'", world_size - 1, value);
        fault->rank = (int)number;
    } else if (strcmp(key, "step") == 0) {
        if (!parse_count(value, INT64_MAX, &fault->step))
            return weft_fail(WEFT_INVALID, "WEFT_FAULT: step must be a number from 0, got '%s'", value);
    } else if (strcmp(key, "at") == 0) {
        if (strcmp(value, "load") != 0 && strcmp(value, "step") != 0 && strcmp(value, "exchange") != 0 && strcmp(value, "capture") != 0)
            return weft_fail(WEFT_INVALID, "WEFT_FAULT: at must be load, step, exchange or capture, got '%s'", value);
        strcpy(fault->at, value);
    } else if (strcmp(key, "kind") == 0) {
        *has_kind = 1;
        if (strcmp(value, "raise") == 0) fault->kind = WEFT__FAULT_RAISE;
        else if (strcmp(value, "stall") == 0) fault->kind = WEFT__FAULT_STALL;
        else if (strcmp(value, "exit") == 0) fault->kind = WEFT__FAULT_EXIT;
        else return weft_fail(WEFT_INVALID, "WEFT_FAULT: kind must be raise, stall or exit, got '%s'", value);
    } else {
        return weft_fail(WEFT_INVALID, "WEFT_FAULT: unknown key '%s' (known: rank, step, at, kind)", key);
    }
    return WEFT_OK;
}

weft_status weft__fault_parse(weft__fault *out, const char *text, int world_size)
{
    weft__fault fault = {.rank = -1, .step = -1};
    char copy[160];
    int has_kind = 0;
    if (text != NULL && *text != 0) {
        if (strlen(text) >= sizeof copy) return weft_fail(WEFT_INVALID, "WEFT_FAULT is longer than %zu bytes", sizeof copy - 1);
        strcpy(copy, text);
        char *rest = copy;
        for (char *field; (field = strsep(&rest, ",")) != NULL;) {
            char *value = strchr(field, '=');
            if (value == NULL)
                return weft_fail(WEFT_INVALID, "WEFT_FAULT: '%s' is not key=value (rank=2,step=5,at=exchange,kind=raise)", field);
            *value++ = 0;
            WEFT_TRY(set_field(&fault, field, value, world_size, &has_kind));
        }
        if (fault.rank < 0 || !has_kind) return weft_fail(WEFT_INVALID, "WEFT_FAULT needs rank= and kind=, got '%s'", text);
    }
    *out = fault;
    return WEFT_OK;
}

static weft_status stall(weft_world *world)
{
    if (weft_world_size(world) == 1) return weft_fail(WEFT_INVALID, "WEFT_FAULT: kind=stall needs a second rank that notices");
    while (atomic_load(&world->aborted.word) == 0) weft__sleep(&world->aborted, 0, 0.05);
    return weft_world_check(world);
}

static void mark(void)
{
    const char *path = getenv("WEFT_FAULT_MARK");
    int file = path != NULL ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
    if (file >= 0) close(file);
}

weft_status weft_rank_fault(weft_rank *rank, const char *at)
{
    const weft__fault *fault = &rank->world->fault;
    weft__note_progress(rank->world, rank->rank);
    if (fault->rank != rank->rank) return WEFT_OK;
    if (fault->step >= 0 && (uint64_t)fault->step != rank->step) return WEFT_OK;
    if (fault->at[0] != 0 && strcmp(fault->at, at) != 0) return WEFT_OK;
    mark();
    if (fault->kind == WEFT__FAULT_STALL) return stall(rank->world);
    if (fault->kind == WEFT__FAULT_EXIT) {
        fprintf(stderr, "weft: rank %d: WEFT_FAULT exit at %s of step %llu\n", rank->rank, at, (unsigned long long)rank->step);
        _exit(1);
    }
    return weft_fail(WEFT_INTERNAL, "WEFT_FAULT raised at %s of step %llu", at, (unsigned long long)rank->step);
}

/* kernels/cuda/tests/sections.h - the sections of a test program that its arguments name. */
#pragma once

#include <stdio.h>
#include <string.h>

typedef struct {
    const char *name;
    void (*run)(void);
} section;

static inline void sections_list(const section *all, int count, FILE *to)
{
    for (int s = 0; s < count; s++) fprintf(to, " %s", all[s].name);
    fprintf(to, "\n");
}

/* -1: each of names[0 .. asked) is a section. Otherwise the program's exit code, once it has said why: 0 for -h and
 * --help, 2 for a name that is none. usage: the line but for the sections. */
static inline int sections_refuse(const section *all, int count, char *const *names, int asked, const char *usage)
{
    for (int i = 0; i < asked; i++) {
        int known = 0, help = strcmp(names[i], "-h") == 0 || strcmp(names[i], "--help") == 0;
        for (int s = 0; s < count; s++) known |= strcmp(names[i], all[s].name) == 0;
        if (known) continue;
        if (!help) fprintf(stderr, "no section '%s'; sections:", names[i]);
        else printf("%s; sections, all by default:", usage);
        sections_list(all, count, help ? stdout : stderr);
        return help ? 0 : 2;
    }
    return -1;
}

static inline int sections_want(const section *one, char *const *names, int asked)
{
    for (int i = 0; i < asked; i++)
        if (strcmp(names[i], one->name) == 0) return 1;
    return asked == 0;
}

/* base/object.h - counted references.
 *
 * Every core object that Lua can hold starts with this header. References are counted in C
 * because Lua finalises in any order and a layer outlives the variable that named its weights.
 * Counts are atomic: two ranks' states may share an object. */
#pragma once

#include <stdatomic.h>

typedef struct weft_object weft_object;
struct weft_object {
    atomic_int refs;
    void (*destroy)(weft_object *self); /* last reference gone; never waits, never calls a device */
};

/* A new object is born with one reference, the creator's. */
void weft_object_init(weft_object *object, void (*destroy)(weft_object *self));
void weft_object_retain(weft_object *object);
void weft_object_release(weft_object *object); /* NULL is allowed */
/* Objects alive in this process; specs compare it before and after. */
long weft_live_objects(void);

#define WEFT_RETAIN(x) (weft_object_retain(&(x)->object), (x))
#define WEFT_RELEASE(x)                                          \
    do {                                                         \
        if ((x) != NULL) weft_object_release(&(x)->object);      \
        (x) = NULL;                                              \
    } while (0)

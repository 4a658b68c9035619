/* base/object.c - counted references. */
#include "base/object.h"

#include <stddef.h>

/* A count for specs, not state that any code depends on. */
static atomic_long live;

void weft_object_init(weft_object *object, void (*destroy)(weft_object *self))
{
    atomic_init(&object->refs, 1);
    object->destroy = destroy;
    atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
}

void weft_object_retain(weft_object *object)
{
    atomic_fetch_add_explicit(&object->refs, 1, memory_order_relaxed);
}

void weft_object_release(weft_object *object)
{
    if (object == NULL) return;
    if (atomic_fetch_sub_explicit(&object->refs, 1, memory_order_acq_rel) == 1) {
        atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
        object->destroy(object);
    }
}

long weft_live_objects(void)
{
    return atomic_load_explicit(&live, memory_order_relaxed);
}

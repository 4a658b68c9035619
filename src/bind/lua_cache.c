#include "bind/core.h"

void weft_open_cache(lua_State *L)
{
    (void)L;
}

#include "bind/core.h"

void weft_open_spawn(lua_State *L)
{
    (void)L;
}

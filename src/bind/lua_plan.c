#include "bind/core.h"

void weft_open_plan(lua_State *L)
{
    (void)L;
}

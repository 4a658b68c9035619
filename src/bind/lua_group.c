#include "bind/core.h"

void weft_open_group(lua_State *L)
{
    (void)L;
}

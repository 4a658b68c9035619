#include "bind/core.h"

void weft_open_norm(lua_State *L)
{
    (void)L;
}

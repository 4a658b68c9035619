#include "bind/core.h"

void weft_open_ops(lua_State *L)
{
    (void)L;
}

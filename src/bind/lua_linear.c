#include "bind/core.h"

void weft_open_linear(lua_State *L)
{
    (void)L;
}

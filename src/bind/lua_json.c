#include "bind/core.h"

void weft_open_json(lua_State *L)
{
    (void)L;
}

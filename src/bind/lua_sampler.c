#include "bind/core.h"

void weft_open_sampler(lua_State *L)
{
    (void)L;
}

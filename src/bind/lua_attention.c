#include "bind/core.h"

void weft_open_attention(lua_State *L)
{
    (void)L;
}

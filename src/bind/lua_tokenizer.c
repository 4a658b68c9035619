#include "bind/core.h"

void weft_open_tokenizer(lua_State *L)
{
    (void)L;
}

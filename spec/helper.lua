-- spec/helper.lua: where the specs find weft. WEFT_BUILD names the build folder (default: build).
local root = os.getenv("WEFT_ROOT") or "."
local build = os.getenv("WEFT_BUILD") or (root .. "/build")
package.path = root .. "/lua/?.lua;" .. root .. "/lua/?/init.lua;" .. root .. "/?.lua;" .. package.path
package.cpath = build .. "/lib/?.so;" .. package.cpath
require "weft.core" -- loaded before busted isolates files, so that its library stays
if os.getenv "WEFT_SANITIZED" then -- children are not to load the sanitizer: sh dies under it
  local ffi = require "ffi"
  ffi.cdef "int unsetenv(const char *name);"
  ffi.C.unsetenv "LD_PRELOAD"
end

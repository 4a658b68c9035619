--- spec/support/terminal.lua: a program at a pseudo-terminal, typed at and read from.
local ffi = require "ffi"

ffi.cdef [[
int tcgetattr(int fd, void *termios);
int forkpty(int *master, char *name, const void *termios, const void *size);
int execvp(const char *file, char *const argv[]);
int setenv(const char *name, const char *value, int overwrite);
int unsetenv(const char *name);
void _exit(int status);
long read(int fd, void *buffer, unsigned long bytes);
long write(int fd, const void *data, unsigned long bytes);
int close(int fd);
int kill(int pid, int signal);
int waitpid(int pid, int *status, int options);
struct spec_pollfd { int fd; short events, revents; };
int poll(struct spec_pollfd *fds, unsigned long count, int timeout_ms);
void (*signal(int signal, void (*handler)(int)))(int);
]]
local C = ffi.C

local Terminal = {}
Terminal.__index = Terminal

--- Starts words[1] with the rest as arguments; env: table of variables to set.
function Terminal.open(words, env)
  local argv = ffi.new("char *[?]", #words + 1)
  local kept = {}
  for i, word in ipairs(words) do
    kept[i] = ffi.new("char[?]", #word + 1, word)
    argv[i - 1] = kept[i]
  end
  local master = ffi.new "int[1]"
  local size = ffi.new("unsigned short[4]", 40, 200, 0, 0)
  io.stdout:flush()
  local pid = C.forkpty(master, nil, nil, size)
  if pid == 0 then
    C.signal(2, nil)
    C.unsetenv "LD_PRELOAD"
    C.setenv("TERM", "dumb", 1)
    C.setenv("WEFT_BENCH_FILE", "", 1)
    for name, value in pairs(env or {}) do C.setenv(name, value, 1) end
    C.execvp(argv[0], argv)
    C._exit(127)
  end
  assert(pid > 0, "forkpty failed")
  return setmetatable({ pid = pid, fd = master[0], screen = "", seen = 0 }, Terminal)
end

--- Reads until the pattern comes behind what was matched before; gives the text up to its end.
function Terminal:expect(pattern, seconds)
  local buffer, fds = ffi.new "char[65536]", ffi.new "struct spec_pollfd[1]"
  local deadline = os.time() + (seconds or 60)
  while true do
    local first, last = self.screen:find(pattern, self.seen + 1)
    if first then
      local text = self.screen:sub(self.seen + 1, last)
      self.seen = last
      return text
    end
    fds[0].fd, fds[0].events = self.fd, 1
    local ready = C.poll(fds, 1, 200)
    local count = ready > 0 and C.read(self.fd, buffer, 65536) or 0
    if count > 0 then
      self.screen = self.screen .. ffi.string(buffer, count):gsub("\r", "")
    elseif ready > 0 or os.time() > deadline then
      error(("'%s' did not come; behind the last match stands:\n%s"):format(pattern, self.screen:sub(self.seen + 1)), 2)
    end
  end
end

function Terminal:send(text) assert(C.write(self.fd, text, #text) == #text) end

--- Whether the terminal itself edits lines, as a shell's does; a line editor has that off.
function Terminal:edits_lines()
  local termios = ffi.new "unsigned int[32]"
  assert(C.tcgetattr(self.fd, termios) == 0)
  return math.floor(termios[3] / 2) % 2 == 1 -- ICANON of c_lflag
end

function Terminal:waits_until_it_edits_lines()
  for _ = 1, 100 do
    if self:edits_lines() then return true end
    C.poll(nil, 0, 50)
  end
  return false
end

function Terminal:signal(number) C.kill(self.pid, number) end

--- Types a line and gives what is shown up to the next prompt.
function Terminal:line(text, prompt)
  self:send(text .. "\n")
  return self:expect(prompt or "weft> ")
end

--- Waits for the program's end; gives its exit code, or "signal N".
function Terminal:finish(seconds)
  pcall(self.expect, self, "\0no such text", seconds or 10)
  local status = ffi.new "int[1]"
  for _ = 1, 100 do
    if C.waitpid(self.pid, status, 1) == self.pid then
      C.close(self.fd)
      self.pid = nil
      local signal = status[0] % 128
      return signal ~= 0 and "signal " .. signal or math.floor(status[0] / 256) % 256
    end
    C.poll(nil, 0, 50)
  end
  self:kill()
  return "did not end"
end

function Terminal:kill()
  if not self.pid then return end
  C.kill(self.pid, 9)
  C.waitpid(self.pid, nil, 0)
  C.close(self.fd)
  self.pid = nil
end

return Terminal

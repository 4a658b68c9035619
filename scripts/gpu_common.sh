# shellcheck shell=bash
# What the gpu-* scripts do first, sourced by them with their arguments: what scripts/common.sh does, and finds the GPUs
# that may be used: visible.
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ ${1:-} != -* ]] || complain "no option $1; scripts/$me --help says what it takes"

command -v nvidia-smi >/dev/null || complain "no GPU here: no nvidia-smi"
found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+$' | paste -sd,)
[ -n "$found" ] || complain "no GPU here: nvidia-smi finds none"
IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES-$found}"
[ ${#visible[@]} -gt 0 ] || complain "CUDA_VISIBLE_DEVICES hides every GPU"

# known WHAT NAMES WANTED: words: those of WANTED; complains of one that is none of NAMES.
known() {
  local word
  read -r -d '' -a words <<<"$3"
  for word in "${words[@]}"; do
    [[ " $2 " == *" $word "* ]] || complain "no $1 '$word'; known: $2"
  done
}

# need_program PATH
need_program() { [[ -f $1 && -x $1 ]] || complain "no program $1; scripts/build makes build/weft, with CUDA where nvcc is"; }

# find_programs BUILD NAME...: sees that BUILD has them. A build folder is brought up to date where cmake is, the default
# one (build) is made; programs in any other folder are used as they are.
find_programs() {
  local build=$1 name missing='' log generator=()
  shift
  for name in "$@"; do [ -x "$build/$name" ] || missing=$build/$name; done
  if [ ! -f "$build/CMakeCache.txt" ]; then
    generator=(-G Ninja)
    [ -n "$missing" ] || return 0
    [ "$build" = build ] || complain "$missing is missing, and $build is no build folder; scripts/build $build makes it one, with CUDA where nvcc is"
  fi
  if ! command -v cmake >/dev/null; then
    [ -z "$missing" ] || complain "$missing is missing, and no cmake is here to build it"
    return 0
  fi
  echo "$me: building $* in $build (a new folder takes minutes)" >&2
  log=$(mktemp)
  with_cuda() { grep -q '^WEFT_ALL_ROOMS:.*weft_kernels_cuda' "$build/CMakeCache.txt"; }
  if ! cmake -S . -B "$build" "${generator[@]}" >"$log" 2>&1 || { with_cuda && ! cmake --build "$build" --target "$@" >"$log" 2>&1; }; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    complain "$build could not be built"
  fi
  rm -f "$log"
  with_cuda || complain "$build is a build without CUDA; scripts/build FOLDER makes one with it where nvcc is"
}

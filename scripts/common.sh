# shellcheck shell=bash
# What scripts do first, sourced by them with their arguments: goes to the repository (paths are from there) and shows
# the comment at the script's head on -h and --help.
me=${0##*/}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

complain() {
  echo "$me: $*" >&2
  exit 2
}

case " $* " in *" -h "* | *" --help "*)
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$me"
  exit 0
  ;;
esac

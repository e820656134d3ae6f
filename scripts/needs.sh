# Sourced by the scripts of this project: installs what is missing, quietly when nothing is.

say() { printf '%s\n' "$*" >&2; }

# need COMMAND PACKAGE [optional]: makes sure that a command exists.
need() {
  command -v "$1" >/dev/null 2>&1 && return 0
  if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    say "installing $2"
    [ -n "${needs_updated:-}" ] || { apt-get update -qq >/dev/null 2>&1 || true; needs_updated=1; }
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$2" >/dev/null 2>&1 || true
  fi
  command -v "$1" >/dev/null 2>&1 && return 0
  [ "${3:-}" = optional ] && { say "note: no $1 here (package $2); what needs it is left out"; return 0; }
  say "error: $1 is needed (package $2)"
  return 1
}

# What every build needs: a C compiler, for SQLite and for linking.
need_build() {
  need cargo cargo
  need cc gcc
  if [ ! -e /usr/include/stdlib.h ]; then need_header; fi
}

need_header() {
  command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ] || return 0
  say "installing libc6-dev"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libc6-dev >/dev/null 2>&1 || true
}

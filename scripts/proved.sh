# Sourced by the scripts of this project: the probes, and that enough of them could be tried.

# Hosts differ in what can be tried (no node, no cgroup); a host on which most is skipped proves nothing.
fewest_held=500

# proved COMMAND...: `carrel doctor --prove` in one of its forms; fails on a breach, and if fewer attacks than that were stopped.
proved() {
  local report held
  report=$(mktemp)
  "$@" >"$report" || { cat "$report" >&2; rm -f "$report"; return 1; }
  cat "$report" >&2
  held=$(sed -n 's/^no breach: \([0-9]*\) attacks were stopped$/\1/p' "$report")
  rm -f "$report"
  [ "${held:-0}" -ge "$fewest_held" ] || { say "error: only ${held:-0} attacks could be tried and were stopped; at least $fewest_held should"; return 1; }
}

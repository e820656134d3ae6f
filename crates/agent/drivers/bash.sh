\builtin eval "${__carrel_code-}"; { "${__carrel[builtin]-:}" return "$?"; "${__carrel[return]-:}"; } 2>&-
# carrel's bash driver: keeps the state of one bash of one session (contract: docs/drivers.md).
#
# bash reads the agent's lines from the request pipe as its script, so user code runs in no loop and no
# function of ours. One call is an empty line (it wakes a shell that is about to be renewed) and the line
#
#     __carrel_begin ID CODEFILE "$@";\. "$__carrel";{ __carrel_done;} 2>&-;__carrel_end
#
# The driver sources itself: its first line evaluates the code, because only a sourced file starts to count
# lines at 1 again, and so messages carry the user's own line numbers.
#
#     call ──▶ __carrel_begin ──▶ eval ──▶ __carrel_done, __carrel_end ──▶ reply `done`
#                                  │
#          exit, set -e, set -u,   │
#          ${x:?}, SIGINT, SIGTERM ▼
#                             __carrel_left  ──▶ reply `done` with "renew" ──▶ wait for the next call
#                                                                                  │
#                     restore ◀── exec of a fresh bash in this process ◀── dump ◀──┘
#
# Invariants:
# - No fork and no external command in start, begin, done and end.
# - Control descriptors are close-on-exec: no program of the user's holds them (a forked subshell does).
# - Our state lives in the arrays __carrel, __carrel_code and __carrel_args: `set -a` cannot export an array.
# - Renewal keeps the process, its children and its descriptors. It loses what only bash's memory knows: the
#   job table, `$!`, the command hash. Background processes live on.
# - SIGINT is caught except while a fresh bash starts. The agent closes that gap: after a `done` with
#   "renew":true it holds the interrupts of the next call until the reply {"renewed":true}.
#
# Deliberately absent: a defence against code that unsets or calls our functions. User code owns its shell.

__carrel_begin() {
  __carrel[id]=$1 __carrel[run]=1
  \builtin mapfile -d '' -n 1 __carrel_code <"$2"
  shift 2
  __carrel_args=("$@")
  # Code that may call for the rest, or change how it would be read, gets it first; so does any that is long, because an
  # extended pattern takes quadratic time.
  if [[ ${__carrel[loaded]} || ${#__carrel_code} -gt 4096 || ${__carrel_code-} == *@(trap|source|". "|exec|set|shopt|alias|enable|eval|"()"|function|exit)* ]]; then
    __carrel_load
    __carrel_prepare
  fi
  __carrel[run]=2
  return "${__carrel[status]}"
}

# Runs with the user's options. Its stderr is thrown away because of `set -x`.
__carrel_done() {
  __carrel[status]=$? __carrel[run]=0
  __carrel_quiet
}

# Remembers the user's options and goes back to those the driver is written for.
__carrel_quiet() {
  __carrel[set]=$SHELLOPTS __carrel[shopt]=$BASHOPTS
  if [[ $SHELLOPTS$BASHOPTS != "${__carrel[plain]}" ]]; then
    # Assignment is syntax: no function of the user's can stand in its way. In posix mode special builtins
    # such as set and unset are found before functions.
    POSIXLY_CORRECT=y
    \set +aefkntuvxCET
    \unset -v POSIXLY_CORRECT
    __carrel_load
    __carrel_quieter
  elif [[ ${__carrel[changed]} ]]; then
    # After `set +o posix` bash expands no aliases, while BASHOPTS still says so.
    if [[ ${__carrel[late]} == *p* ]]; then \builtin shopt -s expand_aliases; fi
    __carrel[late]= __carrel[changed]=
  fi
}

__carrel_end() {
  if [[ ${__carrel[loaded]} ]]; then __carrel_tidy; fi
  # Not `builtin exec`: its redirections would end with it.
  \command exec 0<&249 1>&250 2>&251
  \builtin printf '{"id":%s,"done":{"exit":%s,"error":null}}\n' "${__carrel[id]}" "${__carrel[status]}" >&253
  # Nobody waits for this.
  if [[ ! ${__carrel[loaded]} ]]; then
    __carrel_load
    __carrel_tidy
  fi
  __carrel_code=
}

# What the driver's own traps call: __carrel_int, __carrel_exit.
__carrel_trap() {
  if [[ $BASHPID != "$$" || ${__carrel[run]}$1 == 0int ]]; then return; fi
  __carrel[was]=${__carrel[run]} __carrel[run]=0
  # Stopped in __carrel_begin (1), the options are not the user's yet.
  if [[ ${__carrel[was]} == 2 ]]; then __carrel_quiet; fi
  __carrel_load
  "__carrel_$1" "${@:2}"
}

# Defines what most first calls do not need: see "the rest" below. Nothing of the user's may change how it is read.
__carrel_load() {
  if [[ ${__carrel[loaded]} ]]; then return; fi
  local code=${__carrel_code-}
  __carrel_code= __carrel[loading]=1 __carrel[builtin]=: __carrel[return]=:
  \builtin shopt -u expand_aliases
  \builtin . "$__carrel"
  \builtin shopt -s expand_aliases
  __carrel_code=$code __carrel[loading]= __carrel[loaded]=1 __carrel[builtin]=builtin __carrel[return]=return
}

# ---- start

# Close-on-exec copies of what is ours: 249 stdin, 250 stdout, 251 stderr, 252 requests, 253 replies. While a
# redirection is in force bash keeps the original at the first free descriptor from 10 on, close-on-exec, and
# a duplicate of such a one is so, too.
__carrel_descriptors() {
  local saved=10
  while [[ -e /proc/self/fd/$saved ]]; do ((saved++)); done
  eval "{ exec 249<&$saved; } 0<&-
    { exec 250>&$saved; } 1>&-
    { exec 251>&$saved; } 2>&-
    { exec 252<&$saved; } $1<&-
    { exec 253>&$saved; } $2>&-
    exec $2>&-"
}

# A new shell answers before it has read on: parsing the rest takes longer than the rest of its start. __carrel_load sources
# this file once more for it.
if [[ ! ${__carrel[loading]-}${CARREL_RENEW-} ]]; then
  __carrel_descriptors 3 4
  exec 3<&-
  shopt -s expand_aliases
  # Those that are read under `set -u`. Others are there once they are set.
  declare -A __carrel=([0]=${BASH_SOURCE[0]} [bash]=$BASH [plain]=$SHELLOPTS$BASHOPTS [builtin]=builtin [return]=return
    [id]=0 [run]=0 [status]=0 [late]= [changed]= [set]=$SHELLOPTS [shopt]=$BASHOPTS [exit]= [int]= [debug]= [loaded]=)
  __carrel_code=() __carrel_args=()
  BASH_ARGV0=$__carrel
  trap '{ __carrel_trap exit "$?" "$@"; } 2>/dev/null' EXIT
  trap '{ __carrel_trap int "$@"; } 2>/dev/null' INT
  \builtin printf '{"ready":{"version":"%s.%s.%s"}}\n' "${BASH_VERSINFO[@]:0:3}" >&253
  return
fi

# ==== the rest

# Before the user's code, once this is here: what it may need, and its options.
__carrel_prepare() {
  if [[ ${__carrel[fresh]} ]]; then
    __carrel[fresh]=
    \command exec 246<&-
    BASH_ARGV0=$__carrel
    \builtin printf '{"renewed":true}\n' >&253
  fi
  if [[ ! ${__carrel[guard]} && (${__carrel_code-} == *trap* || ${__carrel_code-} == *source* || ${__carrel_code-} == *". "*) ]]; then
    __carrel_guard
  fi
  if [[ ${__carrel_code-} == *exec* ]]; then __carrel_watch_exec; fi
  if [[ ${__carrel_code-} == *"set -"* ]]; then __carrel_watch_noexec; fi
  # What would show or trip over the driver's own commands is switched on by a prefix; most calls need none.
  # It shares the user's first line, so that lines keep their numbers. `&& :` keeps `set -e` calm.
  if [[ ${__carrel[late]}${__carrel[debug]} ]]; then
    if ((__carrel[status])); then
      __carrel_code="__carrel_late && :;${__carrel_code-}"
    else
      __carrel_code="__carrel_late;${__carrel_code-}"
    fi
  fi
  if [[ ${__carrel[changed]} ]]; then __carrel_options; fi
}

# The rest of __carrel_quiet.
__carrel_quieter() {
  __carrel[late]= __carrel[changed]=1
  if [[ ${__carrel[set]} == *xtrace* ]]; then __carrel[late]+=x; fi
  if [[ ${__carrel[set]} == *verbose* ]]; then __carrel[late]+=v; fi
  if [[ ${__carrel[set]} == *errexit* ]]; then __carrel[late]+=e; fi
  if [[ ${__carrel[set]} == *posix* ]]; then __carrel[late]+=p; fi
  \builtin shopt -u extdebug failglob nullglob nocasematch xpg_echo localvar_inherit inherit_errexit
  \builtin shopt -s expand_aliases
}

# What a call may have left in the driver's way.
__carrel_tidy() {
  if [[ ${__carrel_code-} == *"()"* || ${__carrel_code-} == *enable* ]]; then __carrel_reclaim; fi
  # A code that said `builtin trap` may have replaced these behind the guard.
  \builtin trap '{ __carrel_trap exit "$?" "$@"; } 2>/dev/null' EXIT
  if [[ ! ${__carrel[int]} ]]; then \builtin trap '{ __carrel_trap int "$@"; } 2>/dev/null' INT; fi
  if [[ ${__carrel[debug]} ]]; then \builtin trap - DEBUG; fi
  if [[ ${__carrel[execfn]} ]]; then __carrel[execfn]=; \builtin unset -f exec; fi
}

# SIGINT ends the call where it is. Between calls, and a second time, it does nothing.
__carrel_int() { __carrel_left 130 "$@"; }

# The EXIT trap. Outside a call it is the end of the session.
__carrel_exit() {
  if ((__carrel[was])); then
    # A signal leaves the status as it was, and bash does not say which one it was: SIGTERM is most likely. Any other
    # end has left the user's commands behind and come back to the request's own.
    if [[ $1 == 0 && $BASH_COMMAND != '\. "$__carrel"' && $BASH_COMMAND != *exit* ]]; then set -- 143 "${@:2}"; fi
    __carrel_left "$@"
  fi
  if [[ ${__carrel[exit]} ]]; then \eval "${__carrel[exit]}" 2>&251; fi
}

# The builtins on which everything here rests: functions by their names, or `enable -n`, do not outlive a call. Code that
# could do either has made __carrel_begin load this.
__carrel_reclaim() {
  POSIXLY_CORRECT=y
  \unset -f builtin command enable eval return set unset
  \unset -v POSIXLY_CORRECT
  \enable alias builtin command compgen declare enable eval exec exit mapfile printf pushd read return set shopt trap unset
  \builtin shopt -s expand_aliases
  \builtin shopt -u inherit_errexit # which posix mode leaves on
}

# Gives the user's code the options it left, but for those of __carrel_late.
__carrel_options() {
  local name IFS=:
  for name in ${__carrel[shopt]}; do \builtin shopt -s "$name"; done
  for name in $BASHOPTS; do
    [[ :${__carrel[shopt]}: == *:"$name":* ]] || \builtin shopt -u "$name"
  done
  for name in ${__carrel[set]}; do
    case $name in
      errexit | xtrace | verbose | noexec | posix | monitor | onecmd) ;;
      noglob) local noglob=1 ;; # last: the loops here are not quoted
      *) \builtin set -o "$name" ;;
    esac
  done
  for name in braceexpand hashall interactive-comments; do
    [[ :${__carrel[set]}: == *:"$name":* ]] || \builtin set +o "$name"
  done
  if [[ ${noglob-} ]]; then \builtin set -f; fi
  if [[ :${__carrel[set]}: == *:monitor:* && :$SHELLOPTS: != *:monitor:* ]]; then \builtin set -m; fi
} 2>/dev/null

__carrel_late() {
  if [[ ${__carrel[debug]} ]]; then \builtin trap -- "${__carrel[debug]}" DEBUG; fi
  if [[ ${__carrel[late]} == *p* ]]; then \builtin set -o posix; fi
  if [[ ${__carrel[late]} == *e* ]]; then \builtin set -e; fi
  if [[ ${__carrel[late]} == *v* ]]; then \builtin set -v; fi
  if [[ ${__carrel[late]} == *x* ]]; then
    { \builtin set -x; \builtin return "${__carrel[status]}"; } 2>/dev/null
  fi
  return "${__carrel[status]}"
}

# Changes of the session's variables: `NAME=value` or `NAME`, ended by NULs. Between calls, so the options are ours and an
# interrupt does nothing. No locals: one would stand in the way of a variable of its name. What is readonly stays.
__carrel_env() {
  \builtin mapfile -d '' -t __carrel_args <"$1"
  for ((__carrel[n] = 0; __carrel[n] < ${#__carrel_args[@]}; __carrel[n]++)); do
    case ${__carrel_args[__carrel[n]]} in
      *=*) \builtin declare -gx "${__carrel_args[__carrel[n]]}" ;;
      *) \builtin unset -v "${__carrel_args[__carrel[n]]}" ;;
    esac
  done
  __carrel[n]=
  return 0
} 2>/dev/null

# What this shell holds: its variables, and which of the environment's (`NAME=value`, ended by NULs) are not as they were
# given. Between calls. No fork: it could wait for room, and its end would be heard by a trap. What has no value of its own
# (RANDOM, SECONDS) is not looked at, because looking changes it. Functions cannot be listed without a fork.
__carrel_brief() {
  \builtin local __carrel_n __carrel_v __carrel_t __carrel_rows= __carrel_set= __carrel_unset= __carrel_partial=false
  \builtin local -i __carrel_told=0 __carrel_total=0 __carrel_seen=0
  \builtin local -a __carrel_names __carrel_given
  \builtin local -A __carrel_known
  \builtin mapfile -d '' -t __carrel_given <"$2"
  for __carrel_n in "${__carrel_given[@]}"; do
    __carrel_v=${__carrel_n#*=} __carrel_n=${__carrel_n%%=*}
    __carrel_known[$__carrel_n]=1
    if [[ ! -v $__carrel_n ]]; then
      __carrel_unset+=",\"$__carrel_n\""
    elif [[ ${!__carrel_n} != "$__carrel_v" ]]; then
      __carrel_set+=",\"$__carrel_n\""
    fi
  done
  # bash takes quadratic time to list names: 0.1 s for 5000 of them, each time. It is stopped early where there are so many.
  __carrel_v=${EPOCHREALTIME-}
  for __carrel_n in a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D E F G H I J K L M N O P Q R S T U V W X Y Z _; do
    \builtin eval "__carrel_names+=(\"\${!$__carrel_n@}\")"
    __carrel_t=${EPOCHREALTIME-}
    if ((${__carrel_t//[^0-9]/} + 0 - (${__carrel_v//[^0-9]/} + 0) > 150000)); then __carrel_partial=true; break; fi
  done
  for __carrel_n in "${__carrel_names[@]}"; do
    # More names than anyone reads: the rest is counted.
    if ((__carrel_seen++ == 5000)); then __carrel_total+=${#__carrel_names[@]}-5000; break; fi
    case $__carrel_n in
      __carrel* | BASH | BASHOPTS | BASHPID | BASH_* | COMP_* | DIRSTACK | EPOCHREALTIME | EPOCHSECONDS | EUID | FUNCNAME | GROUPS | HISTCMD | HOSTNAME | HOSTTYPE | IFS | LINENO | MACHTYPE | OLDPWD | OPTERR | OPTIND | OSTYPE | PIPESTATUS | PPID | PS4 | PWD | RANDOM | SECONDS | SHELL | SHELLOPTS | SHLVL | SRANDOM | TERM | UID | _) continue ;;
    esac
    if [[ ${__carrel_known[$__carrel_n]-} ]]; then continue; fi
    if [[ -R $__carrel_n ]]; then __carrel_t=R; else __carrel_t=${!__carrel_n@a}; fi
    if [[ $__carrel_t == *x* && ${#__carrel_set} -lt 4096 ]]; then __carrel_set+=",\"${__carrel_n:0:60}\""; fi
    __carrel_total+=1
    if ((__carrel_told == 40)); then continue; fi
    __carrel_told+=1
    __carrel_rows+=",{\"name\":\"${__carrel_n:0:60}\",\"type\":"
    case $__carrel_t in
      R) __carrel_rows+='"nameref"}' ;;
      *a*) \builtin eval "__carrel_rows+='\"array\",\"shape\":\"'\${#$__carrel_n[@]}'\"}'" ;;
      *A*) \builtin eval "__carrel_rows+='\"map\",\"shape\":\"'\${#$__carrel_n[@]}'\"}'" ;;
      *i*)
        __carrel_v=${!__carrel_n}
        # What had the attribute given to it later may still be any text.
        if [[ ${#__carrel_v} -gt 20 || -z $__carrel_v || ${__carrel_v#-} == *[^0-9]* ]]; then __carrel_v=; fi
        __carrel_rows+="\"integer\",\"value\":\"$__carrel_v\"}"
        ;;
      *) \builtin eval "__carrel_rows+='\"string\",\"shape\":\"'\${#$__carrel_n}'\"}'" ;;
    esac
  done
  \builtin printf '{"id":%s,"brief":{"variables":[%s],"total":%s,"partial":%s,"set":[%s],"unset":[%s]}}\n' "$1" "${__carrel_rows#,}" "$__carrel_total" "$__carrel_partial" "${__carrel_set#,}" "${__carrel_unset#,}" >&253
} 2>/dev/null

# ---- names that user code gets in place of builtins, only where its text asks for it

# `trap` keeps EXIT and INT for the driver and keeps the driver's own commands from the user's DEBUG, ERR and
# RETURN traps. Once on it stays, because functions may call it later. -t: DEBUG and RETURN pass through it.
__carrel_guard() {
  __carrel[guard]=1
  trap() {
    { local - && \builtin set +x; } 2>/dev/null
    case ${1---list} in
      -l) \builtin trap -l; return ;;
      -p | --list) __carrel_trap_list "${@:2}"; return ;;
      --) shift ;;
    esac
    if [[ $BASHPID != "$$" ]]; then \builtin trap -- "$@"; return; fi
    if (($# < 2)) || [[ $1 == [0-9]* ]]; then set -- - "$@"; fi
    local action="$1" name failed=0
    for name in "${@:2}"; do
      name=${name^^} name=${name#SIG}
      case $name:$action in
        EXIT:- | 0:-) __carrel[exit]= ;;
        EXIT:* | 0:*) __carrel[exit]=$action ;;
        INT:- | 2:-) __carrel[int]=; \builtin trap '{ __carrel_trap int "$@"; } 2>/dev/null' INT ;;
        INT:* | 2:*) __carrel[int]=1; \builtin trap -- "$action" INT ;;
        DEBUG:-) __carrel[debug]=; \builtin trap - DEBUG ;;
        DEBUG:*) __carrel_filtered '${FUNCNAME-}:$BASH_COMMAND' 'trap:*|*__carrel*'; __carrel[debug]=$action; \builtin trap -- "$action" DEBUG ;;
        # On return bash would put back the ERR trap it found when this function was called.
        ERR:-) \builtin trap '' ERR ;;
        ERR:*) __carrel_filtered '${FUNCNAME-}:$BASH_COMMAND' 'trap:*|*__carrel*'; \builtin trap -- "$action" ERR ;;
        RETURN:-) \builtin trap - RETURN ;;
        RETURN:*) __carrel_filtered '${FUNCNAME-}:${FUNCNAME[1]-}' 'trap:*|*__carrel*|source:|source:main'; \builtin trap -- "$action" RETURN ;;
        *) \builtin trap -- "$action" "$name" || failed=1 ;;
      esac
    done
    return "$failed"
  }
  declare -ft trap
}

# `case` runs nothing before the action, so the action still sees `$?`.
__carrel_filtered() {
  if [[ $action ]]; then action="case $1 in ($2) ;; (*) $action"$'\n'";; esac"; fi
}

__carrel_trap_list() {
  local name
  if ((!$#)); then
    set -- EXIT {1..31} {34..64} DEBUG ERR RETURN
  fi
  for name; do
    case $name in
      EXIT | SIGEXIT | 0) [[ ! ${__carrel[exit]} ]] || \builtin printf "trap -- '%s' EXIT\n" "${__carrel[exit]//\'/\'\\\'\'}" ;;
      INT | SIGINT | 2) [[ ! ${__carrel[int]} ]] || \builtin trap -p INT ;;
      # What the driver leaves in place of a trap that was taken away.
      ERR | SIGERR) [[ $(\builtin trap -p ERR) == "trap -- '' "* ]] || \builtin trap -p ERR ;;
      *) \builtin trap -p "$name" ;;
    esac
  done
}

# `exec COMMAND` ends the call with the command's status, as the end of the shell would. A function cannot
# make redirections last, so code that also says `exec >file` gets bash's own exec.
__carrel_watch_exec() {
  # A variable before the redirection stands for a number, as in `eval "exec $fd>file"`.
  if [[ ${__carrel_code-} =~ (^|[^-[:alnum:]_])exec[[:space:]]+([0-9]*[\<\>\&]|\{|\$[{]?[[:alnum:]_]+[}]?[\<\>]) ]]; then return; fi
  if \builtin declare -F exec >/dev/null; then return; fi
  __carrel[execfn]=1
  exec() {
    if [[ $BASHPID != "$$" ]]; then \builtin exec "$@"; fi
    if (($#)); then
      (\builtin exec "$@")
      \builtin exit
    fi
  }
}

# `set -n` would make this bash read requests and run none, for ever: such code gets a subshell.
__carrel_watch_noexec() {
  if [[ ${__carrel_code-} =~ (^|[^[:alnum:]_-])set[[:space:]]+(-[a-zA-Z]*n|-o[[:space:]]+noexec) ]]; then
    __carrel[apart]=${__carrel_code-}
    __carrel_code='( \builtin eval "${__carrel[apart]}" )'
  fi
}

# The call is over because the shell would end. Never returns; may run inside functions of the user's.
__carrel_left() {
  __carrel[status]=$1
  shift
  # In no function of the user's, the arguments are the shell's own; else those of the call's start stay.
  if [[ "${FUNCNAME[*]} " == *"__carrel_trap source "* ]]; then __carrel_args=("$@"); fi
  if [[ ${__carrel[exit]} ]]; then
    # A real exit inside the EXIT trap could not be held up again, so it means: go on with the renewal.
    exit() { __carrel_renew "${1-$?}"; }
    __carrel_code=${__carrel[exit]} __carrel[exit]=
    __carrel_status "${__carrel[status]}"
    \builtin eval "${__carrel_code-}" 2>&251
  fi
  __carrel_renew "${__carrel[status]}"
}

__carrel_status() { return "$1"; }

__carrel_renew() {
  __carrel[status]=$1
  POSIXLY_CORRECT=y
  \unset -f exit
  __carrel_reclaim
  \builtin printf '{"id":%s,"done":{"exit":%s,"error":null,"renew":true}}\n' \
    "${__carrel[id]}" "${__carrel[status]}" >&253
  # The rest of this call's line may still be in the pipe; the next call starts with an empty one.
  while :; do
    IFS= \builtin read -r -u 252 __carrel_code
    case $? in
      0)
        if [[ ! ${__carrel_code-} ]]; then break; fi
        # The one question that is answered before.
        if [[ $__carrel_code == '__carrel_load;__carrel_brief '* ]]; then \builtin eval "$__carrel_code"; fi
        ;;
      1) \builtin trap - EXIT; \builtin exit "${__carrel[status]}" ;;
      *) ;; # a signal that the user has trapped
    esac
  done
  # Only this process can see its traps. A signal ignored over exec could never be trapped again.
  __carrel[traps]=$(\builtin trap -p)
  while IFS= \builtin read -r '__carrel[n]'; do
    if [[ ${__carrel[n]} == "trap -- '' SIG"* ]]; then \builtin trap - "${__carrel[n]##* }"; fi
  done <<<"${__carrel[traps]}"
  # Clean environment: exported functions, SHELLOPTS or BASH_ENV must not reach the fresh bash before the
  # driver does. The second exec brings BASH_ENV, now the driver's. The pipes pass through 0, because the
  # duplicate of a close-on-exec descriptor is close-on-exec, unless it is 0, 1 or 2.
  \builtin exec -c "${__carrel[bash]}" --noprofile --norc -c \
    'BASH_ENV=$1 CARREL_RENEW=1 exec "$0" --noprofile --norc /proc/self/fd/246' \
    "${__carrel[bash]}" "$__carrel" \
    248< <(__carrel_dump 2>/dev/null) 0<&252 246<&0 0<&253 247>&0 0<&249 1>&250 2>&251
}

# Prints the state as commands, in an order in which no name of the user's is in the way of a later line. It
# runs in a process of its own and may destroy; it has no locals, because `declare -p` would show them.
__carrel_dump() {
  \builtin trap '' INT
  if [[ ${__carrel[guard]} ]]; then \builtin unset -f trap; fi
  if [[ ${__carrel[execfn]} ]]; then \builtin unset -f exec; fi
  __carrel[execfn]= __carrel_code= __carrel[apart]=
  \builtin printf 'shopt -s extglob\n'
  for __carrel_n in PATH IFS OPTERR OPTIND PS4 OLDPWD SHLVL TERM SHELL HOSTNAME HOSTTYPE MACHTYPE OSTYPE; do
    if [[ ! -v $__carrel_n ]]; then \builtin printf 'unset -v %s\n' "$__carrel_n"; fi
  done
  if [[ ${FUNCNAME[*]} != +(__carrel_+([a-z_])\ )source* ]]; then __carrel_unhide; fi
  \builtin declare -p
  if [[ -v __carrel_unhidden ]]; then \builtin printf 'declare +t %s\n' "${__carrel_unhidden[@]}"; fi
  for ((__carrel_n = ${#DIRSTACK[@]} - 1; __carrel_n > 0; __carrel_n--)); do
    \builtin printf 'pushd -n %q >/dev/null\n' "${DIRSTACK[__carrel_n]}"
  done
  \builtin printf '%s\n' "${__carrel[traps]}"
  \builtin alias -p
  \builtin declare -f
  while IFS= \builtin read -r __carrel_n; do
    if [[ $__carrel_n != 'declare -f '* ]]; then \builtin printf '\\builtin %s\n' "$__carrel_n"; fi
  done < <(\builtin declare -F)
  \builtin printf '__carrel[whole]=1\n'
}

# Inside functions, locals hide globals. `declare -g` marks the global one (-t means nothing for a variable);
# unset takes away the locals of calling functions until it shows.
__carrel_unhide() {
  while IFS= \builtin read -r __carrel_n; do
    case $__carrel_n in
      __carrel* | BASH* | FUNCNAME | GROUPS | DIRSTACK | RANDOM | SRANDOM | SECONDS | EPOCH* | UID | EUID | PPID | SHELLOPTS | LINENO | PIPESTATUS | HISTCMD | COMP_* | IFS | _) continue ;;
    esac
    if [[ -R $__carrel_n ]]; then continue; fi
    \builtin declare -gt "$__carrel_n" || continue
    __carrel_depth=${#FUNCNAME[@]}
    while ((__carrel_depth-- > 0)) && __carrel_is_local; do \builtin unset -v "$__carrel_n"; done
    if [[ -v $__carrel_n || $(\builtin declare -p "$__carrel_n") == *=* ]]; then
      __carrel_unhidden+=("$__carrel_n")
    else
      \builtin unset -v "$__carrel_n"
    fi
  done < <(\builtin compgen -A variable)
}

__carrel_is_local() {
  if [[ ${!__carrel_n@a} == *t* ]]; then return 1; fi
  __carrel_shown=$(\builtin declare -p "$__carrel_n") # for an array without an element 0
  [[ ! $__carrel_shown =~ ^declare\ -[a-zA-Z]*t ]]
}

if [[ ${CARREL_RENEW-} && ! ${__carrel[loading]-} ]]; then
  # bash opens its script only after BASH_ENV, that is after this: __carrel_prepare closes 246.
  __carrel_descriptors 246 247
  unset -v CARREL_RENEW BASH_ENV
  . /proc/self/fd/248 >/dev/null 2>&1
  # Over exec, bash leaves its own descriptor of the process substitution open beside 248.
  for __carrel_n in /proc/self/fd/*; do
    if [[ $__carrel_n != */248 && $__carrel_n -ef /proc/self/fd/248 ]]; then eval "exec ${__carrel_n##*/}<&-"; fi
  done
  exec 248<&-
  set -- "${__carrel_args[@]}"
  # Half a state is worse than none: the agent reports the loss.
  if [[ ! ${__carrel[whole]-} ]]; then \builtin trap - EXIT; \builtin exit 70; fi
  \builtin unset -v __carrel_n __carrel_unhidden __carrel_depth __carrel_shown
  __carrel[whole]= __carrel[traps]= __carrel[loaded]=1 __carrel[fresh]=1 __carrel[changed]=1 __carrel[run]=0
  if [[ ${__carrel[guard]} ]]; then __carrel_guard; fi
  if [[ ${__carrel[debug]} ]]; then \builtin trap - DEBUG; fi
  \builtin shopt -s expand_aliases
fi

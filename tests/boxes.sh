# boxes.sh - what the tests of far boxes share. A test sets `suite`, the name that it reports by, and sources this.
#
# T is a directory of the test's own. At the end it is removed, and every process in `pids` is ended; at_end, where
# a test defines it, runs before that. A test sets `args`, the options of its runs, before it calls `alone`.
# shellcheck shell=bash disable=SC2034,SC2154
set -u
export LC_ALL=C
K3=${K3:-build/k3}
K3_TIER=${K3_TIER:-$(dirname "$K3")/k3-tier}
CHAOS=${CHAOS:-$(dirname "$K3")/tier_chaos}
MODEL=${1:-demo}
T=$(mktemp -d "${TMPDIR:-/tmp}/k3-$suite-XXXXXX") || exit 1
n_passed=0 n_failed=0 n_skipped=0
pids=()
# await PID SECONDS: wait until that child has ended, at most SECONDS. Returns its status, or 124
await() {
    for _ in $(seq $(($2 * 50))); do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.02
    done
    ! kill -0 "$1" 2>/dev/null || return 124
    wait "$1"
}
stop() { # PID...: send SIGTERM, and SIGKILL after ten seconds. Returns the status of the last
    local pid rc=0
    kill "$@" 2>/dev/null
    for pid; do
        await "$pid" 10
        rc=$?
        [ $rc != 124 ] || { echo "FAIL $suite: process $pid does not end"; kill -9 "$pid"; wait "$pid"; }
    done 2>/dev/null
    return $rc
}
at_end() { :; }
trap '[ ${#pids[@]} = 0 ] || stop "${pids[@]}"; at_end; rm -rf "$T"' EXIT

field() { sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p" "$T/out"; }
pass() { n_passed=$((n_passed + 1)); }
skip() {
    n_skipped=$((n_skipped + 1))
    echo "$suite: SKIP $1"
}
fail() {
    n_failed=$((n_failed + 1))
    echo "FAIL $1: $2"
    tail -n 3 "$T/err" | sed 's/^/     /'
}
report() {
    echo "$suite: $n_passed passed, $n_failed failed, $n_skipped skipped"
    [ $n_failed = 0 ]
}

# ends NAME EXIT PATTERN COMMAND...: check the exit code, and that stdout or stderr matches PATTERN. A test may define
# its own `limit`, which runs the command
limit() { timeout -k 1 120 "$@"; }
ends() {
    local name=$1 want=$2 pattern=$3 rc
    shift 3
    limit "$@" >"$T/out" 2>"$T/err"
    rc=$?
    if [ $rc != "$want" ]; then
        fail "$name" "exit $rc, not $want"
    elif ! cat "$T/out" "$T/err" | grep -Eq -- "$pattern"; then
        fail "$name" "nothing matches: $pattern"
    else
        pass
    fi
}

# start_box NAME OPTION...: start a server on $T/NAME.sock and wait for it; its pid is in $box
start_box() {
    local name=$1
    shift
    rm -f "$T/$name.sock"
    "$K3_TIER" --threads 1 --listen "unix:$T/$name.sock" "$@" 2>"$T/$name.err" &
    box=$!
    pids+=($box)
    for _ in $(seq 1500); do
        [ -S "$T/$name.sock" ] && return
        kill -0 $box 2>/dev/null || break
        sleep 0.02
    done
    echo "box $name does not start:"
    cat "$T/$name.err"
    exit 1
}
stat_of() { "$K3_TIER" status "unix:$T/$1.sock" 2>/dev/null | awk -v k="$2" '$1 == k { print $2 }'; }

# alone ADDR...: run without boxes, and set `want` to its hash; set `ram` to the least budget of a run with these
# boxes and a little more
alone() {
    local addr tiers=()
    for addr; do tiers+=(--tier "$addr"); done
    "$K3" run "${args[@]}" >"$T/out" 2>"$T/err" || { cat "$T/err"; exit 1; }
    want=$(field logits_fnv)
    "$K3" run "${args[@]}" --ram 1 "${tiers[@]}" >"$T/out" 2>"$T/err"
    ram=$(sed -n 's/.*give at least \([0-9]*\) bytes.*/\1/p' "$T/err")
    [ -n "$ram" ] || { cat "$T/err"; exit 1; }
    ram=$((ram + 65536))
}

# check NAME SERVED RUN_OPTIONS...: run; check the hash, and that boxes served at least SERVED experts
check() {
    [ -z "${TIMES:-}" ] || date "+%M:%S.%N $1"
    local name=$1 least=$2 rc got served
    shift 2
    timeout -k 1 120 "$K3" run "${args[@]}" --ram "$ram" --tier-wait "${WAIT:-200000}" "$@" >"$T/out" 2>"$T/err"
    rc=$? got=$(field logits_fnv) served=$(field far_served)
    if [ $rc != 0 ]; then
        fail "$name" "exit $rc"
    elif [ "$got" != "$want" ]; then
        fail "$name" "logits_fnv $got, not $want"
    elif [ "${served:-0}" -lt "$least" ]; then
        fail "$name" "$served experts served, not $least or more"
    else
        pass
    fi
}

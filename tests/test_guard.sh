#!/bin/sh
# test_guard.sh - tests/guard.c: it bounds a test's time, ends the processes that the test leaves, and reports both.
set -u
: "${BUILD:=build}"
guard=$BUILD/guard
n_passed=0 n_failed=0
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
expect() { # NAME GOT WANT
    if [ "$2" = "$3" ]; then n_passed=$((n_passed + 1)); else n_failed=$((n_failed + 1)); echo "FAIL $1: got '$2', want '$3'"; fi
}
gone() { if kill -0 "$(cat "$1")" 2>/dev/null; then echo there; else echo gone; fi; }
guarded() { "$guard" "$1" "$T/times" sh -c "$2" >"$T/out" 2>&1; }

guarded 60 'exit 3'
expect "a command's own exit" "$? $(wc -w <"$T/times")" "3 2"
guarded 1 "echo \$\$ >$T/pid; trap '' TERM; while :; do sleep 1; done"
expect "over its time, deaf to SIGTERM" "$? $(gone "$T/pid")" "124 gone"
guarded 60 "setsid sh -c 'echo \$\$ >$T/pid; exec sleep 600' & while [ ! -s $T/pid ]; do sleep 0.01; done"
expect "a process left in a session of its own" "$? $(gone "$T/pid") $(grep -c 'left behind: process' "$T/out")" "125 gone 1"
(trap '' HUP && guarded 60 'kill -HUP $$; sleep 60')
expect "SIGHUP is back under nohup" $? 129
guarded 60 '[ ! -t 0 ] && ! (: </dev/tty)'
expect "no terminal" $? 0
echo "guard: $n_passed passed, $n_failed failed, 0 skipped"
[ $n_failed = 0 ]

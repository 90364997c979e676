# runner.sh - runs test programs and counts their checks; run.sh and run_long.sh source it.
#
# Each program prints "name: N passed, N failed, N skipped", which is added up here. Exit 77 counts as
# one skip, any other failure without a count as one failure. $BUILD/guard ends a program after
# $K3_TEST_LIMIT seconds, and every process that it left behind; the latter is a failure.
# shellcheck shell=sh disable=SC2034
: "${BUILD:=build}" "${CC:=cc}" "${K3_TEST_LIMIT:=900}"
export BUILD CC
export K3="$BUILD/k3"
unset K3_MODEL # the tests use the bundled model
[ -x "$BUILD/guard" ] || { echo "no $BUILD/guard: say make test, or make $BUILD/guard"; exit 1; }
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
trap 'trap "" INT; kill 0' INT # a lane in the background does not get the signal by itself

run() {
    "$BUILD/guard" "$K3_TEST_LIMIT" "$out.times" "$@" >"$out" 2>&1
    rc=$?
    read -r wall cpu <"$out.times" || wall='?' cpu='?'
    line=$(grep -E '^[a-z_0-9]+: [0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$out" | tail -n 1)
    if [ -n "$line" ]; then
        # shellcheck disable=SC2046
        set -- $(echo "$line" | sed 's/^[^:]*: //; s/[^0-9 ]//g')
        passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
        [ $rc -eq 0 ] || [ "$2" -gt 0 ] || { failed=$((failed + 1)); line="$line (exit $rc)"; }
        grep -E 'SKIP' "$out"
        [ $rc -eq 0 ] || grep -v 'SKIP' "$out" | tail -n 40
        echo "$line  [$wall s, CPU $cpu s]"
    elif [ $rc -eq 77 ]; then
        skipped=$((skipped + 1))
        cat "$out"
    else
        failed=$((failed + 1))
        tail -n 40 "$out"
        echo "FAILED (exit $rc): $*"
    fi
}

# lane NAME: run the tests of one lane in order and print what they print; the counts go to $T/NAME.sum
lane() {
    out=$T/$1.out passed=0 failed=0 skipped=0
    "$1"
    echo "$passed $failed $skipped" >"$T/$1.sum"
}

# total LANE...: the last line, and 1 when anything failed
total() {
    for l; do cat "$T/$l.sum" || echo 0 1 0; done |
        awk '{ p += $1; f += $2; s += $3 } END { print p+0 " passed, " f+0 " failed, " s+0 " skipped"; exit f+0 > 0 }'
}

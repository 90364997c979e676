#!/bin/sh
# run.sh - every test of `make test`; the last line is "N passed, N failed, N skipped".
#
#   BUILD=build CC=cc tests/run.sh [--quick | --bits]
#
# --quick shortens them; --bits, for a second compiler, leaves out what does not depend on one.
# Each program prints "name: N passed, N failed, N skipped", which is added up here. Exit 77
# counts as one skip, any other failure without a count as one failure.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${BUILD:=build}" "${CC:=cc}"
export BUILD CC
export K3="$BUILD/k3"
quick=${1:-}
only_bits=
[ "$quick" = --bits ] && only_bits=1 quick=--quick
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
trap 'trap "" INT; kill 0' INT # the lane in the background does not hear it by itself

run() {
    start=$(date +%s)
    "$@" >"$out" 2>&1
    rc=$?
    line=$(grep -E '^[a-z_0-9]+: [0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$out" | tail -n 1)
    if [ -n "$line" ]; then
        # shellcheck disable=SC2046
        set -- $(echo "$line" | sed 's/^[^:]*: //; s/[^0-9 ]//g')
        passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
        [ $rc -eq 0 ] || [ "$2" -gt 0 ] || { failed=$((failed + 1)); line="$line (exit $rc)"; }
        grep -E 'SKIP' "$out"
        [ $rc -eq 0 ] || grep -v 'SKIP' "$out" | tail -n 40
        echo "$line  [$(($(date +%s) - start)) s]"
    elif [ $rc -eq 77 ]; then
        skipped=$((skipped + 1))
        cat "$out"
    else
        failed=$((failed + 1))
        tail -n 40 "$out"
        echo "FAILED (exit $rc): $*"
    fi
}

replay() {
    run "$BUILD/replay_$1" "tests/corpus/$1"
}

# shellcheck disable=SC2086
compute() {
    run "$BUILD/test_kernels" $quick
    run "$BUILD/test_pool"
    run "$BUILD/test_text"
    run "$BUILD/test_model"
    run "$BUILD/test_engine" demo scripts tests/data $quick
    run "$BUILD/test_stream" demo $quick
    run "$BUILD/test_state" demo tests/data $quick
    run "$BUILD/test_tier" demo
    run "$BUILD/test_stage" demo
    run "$BUILD/test_vram" demo
    run "$BUILD/test_dial"
    for target in text config header index state tier slice; do replay $target; done
    [ -n "$quick" ] || run tests/test_builds.sh
    [ -z "$quick" ] || [ -n "$only_bits" ] || run tests/test_cli.sh # so that both lanes are as long
}

# shellcheck disable=SC2046,SC2086
programs() {
    [ -n "$quick" ] || run tests/test_cli.sh
    run "$BUILD/test_xtml"
    if command -v python3 >/dev/null; then
        run python3 tests/test_chat.py $quick
    else
        echo "chat: SKIP python3 is not installed (scripts/deps.sh test)"
        skipped=$((skipped + 1))
    fi
    run tests/test_cache.sh $quick
    run tests/test_tier.sh demo
    run tests/test_slice.sh demo
    run tests/test_tier_gpu.sh demo
    run tests/test_tier_tls.sh demo
    run tests/test_matrix.sh demo $([ -n "$quick" ] && echo 30 || echo 150) --tokens 12 "Once upon a time there was a duck"
    if [ -z "$quick" ]; then
        run tests/test_tier_net.sh demo
        run tests/test_example.sh
    fi
}

# lane NAME: the tests of one lane, in their order; what they printed to $T/NAME.log, the counts last
lane() {
    out=$T/$1.out passed=0 failed=0 skipped=0
    "$1"
    echo "$passed $failed $skipped" >"$T/$1.sum"
}

# Two lanes: many tests wait for the other half of what they test, and leave a core idle.
lanes=compute
[ -n "$only_bits" ] || { lanes="compute programs"; lane programs >"$T/programs.log" 2>&1 & }
lane compute
wait
cat "$T"/*.log 2>/dev/null
for l in $lanes; do cat "$T/$l.sum" || echo 0 1 0; done | awk '{ p += $1; f += $2; s += $3 } END { print p+0 " passed, " f+0 " failed, " s+0 " skipped"; exit f+0 > 0 }'

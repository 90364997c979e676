#!/bin/sh
# run.sh - every test of `make test`; the last line is "N passed, N failed, N skipped".
#
#   BUILD=build CC=cc tests/run.sh [--quick | --bits]
#
# --quick shortens the tests; --bits, for a second compiler, leaves out those that do not depend on the compiler.
# All take less than five minutes on two idle cores. A test of more than 20 seconds of CPU time belongs to
# `make test-long` (run_long.sh).
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/runner.sh
. tests/runner.sh
quick=${1:-}
only_bits=
[ "$quick" = --bits ] && only_bits=1 quick=--quick

replay() {
    run "$BUILD/replay_$1" "tests/corpus/$1"
}

# shellcheck disable=SC2086
compute() {
    run "$BUILD/test_kernels" $quick
    run "$BUILD/test_pool"
    run "$BUILD/test_machine"
    run "$BUILD/test_text"
    run "$BUILD/test_unicode" $quick
    run "$BUILD/test_model"
    run "$BUILD/test_engine" demo scripts tests/data ${quick:---short}
    run "$BUILD/test_stream" demo $quick
    run "$BUILD/test_state" demo tests/data $quick
    run "$BUILD/test_pass" demo $quick
    run "$BUILD/test_mla" $quick
    run "$BUILD/test_draft" demo
    run "$BUILD/test_tier" demo
    run "$BUILD/test_stage" demo
    run "$BUILD/test_vram" demo
    run "$BUILD/test_dial"
    for target in text config header index state tier slice; do replay $target; done
    [ -n "$only_bits" ] || run tests/test_cli.sh # in this lane, so that both take as long
}

# shellcheck disable=SC2086
programs() {
    run tests/test_guard.sh
    run tests/test_couplings.sh
    run "$BUILD/test_xtml"
    if command -v python3 >/dev/null; then
        run python3 tests/test_chat.py $quick
    else
        echo "chat: SKIP python3 is not installed (scripts/deps.sh test)"
        skipped=$((skipped + 1))
    fi
    [ -n "$quick" ] || run tests/test_docs.py
    [ -n "$quick" ] || run tests/test_house.py
    ! command -v python3 >/dev/null || run python3 tests/test_serve.py
    run tests/test_cache.sh $quick
    run tests/test_tier.sh demo
    run tests/test_slice.sh demo
    run tests/test_tier_gpu.sh demo
    run tests/test_tier_tls.sh demo
    run tests/test_tls_bad.sh demo
    run tests/test_matrix.sh demo 30 --tokens 12 "Once upon a time there was a duck"
    if [ -z "$quick" ]; then
        run tests/test_tier_net.sh demo
        run tests/test_example.sh
        run tests/test_install.sh
        run "$BUILD/test_forecast"
        run "$BUILD/test_options"
        ! command -v python3 >/dev/null || run python3 tests/test_screen.py
    fi
}

# Two lanes: a test of two programs often waits for one of them, and would leave a core idle.
lanes=compute
[ -n "$only_bits" ] || { lanes="compute programs"; lane programs >"$T/programs.log" 2>&1 & }
lane compute
wait
cat "$T"/*.log 2>/dev/null
# shellcheck disable=SC2086
total $lanes

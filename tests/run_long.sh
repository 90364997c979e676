#!/bin/sh
# run_long.sh - every test of `make test-long`; the last line is "N passed, N failed, N skipped".
#
#   BUILD=build CC=cc tests/run_long.sh [NAME ...]
#
# Tests that take longer than `make test` allows, or need root or the network: the long forms of tests in
# run.sh, then every tests/long_*.sh. NAMEs choose some: engine, matrix, builds, unicode, debian for
# tests/long_debian.sh. A test that lacks something is skipped with its reason.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${K3_TEST_LIMIT:=7200}"
# shellcheck source=tests/runner.sh
. tests/runner.sh
chosen=" $* "

# long NAME COMMAND...: run the command if NAME is chosen
long() {
    name=$1
    shift
    case $chosen in "  " | *" $name "*) run "$@" ;; esac
}

arms() {
    long engine "$BUILD/test_engine" demo scripts tests/data
    long matrix tests/test_matrix.sh demo 150 --tokens 12 "Once upon a time there was a duck"
    long builds tests/test_builds.sh
    [ ! -e tests/test_unicode.py ] || long unicode python3 tests/test_unicode.py --venv
    for script in tests/long_*.sh; do
        name=${script#tests/long_}
        long "${name%.sh}" "$script"
    done
}

lane arms
total arms

#!/bin/bash
# test_builds.sh - the same hash from every compiler and optimisation level.
#
# Builds k3 with {gcc, clang} x {-O0, -O3, -Ofast -ffast-math} and compares the hashes of a golden
# prompt, for every kernel set, with demo/bits.tsv; the build of the tests themselves
# (CC at -O3) is not made again. -march=native must be refused: the kernel sets are chosen at run
# time.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${BUILD:=build}"
dir=$BUILD-builds
passed=0 failed=0 skipped=0

ok() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); echo "test_builds: FAILED $*"; }

want=$(awk '$1 == 0 { print $2 " " $3 }' demo/bits.tsv)
ids=$(awk '$1 == 0 { print $2 }' tests/data/golden_prompts.tsv)

check() { # compiler, flags
    local k3=$dir/k3 set got
    rm -rf "$dir"
    if ! make -s -j2 BUILD="$dir" CC="$1" CFLAGS="$2" "$dir/k3" >"$BUILD/builds.log" 2>&1; then
        bad "$1 $2 does not build"
        tail -n 20 "$BUILD/builds.log"
        return
    fi
    for set in $("$k3" info --kernels-list); do
        got=$("$k3" run --ids "$ids" --tokens 32 --no-stop --kernels "$set" --json -q |
            grep -oE '"(ids|logits)_fnv": *"[0-9a-f]{16}"' | grep -oE '[0-9a-f]{16}' | xargs)
        if [ "$got" = "$want" ]; then ok; else bad "$1 $2 $set: '$got', want '$want'"; fi
    done
}

for cc in gcc clang; do
    if ! command -v $cc >/dev/null; then
        echo "test_builds: SKIP $cc is not installed"
        skipped=$((skipped + 1))
        continue
    fi
    for flags in "-O0" "-O3" "-Ofast -ffast-math"; do
        [ "$flags" = -O3 ] && [ "$(command -v $cc)" -ef "$(command -v "${CC:-cc}")" ] && continue
        check $cc "$flags"
    done
    rm -rf "$dir"
    if make -s BUILD="$dir" CC=$cc CFLAGS="-O2 -mavx2" "$dir/k3.o" 2>&1 | grep -q 'run time'; then
        ok
    elif [ "$(uname -m)" = x86_64 ]; then
        bad "$cc -mavx2 is not refused"
    fi
    rm -rf "$dir"
done
echo "test_builds: $passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

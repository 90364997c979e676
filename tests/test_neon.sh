#!/bin/sh
# test_neon.sh - cross-build for AArch64; kernel and end-to-end tests under qemu-user.
#
# Needs gcc-aarch64-linux-gnu, qemu-user and the arm64 libraries (scripts/deps.sh ci).
set -u
cd "$(dirname "$0")/.." || exit 1
: "${BUILD:=build}"
cc=aarch64-linux-gnu-gcc
for tool in $cc qemu-aarch64; do
    command -v $tool >/dev/null || { echo "neon: SKIP $tool is not installed (scripts/deps.sh ci)"; exit 77; }
done
if ! echo 'int main(void) { return 0; }' | $cc -x c -o /dev/null - -luring -ljson-c -lzstd -lssl -lcrypto 2>/dev/null; then
    echo "neon: SKIP the arm64 libraries are not installed (scripts/deps.sh ci)"
    exit 77
fi
dir=$BUILD-neon
make -s BUILD="$dir" CC=$cc LDFLAGS=-static CURL=0 all "$dir/test_kernels" "$dir/test_engine" || { echo "neon: 0 passed, 1 failed, 0 skipped"; exit 1; }
emulate="timeout -k 1 1200 qemu-aarch64"
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
rc=0
$emulate "$dir/test_kernels" --quick >>"$out" 2>&1 || rc=1
$emulate "$dir/test_engine" demo scripts tests/data --quick >>"$out" 2>&1 || rc=1

# A box on one instruction set serves a client on the other: the same hash, and experts from both.
farbox() {
    sock=$(mktemp -d)/box
    run="-q --json --no-stop --model demo --tokens 16 --threads 1"
    $emulate "$dir/k3-tier" -q --model demo --ram 1G --threads 1 --listen "unix:$sock" &
    box=$!
    for _ in $(seq 100); do
        "$1-tier" status "unix:$sock" 2>/dev/null | grep -q "experts_held.256" && break
        sleep 0.2
    done
    ram=$("$1" run $run --ram 1 --tier "unix:$sock" "Once" 2>&1 | sed -n 's/.*give at least \([0-9]*\) bytes.*/\1/p')
    want=$("$1" run $run "Once upon a time" | grep -o '"logits_fnv":"[0-9a-f]*"')
    "$1" run $run --ram $((ram + 65536)) --tier "unix:$sock" --tier-wait 1000000 "Once upon a time" >"$sock.out"
    kill $box
    rm -f "$sock"
    if grep -q "$want" "$sock.out" && grep -q '"far_served":[1-9][0-9][0-9]' "$sock.out"; then
        echo "farbox: 1 passed, 0 failed, 0 skipped"
    else
        echo "farbox: 0 passed, 1 failed, 0 skipped"
    fi
    rm -rf "$(dirname "$sock")"
}
if [ -x "$BUILD/k3" ] && [ -x "$BUILD/k3-tier" ]; then
    farbox "$BUILD/k3" >>"$out" 2>&1
else
    echo "farbox: 0 passed, 0 failed, 1 skipped" >>"$out"
    echo "farbox: SKIP no $BUILD/k3 to be the client"
fi
cat "$out"
sed -n 's/^[a-z]*: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$out" |
    awk -v rc=$rc '{ p += $1; f += $2; s += $3; n++ }
        END { if (n != 3 || (rc && !f)) f++; print "neon: " p " passed, " f " failed, " s " skipped" }'
exit $rc

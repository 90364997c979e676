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
if ! echo 'int main(void) { return 0; }' | $cc -x c -o /dev/null - -luring -lpcre2-8 -ljson-c -lzstd -lcrypto 2>/dev/null; then
    echo "neon: SKIP the arm64 libraries are not installed (scripts/deps.sh ci)"
    exit 77
fi
dir=$BUILD-neon
make -s BUILD="$dir" CC=$cc LDFLAGS=-static all "$dir/test_kernels" "$dir/test_engine" || { echo "neon: 0 passed, 1 failed, 0 skipped"; exit 1; }
export OMP_WAIT_POLICY=passive
emulate="timeout -k 1 1200 qemu-aarch64"
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
rc=0
$emulate "$dir/test_kernels" --quick >>"$out" 2>&1 || rc=1
$emulate "$dir/test_engine" demo scripts tests/data --quick >>"$out" 2>&1 || rc=1
cat "$out"
sed -n 's/^[a-z]*: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$out" |
    awk -v rc=$rc '{ p += $1; f += $2; s += $3; n++ }
        END { if (n != 2 || (rc && !f)) f++; print "neon: " p " passed, " f " failed, " s " skipped" }'
exit $rc

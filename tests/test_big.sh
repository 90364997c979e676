#!/usr/bin/env bash
# test_big.sh - streaming at the true dimensions of K3: a random checkpoint of LAYERS layers with
# EXPERTS experts each (about 12 GB for 4 and 64), the matrix of test_matrix.sh over it, a prompt
# of 512 positions counted, and what the disk gives the engine beside what it gives a plain reader.
#
#     BIG_DIR=/fast/disk LAYERS=4 EXPERTS=64 RUNS=24 tests/test_big.sh
set -u
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build}
export K3=$BUILD/k3
BIG_DIR=${BIG_DIR:-${TMPDIR:-/tmp}}
LAYERS=${LAYERS:-4}
EXPERTS=${EXPERTS:-64}
RUNS=${RUNS:-24}
PYTHON=${PYTHON:-python3}
n_passed=0 n_failed=0
need=$((8 + LAYERS * (1 + EXPERTS * 18 / 1000)))
free=$(df --output=avail -BG "$BIG_DIR" | tail -1 | tr -dc 0-9)
if [ "$free" -lt $need ]; then
    echo "SKIP true dimensions: $BIG_DIR has $free GB free, $need are needed; name another with BIG_DIR"
    exit 77
fi
M=$(mktemp -d "$BIG_DIR/k3-big-XXXXXX") || exit 1
trap 'rm -rf "$M"' EXIT
"$PYTHON" scripts/make_checkpoint.py "$M/model" --layers "$LAYERS" --experts "$EXPERTS" --top-k 16 || exit $?
ids=$(seq -s, 1 512)
expect() { # name, got, want
    if [ "$2" = "$3" ]; then n_passed=$((n_passed + 1)); else n_failed=$((n_failed + 1)); echo "FAIL $1: got $2, want $3"; fi
}

DIES_AFTER=2 TMPDIR=$M tests/test_matrix.sh "$M/model" "$RUNS" --ids 5,6,7,8,9,10,11,12 --tokens 6 | tee "$M/matrix"
set -- $(tail -1 "$M/matrix" | tr -dc '0-9 ')
n_passed=$((n_passed + $1)) n_failed=$((n_failed + $2))

# A prompt of 512 positions in one chunk: every distinct expert and every trunk matrix once.
"$K3" run -q --json --model "$M/model" --ids "$ids" --tokens 0 --chunk 512 --ram 6G --no-look-ahead \
    --trace "$M/trace" >"$M/out" || exit 1
distinct=$(awk 'NR > 1 { for (i = 3; i <= NF; i++) { split($i, a, ":"); seen[$2 " " a[1]] = 1 } }
    END { for (x in seen) n++; print n }' "$M/trace")
field() { sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p" "$M/out"; }
expect "512 positions: distinct experts" "$(field expert_uses)" "$distinct"
expect "512 positions: each is read once" "$(field expert_loads)" "$distinct"

# Decoding with no expert in memory yet, beside a program that only reads whole experts.
echo "ids:5" >"$M/prompts"
for threads in $(nproc); do
    for ram in 3G 6G; do
        echo "# --ram $ram --threads $threads"
        "$K3" bench -q --model "$M/model" --prompts "$M/prompts" --tokens 24 --ram $ram --direct on \
            --threads "$threads" --reader | cut -f2-5,12-16
    done
done
echo "big: $n_passed passed, $n_failed failed, 0 skipped"
[ $n_failed = 0 ]

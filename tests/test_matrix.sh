#!/usr/bin/env bash
# test_matrix.sh - one hash, and peak memory within --ram, however weights are read.
#
#     K3=build/k3 tests/test_matrix.sh MODEL RUNS [run options ...]
#
# RUNS runs of one prompt through the program, each with another of the combinations of
#     budget {floor, floor + 64 MiB, half, all}    io {pool, uring}    direct {on, off}
#     mirrors {0, 1, 2, 2 of which one dies}    look-ahead {on, off}    policy {rank, lru}
#     pins {no, yes}    sums {no, yes}    chunk {by the budget, 1, 7, 64}    threads {1, 2}
# Each must give the logits_fnv of a run with everything in memory, and its peak memory
# (VmHWM) must be at most its --ram. Copies for mirrors are hard links: the dying one is cut
# short by name, so it is a real copy, of one shard.
set -u
export LC_ALL=C
K3=${K3:-build/k3}
MODEL=$1
RUNS=$2
shift 2
T=$(mktemp -d "${TMPDIR:-/tmp}/k3-matrix-XXXXXX") || exit 1
trap 'rm -rf "$T"' EXIT
n_passed=0 n_failed=0 n_skipped=0
args=(-q --json --no-stop --model "$MODEL" "$@")

# field NAME: a number or word of the JSON in $T/out
field() { sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p" "$T/out"; }
fail() {
    n_failed=$((n_failed + 1))
    echo "FAIL $1: $2"
    head -2 "$T/err" | sed 's/^/     /'
}
# pick LIST...: print one of them, chosen by the run's own random numbers
seed=12345
pick() {
    seed=$(((seed * 1103515245 + 12345) % 2147483648))
    local i=$((seed / 65536 % $#))
    shift $i
    picked=$1
}

"$K3" run "${args[@]}" --trace "$T/trace" >"$T/out" 2>"$T/err" || { cat "$T/err"; exit 1; }
want=$(field logits_fnv)
"$K3" bench --replay "$T/trace" --write-pins "$T/pins" >/dev/null || exit 1
"$K3" verify -q --write-sums --sums "$T/sums" --model "$MODEL" >/dev/null 2>"$T/err" || { cat "$T/err"; exit 1; }
has_uring=1
"$K3" run "${args[@]}" --tokens 1 --io uring >"$T/out" 2>"$T/err" || has_uring=0
if [ $has_uring = 0 ]; then
    n_skipped=$((n_skipped + 1))
    echo "SKIP io_uring: $(head -1 "$T/err")"
fi
mkdir "$T/one" "$T/dying"
shards=("$MODEL"/*.safetensors)
for f in "${shards[@]}"; do ln -s "$(readlink -f "$f")" "$T/one/"; done # a hard link would change the ctime that states know the files by
last=${shards[$((${#shards[@]} / 2))]}

for ((i = 0; i < RUNS; i++)); do
    pick auto 1 7 64; chunk=$picked
    [ "$chunk" = auto ] && chunk=0
    pick no yes; pins=$picked
    pick no yes; sums=$picked
    options=(--chunk "$chunk")
    pick 1 2; options+=(--threads "$picked")
    [ $pins = yes ] && options+=(--pins "$T/pins")
    [ $sums = yes ] && options+=(--sums "$T/sums")
    pick pool uring; io=$picked
    [ $has_uring = 0 ] && io=pool
    pick on off; options+=(--io $io --direct "$picked")
    pick rank lru; options+=(--policy "$picked")
    pick no yes; [ "$picked" = yes ] && options+=(--no-look-ahead)
    pick 0 1 2 dying; mirrors=$picked
    cp "$last" "$T/dying/" # whole again
    case $mirrors in
    1) options+=(--mirror "$T/one") ;;
    2 | dying) options+=(--mirror "$T/one" --mirror "$T/dying") ;;
    esac
    # a run with one byte of budget is refused with the floor of these options
    "$K3" run "${args[@]}" "${options[@]}" --ram 1 >"$T/out" 2>"$T/err"
    floor=$(sed -n 's/.*give at least \([0-9]*\) bytes.*/\1/p' "$T/err")
    [ -n "$floor" ] || { fail "floor" "none named"; continue; }
    all=$((floor + $(du -sbL "$MODEL" | cut -f1) + (256 << 20)))
    pick "$floor" $((floor + (64 << 20))) $(((floor + all) / 2)) $all; ram=$picked
    name="--ram $ram ${options[*]} ($mirrors mirrors)"
    "$K3" run "${args[@]}" "${options[@]}" --ram "$ram" >"$T/out" 2>"$T/err" &
    pid=$!
    if [ "$mirrors" = dying ]; then
        sleep "${DIES_AFTER:-0.1}"
        truncate -s 4096 "$T/dying/$(basename "$last")"
    fi
    wait $pid
    rc=$?
    if [ "$mirrors" = dying ] && [ $rc != 0 ] && grep -Eq "not a copy|differs from its original" "$T/err"; then
        continue # the mirror was cut before the engine opened it
    fi
    got=$(field logits_fnv) peak=$(field peak_bytes)
    if [ $rc != 0 ]; then
        fail "$name" "exit $rc"
    elif [ "$got" != "$want" ]; then
        fail "$name" "logits_fnv $got, not $want"
    elif [ -z "${K3_SAN:-}" ] && [ "$peak" -gt "$ram" ]; then # a sanitizer takes memory of its own
        fail "$name" "peak memory $peak"
    else
        n_passed=$((n_passed + 1))
    fi
done
echo "matrix: $n_passed passed, $n_failed failed, $n_skipped skipped"
[ $n_failed = 0 ]

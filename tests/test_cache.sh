#!/usr/bin/env bash
# test_cache.sh - many processes and one cache directory, some of them killed at any moment.
#
#     K3=build/k3 tests/test_cache.sh [--quick]
#
# Ten processes ask again and again, so that each stores, finds and evicts what others use, while
# an eleventh is killed with SIGKILL over and over. Every answer must have the hash that the same
# prompt has without a cache; at the end each entry must be whole, the size kept, and nothing left
# behind by the dead. Then --save and --load from outside: exit codes and the hashes of
# demo/bits.tsv, with a kill in the midst of a save. --quick is for sanitizers: each asks once.
set -u
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
K3=${K3:-build/k3}
case $K3 in /*) ;; *) K3=$PWD/$K3 ;; esac
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
n_passed=0 n_failed=0
rounds="0 1 2 3" n_answers=40
[ "${1:-}" != --quick ] || rounds=0 n_answers=10

expect() { # name, got, want
    if [ "$2" = "$3" ]; then
        n_passed=$((n_passed + 1))
    else
        n_failed=$((n_failed + 1))
        printf 'FAIL %s: got %.300s, want %.300s\n' "$1" "$2" "$3"
    fi
}

hashes() { grep -oE '"(ids|logits)_fnv": *"[0-9a-f]{16}"' | grep -oE '[0-9a-f]{16}' | xargs; }
total_bytes() { find "$T/cache" -type f -printf '%s\n' | awk '{ n += $1 } END { print n + 0 }'; }
ask() { "$K3" run -q --json --threads 1 --tokens 6 --ids "$@"; }
# To be run with `&`: exec makes $! the program itself, not a shell that would die without it.
become() { exec "$K3" run -q --json --threads 1 --tokens 6 --ids "$@"; }

# ---- Ten processes ----

# Prompt i: a beginning that all share, as long as i says, then an end of its own; long enough
# (over 256 ids) for its own state to be kept before the answer's.
prompt() { awk -v i="$1" 'BEGIN { for (k = 0; k < 260 + i * 7; k++) printf "%d,", 300 + k * 13 % 1400; print 400 + i }'; }
for i in 0 1 2 3 4 5; do
    prompt $i >"$T/prompt$i"
    ask "$(cat "$T/prompt$i")" | hashes >"$T/want$i"
done
expect "six answers" "$(sort -u "$T"/want? | wc -l | tr -d ' ')" 6
size=2400000 # about six entries of 340 to 390 KB, so that each store has to evict some

worker() { # number
    for round in $rounds; do
        i=$((($1 * 5 + round * 7) % 6))
        got=$(ask "$(cat "$T/prompt$i")" --cache "$T/cache" --cache-size $size 2>>"$T/err" | hashes)
        if [ "$got" = "$(cat "$T/want$i")" ]; then echo same; else echo "prompt $i: $got"; fi
    done >"$T/worker$1"
    touch "$T/done$1"
}

victims() { # until the workers are done
    n=0 killed=0
    while [ "$(find "$T" -name 'done*' | wc -l)" -lt 10 ]; do
        become "$(prompt $((n % 9)))" --cache "$T/cache" --cache-size $size >/dev/null 2>&1 &
        sleep "0.$(printf %03d $((20 + n * 37 % 180)))"
        kill -9 $!
        wait $!
        [ $? -ne 137 ] || killed=$((killed + 1)) # else it had ended before
        n=$((n + 1))
    done
    echo $killed >"$T/killed"
}

for w in 0 1 2 3 4 5 6 7 8 9; do worker $w & done
victims 2>/dev/null &
wait
expect "answers" "$(cat "$T"/worker? | sort | uniq -c | xargs)" "$n_answers same"
expect "messages" "$(grep -v '^k3: no --model' "$T/err" | head -3)" ""
[ "$(cat "$T/killed")" -gt 2 ]
expect "killed more than once: $(cat "$T/killed")" $? 0
"$K3" cache verify "$T/cache" >"$T/out" 2>&1
expect "verify" $? 0
ask 343,336 --cache "$T/cache" --cache-size $size >/dev/null # opening the cache removes what killed writers left
expect "nothing half written is left" "$(find "$T/cache" -type f ! -name '*.k3s' | wc -l | tr -d ' ')" 0
total=$(total_bytes)
[ "$total" -gt 300000 ] && [ "$total" -le $size ]
expect "size $total" $? 0

# ---- The command ----

"$K3" cache ls "$T/cache" >"$T/out" 2>&1
expect "ls" "$? $(grep -c positions "$T/out")" "0 $(find "$T/cache" -name '*.k3s' | wc -l | tr -d ' ')"
victim=$(find "$T/cache" -name '*.k3s' | head -n 1)
printf 'xxxx' | dd of="$victim" bs=1 seek=2000 conv=notrunc 2>/dev/null
"$K3" cache verify "$T/cache" >"$T/out" 2>&1
expect "verify of a damaged entry" "$? $(grep -c 'damaged: ' "$T/out")" "5 1"
"$K3" cache rm --cache-size 900000 "$T/cache" >"$T/out" 2>&1
rc=$?
total=$(total_bytes)
[ $rc -eq 0 ] && [ "$total" -gt 300000 ] && [ "$total" -le 900000 ]
expect "rm to a size: $total" $? 0
"$K3" cache rm "$T/cache" >"$T/out" 2>&1
expect "rm" "$? $(find "$T/cache" -type f | wc -l | tr -d ' ')" "0 0"
"$K3" cache ls "$T/none" >/dev/null 2>&1
expect "ls of no directory" $? 1
"$K3" cache ls >/dev/null 2>&1
expect "ls of nothing" $? 2
"$K3" cache prune "$T/cache" >/dev/null 2>&1
expect "no such verb" $? 2
"$K3" run --cache-size 5G --ids 1 >/dev/null 2>&1
expect "--cache-size without --cache" $? 2
ask 343,336 --cache "$K3" >/dev/null 2>&1
expect "a cache that is a file" $? 1

# ---- A short prompt again ----

short=343,336,327,444,1489,311 # with the scalar kernels a prompt is slow enough to be cached on any machine
"$K3" run -v --kernels ref --ids $short --cache "$T/short" >/dev/null 2>"$T/err"
expect "a short prompt is kept, and -v says why" "$(grep -c 'cache: 5 positions of the prompt took .* is kept' "$T/err")" 1
"$K3" run --ids $short --cache "$T/short" >/dev/null 2>"$T/err"
expect "and found again" "$(grep -c "cache: 5 of the prompt's 6 positions" "$T/err")" 1
chmod go+w "$T/short"
"$K3" run --ids $short --cache "$T/short" >/dev/null 2>"$T/err"
expect "a cache that others may write to" "$? $(grep -c 'others may write to it' "$T/err")" "1 1"

# ---- Weights that were damaged, and repaired ----

# flip DIR LAYER EXPERT: the middle of its w3, where no sample looks; twice is a repair.
flip() {
    python3 - "$@" <<'EOF'
import json, os, struct, sys
where, layer, expert = sys.argv[1:]
name = f"layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight_packed"
with open(os.path.join(where, "model.safetensors.index.json")) as f:
    names = [x for x in json.load(f)["weight_map"].items() if x[0].endswith(name)]
(name, shard), = names
with open(os.path.join(where, shard), "r+b") as f:
    n = struct.unpack("<Q", f.read(8))[0]
    first, end = json.loads(f.read(n))[name]["data_offsets"]
    at = 8 + n + (first + end) // 2
    f.seek(at)
    old = f.read(64)
    f.seek(at)
    f.write(bytes(x ^ 0x55 for x in old))
EOF
}
logits() { grep -oE 'logits_fnv [0-9a-f]{16}' "$T/err"; }
of() { "$K3" run --model "$T/m" --ids $short "$@" >/dev/null 2>"$T/err"; }

if command -v python3 >/dev/null; then
    cp -r demo "$T/m" && chmod -R u+w "$T/m"
    of --trace "$T/routing"
    right=$(logits)
    layer=2 # the expert with the largest weight in layer 2 for the third position
    expert=$(awk '$1 == 2 && $2 == 2 { for (i = 3; i <= NF; i++) { split($i, x, ":"); if (x[2] > w) { w = x[2]; e = x[1] } } } END { print e }' "$T/routing")
    flip "$T/m" "$layer" "$expert"
    of --cache "$T/c" --save "$T/d.k3s"
    wrong=$(logits)
    [ "$right" != "$wrong" ]
    expect "damage changes the answer ($layer $expert)" $? 0
    of --cache "$T/c"
    expect "and the cache keeps it" "$(logits) $(grep -c 'of the prompt' "$T/err")" "$wrong 1"
    flip "$T/m" "$layer" "$expert"
    of --cache "$T/c"
    expect "repaired, without sums: the cache has nothing" "$(logits) $(grep -c 'of the prompt' "$T/err")" "$right 0"
    of --load "$T/d.k3s"
    expect "repaired, without sums: --load says so" "$(grep -c 'nobody can tell whether it was made with exactly these weights' "$T/err")" 1
    flip "$T/m" "$layer" "$expert"
    "$K3" verify -q --model "$T/m" --write-sums >/dev/null 2>&1
    of --cache "$T/c" --save "$T/d.k3s"
    flip "$T/m" "$layer" "$expert"
    of --cache "$T/e" --save "$T/f.k3s"
    expect "a sum that does not match: nothing is kept" "$? $(find "$T/e" -type f 2>/dev/null | wc -l | tr -d ' ') $([ -e "$T/f.k3s" ]; echo $?)" "5 0 1"
    "$K3" verify -q --model "$T/m" --write-sums --no-check >/dev/null 2>&1
    of --cache "$T/c"
    expect "repaired, with sums: the cache has nothing" "$(logits) $(grep -c 'of the prompt' "$T/err")" "$right 0"
    of --load "$T/d.k3s"
    expect "repaired, with sums: --load refuses" "$? $(grep -c 'a state of other weights' "$T/err")" "5 1"
else
    echo "SKIP damaged weights: python3 is not installed"
fi

# ---- --save and --load ----

# A golden prompt cut in two: the answer's hashes are those that two other programs have made.
ids=$(awk '$1 == 3 { print $2 }' tests/data/golden_prompts.tsv)
want=$(awk '$1 == 3 { print $2 " " $3 }' demo/bits.tsv)
"$K3" run -q --tokens 0 --ids "${ids%,*,*}" --save "$T/a.k3s" >/dev/null
got=$("$K3" run -q --json --no-stop --tokens 32 --ids "${ids#"${ids%,*,*},"}" --load "$T/a.k3s" | hashes)
expect "golden in two parts" "$got" "$want"
# The last id of an answer is kept too: 8 + 24 ids are 32.
"$K3" run -q --tokens 8 --no-stop --ids "$ids" --save "$T/b.k3s" --json >"$T/out"
last=$(grep -oE '"n_gen": *[0-9]+' "$T/out" | grep -oE '[0-9]+$')
"$K3" run --tokens 0 --ids 5 --load "$T/b.k3s" >/dev/null 2>"$T/err"
expect "positions of prompt and answer" "$(grep -oE '[0-9]+ positions' "$T/err")" \
    "$(($(echo "$ids" | tr ',' '\n' | wc -l) + last)) positions"
"$K3" run -q --ids 5 --load "$T/a.k3s" --lora-eps 1e-5 >/dev/null 2>"$T/err"
expect "another epsilon" "$? $(grep -c 'lora eps of 1e-06, this run has 1e-05' "$T/err")" "5 1"
"$K3" run -q --ids 5 --load "$T/a.k3s" --context 2 >/dev/null 2>"$T/err"
expect "a context too small" "$? $(grep -c 'raise --context' "$T/err")" "1 1"
"$K3" run -q --ids 5 --load k3.h >/dev/null 2>"$T/err"
expect "no state" "$? $(grep -c 'not a k3 state file' "$T/err")" "5 1"
"$K3" run -q --ids 5 --load "$T/none" >/dev/null 2>&1
expect "no file" $? 1
"$K3" run -q --ids 5 --tokens 0 --save "$T/none/x" >/dev/null 2>&1
expect "no directory to save in" $? 1
# Killed while saving, again and again: the file is always whole, the old one or the new one.
for n in 1 2 3 4 5 6 7 8; do
    become "$(prompt 8)" --save "$T/a.k3s" >/dev/null 2>&1 &
    sleep "0.$(printf %03d $((n * 23)))"
    { kill -9 $! && wait $!; } 2>/dev/null
    "$K3" run -q --ids 5 --tokens 0 --load "$T/a.k3s" >/dev/null 2>&1
    expect "load after kill $n" $? 0
done
ask 343 --save "$T/a.k3s" >/dev/null 2>&1
expect "the temporary file is taken over" "$? $(find "$T" -name 'a.k3s.tmp' | wc -l | tr -d ' ')" "0 0"
echo precious >"$T/q.k3s.tmp"
ask 343 --save "$T/q.k3s" >/dev/null 2>"$T/err"
expect "another's file in the way" "$? $(cat "$T/q.k3s.tmp") $(grep -c 'q.k3s.tmp: is in the way' "$T/err")" "1 precious 1"

echo "test_cache: $n_passed passed, $n_failed failed, 0 skipped"
[ $n_failed -eq 0 ]

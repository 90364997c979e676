#!/usr/bin/env bash
# test_slice.sh - experts for a box that has no checkpoint: slices of the demo, and staging.
#
#     K3=build/k3 K3_TIER=build/k3-tier CHAOS=build/tier_chaos CC=cc tests/test_slice.sh MODEL
#
# What `k3 slice` writes is read by a Python program that knows the safetensors format and nothing
# of this source, and by a C program of a few lines around the published xxhash.h. Every run with a
# box must give the logits_fnv of a run without; where the box works it must have served experts.
CC=${CC:-cc}
suite=slice
# shellcheck source=tests/boxes.sh
. "$(dirname "$0")/boxes.sh"
at_end() { for d in small tight; do [ ! -d "$T/$d" ] || umount "$T/$d" 2>/dev/null; done; }
limit() { case $1 in stage | near | tcp) "$@" ;; *) timeout -k 1 120 "$@" ;; esac }
args=(-q --json --no-stop --model "$MODEL" --tokens 24 --threads 1 "Once upon a time there was a duck")

expect() { if [ "$2" = "$3" ]; then pass; else fail "$1" "got '$2', want '$3'"; fi; }
box() { start_box "$@"; }
# held NAME N: wait until the box holds N experts
held() {
    for _ in $(seq 300); do
        [ "$(stat_of "$1" experts_held)" = "$2" ] && return
        sleep 0.02
    done
    fail "box $1" "holds $(stat_of "$1" experts_held), not $2"
}
alone unix:x unix:y

# Pins as bench writes them: the experts of a trace, the hottest first; then all others, so that all are named.
"$K3" run -q --model "$MODEL" --tokens 40 --no-stop --trace "$T/trace" "Once upon a time" >/dev/null 2>"$T/err"
"$K3" bench --replay "$T/trace" --write-pins "$T/pins" >/dev/null 2>>"$T/err"
for il in 1 2 3 4 5 6 7 8; do for ie in $(seq 0 31); do echo "$il $ie"; done; done >"$T/all"
cat "$T/all" >>"$T/pins"
slice=("$K3" slice -q --model "$MODEL" --pins "$T/pins")

# ---- What is written -------------------------------------------------------------------------

ends "no pins" 2 "write-pins FILE" "$K3" slice --model "$MODEL" --size 1M --out "$T/x"
ends "no size" 2 "size SIZE" "${slice[@]}" --out "$T/x"
ends "no place" 2 "out DIR" "${slice[@]}" --size 1M
ends "room for no expert" 2 "too small for one expert" "${slice[@]}" --size 20000 --out "$T/x"
echo "1 99" >"$T/bad"
ends "pins of another model" 2 "line 1: no expert 99 of layer 1; this model has" "$K3" slice -q --model "$MODEL" --pins "$T/bad" --size 1M --out "$T/x"
ends "pins that are a directory" 1 "$T: Is a directory" "$K3" slice -q --model "$MODEL" --pins "$T" --size 1M --out "$T/x"
for line in "1" "1 2x" "1 -2" "0 1" "99999999999999999999 1" "1 $(printf '%0300d' 1)"; do
    echo "$line" >"$T/bad"
    ends "a slice, pins '$line'" 2 "bad: line 1" "$K3" slice -q --model "$MODEL" --pins "$T/bad" --size 1M --out "$T/x"
    ends "a box, pins '$line'" 2 "bad: line 1" "$K3_TIER" --model "$MODEL" --pins "$T/bad" --ram 1G --listen "unix:$T/x.sock"
done
ends "a box, pins that are a directory" 1 "$T: Is a directory" "$K3_TIER" --model "$MODEL" --pins "$T" --ram 1G --listen "unix:$T/x.sock"
ends "pins that are absent" 1 "No such file" "$K3" slice -q --model "$MODEL" --pins "$T/none" --size 1M --out "$T/x"
[ ! -e "$T/x" ] && pass || fail "misuse" "something was written"
mkdir "$T/full" && touch "$T/full/thing"
ends "a directory with something in it" 2 "not empty" "${slice[@]}" --size 1M --out "$T/full"
expect "it is as it was" "$(ls "$T/full")" thing
ends "over the model itself" 2 "not empty" "${slice[@]}" --size 1M --out "$MODEL"

ends "a slice" 0 "experts .* in 7 shards; [0-9.]* GB/s" "${slice[@]}" --size 1500K --shard 200K --out "$T/s"
ends "the same again" 0 "is there, whole" "${slice[@]/#-q/--no-check}" --size 1500K --shard 200K --out "$T/s"
ends "another one there" 2 "another slice" "${slice[@]}" --size 1M --out "$T/s"
n=$(awk '$1 == "experts" { print $2 }' "$T/s/k3.slice")
n_slice=$n
expect "no more than --size" "$(($(du -sb "$T/s" | cut -f1) - 4096 <= 1500 * 1024))" 1
expect "as many as fit" "$((n > 110 && n < 155))" 1

cat >"$T/read.py" <<'EOF'
"""read.py MODEL SLICE PINS RECORDS: compare a slice with its model, tensor by tensor; write the six
tensors of each expert of k3.slice, in its order, to RECORDS."""
import json, os, struct, sys
model, part, pins, records = sys.argv[1:]
MIDDLE = "block_sparse_moe.experts"
ORDER = [f"{w}.weight_{k}" for w in ("w1", "w3", "w2") for k in ("packed", "scale")]

def shard(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    assert n % 8 == 0 and 8 + n <= len(data), path
    head = json.loads(data[8:8 + n])
    head.pop("__metadata__", None)
    return head, data[8 + n:], 8 + n

def tensors(directory, strict):
    index = json.load(open(f"{directory}/model.safetensors.index.json"))
    out, total = {}, 0
    for name in sorted(set(index["weight_map"].values())):
        head, data, start = shard(f"{directory}/{name}")
        at = 0
        for tensor, x in sorted(head.items(), key=lambda t: t[1]["data_offsets"]):
            b, e = x["data_offsets"]
            assert index["weight_map"][tensor] == name and tensor not in out
            if strict:
                assert b == at and start % 4096 == 0, (tensor, b, at)  # no holes, whole pages
            at = e
            total += e - b
            out[tensor] = (x["dtype"], x["shape"], data[b:e])
        assert at == len(data), name
    assert set(out) == set(index["weight_map"])
    if strict:
        assert index["metadata"]["total_size"] == total
    return out

a, b = tensors(model, False), tensors(part, True)
for name, x in b.items():
    assert a[name] == x, name
assert open(f"{model}/config.json", "rb").read() == open(f"{part}/config.json", "rb").read()
lines = [l.split() for l in open(f"{part}/k3.slice")]
count = next(int(l[1]) for l in lines if l[0] == "experts")
listed = [(int(l[0]), int(l[1])) for l in lines if len(l) == 3 and l[0].isdigit()]
wanted = []
for l in open(pins):
    x = tuple(map(int, l.split()[:2]))
    if x not in wanted:
        wanted.append(x)
assert len(listed) == count and listed == wanted[:count], "not the first of the pins"
names = [[f"language_model.model.layers.{il}.{MIDDLE}.{ie}.{k}" for k in ORDER] for il, ie in listed]
assert set(sum(names, [])) == set(b)
with open(records, "wb") as f:
    for six in names:
        f.write(b"".join(b[name][2] for name in six))
assert sorted(os.listdir(part))[0:2] == ["config.json", "k3.slice"]
assert not [x for x in os.listdir(part) if x.endswith(".part")]
print(len(b))
EOF
cat >"$T/sum.c" <<'EOF'
#define XXH_INLINE_ALL
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>
/* sum N: the XXH3-64 of each N bytes of stdin, or with 0 of all of them. */
int main(int argc, char **argv) {
    size_t n = argc > 1 ? strtoul(argv[1], 0, 10) : 0, all = n ? n : 1 << 22, got;
    unsigned char *p = malloc(all);
    while (p && (got = fread(p, 1, all, stdin)) > 0)
        printf("%016llx\n", (unsigned long long)XXH3_64bits(p, got));
    return 0;
}
EOF
if command -v python3 >/dev/null; then
    limit python3 "$T/read.py" "$MODEL" "$T/s" "$T/pins" "$T/records" >"$T/out" 2>"$T/err"
    expect "every tensor as the model has it" "$(cat "$T/out")" $((6 * n))
    if $CC -O1 -o "$T/sum" "$T/sum.c" 2>"$T/err"; then
        bytes=$(($(wc -c <"$T/records") / n))
        expect "the sums of all experts" "$("$T/sum" $bytes <"$T/records")" "$(awk 'NF == 3 && $1 ~ /^[0-9]+$/ { print $3 }' "$T/s/k3.slice")"
        expect "the sum of config.json" "$("$T/sum" <"$MODEL/config.json")" "$(awk '$1 == "config" { print $2 }' "$T/s/k3.slice")"
        expect "the sum of the manifest" "$(head -n -1 "$T/s/k3.slice" | "$T/sum")" "$(awk '$1 == "end" { print $2 }' "$T/s/k3.slice")"
    else
        skip "sums: no xxhash.h for $CC"
    fi
else
    skip "tensors of a slice: python3 is not installed (scripts/deps.sh test)"
fi

# Killed at any time: there is no k3.slice, or a whole one, and the next run makes the same bytes.
n_kills=0
for ms in $(seq 2 4 60); do
    "${slice[@]}" --size 1500K --shard 200K --out "$T/k" >/dev/null 2>&1 &
    pid=$!
    sleep "$(printf '0.%03d' "$ms")"
    { kill -9 $pid && n_kills=$((n_kills + 1)); wait $pid; } 2>/dev/null
    [ ! -e "$T/k/k3.slice" ] || diff -rq "$T/s" "$T/k" >"$T/err" || fail "killed after $ms ms" "a slice that is not whole"
    [ ! -e "$T/k/k3.slice" ] || rm -rf "$T/k"
done
[ $n_kills -gt 0 ] && pass || fail "killed" "it was never there to be killed"
ends "after it was killed" 0 "7 shards" "${slice[@]}" --size 1500K --shard 200K --out "$T/k"
diff -rq "$T/s" "$T/k" >"$T/err" && pass || fail "after it was killed" "other bytes"
# Ended by a signal: it says how far it came, and the next run goes on.
rm -rf "$T/k"
for _ in $(seq 50); do # until the signal comes after it has begun and before it is done
    "${slice[@]}" --size 1500K --shard 14K --out "$T/k" >/dev/null 2>"$T/err" &
    pid=$!
    until [ -e "$T/k/k3.slice.part" ] || ! kill -0 $pid 2>/dev/null; do :; done
    kill $pid 2>/dev/null
    wait $pid
    rc=$?
    grep -q "interrupted; the same command goes on" "$T/err" && break
    rm -rf "$T/k"
done
expect "told to end" "$rc $([ -e "$T/k/k3.slice" ] && echo whole)" "130 "
ends "after it was told to end" 0 "experts .* in [0-9]+ shards" "${slice[@]}" --size 1500K --shard 14K --out "$T/k"
# A disk that fails in the middle: whole shards stay, an unfinished one is removed.
rm -rf "$T/k"
(trap '' XFSZ; ulimit -f 100; exec "${slice[@]}" --size 1500K --shard 200K --out "$T/k") >"$T/out" 2>"$T/err"
expect "a disk that fails" "$? $(grep -c "File too large; whole shards stay" "$T/err") $(ls "$T/k")" "1 1 k3.slice.part"
ends "a disk that is well again" 0 "7 shards" "${slice[@]}" --size 1500K --shard 200K --out "$T/k"
diff -rq "$T/s" "$T/k" >"$T/err" && pass || fail "a disk that is well again" "other bytes"
# A slice cut short by hand: two shards and the beginning of a third.
unfinish() {
    rm -rf "$T/k" && cp -r "$T/s" "$T/k" && rm "$T/k/k3.slice" "$T/k/config.json" "$T/k/"*index.json
    head -n $((7 + 40 + 9)) "$T/s/k3.slice" | head -c -5 >"$T/k/k3.slice.part"
    rm "$T/k/model-0000"[4-7]*
    mv "$T/k/model-00003-of-000007.safetensors" "$T/k/model-00003-of-000007.safetensors.part"
}
unfinish
ends "an unfinished slice is not served" 3 "is the slice whole" "$K3_TIER" --slice "$T/k" --ram 1G --listen "unix:$T/x.sock"
ends "unfinished, other experts" 2 "unfinished slice of other experts" "${slice[@]}" --size 1M --shard 200K --out "$T/k"
ends "unfinished" 0 "; 2 shards were there" "${slice[@]}" --size 1500K --shard 200K --out "$T/k"
diff -rq "$T/s" "$T/k" >"$T/err" && pass || fail "unfinished" "other bytes"
unfinish
truncate -s -1 "$T/k/model-00002-of-000007.safetensors"
ends "unfinished, the second shard cut short" 0 "; 1 shard was there" "${slice[@]}" --size 1500K --shard 200K --out "$T/k"
diff -rq "$T/s" "$T/k" >"$T/err" && pass || fail "unfinished, cut short" "other bytes"
unfinish
exec 9>>"$T/k/k3.slice.part"
if command -v flock >/dev/null && flock -n 9; then
    ends "two at once" 1 "another process is writing" "${slice[@]}" --size 1500K --shard 200K --out "$T/k"
else
    skip "two at once: no flock program"
fi
exec 9>&-
# A disk that is too small says so before anything is written.
mkdir "$T/small"
if mount -t tmpfs -o size=1M none "$T/small" 2>/dev/null; then
    ends "too small a disk" 1 "to write, .* free" "${slice[@]}" --size 1500K --out "$T/small"
    expect "nothing was written" "$(ls "$T/small")" ""
    umount "$T/small"
else
    skip "too small a disk: mounting a tmpfs needs root"
fi
rmdir "$T/small"
# A damaged model with sums is noticed, and no slice is made.
cp -rL "$MODEL" "$T/m" && rm -f "$T/m/k3.sums"
"$K3" verify -q --model "$T/m" --write-sums >/dev/null
ends "a model with sums" 0 "checked with the model's sums" "$K3" slice -q --model "$T/m" --pins "$T/all" --size 9M --out "$T/a"
printf '\377' | dd of="$T/m/model-00002-of-000003.safetensors" bs=1 seek=3300000 conv=notrunc 2>/dev/null
ends "pins through a pipe" 0 "" bash -c "'$K3' slice -q --model '$MODEL' --pins <(head -3 '$T/all') --size 9M --out '$T/piped'"
ends "a damaged model" 5 "do not match their sum" "$K3" slice -q --model "$T/m" --pins "$T/all" --size 9M --out "$T/d"
[ ! -e "$T/d/k3.slice" ] && pass || fail "a damaged model" "there is a slice"

# ---- Serving it ------------------------------------------------------------------------------

box part --slice "$T/s" --ram 1G
held part "$n"
check "a slice without the checkpoint" 100 --tier "unix:$T/part.sock"
expect "its own figures" "$(($(stat_of part experts_served_total) >= 100))" 1
check "the same, each layer audited" 100 --tier "unix:$T/part.sock" --tier-audit 1/1
stop $box
least=$("$K3_TIER" --slice "$T/s" --threads 1 --ram 1M --listen "unix:$T/x.sock" 2>&1 | sed -n 's/.*give \([0-9]*\)$/\1/p')
box few --slice "$T/s" --ram $((least + 10 * 13000))
n_few=$(stat_of few experts_capacity)
[ "$n_few" -ge 6 ] && [ "$n_few" -le 12 ] && pass || fail "little memory" "room for $n_few"
held few "$n_few"
check "the hottest few of it" 20 --tier "unix:$T/few.sock"
stop $box
box both --model "$MODEL" --slice "$T/s" --ram 1G
held both 256
check "a slice beside the model" 300 --tier "unix:$T/both.sock"
stop $box

# One wrong byte in a slice: its expert is left out, or read from the model.
cp -r "$T/s" "$T/c"
printf '\001' | dd of="$T/c/model-00002-of-000007.safetensors" bs=1 seek=100000 conv=notrunc 2>/dev/null
cmp -s "$T/s/model-00002-of-000007.safetensors" "$T/c/model-00002-of-000007.safetensors" && fail "a changed byte" "it was 1 before"
box torn --slice "$T/c" --ram 1G
held torn $((n - 1))
grep -q "do not match their sum.*left out" "$T/torn.err" && pass || fail "a changed byte" "is not said"
check "a changed byte" 100 --tier "unix:$T/torn.sock"
stop $box
box torn --slice "$T/c" --model "$MODEL" --ram 1G
held torn 256
grep -q "do not match their sum.*read from the model" "$T/torn.err" && pass || fail "a changed byte, with the model" "is not said"
check "a changed byte, with the model" 300 --tier "unix:$T/torn.sock"
stop $box
serve_bad() { # NAME EXIT PATTERN: a box must refuse $T/c
    ends "$1" "$2" "$3" "$K3_TIER" --slice "$T/c" --ram 1G --listen "unix:$T/x.sock"
    rm -rf "$T/c" && cp -r "$T/s" "$T/c"
}
rm -rf "$T/c" && cp -r "$T/s" "$T/c"
truncate -s -100 "$T/c/model-00003-of-000007.safetensors"
serve_bad "a truncated shard" 3 "model-00003-of-000007.safetensors: truncated"
rm "$T/c/model-00003-of-000007.safetensors"
serve_bad "an absent shard" 3 "model-00003-of-000007.safetensors: named by the index but not in"
rm "$T/c/k3.slice"
serve_bad "no manifest" 3 "k3.slice: No such file"
sed -i '20s/.$/0/; 21s/.$/1/' "$T/c/k3.slice"
serve_bad "a damaged manifest" 3 "k3.slice: damaged"
sed -i 's/"activation_situ_beta": 4.0/"activation_situ_beta": 4.5/' "$T/c/config.json"
serve_bad "another config.json" 3 "config.json: absent, or not the one"
truncate -s 250M "$T/c/k3.slice"
ends "a manifest longer than memory" 3 "k3.slice: longer than .* a quarter of --ram" "$K3_TIER" --slice "$T/c" --ram 64M --listen "unix:$T/x.sock"
rm "$T/c/k3.slice" && mkfifo "$T/c/k3.slice"
serve_bad "a pipe for a manifest" 3 "k3.slice: Invalid argument"
rm "$T/c/config.json" && mkfifo "$T/c/config.json"
serve_bad "a pipe for a config.json" 3 "config.json: absent, or not the one"
ends "sums of no model" 2 "no --model that they are of" "$K3_TIER" --slice "$T/c" --sums "$T/none" --ram 1G --listen "unix:$T/x.sock"
ends "sums of nothing" 2 "no --model that they are of" "$K3_TIER" --sums "$T/none" --ram 1G --listen "unix:$T/x.sock"

# A slice of another model: the client says why it does without the box.
rm -rf "$T/m" && cp -rL "$MODEL" "$T/m"
sed -i 's/"activation_situ_beta": 4.0/"activation_situ_beta": 4.5/' "$T/m/config.json"
ends "a slice of another model" 0 "experts" "$K3" slice -q --model "$T/m" --pins "$T/all" --size 1M --out "$T/o"
box other --slice "$T/o" --ram 1G
limit "$K3" run "${args[@]/-q/-v}" --ram "$ram" --tier "unix:$T/other.sock" >"$T/out" 2>"$T/err"
grep -q "refused: another model: fingerprint" "$T/err" && pass || fail "a slice of another model" "no reason"
expect "and its hash" "$(field logits_fnv)" "$want"
stop $box
ends "beside the wrong model" 3 "not of the model in" "$K3_TIER" --model "$MODEL" --slice "$T/o" --ram 1G --listen "unix:$T/x.sock"

# ---- Staging ---------------------------------------------------------------------------------

stage() { # BOX OPTION...
    local name=$1
    shift
    limit "$K3" stage -q --model "$MODEL" --to "unix:$T/$name.sock" "$@"
}
ends "stage to nobody" 1 "is its k3-tier running" stage none
ends "stage where?" 2 "which box" "$K3" stage --model "$MODEL"
ends "no address" 2 "is no address" "$K3" stage -q --model "$MODEL" --to "a:b:c"
ends "pins for an empty box" 2 "no --model to read them from" "$K3_TIER" --pins "$T/pins" --ram 1G --listen "unix:$T/x.sock"
box empty --ram 1G
limit "$K3" run "${args[@]/-q/-v}" --ram "$ram" --tier "unix:$T/empty.sock" >"$T/out" 2>"$T/err"
grep -q "refused: no experts yet" "$T/err" && pass || fail "an empty box" "no reason"
expect "an empty box" "$(field logits_fnv)" "$want"
ends "a size for no expert" 2 "too small for one expert" stage empty --size 100
ends "stage a few" 0 ": 50 experts sent .*, 0 skipped, 0 left out; [0-9.]* GB/s" stage empty --pins "$T/pins" --size 489600
expect "they are there" "$(stat_of empty experts_held) $(stat_of empty experts_staged_total)" "50 50"
check "a few" 50 --tier "unix:$T/empty.sock"
ends "stage all" 0 ": 206 experts sent .*, 50 skipped, 0 left out" stage empty
check "all" 300 --tier "unix:$T/empty.sock"
expect "all of them" "$(field far_served)" "$(field far_asked)"
ends "stage once more" 0 ": 0 experts sent .*, 256 skipped" stage empty
ends "stage another model" 3 "refused: another model: fingerprint" "$K3" stage -q --model "$T/m" --to "unix:$T/empty.sock"
expect "nothing of it" "$(stat_of empty experts_held) $(stat_of empty experts_staged_total)" "256 256"
[ -n "${K3_SAN:-}" ] || expect "within --ram" "$(($(stat_of empty resident_memory_bytes) < (1 << 30)))" 1
stop $box

# Staging is cut off after some bytes, and killed, again and again; experts that arrived are not sent again.
cat >"$T/cut.py" <<'EOF'
"""cut.py LISTEN TARGET N: pass the first N bytes of one client on, then end both connections."""
import socket, sys, threading
listen, target, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
s = socket.socket(socket.AF_UNIX)
s.bind(listen)
s.listen(1)
a = s.accept()[0]
b = socket.socket(socket.AF_UNIX)
b.connect(target)
def back():
    try:
        while data := b.recv(65536):
            a.sendall(data)
    except OSError:
        pass
threading.Thread(target=back, daemon=True).start()
while n > 0 and (data := a.recv(min(n, 65536))):
    b.sendall(data)
    n -= len(data)
for x in (a, b):
    x.shutdown(socket.SHUT_RDWR)
EOF
box cut --ram 1G
if command -v python3 >/dev/null; then
    before=0 grown=0
    for n_bytes in 100 6200 30000 300000 300001 1000000; do
        rm -f "$T/proxy.sock"
        python3 "$T/cut.py" "$T/proxy.sock" "$T/cut.sock" $n_bytes 2>/dev/null &
        proxy=$!
        for _ in $(seq 200); do [ -S "$T/proxy.sock" ] && break; sleep 0.02; done
        ends "cut after $n_bytes bytes" 1 "(connection broke|closed the connection|reset by peer)" stage proxy
        wait $proxy
        sleep 0.05
        have=$(stat_of cut experts_held)
        [ "$have" -gt "$before" ] && grown=$((grown + 1))
        before=$have
    done
    expect "what came before each cut" "$((grown >= 3)) $((have > 90 && have < 256))" "1 1"
    ends "after the cuts" 0 ": $((256 - have)) experts sent .*, $have skipped, 0 left out" stage cut
    check "after the cuts" 300 --tier "unix:$T/cut.sock"
else
    skip "a connection that is cut: python3 is not installed (scripts/deps.sh test)"
fi
stop $box
box cut --ram 1G
for ms in 10 15 20 25 30 40; do
    "$K3" stage -q --model "$MODEL" --to "unix:$T/cut.sock" >/dev/null 2>&1 &
    pid=$!
    sleep "$(printf '0.%03d' $ms)"
    { kill -9 $pid; wait $pid; } 2>/dev/null
done
sleep 0.1
have=$(stat_of cut experts_held)
ends "after kills" 0 ": $((256 - have)) experts sent .*, $have skipped, 0 left out" stage cut
check "after kills" 300 --tier "unix:$T/cut.sock"
stop $box

# Two stagers at once, beginning at opposite ends, while a client makes text.
"$K3" run "${args[@]}" --tokens 600 >"$T/out" 2>"$T/err"
long=$(field logits_fnv)
tac "$T/all" >"$T/back"
box two --ram 1G
stage two --size 20000 >/dev/null
limit "$K3" run "${args[@]}" --tokens 600 --ram "$ram" --tier-wait 200000 --tier "unix:$T/two.sock" >"$T/run" 2>&1 &
runner=$!
sleep 0.05
stage two --pins "$T/all" >"$T/one" 2>&1 &
first=$!
stage two --pins "$T/back" >"$T/other" 2>&1
wait $first
sent=$(sed -n 's/.*: \([0-9]*\) experts sent.*/\1/p' "$T/one" "$T/other" | awk '{ n += $1 } END { print n }')
expect "two at once" "$sent $(stat_of two experts_held)" "254 256"
wait $runner
cp "$T/run" "$T/out"
expect "text made meanwhile" "$(field logits_fnv)" "$long"
[ "$(field far_served)" -gt 100 ] && pass || fail "text made meanwhile" "$(field far_served) served"
stop $box

# An expert is changed on its way, or the box's answer about it: that connection ends, and the next one
# goes on.
for mode in pieces verdicts; do
    box far --ram 1G
    "$CHAOS" "$T/chaos.sock" "$T/far.sock" $mode 6 &
    chaos=$!
    pids+=($chaos)
    for _ in $(seq 100); do [ -S "$T/chaos.sock" ] && break; sleep 0.02; done
    case $mode in
    pieces) ends "a changed piece" 5 "refused: damaged: expert .* does not match its sum" stage chaos ;;
    verdicts) ends "a changed verdict" 1 "a verdict on something else" stage chaos ;;
    esac
    stop $chaos
    rm -f "$T/chaos.sock"
    sleep 0.05
    have=$(stat_of far experts_held)
    expect "$mode: some came before" $((have >= 1 && have < 256)) 1
    ends "after changed $mode" 0 ": $((256 - have)) experts sent .*, $have skipped, 0 left out" stage far
    check "after changed $mode" 300 --tier "unix:$T/far.sock"
    stop $box
done

# Boxes with room for ten experts, with too little for one, with a key, with the model.
box tight --ram 49M
ends "no room for one" 4 "refused: too little memory: this box holds not one" stage tight
least=$(sed -n 's/.*give \([0-9]*\)$/\1/p' "$T/tight.err")
stop $box
box tight --ram $((least + 10 * 13000))
ends "a full box" 0 "the box is full" stage tight --pins "$T/pins"
n=$(stat_of tight experts_held)
[ "$n" -ge 10 ] && [ "$n" -le 12 ] && pass || fail "a full box" "$n experts"
check "a full box" 20 --tier "unix:$T/tight.sock"
ends "a full box, again" 0 ": 0 experts sent .*, $n skipped, .* full" stage tight --pins "$T/pins"
stop $box
printf 'a key of more than sixteen bytes\n' >"$T/key"
printf 'another key of more than sixteen bytes\n' >"$T/other"
chmod 600 "$T/key" "$T/other"
box keyed --ram 1G --psk-file "$T/key"
ends "no key" 1 "give --psk-file" stage keyed
ends "another key" 1 "another key" stage keyed --psk-file "$T/other"
ends "the key" 0 "256 experts sent" stage keyed --psk-file "$T/key"
stop $box
box plain --model "$MODEL" --no-fill --ram 1G
ends "a box without the key" 1 "not the one meant" stage plain --psk-file "$T/key"
ends "a box with the model" 0 ": 0 experts sent .*, 256 skipped, 0 left out" stage plain
expect "it read them itself" "$(stat_of plain experts_held) $(stat_of plain experts_staged_total)" "256 0"
ends "a box with another model" 3 "refused: another model: fingerprint" "$K3" stage -q --model "$T/m" --to "unix:$T/plain.sock"
check "a box with the model" 300 --tier "unix:$T/plain.sock"
stop $box

# A model that differs from ours in one byte of one expert, where no sample looks. Without sums it has our
# fingerprint, and only comparing expert by expert tells the two apart.
cat >"$T/wrong.py" <<'EOF'
"""wrong.py DIR LAYER EXPERT: change one bit of that expert."""
import json, struct, sys
d, il, ie = sys.argv[1:]
name = f"language_model.model.layers.{il}.block_sparse_moe.experts.{ie}.w1.weight_packed"
path = f"{d}/" + json.load(open(f"{d}/model.safetensors.index.json"))["weight_map"][name]
f = open(path, "r+b")
n = struct.unpack("<Q", f.read(8))[0]
at = 8 + n + json.loads(f.read(n))[name]["data_offsets"][0]
f.seek(at + 1234); b = f.read(1); f.seek(at + 1234); f.write(bytes([b[0] ^ 1]))
EOF
near_ours() { # DIR LAYER EXPERT
    cp -rL "$MODEL" "$1" && rm -f "$1/k3.sums" && python3 "$T/wrong.py" "$@"
}
command -v python3 >/dev/null || { skip "models that are nearly ours: python3 is not installed (scripts/deps.sh test)"; report; exit; }
near_ours "$T/near" 4 7
near() { limit "$K3" stage -q --model "$T/near" --to "unix:$T/$1.sock" "${@:2}"; }
box true --model "$MODEL" --no-fill --ram 1G
ends "staged to a box that has the model" 3 "refused: another model: expert 7 of layer 4 is not the one here" near true
expect "nothing of it was taken" "$(stat_of true experts_staged_total)" 0
check "a box that was lied to" 200 --tier "unix:$T/true.sock"
stop $box
box true --ram 1G
ends "staged by an honest one" 0 "256 experts sent" stage true
ends "offered by one who has another" 0 ": 0 experts sent .*, 256 skipped" near true # the box has all: nothing is offered
stop $box
box near --model "$T/near" --ram 1G
held near 256
limit "$K3" run "${args[@]/-q/-v}" --ram "$ram" --tier "unix:$T/near.sock" >"$T/out" 2>"$T/err"
grep -q "compared by samples only, since ours has no sums" "$T/err" && pass || fail "samples only" "not said"
stop $box
# With sums on both sides such a model is refused at once: as a box's, as a slice's, as a stager's.
cp -rL "$MODEL" "$T/ours" && rm -f "$T/ours/k3.sums"
"$K3" verify -q --model "$T/near" --write-sums >/dev/null && "$K3" verify -q --model "$T/ours" --write-sums >/dev/null
ends "a slice with sums" 0 "checked with the model's sums" "$K3" slice -q --model "$T/near" --pins "$T/all" --size 9M --out "$T/near.s"
expect "its fingerprint by sums" "$(awk '$1 == "fingerprint" && NF == 3 && $3 != "0000000000000000" { print "there" }' "$T/near.s/k3.slice")" there
apart() { # NAME SAID OPTION...: a client with our model and its sums prints SAID on stderr
    local name=$1 said=$2
    shift 2
    limit "$K3" run "${args[@]/-q/-v}" --model "$T/ours" --ram $((ram + (1 << 20))) --tier-wait 200000 "$@" >"$T/out" 2>"$T/err"
    grep -q "$said" "$T/err" && pass || fail "$name" "not said: $said"
    expect "$name: the hash" "$(field logits_fnv)" "$want"
}
box near --model "$T/near" --ram 1G
apart "a box with a model that is nearly ours" "refused: another model: fingerprint by sums" --tier "unix:$T/near.sock"
expect "and was not asked" "$(field far_served)" 0
ends "staged by sums" 3 "refused: another model: fingerprint by sums" "$K3" stage -q --model "$T/ours" --to "unix:$T/near.sock"
stop $box
box near --slice "$T/near.s" --ram 1G
apart "a slice of a model that is nearly ours" "refused: another model: fingerprint by sums" --tier "unix:$T/near.sock"
ends "beside the model" 3 "not of the model in .*: another model: fingerprint by sums" "$K3_TIER" --model "$T/ours" --slice "$T/near.s" --ram 1G --listen "unix:$T/x.sock"
stop $box
box near --ram 1G
ends "staged with sums" 0 "256 experts sent" near near
apart "staged of a model that is nearly ours" "refused: another model: fingerprint by sums" --tier "unix:$T/near.sock"
stop $box
box ours --model "$T/ours" --ram 1G
held ours 256
apart "ours, with sums" "up, holds 256 experts of 256 it has room for$" --tier "unix:$T/ours.sock"
[ "$(field far_served)" -ge 200 ] && pass || fail "ours, with sums" "$(field far_served) served"
check "ours, without" 200 --tier "unix:$T/ours.sock"
stop $box
# A slice that was written without sums, beside a model that has some: each expert is compared.
rm "$T/near/k3.sums"
ends "a slice without sums" 0 "experts" "$K3" slice --model "$T/near" --pins "$T/all" --size 9M --out "$T/near.t"
grep -q "note: .* has no sums" "$T/err" && pass || fail "a slice without sums" "not said"
box both --model "$T/ours" --slice "$T/near.t" --ram 1G
held both 256
expect "one expert is the model's" "$(grep -c "the slice has another than the model's sums tell of" "$T/both.err")" 1
check "a slice that is nearly ours, beside the model" 200 --tier "unix:$T/both.sock"
stop $box
# A slice as older releases wrote it.
if [ -x "$T/sum" ]; then
    cp -r "$T/s" "$T/v1" && head -n -1 "$T/s/k3.slice" | sed 's/^k3-slice 2/k3-slice 1/; s/^\(fingerprint [0-9a-f]*\) .*/\1/' >"$T/list"
    { cat "$T/list"; echo "end $("$T/sum" <"$T/list")"; } >"$T/v1/k3.slice"
    box old --slice "$T/v1" --ram 1G
    held old "$n_slice"
    check "a slice of version 1" 100 --tier "unix:$T/old.sock"
    stop $box
fi
# A box whose slice is damaged takes that expert from a stager, if its bytes have the slice's sum.
rm -rf "$T/c" && cp -r "$T/s" "$T/c"
printf '\001' | dd of="$T/c/model-00002-of-000007.safetensors" bs=1 seek=100000 conv=notrunc 2>/dev/null
box torn --slice "$T/c" --ram 1G
held torn $((n_slice - 1))
read -r il ie < <(sed -n 's/.*expert \([0-9]*\) of layer \([0-9]*\).*left out/\2 \1/p' "$T/torn.err")
echo "$il $ie" >"$T/one.pin"
near_ours "$T/wrong" "$il" "$ie"
ends "another expert in its place" 5 "refused: damaged: expert .* does not match the sum that this box has" "$K3" stage -q --model "$T/wrong" --to "unix:$T/torn.sock" --pins "$T/one.pin"
ends "a damaged expert is staged" 0 ": 1 experts sent" stage torn --pins "$T/one.pin"
expect "it is here" "$(stat_of torn experts_held) $(stat_of torn experts_staged_total)" "$n_slice 1"
check "with a staged expert in the place of a damaged one" 100 --tier "unix:$T/torn.sock"
stop $box

# Staging over TCP needs a right of its own: neither a connection, nor a key for asking, nor --insecure is enough.
printf 'a key for those who stage, and no other\n' >"$T/stage.key" && chmod 600 "$T/stage.key"
port=$((20000 + ($$ + 7777) % 20000))
tcp() { limit "$K3" stage -q --model "$MODEL" --to "127.0.0.1:$port" "$@"; }
box tcp --ram 1G --listen "127.0.0.1:$port" --insecure
ends "stage over TCP" 1 "refused: may not stage: start this box with --stage-psk-file" tcp
stop $box
box tcp --ram 1G --listen "127.0.0.1:$port" --psk-file "$T/key"
ends "stage with a key to ask" 1 "refused: may not stage" tcp --psk-file "$T/key"
stop $box
box tcp --ram 1G --listen "127.0.0.1:$port" --psk-file "$T/key" --psk-file "$T/other" --stage-psk-file "$T/stage.key"
ends "stage with a key to ask, beside one to stage" 1 "refused: another key" tcp --psk-file "$T/key"
ends "stage with the key to stage" 0 "256 experts sent" tcp --psk-file "$T/stage.key"
for k in key other; do check "asked with $k" 200 --tier "127.0.0.1:$port" --psk-file "$T/$k"; done
check "asked with the key to stage" 0 --tier "127.0.0.1:$port" --psk-file "$T/stage.key"
expect "and not answered" "$(field far_served)" 0
for k in key other stage.key; do
    expect "looked at with $k" "$("$K3_TIER" status "127.0.0.1:$port" --psk-file "$T/$k" | grep -c '^experts_held.256')" 1
done
stop $box
ends "nobody could stage" 2 "nobody may stage" "$K3_TIER" --ram 1G --linger 1 --listen "127.0.0.1:$port"

# ---- Keeping what was staged -------------------------------------------------------------------

ends "keep and a model" 2 "without --model" "$K3_TIER" --model "$MODEL" --keep "$T/k1" --ram 1G --listen "unix:$T/x.sock"
ends "keep in a slice" 2 "serve it with --slice" "$K3_TIER" --keep "$T/s" --ram 1G --listen "unix:$T/x.sock"
box kept --ram 1G --keep "$T/kept"
ends "two boxes, one directory" 1 "another k3-tier keeps" "$K3_TIER" --keep "$T/kept" --ram 1G --listen "unix:$T/x.sock"
ends "stage to keep" 0 "100 experts sent" stage kept --size 979200
expect "written when stage ends" "$(awk '$1 == "experts" { print $2 }' "$T/kept/k3.slice")" 100
ends "stage more" 0 "56 experts sent .*, 100 skipped" stage kept --size 1527552
{ kill -9 $box && wait $box; } 2>/dev/null
expect "written when stage ends, killed at once" "$(awk '$1 == "experts" { print $2 }' "$T/kept/k3.slice")" 156
# The directory as a kill leaves it while the third shard is being written.
cp "$T/kept/kept-000000.safetensors" "$T/kept/kept-000156.safetensors.part"
box kept --ram 1G --keep "$T/kept"
held kept 156
check "kept, killed, started again" 100 --tier "unix:$T/kept.sock"
ends "stage the rest" 0 "100 experts sent .*, 156 skipped" stage kept
stop $box # a box that is told to end writes all that it holds
expect "what is kept" "$(awk '$1 == "experts" { print $2 }' "$T/kept/k3.slice"; cd "$T/kept" && echo *.safetensors)" \
    "256
kept-000000.safetensors kept-000100.safetensors kept-000156.safetensors"
box kept --ram 1G --keep "$T/kept"
held kept 256
check "all of it" 300 --tier "unix:$T/kept.sock"
expect "all of all" "$(field far_served)" "$(field far_asked)"
ends "nothing left to stage" 0 ": 0 experts sent .*, 256 skipped" stage kept
ends "keep another model" 3 "refused: another model: fingerprint" "$K3" stage -q --model "$T/m" --to "unix:$T/kept.sock"
stop $box
# A directory with other contents is refused and stays as it was: an unfinished slice, files, another config.json.
ends "keep among files" 2 "there is thing" "$K3_TIER" --keep "$T/full" --ram 1G --linger 1 --listen "unix:$T/x.sock"
mkdir "$T/half" && head -n 7 "$T/s/k3.slice" >"$T/half/k3.slice.part"
ends "keep in an unfinished slice" 2 "there is k3.slice.part" "$K3_TIER" --keep "$T/half" --ram 1G --linger 1 --listen "unix:$T/x.sock"
mkdir "$T/alone" && echo '{"mine": 1}' >"$T/alone/config.json"
box alone --ram 1G --keep "$T/alone"
ends "keep beside another config.json" 3 "has another config.json" stage alone
stop $box
expect "it is as it was" "$(cat "$T/alone/config.json"; ls "$T/alone")" '{"mine": 1}
config.json'
# Started with closed descriptors: messages must not be written into a socket or a shard.
"$K3_TIER" --threads 1 --ram 1G --keep "$T/closed" --listen "unix:$T/closed.sock" <&- >&- 2>&- &
box=$!
pids+=($box)
for _ in $(seq 300); do [ -S "$T/closed.sock" ] && break; sleep 0.02; done
ends "stage to a box without stderr" 0 "100 experts sent" stage closed --size 979200
for fd in 0 1 2; do readlink /proc/$box/fd/$fd; done >"$T/fds"
expect "its descriptors" "$(sort -u "$T/fds")" /dev/null
stop $box
# A full disk is reported even with -q, and the exit code says that it failed.
if mkdir "$T/tight" && mount -t tmpfs -o size=300k none "$T/tight" 2>/dev/null; then
    box tight -q --ram 1G --keep "$T/tight/k"
    ends "stage to a full disk" 1 "could not write it .--keep." stage tight --size 979200
    kill $box
    await $box 20
    expect "kept on a full disk" "$? $(grep -c "No space left.*make room" "$T/tight.err") $(ls "$T/tight/k")" "1 1 config.json"
    umount "$T/tight"
else
    skip "a full disk for --keep: no right to mount one"
fi
# A shard that was written and never listed is not served, and does no harm.
head -n $((7 + 156)) "$T/kept/k3.slice" | sed 's/^experts .*/experts 156/' >"$T/list"
if [ -x "$T/sum" ]; then
    { cat "$T/list"; echo "end $("$T/sum" <"$T/list")"; } >"$T/kept/k3.slice"
    box kept --ram 1G --keep "$T/kept"
    held kept 156
    grep -q "left out" "$T/kept.err" && fail "a shard that was not listed" "was read"
    ends "in place of a shard that was not listed" 0 "100 experts sent .*, 156 skipped" stage kept
    stop $box
    box kept --ram 1G --keep "$T/kept"
    held kept 256
    check "a list that was behind" 300 --tier "unix:$T/kept.sock"
    stop $box
else
    skip "a shard that was not listed: no xxhash.h for $CC"
fi

report

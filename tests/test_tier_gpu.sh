#!/usr/bin/env bash
# test_tier_gpu.sh - the hash with experts in VRAM.
#
#     K3=build/k3 K3_TIER=build/k3-tier-fake tests/test_tier_gpu.sh MODEL [--device]
#
# The server's part of the GPU arm: experts in VRAM, in slots, in both; CPU and GPU computing one request; a
# device that fails while it uploads, computes or answers; terms out of range on it. By default a CPU plays
# the GPU (fake_gpu.c) and fails when told to; --device, of `make test-gpu`, takes a real one.
# Every run must give the logits_fnv of a run without boxes.
set -u
export LC_ALL=C
K3=${K3:-build/k3}
K3_TIER=${K3_TIER:-$(dirname "$K3")/k3-tier-fake}
MODEL=${1:-demo}
is_device=
[ "${2:-}" = --device ] && is_device=1
T=$(mktemp -d "${TMPDIR:-/tmp}/k3-vram-XXXXXX") || exit 1
n_passed=0 n_failed=0 n_skipped=0 box=
# boxes: print the processes that serve one of this test's sockets; the bracket in the pattern keeps grep from
# finding itself
boxes() { grep -la "$T/k3-gp[u]" /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3 | tr '\n' ' '; }
# stop: send the box SIGTERM, and SIGKILL after ten seconds
stop() {
    [ -n "$box" ] || return
    kill "$box"
    for _ in $(seq 500); do kill -0 "$box" || break; sleep 0.02; done
    kill -9 "$box" && fail "the box" "does not end"
    wait "$box"
} 2>/dev/null
trap 'kill $box $(boxes) 2>/dev/null; rm -rf "$T"' EXIT
args=(-q --json --no-stop --model "$MODEL" --tokens 24 --threads 1 --ram "${RAM:-90M}")
prompt="Once upon a time there was a duck"

field() { sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p" "$T/out"; }
pass() { n_passed=$((n_passed + 1)); }
fail() {
    n_failed=$((n_failed + 1))
    echo "FAIL $1: $2"
    cat "$T/err" "$T/box.err" 2>/dev/null | head -5 | sed 's/^/     /'
}
stat_of() { "$K3_TIER" status "unix:$T/box.sock" 2>/dev/null | awk -v k="$1" '$1 == k { print $2 }'; }
wait_for() { # FIGURE N
    for _ in $(seq 500); do
        [ "$(stat_of "$1")" -ge "$2" ] 2>/dev/null && return
        sleep 0.02
    done
    fail "the box" "$1 is $(stat_of "$1"), not $2 or more"
}
box() { # OPTION...
    stop
    rm -f "$T/box.sock"
    "$K3_TIER" --model "$MODEL" --gpu --threads 1 --listen "unix:$T/box.sock" "$@" 2>"$T/box.err" &
    box=$!
    for _ in $(seq 1500); do [ -S "$T/box.sock" ] && return; kill -0 $box 2>/dev/null || break; sleep 0.02; done
    echo "the box does not start:"
    cat "$T/box.err"
    exit 1
}
run() { timeout -k 1 120 "$K3" run "${args[@]}" --tier-wait 300000 --tier "unix:$T/box.sock" "$@" "$prompt" >"$T/out" 2>"$T/err"; }
check() { # NAME FIGURE LEAST
    local rc=$?
    if [ $rc != 0 ]; then
        fail "$1" "exit $rc"
    elif [ "$(field logits_fnv)" != "$want" ]; then
        fail "$1" "logits_fnv $(field logits_fnv), not $want"
    elif [ "$(stat_of "$2")" -lt "$3" ]; then
        fail "$1" "$2 is $(stat_of "$2"), not $3 or more"
    else
        pass
    fi
}

"$K3" run "${args[@]}" "$prompt" >"$T/out" 2>"$T/err" || { cat "$T/err"; exit 1; }
want=$(field logits_fnv)

# All experts in VRAM, and a few slots through which they get there.
box --ram 1G --vram 1M
slot=$((1048576 / $(sed -n 's/.*room for \([0-9]*\) experts in .*VRAM/\1/p' "$T/box.err") + 1))
box --ram 1G --vram 1G
grep -q "room for 256 experts in" "$T/box.err" && pass || fail "room" "for more experts than there are"
wait_for vram_experts_held 256
run; check "warm" gpu_experts_served_total 200
run --chunk 7; check "warm, chunks of 7" gpu_experts_served_total 400
run --tier-audit 1/1; check "audited" gpu_experts_served_total 600

# Half of them in VRAM, so that slots and VRAM fill with different experts and both CPU and GPU compute.
one=$(stat_of vram_experts_held)
floor=$("$K3_TIER" --model "$MODEL" --gpu --threads 1 --ram 1M --listen "unix:$T/no.sock" 2>&1 | sed -n 's/.*give \([0-9]*\).*/\1/p')
box --ram $((floor + 100 * 16500)) --vram $((slot * 100))
wait_for vram_experts_held 90
wait_for experts_held 180
run; check "half in VRAM" gpu_experts_served_total 20
held=$(stat_of experts_held) vram=$(stat_of vram_experts_held)
if [ "$held" -gt "$vram" ] && [ "$held" -le "$one" ]; then pass; else fail "half in VRAM" "$held held, $vram of them there, $one in all"; fi

if [ -n "$is_device" ]; then
    stop
    export K3_TIER XDG_RUNTIME_DIR=$T
    for again in 1 2; do # first started, then joined
        timeout -k 1 60 "$K3" run "${args[@]}" --tier-wait 300000 --gpu "$prompt" >"$T/out" 2>"$T/err"
        rc=$?
        if [ $rc = 0 ] && [ "$(field logits_fnv)" = "$want" ]; then pass; else fail "k3 run --gpu, $again" "exit $rc"; fi
        sleep 2 # warm
    done
    served=$("$K3_TIER" status "unix:$(ls "$T"/k3-gpu-*.sock)" | awk '$1 == "gpu_experts_served_total" { print $2 }')
    [ "${served:-0}" -gt 100 ] && pass || fail "k3 run --gpu" "the GPU served ${served:-0} experts"
    echo "tier_gpu: $n_passed passed, $n_failed failed, $n_skipped skipped"
    [ $n_failed = 0 ]
    exit
fi

# The device fails.
for case in BEGIN:1 BEGIN:50 END:1 END:37 UPLOAD:1 UPLOAD:20; do
    export "FAKE_GPU_${case%:*}=${case#*:}"
    box --ram 1G --vram 1G
    wait_for experts_held 60
    run; check "$case" experts_served_total 100
    grep -q "going on without the GPU" "$T/box.err" || fail "$case" "does not say so"
    [ "$(stat_of vram_experts_capacity)" = 0 ] || fail "$case" "still counts the GPU"
    unset "FAKE_GPU_${case%:*}"
done
for n in 1 10; do
    export FAKE_GPU_BAD=$n
    box --ram 1G --vram 1G
    wait_for vram_experts_held 256
    run; check "bad term in request $n" gpu_experts_served_total 100
    unset FAKE_GPU_BAD
done

# Staged experts go through a few slots into VRAM, though they arrive faster than that; with --keep each is also
# written, once, before its slot is used again.
cp -r "$MODEL" "$T/model with a space"
export FAKE_GPU_UPLOAD_US=3000
for keep in "" "--keep $T/kept"; do
    stop
    rm -f "$T/box.sock"
    # shellcheck disable=SC2086
    "$K3_TIER" --gpu --threads 1 --ram "$((floor + 60 * 12400 + (${#keep} > 0 ? 9000000 : 0)))" --vram 1G --listen "unix:$T/box.sock" $keep 2>"$T/box.err" &
    box=$!
    for _ in $(seq 500); do [ -S "$T/box.sock" ] && break; sleep 0.02; done
    timeout -k 1 60 "$K3" stage --model "$MODEL" --to "unix:$T/box.sock" >"$T/out" 2>"$T/err"
    rc=$?
    if [ $rc = 0 ] && grep -q " 0 left out" "$T/out"; then pass; else fail "staged into VRAM $keep" "exit $rc: $(cat "$T/out")"; fi
    wait_for vram_experts_held 240
    run; check "staged into VRAM $keep" gpu_experts_served_total 200
done
unset FAKE_GPU_UPLOAD_US
stop
n=$(grep -cE '^[0-9]+ [0-9]+ [0-9a-f]{16}$' "$T/kept/k3.slice")
[ "$n" = 256 ] && pass || fail "staged, kept" "$n experts listed"
"$K3_TIER" --ram 1M --slice "$T/kept" --listen "unix:$T/no.sock" 2>&1 | grep -q "give" && pass || fail "staged, kept" "the slice is not whole"

# A box that ends when it was alone for a second: a stager is company.
export FAKE_GPU_UPLOAD_US=10000
rm -f "$T/box.sock"
"$K3_TIER" --gpu --threads 1 --ram "$((floor + 20 * 12400))" --vram 1G --linger 1 --listen "unix:$T/box.sock" 2>"$T/box.err" &
box=$!
for _ in $(seq 500); do [ -S "$T/box.sock" ] && break; sleep 0.02; done
timeout -k 1 60 "$K3" stage --model "$MODEL" --to "unix:$T/box.sock" >"$T/out" 2>"$T/err"
rc=$?
[ $rc = 0 ] && grep -q " 0 left out" "$T/out" && pass || fail "--linger" "staging ended with $rc"
unset FAKE_GPU_UPLOAD_US

box --ram 1G --vram 1G # not joined by the runs that follow

# `k3 run --gpu` starts a box or joins one: two runs at once share one box, and the box keeps no descriptor of
# the run that started it.
export K3_TIER XDG_RUNTIME_DIR=$T
gpu_run() { timeout -k 1 60 "$K3" run "${args[@]}" --tier-wait 300000 --gpu "$@" "$prompt" >"$T/out" 2>"$T/err"; }
(timeout -k 1 120 "$K3" run "${args[@]}" --gpu "$prompt" >"$T/other.out" 2>&1 9>"$T/held") &
other=$!
gpu_run 9>"$T/held"; check "k3 run --gpu" experts_held 0
wait $other
first=$(boxes)
[ "$(echo "$first" | wc -w)" = 1 ] && pass || fail "two at once" "'$first' are there"
gpu_run; check "k3 run --gpu again" experts_held 0
if [ -n "$first" ] && [ "$(boxes)" = "$first" ]; then pass; else fail "--gpu" "did not join the one there is"; fi
[ "$(field far_served)" -gt 100 ] && pass || fail "--gpu" "$(field far_served) served"
left=$(readlink "/proc/${first%% *}/fd/"* "/proc/${first%% *}/cwd" | grep -e "$T/held" -e "^$PWD$" -e /dev/pts -e "$T/other" | head -1)
[ -z "$left" ] && pass || fail "--gpu" "the box holds $left"

# A model in another's directory gets a box of its own; a path may have spaces.
gpu_run --model "$T/model with a space"; check "a space" experts_held 0
two=$(boxes)
mv "$T/model with a space/config.json" "$T/config" && cp "$T/config" "$T/model with a space/config.json"
gpu_run --model "$T/model with a space"; check "replaced, cold" experts_held 0
gpu_run --model "$T/model with a space"; check "replaced" experts_held 0
if [ "$(echo "$two" | wc -w) $(boxes | wc -w)" = "2 3" ]; then pass; else fail "replaced" "'$two', then '$(boxes)'"; fi
[ "$(field far_served)" -gt 0 ] && pass || fail "replaced" "nothing served"

# With a key that the user's other boxes have.
(umask 077 && head -c 32 /dev/urandom >"$T/key")
gpu_run --psk-file "$T/key"; check "a key, cold" experts_held 0
gpu_run --psk-file "$T/key"; check "a key" experts_held 0
[ "$(field far_served)" -gt 0 ] && pass || fail "a key" "$(cat "$T/err")"
# shellcheck disable=SC2046
kill $(boxes) 2>/dev/null
for _ in $(seq 200); do [ -z "$(boxes)" ] && break; sleep 0.02; done

# The socket of a killed box is replaced; a box that hangs holds up no run.
gpu_run; check "started once more" experts_held 0
first=$(boxes)
# shellcheck disable=SC2086
kill -9 $first
gpu_run; check "after a stale socket, cold" experts_held 0
gpu_run; check "after a stale socket" experts_held 0
[ -n "$(boxes)" ] && [ "$(field far_served)" -gt 0 ] && pass || fail "stale socket" "no box"
first=$(boxes)
sock=$(tr '\0' '\n' <"/proc/${first%% *}/cmdline" | sed -n 's/^unix://p')
# shellcheck disable=SC2086
kill $first
for _ in $(seq 200); do [ -z "$(boxes)" ] && break; sleep 0.02; done
if command -v python3 >/dev/null; then
    python3 -c 'import socket, sys, time
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(0)
c = [socket.socket(socket.AF_UNIX) for _ in range(3)]
for x in c: x.setblocking(False); x.connect_ex(sys.argv[1])
print("full", flush=True); time.sleep(60)' "$sock" >"$T/full" &
    hung=$!
    for _ in $(seq 200); do [ -s "$T/full" ] && break; sleep 0.02; done
    gpu_run; check "one that hangs" experts_held 0
    kill $hung
    rm -f "$sock"
else
    echo "tier_gpu: SKIP one that hangs: no python3"
    n_skipped=$((n_skipped + 1))
fi

# A runtime directory whose name is too long, or that cannot be written.
long=$T/$(printf 'x%.0s' $(seq 100))
mkdir "$long"
XDG_RUNTIME_DIR=$long K3_TIER=/nowhere gpu_run; check "long name" experts_held 0
[ -z "$(find "$T" -maxdepth 1 -name 'x*' ! -path "$long")" ] && pass || fail "long name" "another directory was made"
K3_TIER=/nowhere timeout -k 1 60 "$K3" run "${args[@]}" --tier-wait 300000 --gpu "$prompt" >"$T/out" 2>"$T/err"
check "no k3-tier" experts_held 0
grep -q "without" "$T/err" && pass || fail "no k3-tier" "does not say so"
many=()
for i in $(seq 16); do many+=(--tier "unix:$T/none$i"); done
gpu_run "${many[@]}"; check "as many boxes as there can be" experts_held 0

echo "tier_gpu: $n_passed passed, $n_failed failed, $n_skipped skipped"
[ $n_failed = 0 ]

#!/usr/bin/env bash
# test_tier_gpu.sh - the hash with experts in VRAM.
#
#     K3=build/k3 K3_TIER=build/k3-tier-fake tests/test_tier_gpu.sh MODEL [--device]
#
# The server's part of the GPU arm: experts in VRAM, in slots, in both; both computing one request;
# a device that fails while it uploads, computes or answers; terms out of range there. By default
# with a CPU that plays GPU (fake_gpu.c); --device, of `make test-gpu`, takes a real one, which fails
# when it wants to. Every run must give the logits_fnv of a run without boxes.
set -u
export LC_ALL=C OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
K3=${K3:-build/k3}
K3_TIER=${K3_TIER:-$(dirname "$K3")/k3-tier-fake}
MODEL=${1:-demo}
is_device=
[ "${2:-}" = --device ] && is_device=1
T=$(mktemp -d "${TMPDIR:-/tmp}/k3-vram-XXXXXX") || exit 1
n_passed=0 n_failed=0 n_skipped=0 box=
trap 'kill $box 2>/dev/null; rm -rf "$T"' EXIT
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
    echo "box: $1 is $(stat_of "$1"), not $2 or more"
}
box() { # OPTION...
    [ -z "$box" ] || { kill "$box" && wait "$box"; } 2>/dev/null
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

# Everything in VRAM, a few slots to pass through.
box --ram 1G --vram 1G
slot=$((1073741824 / $(sed -n 's/.*room for \([0-9]*\) experts in .*VRAM/\1/p' "$T/box.err") + 1))
wait_for vram_experts_held 256
run; check "warm" gpu_experts_served_total 200
run --chunk 7 && check "warm, chunks of 7" gpu_experts_served_total 400
run --tier-audit 1/1 && check "audited" gpu_experts_served_total 600

# Half of it, so that both kinds are full of different ones and both compute.
one=$(stat_of vram_experts_held)
floor=$("$K3_TIER" --model "$MODEL" --gpu --ram 1M --listen "unix:$T/no.sock" 2>&1 | sed -n 's/.*give \([0-9]*\).*/\1/p')
box --ram $((floor + 100 * 12400)) --vram $((slot * 100))
wait_for vram_experts_held 90
wait_for experts_held 180
run; check "half in VRAM" gpu_experts_served_total 20
held=$(stat_of experts_held) vram=$(stat_of vram_experts_held)
if [ "$held" -gt "$vram" ] && [ "$held" -le "$one" ]; then pass; else fail "half in VRAM" "$held held, $vram of them there, $one in all"; fi

if [ -n "$is_device" ]; then
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

# Started and joined by a flag.
export K3_TIER XDG_RUNTIME_DIR=$T
timeout -k 1 120 "$K3" run "${args[@]}" --tier-wait 300000 --gpu "$prompt" >"$T/out" 2>"$T/err"
check "k3 run --gpu" experts_held 0
first=$(pgrep -f "$T/k3-gpu" | tr '\n' ' ')
timeout -k 1 120 "$K3" run "${args[@]}" --tier-wait 300000 --gpu "$prompt" >"$T/out" 2>"$T/err"
check "k3 run --gpu again" experts_held 0
if [ -n "$first" ] && [ "$(pgrep -f "$T/k3-gpu" | tr '\n' ' ')" = "$first" ]; then pass; else fail "--gpu" "did not join the one there is"; fi
[ "$(field far_served)" -gt 100 ] && pass || fail "--gpu" "$(field far_served) served"
# shellcheck disable=SC2086
kill $first 2>/dev/null
K3_TIER=/nowhere timeout -k 1 60 "$K3" run "${args[@]}" --tier-wait 300000 --gpu "$prompt" >"$T/out" 2>"$T/err"
check "no k3-tier" experts_held 0
grep -q "without" "$T/err" && pass || fail "no k3-tier" "does not say so"

echo "tier_gpu: $n_passed passed, $n_failed failed, $n_skipped skipped"
[ $n_failed = 0 ]

#!/usr/bin/env bash
# test_tls_bad.sh - a peer that speaks TLS badly on purpose, in both directions (tests/tls_bad.c).
#
#     K3=build/k3 K3_TIER=build/k3-tier tests/test_tls_bad.sh MODEL [long]
#
# A client of such a box must give the hash of a run without boxes, in at most 1.05 of its time and a second.
# A box with such clients must give figures to other peers within 200 ms of the time without them.
# Times are compared in pairs; on a busy machine a pair may be tried again. `long`, for
# tests/long_tls_bad.sh, runs every kind, so long that 5 % is more than the second.
suite=tls_bad
# shellcheck source=tests/boxes.sh
. "$(dirname "$0")/boxes.sh"
BAD=${BAD:-$(dirname "$K3")/tls_bad}
unset http_proxy https_proxy all_proxy no_proxy HTTPS_PROXY ALL_PROXY NO_PROXY
command -v openssl >/dev/null || { echo "tls_bad: SKIP the openssl program is not installed (scripts/deps.sh test)"; exit 77; }
"$K3" run --model "$MODEL" --tier tls:localhost x 2>&1 | grep -q "without libcurl" &&
    { echo "tls_bad: SKIP built without libcurl, so without TLS"; exit 77; }
prompt=$(awk '$1 == 0 { print $2 }' tests/data/golden_prompts.tsv)
is_long=${2:+1}
args=(-q --json --no-stop --model "$MODEL" --ids "$prompt" --tokens $((is_long ? 3000 : 200)) --threads 1)

openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -keyout "$T/box.key" -out "$T/box.pem" -days 2 \
    -subj /CN=box -addext subjectAltName=IP:127.0.0.1 >"$T/err" 2>&1 || { cat "$T/err"; exit 1; }
chmod 600 "$T/box.key"
port=$((20000 + ($$ * 7) % 20000))
new_port() {
    port=$((port + 1))
    while { : <>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null; do port=$((port + 1)); done
}
up() { for _ in $(seq 200); do { : <>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null && return; sleep 0.02; done; }
ms() { # COMMAND...: print how many ms it took
    local start
    start=$(date +%s%N)
    "$@" >"$T/out" 2>"$T/err"
    echo $((($(date +%s%N) - start) / 1000000))
}

# ---- A client of such a box ----

alone tls:127.0.0.1:1
one_run() { timeout -k 1 120 "$K3" run "${args[@]}" --ram "$ram" "$@"; }
# The note that the client prints for each kind: it must have left the box alone for that reason.
declare -A said=([empty]="nothing new" [bytes]="(takes more time than it saves|does not answer in time)" [late]="takes more time than it saves")
# bad_box MODE: a run has three tries to be in time; its hash must be right each time. Mode `late` answers each
# question after 18 ms, so a client that always waits would take 29 seconds for 200 ids and 8 layers.
bad_box() {
    local bare took try got wait=()
    [ "$1" != late ] || wait=(--tier-wait 20000)
    new_port
    "$BAD" box "$port" "$T/box.pem" "$T/box.key" "$T/true.sock" "$1" 2>"$T/bad.err" &
    local bad=$!
    pids+=($bad)
    up
    for try in 1 2 3; do
        bare=$(ms one_run)
        took=$(ms one_run --tier "tls:127.0.0.1:$port" --tier-ca "$T/box.pem" "${wait[@]}")
        got=$(field logits_fnv)
        [ "$got" = "$want" ] || break
        [ "$took" -le $((bare * 105 / 100 + 1000)) ] && break
    done
    [ -z "${said[$1]:-}" ] || {
        timeout -k 1 120 "$K3" run "${args[@]:1}" --ram "$ram" --tier "tls:127.0.0.1:$port" --tier-ca "$T/box.pem" "${wait[@]}" >"$T/out" 2>"$T/err"
        grep -Eq "note: tier .*${said[$1]}" "$T/err" && pass || fail "a box that sends $1" "nothing is said of it"
    }
    stop $bad
    [ "$got" = "$want" ] || { fail "a box that sends $1" "logits_fnv '$got', not $want"; return; }
    echo "tls_bad: box $1: $bare ms without it, $took ms with it"
    if [ "$took" -le $((bare * 105 / 100 + 1000)) ]; then pass; else fail "a box that sends $1" "$took ms, without it $bare"; fi
}
start_box true --model "$MODEL" --ram 1G
boxes="update bytes late empty" clients="update bytes"
[ -z "$is_long" ] || boxes="early-update early-bytes update bytes flip empty late endless" clients="update bytes looks cut"
for mode in $boxes; do bad_box "$mode"; done

# SIGTERM ends a client while a box floods it
new_port
"$BAD" box "$port" "$T/box.pem" "$T/box.key" "$T/true.sock" update 2>"$T/bad.err" &
bad=$!
pids+=($bad)
up
"$K3" run "${args[@]}" --tokens 100000 --context 120000 --tier "tls:127.0.0.1:$port" --tier-ca "$T/box.pem" >"$T/out" 2>"$T/err" &
run=$!
sleep 1
stopped=$(ms stop $run)
[ "$stopped" -lt 3000 ] && pass || fail "SIGTERM while a box floods" "took $stopped ms"
# `k3 stage` and `k3-tier status` end in time, and say why
asks=("$K3_TIER status tls:127.0.0.1:$port --tls-ca $T/box.pem")
[ -z "$is_long" ] || asks+=("$K3 stage -q --model $MODEL --to tls:127.0.0.1:$port --tier-ca $T/box.pem")
for what in "${asks[@]}"; do
    stop $bad
    "$BAD" box "$port" "$T/box.pem" "$T/box.key" "$T/true.sock" early-update 2>"$T/bad.err" &
    bad=$!
    pids+=($bad)
    up
    # shellcheck disable=SC2086
    took=$(ms timeout -k 1 60 $what)
    grep -q "no answer" "$T/err" && [ "$took" -lt 20000 ] && pass || fail "$what" "$took ms"
done
stop $bad

# ---- A box with such clients ----

# figures: print the median over five pairs, in ms, of the time of `k3-tier status` less that of `k3-tier --version`,
# which a busy machine delays as much; print nothing when one failed.
figures() {
    local bare
    for _ in 1 2 3 4 5; do
        bare=$(ms "$K3_TIER" -V)
        took=$(ms timeout -k 1 20 "$K3_TIER" status "unix:$T/tls.sock")
        grep -q experts_held "$T/out" || { echo "a look failed: $(cat "$T/err")" >&2; return; }
        echo $((took - bare))
    done | sort -n | sed -n 3p
}
new_port
start_box tls --model "$MODEL" --ram 1G --clients 8 --listen "tls:127.0.0.1:$port" --tls-cert "$T/box.pem" --tls-key "$T/box.key"
for mode in $clients; do
    for try in 1 2 3; do
        bare=$(figures)
        "$BAD" client "$port" "$mode" 2>"$T/bad.err" &
        bad=$!
        pids+=($bad)
        sleep 0.5
        took=$(figures)
        stop $bad
        [ -n "$took" ] && [ "$took" -le $((bare + 200)) ] && break
    done
    echo "tls_bad: clients $mode: figures after $bare ms without them, ${took:-?} ms with them"
    if [ -n "$took" ] && [ "$took" -le $((bare + 200)) ]; then pass; else fail "clients that send $mode" "figures after ${took:-?} ms, without them $bare"; fi
done
kill -0 $box 2>/dev/null && pass || fail "the box" "is gone"
[ "$(wc -l <"$T/tls.err")" -le 200 ] && pass || fail "the log" "$(wc -l <"$T/tls.err") lines"
report

#!/usr/bin/env bash
# test_tier.sh - one hash, whatever the far boxes do.
#
#     K3=build/k3 K3_TIER=build/k3-tier CHAOS=build/tier_chaos tests/test_tier.sh MODEL
#
# Runs of one prompt with hardly any memory for experts, so that every layer asks the boxes: none,
# dead, warm, cold, half full, two and four with uneven and overlapping shares, killed and started
# again while text is made, and behind a proxy that lies in every way it knows (tier_chaos.c). Each
# must give the logits_fnv of a run without boxes. A box that works must also have served experts.
suite=tier
# shellcheck source=tests/boxes.sh
. "$(dirname "$0")/boxes.sh"
prompt="Once upon a time there was a duck"
args=(-q --json --no-stop --model "$MODEL" --tokens "${TOKENS:-24}" --threads 1 "$prompt")

box() { # NAME OPTION...
    local name=$1
    shift
    start_box "$name" -q --model "$MODEL" --ram "${BOX_RAM:-1G}" "$@"
}
# held NAME N: wait until the box holds N experts
held() {
    for _ in $(seq 300); do
        held_now=$(stat_of "$1" experts_held)
        [ "${held_now:-0}" -ge "$2" ] && return
        sleep 0.02
    done
    echo "box $1 does not warm up"
}
alone unix:x unix:y unix:z unix:w

# aside NAME FUNCTION: run it beside the other tests, with files of its own; `together` adds its counts
asides=()
aside() {
    mkdir "$T/$1"
    (
        T=$T/$1 n_passed=0 n_failed=0 n_skipped=0 pids=()
        trap '[ ${#pids[@]} = 0 ] || stop "${pids[@]}"' EXIT
        "$2" >"$T/says" 2>&1
        echo "$n_passed $n_failed" >"$T/counts"
    ) &
    pids+=($!)
    asides+=($! "$1")
}
together() {
    local pid name p f
    for ((i = 0; i < ${#asides[@]}; i += 2)); do
        pid=${asides[i]} name=${asides[i + 1]} p=0 f=1
        wait "$pid"
        read -r p f <"$T/$name/counts" || echo "FAIL $name: did not end"
        cat "$T/$name/says"
        n_passed=$((n_passed + p)) n_failed=$((n_failed + f))
    done
    asides=()
}

# `k3 bench --hop`: right sums, every request answered, a box whose memory does not grow. Most of the time goes
# into waiting for boxes that do not exist.
hop() { # NAME EXIT PATTERN OPTION...
    local name=$1 want_rc=$2 pattern=$3
    shift 3
    # a sanitizer keeps freed memory, so there a box does grow
    timeout -k 1 60 "$K3" bench --model "$MODEL" --requests 50 --sustain "$([ -n "${K3_SAN:-}" ] && echo 0 || echo 1)" "$@" >"$T/out" 2>"$T/err"
    local rc=$?
    if [ $rc = "$want_rc" ] && cat "$T/out" "$T/err" | grep -q -- "$pattern"; then pass; else fail "hop: $name" "exit $rc"; fi
}
hops() {
    box hop
    held hop 256
    hop "a good box" 0 "0 requests without a whole answer, 0 wrong" --hop "unix:$T/hop.sock"
    [ "$(grep -c "^unix:$T/hop.sock" "$T/out")" = 6 ] && pass || fail "hop: a good box" "not 6 rows"
    [ -n "${K3_SAN:-}" ] || { grep -q ": 0.000 bytes a request; 0 timeouts" "$T/out" && pass || fail "hop: sustain" "$(grep sustain "$T/out")"; }
    hop "nobody there" 1 "cannot be asked" --hop "unix:$T/none.sock"
    hop "--tier as well" 2 "one of them" --hop "unix:$T/hop.sock" --tier "unix:$T/hop.sock"
    "$CHAOS" "$T/chaos.sock" "$T/hop.sock" garbage &
    proxy=$!
    pids+=($proxy)
    for _ in $(seq 100); do [ -S "$T/chaos.sock" ] && break; sleep 0.02; done
    hop "garbage" 5 "a sum differs from ours" --hop "unix:$T/chaos.sock"
    stop $proxy $box
    box empty --no-fill
    hop "an empty box" 1 "wait until it is warm" --hop "unix:$T/empty.sock"
    stop $box
    "$K3" bench --requests 5 >"$T/out" 2>"$T/err"
    [ $? = 2 ] && pass || fail "hop: --requests alone" "was taken"
}
aside hop hops

check "no box" 0
check "dead box" 0 --tier "unix:$T/none.sock"
check "dead box on TCP" 0 --tier 127.0.0.1:1

box warm
held warm 256
check "warm box" 300 --tier "unix:$T/warm.sock"
check "warm box, chunks of 3" 300 --tier "unix:$T/warm.sock" --chunk 3
check "warm box, chunks of 64" 100 --tier "unix:$T/warm.sock" --chunk 64 --ram $((ram + (8 << 20)))
check "warm box, chunks of 2000" 100 --tier "unix:$T/warm.sock" --chunk 2000 --ram 1G
[ "$(field chunk)" = 512 ] && pass || fail "chunks of 2000" "the chunk is $(field chunk): boxes take 512 rows"
check "warm box, no wait" 0 --tier "unix:$T/warm.sock" --tier-wait 0
check "warm box, no spinning" 300 --tier "unix:$T/warm.sock" --spin-us 0
for k in $("$K3" info --kernels-list); do
    check "warm box, client with $k" 300 --tier "unix:$T/warm.sock" --kernels "$k"
    box "with_$k" --kernels "$k"
    held "with_$k" 256
    check "box with $k" 300 --tier "unix:$T/with_$k.sock"
    stop $box
done

# Boxes that hold a share of the experts: by parity, by layer, all but some.
for il in 1 2 3 4 5 6 7 8; do for ie in $(seq 0 31); do echo "$il $ie"; done; done >"$T/all"
awk '$2 % 2 == 0' "$T/all" >"$T/even"
awk '$2 % 3 == 0' "$T/all" >"$T/third"
awk '$1 < 4' "$T/all" >"$T/low"
# Experts in local memory are not asked for: empty slots fill up, and pinned experts are there from the start.
check "a warm box, and room for all here" 20 --tier "unix:$T/warm.sock" --ram 1G
[ "$(field expert_hits)" -gt 20 ] && pass || fail "room for all here" "$(field expert_hits) experts were here"
check "a warm box, and room for half" 20 --tier "unix:$T/warm.sock" --ram $((ram + (6 << 20)))
[ "$(field expert_hits)" -gt 20 ] && pass || fail "room for half" "$(field expert_hits) experts were here"
check "a warm box, and all here" 0 --tier "unix:$T/warm.sock" --ram 1G --pins "$T/all"
[ "$(field far_asked)" = 0 ] && pass || fail "all here" "$(field far_asked) experts were asked for"
box cold --no-fill
check "cold box" 0 --tier "unix:$T/cold.sock"
check "the same, warmed by what was wanted" 300 --tier "unix:$T/cold.sock"
box even --no-fill --pins "$T/even"
held even 128
check "half a box" 200 --tier "unix:$T/even.sock"
box third --no-fill --pins "$T/third"
held third 80
check "two boxes, overlapping" 300 --tier "unix:$T/even.sock" --tier "unix:$T/third.sock"
box low --no-fill --pins "$T/low"
held low 96
check "four boxes" 300 --tier "unix:$T/even.sock" --tier "unix:$T/third.sock" \
    --tier "unix:$T/low.sock" --tier "unix:$T/warm.sock"
check "one of two is dead" 200 --tier "unix:$T/even.sock" --tier "unix:$T/none.sock"

# The modes of tier_chaos.c. SERVED is 0 where every answer is spoilt.
for mode in pass delay drop truncate corrupt upcorrupt reorder duplicate ids oversize midframe \
    counts layer range announce model stall flood blackhole random; do
    "$CHAOS" "$T/chaos.sock" "$T/even.sock" $mode 3 &
    proxy=$!
    pids+=($proxy)
    for _ in $(seq 100); do [ -S "$T/chaos.sock" ] && break; sleep 0.02; done
    case $mode in # these modes answer: wait for them, however busy this machine is
    pass | duplicate) least=200 wait=100000 ;;
    delay | announce) least=20 wait=100000 ;;
    drop) least=4 wait=20000 ;;
    *) least=0 wait=8000 ;;
    esac
    WAIT=$wait check "chaos: $mode" $least --tier "unix:$T/chaos.sock"
    case $mode in drop | corrupt | midframe | announce | stall | random)
    WAIT=$wait check "chaos: $mode, beside a good box" $least --tier "unix:$T/chaos.sock" --tier "unix:$T/third.sock" ;;
    esac
    stop $proxy
    rm -f "$T/chaos.sock"
done
[ "$(stat_of even experts_held)" -ge 128 ] && pass || fail "chaos" "the box behind the proxy is gone"

# Wrong sums in frames with right checksums: only an audit, which computes them here too, finds them.
check "audit of a good box" 300 --tier "unix:$T/warm.sock" --tier-audit 1/3
[ "$(field far_audits)" -gt 10 ] && pass || fail "audit" "$(field far_audits) layers compared"
check "audit of half a box" 100 --tier "unix:$T/even.sock" --tier-audit 1/1
check "audit of two good boxes" 300 --tier "unix:$T/even.sock" --tier "unix:$T/third.sock" --tier-audit 1/1
check "audit of a good box, chunks of 5" 300 --tier "unix:$T/warm.sock" --tier-audit 1/2 --chunk 5
"$CHAOS" "$T/chaos.sock" "$T/warm.sock" garbage &
proxy=$!
pids+=($proxy)
for _ in $(seq 100); do [ -S "$T/chaos.sock" ] && break; sleep 0.02; done
check "garbage, each answer compared" 0 --tier "unix:$T/chaos.sock" --tier-audit 1/1
# the box that lied is banned; the one that answered in the same layer is not
check "garbage, and a good box in the same layers" 200 --tier "unix:$T/chaos.sock" --tier "unix:$T/third.sock" --tier-audit 1/1
check "a good box, and garbage in the same layers" 200 --tier "unix:$T/even.sock" --tier "unix:$T/chaos.sock" --tier-audit 1/1 --chunk 4
# Each of this run's 184 requests is compared with a chance of 1/4, so only one run in 10^23 finds no lie. A lie in
# the first answer is caught and the run goes on and is right; caught later, the run ends with exit 5.
lied=(--ram "$ram" --tier-wait 200000 --tier "unix:$T/chaos.sock" --tier-audit 1/4)
caught() { # NAME OPTIONS...: the lie is caught
    local name=$1 rc
    shift
    "$K3" run "${args[@]}" "${lied[@]}" "$@" >"$T/out" 2>"$T/err"
    rc=$?
    if [ $rc = 0 ] && [ "$(field logits_fnv)" = "$want" ] && [ "$(field far_lies)" = 1 ]; then pass
    elif [ $rc = 5 ] && grep -q "gives wrong expert sums" "$T/err"; then pass
    else fail "$name" "exit $rc"; fi
    last=$rc
}
n_late=0
for _ in $(seq 8); do
    caught "garbage, one answer in 4"
    n_late=$((n_late + (last == 5)))
done
[ $n_late -gt 0 ] && pass || fail "garbage, one answer in 4" "eight runs, and always caught at the first answer"
caught "garbage, one answer in 4, beside a good box" --tier "unix:$T/third.sock"
rm -f "$T/rows.lied"
caught "garbage, rows to a file" --dump-logits "$T/rows.lied"
[ $last = 0 ] || [ ! -e "$T/rows.lied" ] && pass || fail "garbage, rows to a file" "rows that may be wrong were left"
"$K3" run "${args[@]}" "${lied[@]}" --save "$T/state" >"$T/out" 2>"$T/err"
[ $? = 2 ] && grep -q "1/1" "$T/err" && [ ! -e "$T/state" ] && pass || fail "--save with audits of some answers" "$(cat "$T/err")"
"$K3" run "${args[@]}" --tokens 5 --save "$T/state" >"$T/out" 2>"$T/err"
"$K3" run "${args[@]}" --load "$T/state" >"$T/out" 2>"$T/err"
loaded=$(field logits_fnv)
"$K3" run "${args[@]}" --load "$T/state" "${lied[@]}" --tier-audit 1/1 >"$T/out" 2>"$T/err"
[ "$(field logits_fnv)" = "$loaded" ] && pass || fail "garbage after --load" "logits_fnv $(field logits_fnv), not $loaded"
"$K3" run "${args[@]}" --kernels ref --cache "$T/kept" --ram "$ram" --tier-wait 200000 --tier "unix:$T/warm.sock" --tier-audit 1/1000000 >"$T/out" 2>"$T/err"
[ "$("$K3" cache ls "$T/kept" | grep -c k3s)" = 0 ] && pass || fail "cache" "a state that may be wrong was kept"
"$K3" run "${args[@]}" --kernels ref --cache "$T/kept" --ram "$ram" --tier-wait 200000 --tier "unix:$T/warm.sock" >"$T/out" 2>"$T/err"
n=$("$K3" cache ls "$T/kept" | grep -c k3s) # one state for the prompt, one for the answer
[ "$n" -ge 1 ] && [ "$("$K3" cache ls "$T/kept" | grep -c "k3s  with far answers that nobody compared")" = "$n" ] && pass || fail "cache" "nothing was kept, or not said that it is in doubt"
"$K3" run "${args[@]}" --kernels ref --cache "$T/kept" --ram "$ram" --tier-wait 200000 --tier "unix:$T/warm.sock" --tier-audit 1/1 >"$T/out" 2>"$T/err"
[ "$(field n_restored)" = 0 ] && ! "$K3" cache ls "$T/kept" | grep -q "nobody compared" && pass || fail "cache" "with audits, what nobody compared was taken or stayed"
printf 'What is the capital of France?\nAnd of Spain?\n' >"$T/turns"
"$K3" chat -q --model "$MODEL" --threads 1 --temperature 0 --tokens 40 <"$T/turns" >"$T/local" 2>"$T/err"
chats() {
    local n_same=0 rc
    for _ in 1 2 3 4; do
        "$K3" chat -q --model "$MODEL" --threads 1 --temperature 0 --tokens 40 --context 512 "${lied[@]}" --ram $((ram + (8 << 20))) <"$T/../turns" >"$T/out" 2>"$T/err"
        rc=$?
        if cmp -s "$T/out" "$T/../local"; then n_same=$((n_same + 1)); elif [ $rc = 0 ]; then fail "garbage, chat" "another text, and exit 0"; fi
    done
    echo $n_same >"$T/../same.${T##*/}"
}
together
aside chat_1 chats
aside chat_2 chats
together
cat "$T"/same.chat_? | grep -q '[1-9]' && pass || fail "garbage, chat" "never the right text"
# `k3 bench`, with a lie that is caught after the first row was printed or after an uncompared answer: exit 5.
total=$("$K3" bench -q --model "$MODEL" --threads 1 --tokens 20 2>/dev/null | awk -F'\t' '/^# total/ { print $7 }')
n_late=0
for i in $(seq 40); do
    [ "$i" -gt 6 ] && [ $n_late -gt 0 ] && break
    "$K3" bench --model "$MODEL" --threads 1 --tokens 20 --ram $((ram + 600000)) --tier-wait 200000 --tier "unix:$T/chaos.sock" --tier-audit 1/200 >"$T/out" 2>"$T/err"
    rc=$?
    is_right=$([ "$(awk -F'\t' '/^# total/ { print $7 }' "$T/out")" = "$total" ] && echo 1)
    n_late=$((n_late + (rc == 5)))
    if [ $rc = 5 ] && grep -q "rows above may be wrong\|gives wrong expert sums" "$T/err" || { [ $rc = 0 ] && [ -n "$is_right" ]; } ||
        { [ $rc = 0 ] && ! grep -q "sums are wrong" "$T/err"; }; then
        pass # the lie was caught late, caught in time, or never compared
    else
        fail "garbage, bench" "exit $rc, and hashes that are not what that says"
    fi
done
[ $n_late -gt 0 ] && pass || fail "garbage, bench" "never caught late"
"$K3" run "${args[@]}" --ram "$ram" --tier-wait 200000 --tier "unix:$T/chaos.sock" >"$T/out" 2>"$T/err"
[ "$(field logits_fnv)" != "$want" ] && pass || fail "garbage" "the proxy does not spoil anything"
stop $proxy

# A lie so large that the text changes. Caught at the first answer the text is right and the exit 0; caught later the
# exit is 5. Both happen here, except in one of 10^5 tests.
"$CHAOS" "$T/chaos.sock" "$T/warm.sock" lie 5 &
proxy=$!
pids+=($proxy)
for _ in $(seq 100); do [ -S "$T/chaos.sock" ] && break; sleep 0.02; done
text=(-q --no-stop --model "$MODEL" --tokens 24 --threads 1 "$prompt")
"$K3" run "${text[@]}" >"$T/local"
lies() {
    local n_right=0 n_caught=0 n_wrong=0 rc
    for _ in $(seq 12); do
        "$K3" run "${text[@]}" --ram "$ram" --tier-wait 200000 --tier "unix:$T/../chaos.sock" --tier-audit 1/12 >"$T/out" 2>"$T/err"
        rc=$?
        if [ $rc = 0 ] && cmp -s "$T/out" "$T/../local"; then
            n_right=$((n_right + 1))
        elif [ $rc = 5 ] && grep -q "gives wrong expert sums" "$T/err"; then
            n_caught=$((n_caught + 1))
        else
            n_wrong=$((n_wrong + 1))
            fail "a lie that changes the text" "exit $rc, and the text is not what that says"
        fi
    done
    echo $n_right $n_caught $n_wrong >"$T/../lies.${T##*/}"
}
aside lies_1 lies
aside lies_2 lies
together
# in one run of 10^7 no answer is compared
read -r n_right n_caught n_wrong < <(cat "$T"/lies.lies_? | awk '{ r += $1; c += $2; w += $3 } END { print r, c, w }')
if [ "$n_wrong" = 0 ] && [ "$n_caught" -gt 0 ]; then pass; else
    fail "a lie that changes the text" "$n_right right, $n_caught caught, $n_wrong neither"
fi
stop $proxy

# --tier-hedge: two boxes hold the same, and one of them is slow, silent or answers twice.
for mode in pass delay drop reorder duplicate stall random; do
    "$CHAOS" "$T/chaos.sock" "$T/warm.sock" $mode 3 &
    proxy=$!
    pids+=($proxy)
    for _ in $(seq 100); do [ -S "$T/chaos.sock" ] && break; sleep 0.02; done
    WAIT=100000 check "hedged: $mode" 300 --tier "unix:$T/chaos.sock" --tier "unix:$T/warm.sock" --tier-hedge
    case $mode in drop | stall)
        for _ in 1 2; do # on a busy machine the text may be done before the slow box has answered
            [ "$(field far_hedged)" -gt 0 ] && break
            WAIT=100000 check "hedged: $mode" 300 --tier "unix:$T/chaos.sock" --tier "unix:$T/warm.sock" --tier-hedge
        done
        [ "$(field far_hedged)" -gt 0 ] && pass || fail "hedged: $mode" "no question was asked twice" ;;
    esac
    WAIT=100000 check "hedged: $mode, audited" 0 --tier "unix:$T/chaos.sock" --tier "unix:$T/warm.sock" --tier-hedge --tier-audit 1/2
    WAIT=100000 check "hedged: $mode, in chunks" 0 --tier "unix:$T/warm.sock" --tier "unix:$T/chaos.sock" --tier-hedge --chunk 4
    stop $proxy
    rm -f "$T/chaos.sock"
done

# A box is killed and started again RESTARTS times while one text is made.
restarts=${RESTARTS:-10}
"$K3" run "${args[@]}" --tokens $((restarts * 60)) >"$T/out" 2>"$T/err"
short=$want want=$(field logits_fnv)
: >"$T/restarts"
touch "$T/go"
(
    n=0
    while [ -e "$T/go" ]; do
        "$K3_TIER" -q --model "$MODEL" --ram 1G --threads 1 --listen "unix:$T/flaky.sock" 2>/dev/null &
        box=$!
        sleep "${K3_SAN:+0.4}" 2>/dev/null || sleep 0.0$((5 + n % 4)) # a sanitizer starts slowly
        kill -9 $box
        wait $box
        n=$((n + 1))
        echo $n >"$T/restarts"
    done
) 2>/dev/null &
killer=$!
pids+=($killer)
check "killed and started again" 1 --tokens $((restarts * 60)) --tier "unix:$T/flaky.sock"
rm "$T/go"
wait $killer 2>/dev/null
n=$(cat "$T/restarts")
[ "${n:-0}" -ge $((restarts / 4)) ] && pass || fail "killed and started again" "only ${n:-0} times"
echo "tier: the box was killed ${n:-0} times in one run, $(field far_served) of $(field far_asked) experts served"
want=$short

# Who gets in.
refused() { # NAME PATTERN OPTION...
    local name=$1 pattern=$2
    shift 2
    timeout -k 1 5 "$K3_TIER" --model "$MODEL" --ram 1G "$@" >"$T/out" 2>"$T/err"
    local rc=$?
    if [ $rc = 2 ] && grep -q -- "$pattern" "$T/err"; then pass; else fail "$name" "exit $rc"; fi
}
refused "an open address without a key" "psk-file" --listen 0.0.0.0:0
refused "all addresses of IPv6 without a key" "psk-file" --listen '[::]:0'
refused "metrics for all" "insecure" --listen "unix:$T/m.sock" --metrics 0.0.0.0:0
refused "metrics for all, with the other's option" "metrics-insecure" --listen "unix:$T/m.sock" --metrics 0.0.0.0:0 --insecure
refused "an open address, with the option of metrics" "psk-file" --listen 0.0.0.0:0 --metrics-insecure
printf 'short' >"$T/short"
printf 'a key of more than sixteen bytes\n' >"$T/key"
printf 'another key of more than sixteen bytes\n' >"$T/other"
chmod 600 "$T/short" "$T/key" "$T/other"
refused "a short key" "shorter than 32 bytes.*openssl rand -base64 32" --listen 0.0.0.0:0 --psk-file "$T/short"
cp "$T/key" "$T/open" && chmod 644 "$T/open"
printf 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n' >"$T/plain" && chmod 600 "$T/plain"
refused "a key that is not random" "not random" --listen 0.0.0.0:0 --psk-file "$T/plain"
refused "a key for two rights" "each has a right of its own" --listen 0.0.0.0:0 --psk-file "$T/key" --stage-psk-file "$T/key"
refused "a key to stage alone for an open address" "psk-file" --listen 0.0.0.0:0 --stage-psk-file "$T/key"
refused "a key that others may read" "chmod 600" --listen 0.0.0.0:0 --psk-file "$T/open"
echo precious >"$T/file"
refused "a file where the socket goes" "there is a file" --listen "unix:$T/file"
[ "$(cat "$T/file")" = precious ] && pass || fail "a file where the socket goes" "it is gone"
box keyed --psk-file "$T/key"
for _ in $(seq 100); do
    n=$("$K3_TIER" status "unix:$T/keyed.sock" --psk-file "$T/key" | awk '$1 == "experts_held" { print $2 }')
    [ "${n:-0}" = 256 ] && break
    sleep 0.02
done
check "the right key" 300 --tier "unix:$T/keyed.sock" --psk-file "$T/key"
check "no key" 0 --tier "unix:$T/keyed.sock"
[ "$(field far_served)" = 0 ] && pass || fail "no key" "was let in"
check "another key" 0 --tier "unix:$T/keyed.sock" --psk-file "$T/other"
[ "$(field far_served)" = 0 ] && pass || fail "another key" "was let in"
# A key belongs to an address: a box that a key is stated for must ask for it; the key for all boxes is required
# only of plain addresses of other machines.
check "a box without the key stated for it" 0 --tier "unix:$T/warm.sock,psk=$T/key"
[ "$(field far_served)" = 0 ] && pass || fail "a box without the key stated for it" "was believed"
both() { # NAME OPTION...: check the hash with two boxes that run
    check "$@"
    "$K3" run "${args[@]:1}" --ram "$ram" "${@:3}" >"$T/out" 2>"$T/err"
    grep -q "up, holds" "$T/err" && ! grep -qE "another key|asks for no key|without a key|no key" "$T/err" && pass || { fail "$1" "they are not both up"; grep "note:" "$T/err"; }
}
both "a key for one of two boxes" 300 --tier "unix:$T/warm.sock" --tier "unix:$T/keyed.sock,psk=$T/key"
both "one key for all, and a box without" 300 --tier "unix:$T/warm.sock" --tier "unix:$T/keyed.sock" --psk-file "$T/key"
check "its own key before the one of all" 300 --tier "unix:$T/keyed.sock,psk=$T/key" --psk-file "$T/other"
[ "$(field far_served)" -gt 0 ] && pass || fail "its own key before the one of all" "was not let in"
ends "a key file that is not there" 2 "key file $T/none: No such file" "$K3" run "${args[@]}" --tier "unix:$T/warm.sock,psk=$T/none"
ends "an address before a key" 2 "is no address" "$K3" run "${args[@]}" --tier ",psk=$T/key"
"$K3_TIER" status "unix:$T/warm.sock" --psk-file "$T/key" >"$T/out" 2>&1
[ $? = 1 ] && grep -q "not the one meant" "$T/out" && pass || fail "status with a key of a box without" "$(head -1 "$T/out")"
# A libcrypto without HMAC-SHA256, at either end: no peer is let in, whatever its key.
printf 'openssl_conf = a\n[a]\nproviders = b\n[b]\nnull = c\n[c]\nactivate = 1\n' >"$T/null.cnf"
OPENSSL_CONF=$T/null.cnf box nohmac --psk-file "$T/key"
OPENSSL_CONF=$T/null.cnf "$K3_TIER" status "unix:$T/nohmac.sock" --psk-file "$T/other" >"$T/out" 2>&1
if [ $? = 1 ] && grep -q "no HMAC-SHA256" "$T/out"; then pass; else fail "no HMAC" "$(head -1 "$T/out")"; fi

# When the box ends, a file that has taken its socket's place stays: it is somebody else's.
box moved
rm "$T/moved.sock"
echo precious >"$T/moved.sock"
stop "${pids[-1]}"
[ "$(cat "$T/moved.sock" 2>/dev/null)" = precious ] && pass || fail "a file in its socket's place" "it is gone"
# Under nohup this shell ignores SIGHUP and so would the box: env sets it back.
env --default-signal=HUP "$K3_TIER" -q --model "$MODEL" --ram 1G --threads 1 --listen "unix:$T/hung_up.sock" 2>"$T/hung_up.err" &
pids+=($!)
for _ in $(seq 200); do [ -S "$T/hung_up.sock" ] && break; sleep 0.02; done
kill -HUP "${pids[-1]}" && await "${pids[-1]}" 20
[ $? = 0 ] && [ ! -e "$T/hung_up.sock" ] && pass || fail "SIGHUP" "not an end like any other"
(trap '' HUP && exec "$K3_TIER" --model "$MODEL" --ram 1G --threads 1 --listen "unix:$T/nohup.sock" 2>"$T/nohup.err") &
pids+=($!)
for _ in $(seq 200); do [ -S "$T/nohup.sock" ] && break; sleep 0.02; done
kill -HUP "${pids[-1]}"
held nohup 256
[ "$(stat_of nohup experts_held)" = 256 ] && pass || fail "SIGHUP under nohup" "it ended"
refused "an empty address" "no address" --listen ""
"$K3_TIER" --ram 1 --listen "unix:$T/little.sock" >"$T/out" 2>&1
[ $? = 4 ] && grep -q "the program needs" "$T/out" && pass || fail "--ram 1 without a model" "$(cat "$T/out")"
for what in "--model $MODEL" "" "--listen unix:$T/little.sock"; do # too little for one expert, no way to stage, too little for the program
    # shellcheck disable=SC2086
    "$K3_TIER" -q $what --ram 64 >"$T/out" 2>&1
    grep -q "^k3-tier: --ram 64 was read as 64 bytes: did you mean --ram 64G?" "$T/out" && pass || fail "--ram 64 $what" "$(cat "$T/out")"
done
"$K3_TIER" -q --ram 64B --listen "unix:$T/little.sock" >"$T/out" 2>&1
grep -q "did you mean" "$T/out" && fail "--ram 64B is what was meant" "$(cat "$T/out")" || pass
"$K3_TIER" --ram 999T --stage-psk-file "$T/none" >"$T/out" 2>&1
grep -q "note: --ram is 999.00 TiB, but .* GiB free.*--ram [0-9]*[GM] fits" "$T/out" && pass || fail "--ram above the machine's memory" "$(cat "$T/out")"
"$K3_TIER" --version >"$T/out" 2>&1
[ "$(sed 's/^k3-tier //' "$T/out")" = "$("$K3" --version | sed 's/^k3 //')" ] && pass || fail "k3-tier --version" "$(cat "$T/out")"
"$K3_TIER" status "unix:$T/keyed.sock" --psk-file "$T/other" >"$T/out" 2>&1
grep -q "refused: another key" "$T/out" && pass || fail "status with another key" "$(cat "$T/out")"

# /metrics over HTTP, and --dump.
port=$((20000 + $$ % 20000))
box open --metrics 127.0.0.1:$port --dump "$T/dump"
held open 256
check "a box that writes down all frames" 300 --tier "unix:$T/open.sock"
{ exec 3<>/dev/tcp/127.0.0.1/$port && printf 'GET /metrics HTTP/1.1\r\n\r\n' >&3 && cat <&3 >"$T/metrics"; } 2>"$T/err"
exec 3>&-
if grep -q '^HTTP/1.0 200' "$T/metrics" && grep -q '^k3_tier_experts_held 256' "$T/metrics"; then
    pass
else
    fail "metrics" "$(head -1 "$T/metrics")"
fi
# A request with headers of 8 KB, as a bearer token makes them, is answered; so is one of more than 16 KB.
trap '' PIPE # the box may answer and close before all of the request is written
for n in 500 8000 40000; do
    { exec 3<>/dev/tcp/127.0.0.1/$port && { printf 'GET /metrics HTTP/1.1\r\nAuthorization: Bearer %*s\r\n\r\n' $n x >&3
        cat <&3 >"$T/metrics"; }; } 2>"$T/err"
    exec 3>&-
    [ $n -le 8000 ] && want_http=200 || want_http=431
    grep -q "^HTTP/1.0 $want_http" "$T/metrics" && pass || fail "metrics, a head of $n bytes" "$(head -1 "$T/metrics")"
done
trap - PIPE
[ "$(stat -c %a "$T/dump")" = 600 ] && pass || fail "dump" "mode $(stat -c %a "$T/dump")"
stop $box
(umask 0; : >"$T/dump2"; chmod 666 "$T/dump2"; box wide --dump "$T/dump2"; stat -c %a "$T/dump2" >"$T/mode"; stop "$box")
[ "$(cat "$T/mode")" = 600 ] && pass || fail "dump into a file that is there" "mode $(cat "$T/mode")"

# Strangers: 300 connections that say nonsense.
start_box crowd --model "$MODEL" --ram 1G
python3 - "$T/crowd.sock" <<'PY' 2>"$T/err" && pass || fail "strangers" "a look was refused: $(tail -1 "$T/err")"
import socket, sys
path = sys.argv[1]
def dial():
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(10)
    s.connect(path)
    return s
for _ in range(300):
    s = dial()
    s.sendall(b"nonsense" * 8)
    try:
        while s.recv(4096): pass
    except ConnectionError: pass
PY
grep -Eq '^k3-tier: 20[0-9-]+T[0-9:]+Z client [0-9]+, unix: not a frame' "$T/crowd.err" && pass || fail "the log" "no time, or no peer"
[ "$(wc -l <"$T/crowd.err")" -lt 60 ] && pass || fail "strangers" "$(wc -l <"$T/crowd.err") lines in the log"
# A box with 16 places for clients and a limit of 20 descriptors, 13 of which are its own.
(ulimit -n 20; exec "$K3_TIER" --model "$MODEL" --ram 1G --threads 1 --listen "unix:$T/few.sock" 2>"$T/few.err") &
box=$!
pids+=($box)
held few 256
python3 - "$T/few.sock" $box <<'PY' 2>"$T/err" && pass || fail "no descriptor left" "$(tail -1 "$T/err")"
import socket, sys, time
path, pid = sys.argv[1:]
ticks = lambda: sum(map(int, open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11:13]))
held = []
for _ in range(40):
    s = socket.socket(socket.AF_UNIX)
    s.setblocking(False)
    try: s.connect(path)
    except BlockingIOError: pass
    held.append(s)
time.sleep(0.2)
before = ticks()
time.sleep(1)
if ticks() - before > 30: sys.exit(f"{ticks() - before} ticks in a second of waiting")
PY
held few 256 # and clients that wait get in again
[ "$(stat_of few experts_held)" = 256 ] && pass || fail "descriptors again" "no figures"
n=$(grep -c "raise .ulimit -n" "$T/few.err") # this line comes once in 10 seconds
[ "$n" -ge 1 ] && [ "$n" -le 3 ] && pass || fail "no descriptor left" "said $n times"
stop $box
n=$(grep -c 'client [0-9]* -> request' "$T/dump")
m=$(grep -c 'client [0-9]* <- reply' "$T/dump")
[ "$n" -gt 100 ] && [ "$n" = "$m" ] && pass || fail "dump" "$n requests, $m replies"

# The box ends on SIGTERM and leaves no file behind, and its memory stays in bounds.
rss=$(stat_of warm resident_memory_bytes)
box last
stop $box
[ ! -e "$T/last.sock" ] && pass || fail "SIGTERM" "the socket is still there"
check "warm box, once more" 300 --tier "unix:$T/warm.sock"
grown=$(($(stat_of warm resident_memory_bytes) - rss))
[ -n "${K3_SAN:-}" ] || { [ $grown -le 65536 ] && pass || fail "memory" "grew by $grown bytes in a run"; }

report

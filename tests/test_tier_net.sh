#!/usr/bin/env bash
# test_tier_net.sh - one hash over a bad network: delay, loss, a link that is pulled.
#
#     K3=build/k3 K3_TIER=build/k3-tier tests/test_tier_net.sh MODEL
#
# Client and box each in a network namespace of their own, with a cable between them. Needs root and
# iproute2. Delay is the kernel's netem, where it has one, and a forwarder between the two
# (tier_link.py); loss is netem's, or a packet filter's that drops by chance. What is missing is
# skipped.
set -u
export LC_ALL=C
K3=${K3:-build/k3}
K3_TIER=${K3_TIER:-$(dirname "$K3")/k3-tier}
MODEL=${1:-demo}
A=k3a$$ B=k3b$$
if ! { ip netns add $A && ip netns add $B; } 2>/dev/null; then
    ip netns del $A 2>/dev/null
    echo "tier_net: SKIP network namespaces need root and iproute2"
    exit 77
fi
T=$(mktemp -d "${TMPDIR:-/tmp}/k3-net-XXXXXX") || exit 1
n_passed=0 n_failed=0 n_skipped=0
box=
link=
trap '[ -z "$link" ] || { kill $link && wait $link; } 2>/dev/null; [ -z "$box" ] || { kill $box && wait $box; } 2>/dev/null; ip netns del $A; ip netns del $B; rm -rf "$T"' EXIT
ip -n $A link add name near type veth peer name away netns $B || { echo "tier_net: SKIP no veth"; exit 77; }
ip -n $A addr add 10.77.0.1/24 dev near && ip -n $B addr add 10.77.0.2/24 dev away
ip -n $A link set near up && ip -n $B link set away up

printf 'a key of more than sixteen bytes\n' >"$T/key"
chmod 600 "$T/key"
ip netns exec $B "$K3_TIER" -q --model "$MODEL" --ram 1G --threads 1 --psk-file "$T/key" --listen 10.77.0.2:7383 &
box=$!
for _ in $(seq 200); do
    n=$(ip netns exec $A "$K3_TIER" status 10.77.0.2:7383 --psk-file "$T/key" 2>/dev/null | awk '$1 == "experts_held" { print $2 }')
    [ "${n:-0}" = 256 ] && break
    sleep 0.02
done

args=(-q --json --no-stop --model "$MODEL" --threads 1 "Once upon a time there was a duck")
field() { sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p" "$T/out"; }
tier=(--tier 10.77.0.2:7383 --psk-file "$T/key")
"$K3" run "${args[@]}" --ram 1 "${tier[@]}" >"$T/out" 2>"$T/err"
ram=$(sed -n 's/.*give at least \([0-9]*\) bytes.*/\1/p' "$T/err")
ram=$((ram + 65536))

# check NAME SERVED TOKENS OPTION...: check the hash, and that at least SERVED experts were served
check() {
    local name=$1 least=$2 tokens=$3
    shift 3
    "$K3" run "${args[@]}" --tokens "$tokens" >"$T/out" 2>"$T/err"
    local want got rc
    want=$(field logits_fnv)
    for _ in $(seq "${TRIES:-1}"); do # over a bad link a short run may end before the hello
        ip netns exec $A "$K3" run "${args[@]}" --tokens "$tokens" --ram $ram "${tier[@]}" "$@" >"$T/out" 2>"$T/err"
        rc=$?
        got=$(field logits_fnv)
        [ $rc = 0 ] && [ "$got" = "$want" ] && [ "$(field far_served)" -lt "$least" ] || break
    done
    if [ $rc = 0 ] && [ "$got" = "$want" ] && [ "$(field far_served)" -ge "$least" ]; then
        n_passed=$((n_passed + 1))
    else
        n_failed=$((n_failed + 1))
        echo "FAIL $name: exit $rc, logits_fnv $got (want $want), $(field far_served) served"
    fi
}
check "a good cable" 100 24 --tier-wait 200000
if ip netns exec $A tc qdisc add dev near root netem delay 2ms 2>/dev/null; then
    check "2 ms of delay" 100 24 --tier-wait 200000
    ip netns exec $A tc qdisc change dev near root netem delay 2ms 2ms loss 5% reorder 20%
    check "delay, loss, reordering" 20 24 --tier-wait 200000
    ip netns exec $A tc qdisc change dev near root netem delay 100ms
    check "no answer in time" 0 24 --tier-wait 1000
    ip netns exec $A tc qdisc del dev near root
else
    n_skipped=$((n_skipped + 1))
    echo "tier_net: SKIP delay and loss of packets: this kernel has no netem"
fi

# delayed NAME DELAY_MS JITTER_MS SERVED TOKENS OPTION...: the same behind a slow link
delayed() {
    local name=$1 ms=$2 jitter=$3
    shift 3
    ip netns exec $A python3 tests/tier_link.py 127.0.0.1:7384 10.77.0.2:7383 "$ms" "$jitter" >"$T/link" &
    link=$!
    for _ in $(seq 200); do grep -q ready "$T/link" && break; sleep 0.02; done
    tier=(--tier 127.0.0.1:7384 --psk-file "$T/key")
    TRIES=5 check "$name" "$@"
    tier=(--tier 10.77.0.2:7383 --psk-file "$T/key")
    { kill $link && wait $link; } 2>/dev/null
    link=
}
if command -v python3 >/dev/null; then
    ip -n $A link set lo up
    delayed "5 ms each way" 5 0 100 8 --tier-wait 200000
    delayed "5 ms and up to 10 more" 5 10 100 8 --tier-wait 200000
    delayed "50 ms each way" 50 0 20 4 --tier-wait 400000
    delayed "50 ms and up to 50 more, in chunks of 3" 50 50 20 4 --tier-wait 400000 --chunk 3
    delayed "50 ms, and no patience" 50 0 0 24 --tier-wait 1000
    delayed "15 ms, patience for some" 5 20 0 24 --tier-wait 25000
else
    n_skipped=$((n_skipped + 1))
    echo "tier_net: SKIP a slow link: python3 is not installed (scripts/deps.sh test)"
fi

# loses PART: both ends drop that part of the packets that arrive, by iptables or nft; false: neither can
loses() {
    local ns
    for ns in $A $B; do
        ip netns exec $ns iptables -A INPUT -p tcp -m statistic --mode random --probability "0.0$1" -j DROP 2>/dev/null && continue
        ip netns exec $ns nft -f - 2>/dev/null <<RULES || return 1
table inet lossy {
    chain input {
        type filter hook input priority 0; policy accept;
        meta l4proto tcp numgen random mod 100 < $1 counter drop
    }
}
RULES
    done
}
n_lost() { # print how many packets were dropped so far
    local ns
    for ns in $A $B; do
        ip netns exec $ns iptables -L INPUT -v -n -x 2>/dev/null | awk '/DROP/ { print $1 }'
        ip netns exec $ns nft list table inet lossy 2>/dev/null | sed -n 's/.*counter packets \([0-9]*\).*/\1/p'
    done | awk '{ n += $1 } END { print n + 0 }'
}
finds() { # no packet is lost from here on
    local ns
    for ns in $A $B; do
        ip netns exec $ns iptables -F INPUT 2>/dev/null
        ip netns exec $ns nft delete table inet lossy 2>/dev/null
    done
}
if loses 5; then
    TRIES=5 check "one packet in 20 lost" 1 8 --tier-wait 1000000
    check "one packet in 20 lost, and no patience" 0 24 --tier-wait 2000
    if [ "$(n_lost)" -gt 0 ]; then
        n_passed=$((n_passed + 1))
    else
        n_failed=$((n_failed + 1))
        echo "FAIL loss: no packet was dropped"
    fi
else
    n_skipped=$((n_skipped + 1))
    echo "tier_net: SKIP loss: neither iptables' statistic match nor nft's numgen works here"
fi
finds
( # the link is pulled while text is made, and put back
    for _ in 1 2 3 4 5; do
        sleep 0.15
        ip -n $B link set away down
        sleep 0.15
        ip -n $B link set away up
    done
) &
puller=$!
TRIES=5 check "the cable pulled and put back" 1 600 --tier-wait 5000
wait $puller
ip -n $B link set away down
check "no cable" 0 24 --tier-wait 5000
ip -n $B link set away up
check "the cable once more" 1 200 --tier-wait 200000
echo "tier_net: $n_passed passed, $n_failed failed, $n_skipped skipped"
[ $n_failed = 0 ]

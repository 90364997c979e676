#!/usr/bin/env bash
# tier_speed.sh - the speed of decoding with good and with bad far boxes, in paired runs.
#
#     scripts/tier_speed.sh [NAME=VALUE ...]          the same names from the environment
#
#     BUILD=build            where k3, k3-tier and tier_chaos are (make all build/tier_chaos)
#     PYTHON=python3         with numpy where a checkpoint is to be made
#     MODEL=                 a model directory; none: one of true dimensions is made and removed,
#     DIR=/tmp LAYERS=3 EXPERTS=112      here, of this size (1.2 GB and 17.6 MB an expert each layer)
#     COLD_RAM=5400M         the client's --ram with which experts come from disk, and only experts
#     WARM_RAM=              the client's --ram with which all is resident; none: what is free
#     BOX_RAM=64G            the box's; BOX_OPTIONS= more of k3-tier's, --gpu for one
#     KINDS=                 some of the kinds below; none: all
#     BOX_THREADS= THREADS=  of the box, and of the client; none: half of the cores each
#     ROUNDS=5 TOKENS=6      TOKENS: ids after each prompt; the first prompt only warms up and is not counted
#     PROMPTS=               a file for bench --prompts with two lines; none: ids of any model
#     LIMIT=270              no run begins after so many seconds; ratios are of whole pairs
#     DIRECT=on              reads of the client past the page cache: cold by construction
#
# Each round runs these kinds in turn, beginning with another kind each time:
#     cold       no box                       resident       all experts here, no box
#     warm       a box that holds all         resident+box   the same, with that box
#     refused    nobody listens               stalled        welcomes, holds all, never answers
#     blackhole  no answer to the SYN
# Prints tokens per second, then medians, and medians of the ratios within rounds. Every run must have
# the same logits_fnv, else exit 5. A ratio that misses its aim is marked, and the exit stays 0.
set -u
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
names=" BUILD PYTHON MODEL DIR LAYERS EXPERTS COLD_RAM WARM_RAM BOX_RAM BOX_THREADS THREADS ROUNDS TOKENS PROMPTS LIMIT DIRECT BOX_OPTIONS KINDS "
for word in "$@"; do
    case $word in
    [A-Z]*=*)
        case $names in *" ${word%%=*} "*) ;; *) echo "tier_speed: no name '${word%%=*}'; the names are$names"; exit 2 ;; esac
        export "${word?}" ;;
    *) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2 ;;
    esac
done
BUILD=${BUILD:-build} PYTHON=${PYTHON:-python3} MODEL=${MODEL:-} DIR=${DIR:-/tmp} LAYERS=${LAYERS:-3}
EXPERTS=${EXPERTS:-112} COLD_RAM=${COLD_RAM:-5400M} WARM_RAM=${WARM_RAM:-} BOX_RAM=${BOX_RAM:-64G}
ROUNDS=${ROUNDS:-5} TOKENS=${TOKENS:-6} PROMPTS=${PROMPTS:-} LIMIT=${LIMIT:-270} DIRECT=${DIRECT:-on}
[ "$ROUNDS" -ge 1 ] 2>/dev/null || { echo "tier_speed: ROUNDS=$ROUNDS: how many? 1 or more"; exit 2; }
n_cores=$(nproc)
BOX_THREADS=${BOX_THREADS:-$(((n_cores + 1) / 2))}
THREADS=${THREADS:-$((n_cores > 1 ? n_cores / 2 : 1))}
for program in k3 k3-tier tier_chaos; do
    [ -x "$BUILD/$program" ] || { echo "tier_speed: no $BUILD/$program: make all $BUILD/tier_chaos, or give BUILD=DIR"; exit 2; }
done
T=$(mktemp -d "$DIR/k3-speed-XXXXXX") || exit 1
pids=()
trap '[ ${#pids[@]} = 0 ] || { kill "${pids[@]}" && wait "${pids[@]}"; } 2>/dev/null; rm -rf "$T"' EXIT
if [ -z "$MODEL" ]; then
    MODEL=$T/model
    "$PYTHON" scripts/make_checkpoint.py "$MODEL" --layers "$LAYERS" --experts "$EXPERTS" --top-k 16 --vocab 4096 >"$T/log" 2>&1 || { tail -1 "$T/log"; exit 1; }
fi
if [ -z "$PROMPTS" ]; then
    PROMPTS=$T/prompts
    printf 'ids:5\nids:9\n' >"$PROMPTS"
fi
"$BUILD/k3" info --model "$MODEL" >"$T/info" 2>/dev/null
# every expert of every layer, for --pins; a trace tells how many there are
"$BUILD/k3" run -q --model "$MODEL" --ids 5 --tokens 0 --trace "$T/trace" --direct "$DIRECT" || exit 1
awk 'NR == 1 { n = $4 } NR > 1 { for (ie = 0; ie < n; ie++) print $2, ie }' "$T/trace" | sort -u -n -k 1,1 -k 2,2 >"$T/pins"
n_experts=$(wc -l <"$T/pins")

# a warm box; a mute proxy before it; a listener whose queue is full, so that the kernel drops SYNs
"$BUILD/k3-tier" -q --model "$MODEL" --ram "$BOX_RAM" --threads "$BOX_THREADS" ${BOX_OPTIONS:-} --listen "unix:$T/box.sock" 2>"$T/box.err" &
pids+=($!)
held=0
for _ in $(seq 1200); do
    held=$("$BUILD/k3-tier" status "unix:$T/box.sock" 2>/dev/null | awk '$1 == "experts_held" { print $2 }')
    [ "${held:-0}" -ge "$n_experts" ] && break
    sleep 0.1
done
[ "${held:-0}" -ge "$n_experts" ] || { echo "tier_speed: the box holds ${held:-0} of $n_experts experts: give it more BOX_RAM"; cat "$T/box.err"; exit 1; }
"$BUILD/tier_chaos" "$T/mute.sock" "$T/box.sock" mute &
pids+=($!)
"$PYTHON" - "$T/hole" <<'PY' &
import os, socket, sys, time
ear = socket.socket()
ear.bind(("127.0.0.1", 0))
ear.listen(0)
full = []
for _ in range(8):  # until the queue is full
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex(ear.getsockname())
    full.append(s)
time.sleep(0.1)
with open(sys.argv[1] + ".new", "w") as f:
    f.write(str(ear.getsockname()[1]))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(3600)
PY
pids+=($!)
for _ in $(seq 100); do [ -e "$T/hole" ] && [ -S "$T/mute.sock" ] && break; sleep 0.05; done
hole=$(cat "$T/hole")

bench() { # KIND OPTION...
    local kind=$1
    shift
    "$BUILD/k3" bench -q --model "$MODEL" --prompts "$PROMPTS" --tokens "$TOKENS" --threads "$THREADS" --direct "$DIRECT" "$@" >"$T/out" 2>"$T/err" ||
        { echo "tier_speed: $kind: exit $?"; tail -2 "$T/err"; exit 1; }
    awk -F'\t' -v r="$round" -v k="$kind" '$1 == "1" { speed = $5 } $1 == "# total" { print r "\t" k "\t" speed "\t" $7 }' "$T/out" | tee -a "$T/rows"
}
one() { # KIND
    case $1 in
    cold) bench cold --ram "$COLD_RAM" ;;
    warm) bench warm --ram "$COLD_RAM" --tier "unix:$T/box.sock" ;;
    refused) bench refused --ram "$COLD_RAM" --tier 127.0.0.1:1 ;;
    stalled) bench stalled --ram "$COLD_RAM" --tier "unix:$T/mute.sock" ;;
    blackhole) bench blackhole --ram "$COLD_RAM" --tier "127.0.0.1:$hole" ;;
    resident) bench resident ${WARM_RAM:+--ram "$WARM_RAM"} --pins "$T/pins" ;;
    resident+box) bench resident+box ${WARM_RAM:+--ram "$WARM_RAM"} --pins "$T/pins" --tier "unix:$T/box.sock" ;;
    esac
}
kinds=(cold warm refused stalled blackhole resident resident+box)
echo "# $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $n_cores cores: client $THREADS threads, box $BOX_THREADS; $(head -1 "$T/info")"
printf 'round\tkind\ttok_s\tlogits_fnv\n'
# shellcheck disable=SC2206
[ -z "${KINDS:-}" ] || kinds=($KINDS)
for round in $(seq "$ROUNDS"); do
    for i in "${!kinds[@]}"; do
        [ "$SECONDS" -lt "$LIMIT" ] || { echo "# stopped in round $round after $SECONDS s"; break 2; }
        one "${kinds[(i + round - 1) % ${#kinds[@]}]}"
    done
done
"$PYTHON" - "$T/rows" <<'PY'
import statistics, sys
rows = [line.rstrip("\n").split("\t") for line in open(sys.argv[1])]
speed = {}
for r, kind, tok_s, _ in rows:
    speed.setdefault(kind, {})[r] = float(tok_s)
aims = {"warm": ("cold", 2.0), "refused": ("cold", 0.95), "stalled": ("cold", 0.95), "blackhole": ("cold", 0.95),
        "resident+box": ("resident", 1.0)}
print("# kind\tmedian_tok_s\tof\tmedian_ratio\tleast\tmost\taim")
for kind, by_round in speed.items():
    line = f"# {kind}\t{statistics.median(by_round.values()):.3f}"
    if kind in aims:
        base, aim = aims[kind]
        ratio = [by_round[r] / speed[base][r] for r in by_round if speed.get(base, {}).get(r)]
        if ratio:
            middle = statistics.median(ratio)
            line += f"\t{base}\t{middle:.3f}\t{min(ratio):.3f}\t{max(ratio):.3f}\t{aim:.2f} {'met' if middle >= aim else 'MISSED'}"
    print(line)
hashes = {row[3] for row in rows}
print(f"# {len(rows)} runs, logits_fnv {' '.join(sorted(hashes))}: {'one hash' if len(hashes) == 1 else 'DIFFERENT HASHES'}")
sys.exit(0 if len(hashes) == 1 else 5)
PY

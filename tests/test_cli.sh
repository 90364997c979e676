#!/usr/bin/env bash
# test_cli.sh - the `k3` program from outside: exit codes, messages, stdout, hashes.
#
#     K3=build/k3 tests/test_cli.sh
#
# Every case runs the program once and says what it must exit with and what stderr must
# match. Golden hashes are those of demo/bits.tsv, made by other people's programs. What
# this machine lacks (python3, a CPU feature) is a SKIP with its reason, never a pass.
set -u
export LC_ALL=C
unset K3_MODEL OMP_NUM_THREADS
cd "$(dirname "$0")/.." || exit 1
K3=${K3:-build/k3}
case $K3 in /*) ;; *) K3=$PWD/$K3 ;; esac
DEMO=$PWD/demo
PARIS="The capital of France is"
BASIS=cbf29ce484222325
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
n_passed=0 n_failed=0 n_skipped=0

pass() { n_passed=$((n_passed + 1)); echo "PASS $1"; }
skip() { n_skipped=$((n_skipped + 1)); echo "SKIP $1: $2"; }
fail() { # name, reason
    n_failed=$((n_failed + 1))
    printf 'FAIL %s: %.300s\n' "$1" "$2"
    sed 's/^/     stderr: /' "$T/err" 2>/dev/null | head -3
}
limit() { if command -v timeout >/dev/null; then timeout 300 "$@"; else "$@"; fi; }

# check NAME EXIT PATTERN COMMAND...: stderr must match PATTERN ("" is: be empty).
check() {
    local name=$1 want=$2 pattern=$3 rc
    shift 3
    limit "$@" >"$T/out" 2>"$T/err"
    rc=$?
    if [ $rc != "$want" ]; then
        fail "$name" "exit $rc, not $want"
    elif [ -z "$pattern" ] && [ -s "$T/err" ]; then
        fail "$name" "stderr is not empty"
    elif [ -n "$pattern" ] && ! grep -Eq -- "$pattern" "$T/err"; then
        fail "$name" "stderr does not match: $pattern"
    else
        pass "$name"
        return 0
    fi
    return 1
}

# Misuse: exit 2, one line on stderr that matches, nothing on stdout.
misuse() { # name, pattern, arguments...
    local name=$1 pattern=$2
    shift 2
    check "$name" 2 "$pattern" "$K3" "$@" || return
    expect "$name: one line, no output" "$(wc -l <"$T/err" | tr -d ' ') $(wc -c <"$T/out" | tr -d ' ')" "1 0"
}

# expect NAME GOT WANT
expect() {
    if [ "$2" = "$3" ]; then pass "$1"; else fail "$1" "got '$2', want '$3'"; fi
}

json() { sed -n "s/.*\"$1\":\"\\{0,1\\}\\([^\",}]*\\).*/\\1/p" "$T/out"; } # a plain field of $T/out
size() { wc -c <"$1" | tr -d ' '; }

# ---- Help and misuse ---------------------------------------------------------------------

check "no arguments" 2 "^usage: k3" "$K3"
expect "no arguments: stdout is empty" "$(size "$T/out")" 0
for arg in --help -h help --version -V "help run" "help chat" "help tokenize" "help bench" "help verify" \
    "help plan" "help info" "help slice" "help stage" "run --help" "bench -h" "run --tokens 3 -h"; do
    # shellcheck disable=SC2086
    check "k3 $arg" 0 "" "$K3" $arg && [ ! -s "$T/out" ] && fail "k3 $arg" "no output"
done
misuse "unknown command" "'runn'.*did you mean run" runn x
misuse "unknown command, nothing near" "'frobnicate'.*k3 help" frobnicate
misuse "help of an unknown command" "'benhc'.*did you mean bench" help benhc
misuse "unknown option" "--tokns.*did you mean --tokens" run --tokns 3 x
misuse "unknown option, nothing near" "--zzzzzz" run --zzzzzz x
misuse "option of another command" "bench does not take --json" bench --json
misuse "option before the command" "--model comes after a command" --model demo run x
misuse "option without value" "--tokens needs a value" run x --tokens
misuse "option as value" "--model needs a value" run x --model --tokens 3
misuse "flag with value" "--json takes no value" run --json=1 x
for value in abc -1 1e3 " 5" "" 5x 99999999999999999999; do
    misuse "--tokens '$value'" "--tokens: '$value' is not a whole number" run "--tokens=$value" x
done
for value in nan inf -1 0x1 1x "" 101; do
    misuse "--temperature '$value'" "--temperature: '$value' is not a number" run "--temperature=$value" x
done
for value in 8X 0 -1 "" G 1.5GGiB 1e30T; do
    misuse "--ram '$value'" "--ram: '$value' is not a size" run "--ram=$value" x
done
misuse "--top-p 2" "--top-p: '2'" run --top-p 2 x
misuse "--chunk 5000" "--chunk: '5000'" run --chunk 5000 x
misuse "--stop ''" "--stop: an empty text" run --stop "" x
misuse "--io aio" "--io: 'aio' is not auto\|pool\|uring" run --io aio x
misuse "--io au" "--io: 'au' is not" run --io=au x
misuse "--io ''" "--io: '' is not" run --io= x
misuse "--direct maybe" "--direct: 'maybe' is not auto\|on\|off" bench --direct maybe
misuse "--policy fifo" "--policy: 'fifo' is not rank\|lru" run --policy fifo x
misuse "--io-depth 65" "--io-depth: '65'" run --io-depth 65 x
misuse "--mirror ''" "--mirror: an empty name" run --mirror "" x
misuse "eight mirrors" "--mirror: at most 7" run --mirror a --mirror b --mirror c --mirror d --mirror e --mirror f --mirror g --mirror h x
misuse "--disk 0" "--disk: a disk of 0" plan --disk 0
misuse "argument to plan" "plan takes no argument" plan x
misuse "--expect junk" "--expect: 'zz' is not a hash" bench --expect zz
misuse "two prompts" "'b' is a second one" run a b
misuse "prompt and file" "one prompt" run a --prompt-file b
check "no prompt" 2 "run needs a prompt: text" "$K3" run </dev/null
expect "no prompt: one line, no output" "$(wc -l <"$T/err" | tr -d ' ') $(wc -c <"$T/out" | tr -d ' ')" "1 0"
check "no prompt, nothing in the pipe" 2 "run needs a prompt, and stdin is empty" bash -c ": | '$K3' run -q"
misuse "argument to info" "info takes no argument" info x
misuse "--decode without --ids" "--decode needs --ids" tokenize --decode x

# ---- Bad prompts -------------------------------------------------------------------------

misuse "empty prompt" "the prompt is empty" run ""
: >"$T/empty"
misuse "empty prompt file" "the prompt is empty" run --prompt-file "$T/empty"
check "empty stdin" 2 "the prompt is empty" "$K3" run - </dev/null
check "absent prompt file" 1 "$T/none: No such file" "$K3" run --prompt-file "$T/none"
check "directory as prompt file" 1 "Is a directory" "$K3" run --prompt-file "$T"
misuse "ids 1,,2" "--ids: number 2 is empty" run --ids 1,,2
misuse "ids 1," "--ids: number 2 is empty" run --ids 1,
misuse "ids ''" "--ids: number 1 is empty" run --ids ""
misuse "ids abc" "--ids: number 1, 'abc'" run --ids abc
misuse "ids 1,-2" "--ids: number 2, '-2'" run --ids 1,-2
misuse "ids 1,4294967296" "--ids: number 2, '4294967296'" run --ids 1,4294967296
check "id out of range" 2 "2048" "$K3" run -q --ids 3,2048
check "prompt longer than the context" 1 "6 ids.*holds 4.*--context" "$K3" run --context 4 "$PARIS"
printf 'a\xff\xfe\x80\xe4b\n' >"$T/invalid"
check "invalid UTF-8 prompt" 0 "ids_fnv" "$K3" run --tokens 3 --prompt-file "$T/invalid"
printf 'a\0b' >"$T/nul"
check "prompt with NUL" 0 "prompt 3 ids" "$K3" run --tokens 3 --prompt-file "$T/nul"

# ---- Bad models --------------------------------------------------------------------------

check "absent model" 3 "$T/none: No such file" "$K3" run --model "$T/none" x
check "file as model" 3 "not a directory" "$K3" run --model "$T/empty" x
check "model without config" 3 "no readable config.json" "$K3" run --model "$T" x
for cmd in "run --tokens 0 x" "bench --tokens 1" plan info verify; do
    # shellcheck disable=SC2086
    check "absent model, $cmd" 3 "No such file" "$K3" $cmd --model "$T/none"
done
# Make a directory of links to the demo's files, all but one.
broken() { # name of copy, file left out
    mkdir "$T/$1"
    for f in "$DEMO"/*; do [ "${f##*/}" = "$2" ] || ln -s "$f" "$T/$1/"; done
}
broken noshard model-00002-of-000003.safetensors
check "missing shard" 3 "model-00002-of-000003.safetensors" "$K3" run --model "$T/noshard" x
broken short model-00003-of-000003.safetensors
head -c 1000000 "$DEMO/model-00003-of-000003.safetensors" >"$T/short/model-00003-of-000003.safetensors"
check "truncated shard" 3 "model-00003-of-000003.safetensors" "$K3" run --model "$T/short" x
broken badconfig config.json
echo '{"model_type": "kimi_k3", ' >"$T/badconfig/config.json"
check "config cut short" 3 "config.json" "$K3" run --model "$T/badconfig" x
broken nanconfig config.json
sed 's/"rms_norm_eps": [^,]*/"rms_norm_eps": NaN/' "$DEMO/config.json" >"$T/nanconfig/config.json"
check "config with NaN" 3 "config.json|rms_norm_eps" "$K3" run --model "$T/nanconfig" x
broken notok tiktoken.model
limit "$K3" run --model "$T/notok" x >"$T/out" 2>"$T/err"
rc=$?
if { [ $rc = 1 ] || [ $rc = 3 ]; } && grep -q tiktoken.model "$T/err"; then
    pass "missing tiktoken.model"
else
    fail "missing tiktoken.model" "exit $rc, wanted 1 or 3 and the name"
fi
check "ids without tiktoken.model" 0 "ids only, no text" "$K3" run --model "$T/notok" --tokens 4 --ids 343,336,327,444,1489,311
check "memory bound too small" 4 "--ram" "$K3" run -q --ram 1M x
check "context beyond the model" 2 "100000.*4096" "$K3" run -q --context 100000 x
check "unknown kernels" 2 "nope" "$K3" run -q --kernels nope x

# ---- Text --------------------------------------------------------------------------------

check "text, quiet" 0 "" "$K3" run -q "$PARIS"
expect "the capital of France" "$(cat "$T/out")" " Paris."
check "text, with notes" 0 "using the small bundled model" "$K3" run "$PARIS"
grep -Eq "prompt 6 ids, .* tok/s; answer 4 ids, .* \(eos\); ids_fnv [0-9a-f]{16} logits_fnv [0-9a-f]{16}" "$T/err" &&
    pass "statistics line" || fail "statistics line" "not as documented"
expect "stdout is the answer alone" "$(cat "$T/out")" " Paris."
check "options after --" 0 "" "$K3" run -q --tokens 2 -- --tokens
printf '%s' "$PARIS" >"$T/prompt"
check "prompt file" 0 "" "$K3" run -q --prompt-file "$T/prompt"
expect "prompt file: same answer" "$(cat "$T/out")" " Paris."
check "stdin" 0 "" sh -c "'$K3' run -q - <'$T/prompt'"
expect "stdin: same answer" "$(cat "$T/out")" " Paris."
check "a last newline is noted" 0 "ends with a newline" "$K3" run --tokens 0 "a
"
check "no-stop names specials" 0 "" "$K3" run -q --no-stop --tokens 7 "$PARIS"
expect "no-stop text" "$(cat "$T/out")" " Paris.<|end_of_msg|><|open|>response<|sep|>"
check "stop text over tokens" 0 "" "$K3" run -q --stop aris. "$PARIS"
expect "stop text over tokens: what is before" "$(cat "$T/out")" " P"
check "stop text not met" 0 "" "$K3" run -q --stop "Paris.!" --stop zzz "$PARIS"
expect "held-back text is printed" "$(cat "$T/out")" " Paris."
check "first of two stop texts" 0 "" "$K3" run -q --json --stop is --stop ar "$PARIS"
expect "first of two stop texts: text" "$(json text)" " P"
expect "first of two stop texts: reason" "$(json stop_reason)" stop
check "stop inside a streamed answer" 0 "" "$K3" run -q --no-stop --tokens 32 --stop "Paris is the" "$PARIS"
expect "stop inside a streamed answer: text" "$(cat "$T/out")" " Paris.<|end_of_msg|><|open|>response<|sep|>Yes. "
check "full context" 0 "\(context\)" "$K3" run --context 8 --no-stop --tokens 32 "$PARIS"
grep -q "answer 3 ids" "$T/err" && pass "full context: three ids" || fail "full context: three ids" "other count"
check "emoji and CJK" 0 "" "$K3" run -q "Tokyo in Japanese is"
expect "CJK answer" "$(cat "$T/out")" " 東京."
check "sampled" 0 "" "$K3" run -q --json --temperature 1.5 --seed 7 --no-stop --tokens 24 "$PARIS"
first=$(json ids_fnv)
"$K3" run -q --json --temperature 1.5 --seed 7 --no-stop --tokens 24 "$PARIS" >"$T/out" 2>"$T/err"
expect "same seed, same ids" "$(json ids_fnv)" "$first"
"$K3" run -q --json --temperature 1.5 --seed 8 --no-stop --tokens 24 "$PARIS" >"$T/out" 2>"$T/err"
[ "$(json ids_fnv)" != "$first" ] && pass "another seed, other ids" || fail "another seed, other ids" "same"
check "top-k without temperature is noted" 0 "change nothing" "$K3" run --tokens 1 --top-k 5 "$PARIS"

# A pipe or a file is a prompt without being called -, a terminal or /dev/null is none.
check "a prompt through a pipe" 0 "reading the prompt from stdin" bash -c "printf '%s' '$PARIS' | '$K3' run"
expect "a prompt through a pipe: same answer" "$(cat "$T/out")" " Paris."
check "a prompt from a file" 0 "" bash -c "'$K3' run -q <'$T/prompt'"
expect "a prompt from a file: same answer" "$(cat "$T/out")" " Paris."
check "an argument wins over a pipe" 0 "" bash -c "echo no | '$K3' run -q '$PARIS'"
expect "an argument wins over a pipe: same answer" "$(cat "$T/out")" " Paris."
check "ids through a pipe" 0 "" bash -c "printf '%s' '$PARIS' | '$K3' tokenize -q --ids-only"
expect "ids through a pipe: same ids" "$(cat "$T/out")" "343,336,327,444,1489,311"

# ---- Suggestions, defaults and notes -----------------------------------------------------

# K3_MODEL is --model where none is given; the command line wins, and an empty one is none.
check "K3_MODEL" 0 "model: $DEMO .from K3_MODEL" env K3_MODEL="$DEMO" "$K3" run "$PARIS"
grep -q "bundled" "$T/err" && fail "K3_MODEL: not the bundled one" "$(cat "$T/err")" || pass "K3_MODEL: not the bundled one"
for cmd in "run x" "chat" "tokenize x" "bench" "verify" "plan" "info" "slice --pins /dev/null --size 1M --out $T/none" "stage --to unix:$T/none"; do
    # shellcheck disable=SC2086
    check "K3_MODEL, absent, $cmd" 3 "K3_MODEL $T/none: No such file" env K3_MODEL="$T/none" "$K3" $cmd </dev/null
done
check "--model wins over K3_MODEL" 0 "" env K3_MODEL="$T/none" "$K3" run -q --model "$DEMO" "$PARIS"
check "an empty K3_MODEL" 0 "bundled model" env K3_MODEL= "$K3" run "$PARIS"
check "plan --released, whatever K3_MODEL" 0 "" env K3_MODEL="$T/none" "$K3" plan -q --released --gflops 40
check "cache has no model" 1 "$T/none: No such file" env K3_MODEL="$DEMO" "$K3" cache ls "$T/none"

check "--ram without a unit" 4 "floor" "$K3" run -q --ram 64 x
grep -q "^k3: --ram 64 was read as 64 bytes: did you mean --ram 64G?" "$T/err" && pass "--ram 64: says what was read" || fail "--ram 64: says what was read" "no"
check "plan --ram without a unit" 4 "did you mean --ram 64G" "$K3" plan -q --ram 64
check "chat --ram without a unit" 4 "did you mean --ram 64G" "$K3" chat -q --ram 64 </dev/null
check "--ram with a unit that is too small" 4 "floor" "$K3" run -q --ram 64B x
grep -q "did you mean" "$T/err" && fail "--ram 64B is what was meant" "$(cat "$T/err")" || pass "--ram 64B is what was meant"
misuse "--cache-size without a unit" "20 is 20 bytes: did you mean 20G" run --cache "$T/c" --cache-size 20 x
misuse "cache rm --cache-size without a unit" "5 is 5 bytes: did you mean 5G" cache rm --cache-size 5 "$T/c"

head -c 20000 /dev/zero | tr '\0' 'a' | sed 's/aa/a b/g' >"$T/long"
check "longer than the model" 1 "this model holds 4096: shorten it" "$K3" run -q --prompt-file "$T/long"
check "longer than the model, with its largest context" 1 "this model holds 4096, whatever --context says: shorten it" \
    "$K3" run -q --context 4096 --prompt-file "$T/long"
check "longer than the context" 1 "6 ids.*holds 4: raise --context to 6 or more" "$K3" run -q --context 4 "$PARIS"

check "OMP_NUM_THREADS is not read" 0 "OMP_NUM_THREADS=77 is not read; [0-9]+ threads, and --threads N" env OMP_NUM_THREADS=77 "$K3" run --tokens 1 "$PARIS"
check "OMP_NUM_THREADS and --threads" 0 "" env OMP_NUM_THREADS=77 "$K3" run --threads 1 --tokens 1 --model "$DEMO" -q "$PARIS"
env OMP_NUM_THREADS=77 "$K3" run --threads 1 --tokens 1 "$PARIS" 2>&1 | grep -q OMP_NUM && fail "--threads is enough said" "a note" || pass "--threads is enough said"

# --ram above what is free here: a note with both figures, and nothing refused. The figures themselves are
# of tests/test_machine.c.
above="note: --ram is 999\.00 TiB, but (this machine|its control group) has [0-9.]+ [GM]iB free.*--ram [0-9]+[GM] fits"
check "run --ram above the memory" 0 "$above" "$K3" run --ram 999T --tokens 1 "$PARIS"
check "bench --ram above the memory" 0 "$above" "$K3" bench --ram 999T --tokens 1
check "plan --ram above the memory" 0 "$above" "$K3" plan --ram 999T --gflops 40
check "plan --released --ram above the memory" 0 "$above" "$K3" plan --released --ram 999T --gflops 40
check "chat --ram above the memory" 0 "$above" "$K3" chat --ram 999T </dev/null
"$K3" run -q --ram 999T --tokens 1 "$PARIS" >"$T/out" 2>"$T/err"
[ -s "$T/err" ] && fail "-q: no word on --ram" "$(cat "$T/err")" || pass "-q: no word on --ram"
"$K3" run --ram 200M --tokens 1 "$PARIS" >"$T/out" 2>"$T/err"
grep -q "note: --ram" "$T/err" && fail "a --ram that fits" "$(cat "$T/err")" || pass "a --ram that fits"

check "info says how many threads and why" 0 "" "$K3" info --model "$DEMO"
grep -Eq "^threads +[0-9]+: [0-9]+ CPUs?, [0-9]+ cores?(, quota [0-9]+)?$" "$T/out" && pass "info: threads" || fail "info: threads" "$(cat "$T/out")"
if command -v taskset >/dev/null; then # where one CPU is allowed, one thread computes
    taskset -c "$(taskset -pc $$ | sed 's/.*: //;s/[^0-9].*//')" "$K3" info --model "$DEMO" >"$T/out"
    grep -Eq "^threads +1: 1 CPU, 1 core" "$T/out" && pass "info: threads of one CPU" || fail "info: threads of one CPU" "$(cat "$T/out")"
else
    skip "info: threads of one CPU" "no taskset"
fi

"$K3" -V >"$T/out" 2>"$T/err"
if [ -e .git ] && git rev-parse HEAD >/dev/null 2>&1; then
    grep -Eq "^k3 [0-9.]+ \(k3-[a-z0-9-]+\), commit [0-9a-f]{12}" "$T/out" && pass "--version has the commit" || fail "--version has the commit" "$(cat "$T/out")"
else
    skip "--version has the commit" "no git checkout"
fi

mkdir -p "$T/hub/snapshots/abc"
check "a download cache" 3 "inside its snapshots" "$K3" run --model "$T/hub" x
echo x >"$T/some.gguf"
check "a GGUF file" 3 "not GGUF files" "$K3" run --model "$T/some.gguf" x
check "no model there: what is expected" 3 "no readable config.json.*holds config.json, tiktoken.model" "$K3" info --model "$T"
broken noshards model-00002-of-000003.safetensors
rm "$T/noshards/model-00001-of-000003.safetensors"
check "two missing shards" 3 "model-00001-of-000003.*model-00002-of-000003.*1 of 3 shards are there" "$K3" verify --model "$T/noshards"
broken other config.json
echo '{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}' >"$T/other/config.json"
check "another architecture" 3 "this model is Qwen3MoeForCausalLM .model_type qwen3_moe.; k3 runs Kimi K3" "$K3" run -q --model "$T/other" x

check "after a plan" 0 "next: \`k3 plan --released\`" "$K3" plan
check "after a plan of a model" 0 "next: \`k3 chat --model $DEMO\`" "$K3" plan --model "$DEMO"
check "after a plan without files" 0 "next: \`hf download moonshotai/Kimi-K3 --local-dir DIR\`" "$K3" plan --released --gflops 40
check "after verify" 0 "next: \`k3 verify --write-sums --model $DEMO\`" "$K3" verify --model "$DEMO"
check "after verify, without a tokenizer" 0 "tiktoken.model is absent" "$K3" verify --model "$T/notok"
check "how a key is made" 0 "" "$K3" help run
grep -q "umask 077; openssl rand -base64 32 >FILE" "$T/out" && pass "help of --psk-file" || fail "help of --psk-file" "no"
for word in "k3 run \"The capital" "k3 plan --released" "k3 chat --model DIR" "Make text" "K3_MODEL"; do
    "$K3" --help | grep -qF "$word" && pass "help: $word" || fail "help: $word" "absent"
done
misuse "help --man of no command" "unknown command 'nope'" help --man nope
misuse "help --man of two" "help takes one command" help --man run chat

# A box that accepts and never answers, and an address where nobody listens: one line says that no box helped.
check "nobody listens" 0 "no box was of use .unix:$T/no.sock.: none was there" "$K3" run --tokens 2 --tier "unix:$T/no.sock" "$PARIS"
check "nobody listens, bench" 0 "no box was of use" "$K3" bench --tokens 1 --tier "unix:$T/no.sock"
check "nobody listens, quiet" 0 "" "$K3" run -q --tokens 2 --tier "unix:$T/no.sock" "$PARIS"
if command -v python3 >/dev/null; then
    python3 -c 'import socket,sys,time; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(8); time.sleep(60)' "$T/mute.sock" &
    mute=$!
    for _ in $(seq 100); do [ -S "$T/mute.sock" ] && break; sleep 0.05; done
    check "a box that never speaks" 0 "no box was of use .unix:$T/mute.sock" "$K3" run --tokens 2 --tier "unix:$T/mute.sock" "$PARIS"
    kill $mute
    wait $mute 2>/dev/null
else
    skip "a box that never speaks" "no python3"
fi

# ---- The plan of prompts ---------------------------------------------------------------------

cmp -s share/Kimi-K3/config.json tests/data/k3_config.json && pass "the released config" || fail "the released config" "not that of tests/data"
check "plan --released" 0 "" "$K3" plan -q --released --ram 16G --threads 16 --gflops 40 --disk-rate 7 --context 16384
row() { sed -n "s/^ *\($1 ids.*\)/\1/p" "$T/out" | tr -s ' '; }
expect "plan --released: 100 ids" "$(row 100)" "100 ids 1.19 TiB 32 s 3 min"
expect "plan --released: 1000 ids" "$(row 1000)" "1000 ids 1.41 TiB 5 min 5 min"
expect "plan --released: 10000 ids" "$(row 10000)" "10000 ids 4.21 TiB 60 min 60 min"
expect "plan --released: chat" "$(row 88)" "88 ids 1.14 TiB 28 s 3 min chat's own, by the released tokenizer"
grep -q "40 GFLOP/s each, as given" "$T/out" && pass "plan says what it computes with" || fail "plan says what it computes with" "no"
"$K3" plan -q --released --ram 16G >"$T/out"
expect "three disks" "$(grep -c "3 GB/s     7 GB/s    14 GB/s" "$T/out")" 1
grep -q "10000 ids.*with --context 10000" "$T/out" && pass "a prompt beyond the context" || fail "a prompt beyond the context" "no"
"$K3" plan -q --ram 55M --gflops 40 >"$T/out"
echo '{"messages":[{"role":"user","content":""}]}' >"$T/empty.json"
n_chat=$("$K3" chat -q --render "$T/empty.json" --ids-only | tr ',' '\n' | wc -l)
grep -Eq "^ +$n_chat ids .* chat's own$" "$T/out" && pass "chat's own ids, counted" || fail "chat's own ids, counted" "$n_chat: $(grep chat "$T/out")"
if command -v python3 >/dev/null; then
    expect "chat's own ids, of the released tokenizer" "$(python3 -c '
import json
pins = json.load(open("tests/data/tokenizer_pins.json"))
ids = next(c["ids"] for c in pins["chat"] if c["name"] == "user_turn")
sep, close = 163589, 163588
ends = [i for i, x in enumerate(ids) if x == close]
text = ids[:ends[1]][::-1].index(sep)  # between the user message and its end
print(len(ids) - text)')" 88
else
    skip "chat's own ids, of the released tokenizer" "no python3"
fi
misuse "--released and --model" "--released is a plan without files: not with --model" plan --released --model "$DEMO"
misuse "--released and --reader" "not with --reader" plan --released --reader
misuse "--disk-rate 0" "a disk of 0" plan --disk-rate 0
check "plan --released below the floor" 4 "floor" "$K3" plan -q --released --ram 100M

# ---- JSON, dumps, traces -------------------------------------------------------------------

check "json" 0 "" "$K3" run -q --json "$PARIS"
expect "json: one line" "$(wc -l <"$T/out" | tr -d ' ')" 1
expect "json: stop reason" "$(json stop_reason)" eos
expect "json: numerics" "$(json numerics)" k3-f32-dot16-q40
grep -q '"ids":\[1379,265,13,1794\]' "$T/out" && pass "json: ids" || fail "json: ids" "$(cat "$T/out")"
if command -v python3 >/dev/null; then
    for seed in 1 2 3 4; do
        "$K3" run -q --json --temperature 60 --seed $seed --no-stop --tokens 64 "$PARIS" >"$T/out" 2>"$T/err"
        python3 -c 'import json,sys; d=json.loads(open(sys.argv[1],"rb").read().decode("utf-8")); assert len(d["ids"])==64 and d["n_prompt"]==6 and isinstance(d["gen_tok_s"],float)' \
            "$T/out" 2>"$T/err" && pass "json of wild text is valid ($seed)" || fail "json of wild text is valid ($seed)" "no"
    done
else
    skip "json of wild text is valid" "no python3"
fi
row=$((2048 * 4))
check "tokens 0 with dump" 0 "" "$K3" run -q --json --tokens 0 --dump-logits "$T/rows0" "$PARIS"
expect "tokens 0: no text" "$(json text)" ""
expect "tokens 0: ids_fnv is the basis" "$(json ids_fnv)" $BASIS
last_row=$(json logits_fnv)
expect "tokens 0: six rows" "$(size "$T/rows0")" $((6 * row))
"$K3" run -q --json --tokens 1 "$PARIS" >"$T/out" 2>"$T/err"
expect "tokens 0: logits_fnv is the last prompt row" "$last_row" "$(json logits_fnv)"
check "tokens 0, text mode" 0 "" "$K3" run -q --tokens 0 "$PARIS"
expect "tokens 0, text mode: nothing said" "$(size "$T/out")" 0
for n in 1 3; do
    check "dump with $n tokens" 0 "" "$K3" run -q --tokens $n --chunk 4 --dump-logits "$T/rows$n" "$PARIS"
    expect "dump with $n tokens: rows" "$(size "$T/rows$n")" $(((6 + n - 1) * row))
    cmp -s -n $((6 * row)) "$T/rows0" "$T/rows$n" && pass "dump with $n tokens: same prompt rows" ||
        fail "dump with $n tokens: same prompt rows" "they differ"
done
check "dump into no directory" 1 "No such file" "$K3" run -q --dump-logits "$T/none/rows" x
if [ -w /dev/full ]; then
    check "dump to a full device" 1 "/dev/full: No space left" "$K3" run -q --dump-logits /dev/full x
    check "trace to a full device" 1 "/dev/full: " "$K3" run -q --trace-hash=/dev/full x
    [ -c /dev/full ] && pass "the device is still there" || fail "the device is still there" "removed"
    check "stdout on a full device" 1 "stdout: No space left" sh -c "'$K3' run -q x >/dev/full"
    check "tokenize to a full device" 1 "stdout: No space left" sh -c "'$K3' tokenize -q x >/dev/full"
else
    skip "full device" "no /dev/full"
fi
check "dump over the file size limit" 1 "rows: File too large" \
    bash -c "trap '' XFSZ; ulimit -f 12; exec '$K3' run -q --dump-logits '$T/rows' '$PARIS'"
[ ! -e "$T/rows" ] && pass "a partial dump is removed" || fail "a partial dump is removed" "still there"
check "trace to a file" 0 "" "$K3" run -q --json --tokens 5 --no-stop --trace-hash="$T/trace" "$PARIS"
expect "trace: a line for each position and layer, and the hash" "$(grep -c '^trace ' "$T/trace") $(tail -1 "$T/trace")" \
    "$((10 * 9)) trace_fnv $(json trace_fnv)"
check "trace to stderr" 0 "^trace 0 0 [0-9a-f]{16}$" "$K3" run -q --tokens 0 --trace-hash "$PARIS"

# ---- Golden hashes -------------------------------------------------------------------------

# The three hashes of every golden prompt, from the best kernels.
while read -r index ids; do
    case $index in '#') continue ;; esac
    "$K3" run -q --json --tokens 32 --no-stop --trace-hash=/dev/null --ids "$ids" >"$T/out" 2>"$T/err"
    expect "golden prompt $index" "$(json ids_fnv) $(json logits_fnv) $(json trace_fnv)" \
        "$(awk -F'\t' -v i="$index" '$1 == i {print $2, $3, $4}' "$DEMO/bits.tsv")"
done <tests/data/golden_prompts.tsv

# Two of them from every kernel set, with other threads and chunks; `ref` is the slow one and
# runs them all once.
awk -F'\t' '!/^#/ {print "ids:" $2}' tests/data/golden_prompts.tsv >"$T/prompts"
awk -F'\t' 'NR > 1 {print $2, $3}' "$DEMO/bits.tsv" >"$T/want"
total=
"$K3" info -q | sed -n 's/^kernels *//p; ' | sed 's/ - best.*//; s/ (not on this CPU)/:no/g' >"$T/kernels"
for set in $(cat "$T/kernels"); do
    case $set in *:no)
        skip "golden hashes, ${set%:no}" "not on this CPU"
        continue
        ;;
    esac
    for how in "--threads 1 --chunk 1" "--threads 2 --chunk 7" "--threads 3 --chunk 64"; do
        n=13
        [ "$set" = ref ] && [ "$how" != "--threads 2 --chunk 7" ] && n=7
        [ -n "${K3_SAN:-}" ] && n=3 # a sanitizer is slow, and the plain build compares all hashes
        head -$n "$T/prompts" >"$T/some"
        # shellcheck disable=SC2086
        check "bench, $set $how" 0 "" "$K3" bench -q --kernels $set $how --prompts "$T/some" || continue
        awk -F'\t' 'NR > 1 && !/^#/ {print $6, $7}' "$T/out" >"$T/got"
        head -$n "$T/want" | cmp -s - "$T/got" && pass "golden hashes, $set $how, $n prompts" ||
            fail "golden hashes, $set $how" "they differ"
        [ $n = 13 ] && total=$(awk -F'\t' '/^# total/ {print $7}' "$T/out")
    done
done

# ---- Tokenize ------------------------------------------------------------------------------

check "tokenize" 0 "6 ids" "$K3" tokenize "$PARIS"
expect "tokenize: first line" "$(head -1 "$T/out")" "343	The"
check "tokenize to ids" 0 "" "$K3" tokenize -q --ids-only "$PARIS"
expect "tokenize to ids: golden" "$(cat "$T/out")" "343,336,327,444,1489,311"
check "text mode" 0 "" "$K3" tokenize -q --ids-only "<|end_of_msg|>"
[ "$(cat "$T/out")" != 1794 ] && pass "special spelling is text" || fail "special spelling is text" "1794"
check "control mode" 0 "" "$K3" tokenize -q --ids-only --control "<|end_of_msg|>"
expect "special spelling is control" "$(cat "$T/out")" 1794
check "escapes" 0 "" "$K3" tokenize -q --prompt-file "$T/invalid"
grep -q 'xff$' "$T/out" && pass "invalid bytes are escaped" || fail "invalid bytes are escaped" "$(cat "$T/out")"
for i in 0 1 2 3 4 5 6 7 8 9 a b c d e f; do for j in 0 1 2 3 4 5 6 7 8 9 a b c d e f; do
    # shellcheck disable=SC2059
    printf "\\x$i$j"
done; done >"$T/bytes"
"$K3" tokenize -q --ids-only --prompt-file "$T/bytes" >"$T/ids" 2>"$T/err"
check "decode" 0 "" "$K3" tokenize -q --decode --ids "$(cat "$T/ids")"
cmp -s "$T/out" "$T/bytes" && pass "decode gives every byte back" || fail "decode gives every byte back" "they differ"
check "decode of an unknown id" 2 "number 2, 99999" "$K3" tokenize -q --decode --ids 3,99999

# ---- Bench, verify, info -------------------------------------------------------------------

check "bench" 0 "" "$K3" bench -q --tokens 4 --repeats 2
expect "bench: sixteen columns, seven lines" "$(awk -F'\t' '{print NF}' "$T/out" | sort | uniq -c | tr -s ' ')" " 7 16"
fnv=$(awk -F'\t' '/^# total/ {print $7}' "$T/out")
check "bench --expect, the same" 0 "" "$K3" bench -q --tokens 4 --expect "$fnv"
check "bench --expect, another" 5 "$fnv.*0123456789abcdef" "$K3" bench -q --tokens 4 --expect 0123456789abcdef
printf 'ids:1,x\n' >"$T/badprompts"
check "bench, bad prompts file" 2 "line 1: number 2, 'x'" "$K3" bench -q --prompts "$T/badprompts"
check "bench, empty prompts file" 2 "no prompt" "$K3" bench -q --prompts "$T/empty"
check "bench, absent prompts file" 1 "No such file" "$K3" bench -q --prompts "$T/none"
check "bench, missing kernels" 2 "nope" "$K3" bench -q --kernels nope
if [ -n "$total" ]; then
    check "bench --expect over all golden prompts" 0 "" "$K3" bench -q --prompts "$T/prompts" --expect "$total"
else
    skip "bench --expect over all golden prompts" "slow under a sanitizer"
fi

check "verify" 0 "" "$K3" verify -q
grep -q "256 of 256 experts" "$T/out" && pass "verify: every expert" || fail "verify: every expert" "$(cat "$T/out")"
check "verify --golden of another model" 2 "released weights.*93.*163840.*9 and 2048" "$K3" verify -q --golden
check "verify, truncated shard" 3 "model-00003" "$K3" verify -q --model "$T/short"
if command -v python3 >/dev/null; then
    broken badscale model-00001-of-000003.safetensors
    python3 - "$DEMO/model-00001-of-000003.safetensors" "$T/badscale/model-00001-of-000003.safetensors" <<'PY'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
n = struct.unpack("<Q", data[:8])[0]
head = json.loads(data[8:8 + n])
name = sorted(k for k in head if "experts." in k and k.endswith("weight_scale"))[0]
data[8 + n + head[name]["data_offsets"][0]] = 253
open(sys.argv[2], "wb").write(data)
PY
    check "verify finds a bad scale code" 3 "expert" "$K3" verify -q --model "$T/badscale"
else
    skip "verify finds a bad scale code" "no python3"
fi
# A file that was made in its full size and only half written, as a stopped download leaves it.
broken unwritten model-00002-of-000003.safetensors
cp "$DEMO/model-00002-of-000003.safetensors" "$T/unwritten/"
n=$(size "$T/unwritten/model-00002-of-000003.safetensors")
truncate -s $((n / 2)) "$T/unwritten/model-00002-of-000003.safetensors"
truncate -s "$n" "$T/unwritten/model-00002-of-000003.safetensors"
check "verify, bytes never written" 5 "bytes are zeros and nothing else \(model-00002-of-000003.safetensors, offset 0x" "$K3" verify -q --model "$T/unwritten"
check "run, bytes never written" 0 "note: .* bytes are zeros and nothing else .*k3 verify" "$K3" run --no-stop --tokens 40 --model "$T/unwritten" --ids 1,2,3
expect "run, bytes never written: few notes" "$(grep -c "zeros and nothing else" "$T/err")" 8
if command -v python3 >/dev/null; then # counts in config.json that no header bears out
    broken counts config.json
    python3 - "$DEMO/config.json" "$T/counts/config.json" <<'PY'
import json, sys
c = json.load(open(sys.argv[1]))
t = c["text_config"]
t["linear_attn_config"].update(kda_layers=list(range(1, 1025)), full_attn_layers=[])
t.update(num_hidden_layers=1024, num_experts=65535)
json.dump(c, open(sys.argv[2], "w"))
PY
    for cmd in info "plan --ram 64M" "run --ids 1 --ram 64M" "verify --ram 64M"; do
        # shellcheck disable=SC2086
        check "hostile counts: $cmd" 3 "1024 layers, 1023 of them with 65535 experts each.*headers of 3 shards name at most" \
            python3 -c 'import resource, subprocess, sys
rc = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
sys.exit(rc)' "$K3" $cmd -q --model "$T/counts"
        [ "$(tail -1 "$T/out")" -le 104 ] && pass "hostile counts, memory: $cmd" || fail "hostile counts, memory: $cmd" "$(tail -1 "$T/out") MiB"
    done
else
    skip "hostile counts" "no python3"
fi
check "info" 0 "" "$K3" info -q --context 1000
grep -q "1000 positions" "$T/out" && grep -q "k3-f32-dot16-q40" "$T/out" && pass "info: memory and numerics" ||
    fail "info: memory and numerics" "$(cat "$T/out")"

check "info --kernels-list" 0 "" "$K3" info --kernels-list --model "$T/none"
expect "info --kernels-list: what info says" "$(cat "$T/out")" "$(tr ' ' '\n' <"$T/kernels" | grep -v ':no$' | xargs)"

# ---- Budget, plan, disk --------------------------------------------------------------------

# Two threads throughout: the floor depends on their number.
golden_ids=$(awk -F'\t' '$1 == 0 {print $2}' tests/data/golden_prompts.tsv)
golden_want=$(awk -F'\t' '$1 == 0 {print $2, $3}' "$DEMO/bits.tsv")
check "plan" 0 "" "$K3" plan -q --threads 2
floor=$(awk '/^floor/ {print $4}' "$T/out")
[ "${floor:-0}" -gt 1000000 ] && pass "plan: the floor in bytes" || fail "plan: the floor in bytes" "$(cat "$T/out")"
grep -q "everything is in memory" "$T/out" && pass "plan: all fits" || fail "plan: all fits" "$(cat "$T/out")"
check "plan at the floor" 0 "" "$K3" plan -q --threads 2 --ram "$floor" --disk 6.3
expect "plan at the floor: budget" "$(awk '/^budget/ {print $4}' "$T/out")" "$floor"
expect "plan: the parts are the budget" "$(awk '/^  [a-z]/ && !/GB.s/ {for (i = 2; i < NF; i++) if ($i ~ /^([KMGT]i)?B$/) {sum += $(i + 1); break}} END {print sum}' "$T/out")" "$floor"
grep -q "at 6.3 GB/s" "$T/out" && pass "plan --disk" || fail "plan --disk" "$(cat "$T/out")"
"$K3" plan -q --reader >"$T/out" 2>"$T/err" # in a container without a disk this is an error that says so
case $? in
0) grep -q "^this disk .*GB/s" "$T/out" && pass "plan --reader" || fail "plan --reader" "$(cat "$T/out")" ;;
*) grep -q -- "--reader: " "$T/err" && skip "plan --reader" "$(cat "$T/err")" || fail "plan --reader" "$(cat "$T/err")" ;;
esac
check "plan below the floor" 4 "below the floor.*$floor bytes" "$K3" plan -q --threads 2 --ram $((floor - 1))
expect "plan below the floor: the table" "$(awk '/^floor/ {print $4} /^at the floor/ {print "shown"}' "$T/out" | xargs)" "$floor shown"
check "plan far below the floor" 4 "below the floor.*$floor bytes" "$K3" plan -q --threads 2 --ram 1M
check "plan, a larger context" 0 "" "$K3" plan -q --threads 2 --context 2048
[ "$(awk '/^floor/ {print $4}' "$T/out")" -lt "$floor" ] && pass "plan: the context counts" || fail "plan: the context counts" "$(cat "$T/out")"
check "plan, context beyond the model" 2 "100000.*4096" "$K3" plan -q --context 100000
check "run below the floor" 4 "below the floor.*$floor bytes" "$K3" run -q --threads 2 --ram $((floor - 1)) --ids "$golden_ids"
check "bench below the floor" 4 "below the floor.*$floor bytes" "$K3" bench -q --threads 2 --context 4096 --ram $((floor - 1))

# Weights streamed: the same hash however they are read.
mkdir "$T/mirror" "$T/part"
cp "$DEMO"/*.safetensors "$T/mirror"
cp "$DEMO"/model-00002-of-000003.safetensors "$T/part"
golden_at() { # bytes, options...
    local name="golden hash, --ram floor + $(($1 - floor))${2:+ }${*:2}"
    limit "$K3" run -q --json --tokens 32 --no-stop --threads 2 --ids "$golden_ids" --ram "$@" >"$T/out" 2>"$T/err"
    local rc=$?
    if [ $rc = 1 ] && grep -q "io_uring.*--io pool" "$T/err"; then
        skip "$name" "$(cat "$T/err")"
    else
        expect "$name" "$rc $(json ids_fnv) $(json logits_fnv)" "0 $golden_want"
    fi
}
for more in 0 3000000; do
    for how in "" "--io pool" "--io uring" "--direct on" "--direct off" "--io uring --direct on --io-depth 64" \
        "--io-depth 1" "--policy rank" "--policy lru" "--no-look-ahead" "--chunk 1" \
        "--mirror $T/mirror" "--mirror $T/part --mirror $T/mirror --direct on"; do
        # shellcheck disable=SC2086
        golden_at $((floor + more)) $how
    done
done
golden_at $((floor + 3000000))
expect "json: the budget" "$(json ram_bytes)" $((floor + 3000000))
[ "$(json resident_bytes)" -le $((floor + 3000000)) ] && pass "json: within the budget" || fail "json: within the budget" "$(cat "$T/out")"
[ "$(json read_bytes)" -gt 1000000 ] && [ "$(json load_bytes)" -gt 0 ] && pass "json: bytes read" || fail "json: bytes read" "$(cat "$T/out")"
[ "$(json guesses)" -gt 0 ] && [ "$(json expert_uses)" -gt 0 ] && pass "json: experts" || fail "json: experts" "$(cat "$T/out")"
golden_at $((floor + 3000000)) --no-look-ahead
expect "json: no guesses without look-ahead" "$(json guesses) $(json wasted_bytes)" "0 0"
check "streaming is said" 0 "plan: .* read for each chunk" "$K3" run --threads 2 --ram "$floor" "$PARIS"
grep -q "k3: disk: .* read while computing" "$T/err" && grep -q "k3: experts: " "$T/err" && pass "statistics of streaming" ||
    fail "statistics of streaming" "not there"
check "run -v says the plan" 0 "plan: .*expert slots" "$K3" run -v "$PARIS"
check "run -q does not" 0 "" "$K3" run -q --threads 2 --ram "$floor" "$PARIS"
check "bench, streaming" 0 "" "$K3" bench -q --tokens 4 --threads 2 --context 4096 --ram "$floor"
expect "bench, streaming: the same hash" "$(awk -F'\t' '/^# total/ {print $7}' "$T/out")" "$fnv"
expect "bench: bytes read" "$(awk -F'\t' '/^# total/ {print ($12 > 1000000)}' "$T/out")" 1
check "bench, context too small" 1 "--context holds 5" "$K3" bench -q --context 5
check "mirror that is no copy" 3 "short/model-00003-of-000003.safetensors.*not a copy" "$K3" run -q --mirror "$T/short" x
check "mirror without shards" 3 "$T/nothing" sh -c "mkdir '$T/nothing'; '$K3' run -q --mirror '$T/nothing' x"
check "absent mirror" 3 "--mirror $T/none: No such file" "$K3" run -q --mirror "$T/none" x
check "file as mirror" 3 "--mirror $T/empty: not a directory" "$K3" run -q --mirror "$T/empty" x

# A prompt longer than the default context gets the room it needs, as far as the model goes.
long=$(awk 'BEGIN {for (i = 0; i < 4097; i++) printf "%s%d", i ? "," : "", 300 + i % 700}')
check "prompt longer than the model" 1 "4097 ids and this model holds 4096" "$K3" run -q --tokens 0 --ids "$long"
broken longer config.json
sed 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 8192/' "$DEMO/config.json" >"$T/longer/config.json"
if [ -n "${K3_SAN:-}" ]; then
    skip "prompt longer than 4096" "half a minute under a sanitizer"
else
    check "prompt longer than 4096" 0 "context 4099," "$K3" run -v --tokens 2 --model "$T/longer" --ids "$long"
fi

# Peak memory as the system measured it.
peak() { # name, bytes, arguments...: at most so many
    local name="peak memory, $1" most=$2 got
    shift 2
    if ! command -v python3 >/dev/null; then
        skip "$name" "no python3"
    elif grep -aqE '__(asan|tsan)_init' "$K3"; then
        skip "$name" "a sanitizer takes memory of its own"
    else
        got=$(python3 -c 'import resource, subprocess, sys
rc = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(rss if sys.platform == "darwin" else rss * 1024, rc)' "$K3" "$@" 2>"$T/err")
        [ "${got#* }" = 0 ] && [ "${got% *}" -le "$most" ] && pass "$name (${got% *} of $most)" ||
            fail "$name" "bytes and exit: $got, at most $most"
    fi
}
for more in 0 1000000 3000000 20000000; do
    ram=$((floor + more))
    peak "floor + $more" $ram run -q --ram $ram --threads 2 --tokens 200 --no-stop "$PARIS"
done
peak "full context" $((floor + 3000000)) run -q --ram $((floor + 3000000)) --threads 2 --tokens 1 --ids "${long%,*}"
peak "bench at the floor" "$floor" bench -q --ram "$floor" --threads 2 --context 4096
peak "rows dumped at the floor" "$floor" run -q --ram "$floor" --threads 2 --tokens 3 --dump-logits "$T/peak_rows" --json "$PARIS"

# ---- A terminal ------------------------------------------------------------------------------

# The progress line: there on a terminal, at most ten times a second, wiped before anything else.
if command -v python3 >/dev/null; then
    cat >"$T/terminal.py" <<'PY'
import os, pty, re, subprocess, sys, time
master, slave = pty.openpty()
start = time.time()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=slave)
os.close(slave)
seen = b""
while True:
    try:
        got = os.read(master, 65536)
    except OSError:
        break
    if not got:
        break
    seen += got
took = time.time() - start
assert child.wait() == 0, seen
parts = seen.split(b"\r\x1b[K")
lines = [p for p in parts if re.match(rb"(prompt|answer|loading|headers|checking): ", p)]
assert any(re.fullmatch(rb"answer: layer \d+, [0-9.]+ GB/s, \d+ ids, [0-9.]+ tok/s, at most \d+ s left", p) for p in lines), parts
assert any(p.startswith(b"prompt: layer ") and b"positions left" in p for p in lines), parts
assert len(lines) <= 10 * took + 1, (len(lines), took)
assert not re.match(rb"(prompt|answer)", parts[-1]), parts[-1]
assert all(b"\n" not in p for p in lines), lines
PY
    if limit python3 "$T/terminal.py" "$K3" run --threads 2 --ram "$floor" --no-stop --tokens 900 --ids "$(echo "$long" | cut -d, -f1-600)" >"$T/out" 2>"$T/err"; then
        pass "progress on a terminal"
    else
        fail "progress on a terminal" "$(tail -1 "$T/err")"
    fi
else
    skip "progress on a terminal" "no python3"
fi
"$K3" run --threads 2 --ram "$floor" --no-stop --tokens 200 "$PARIS" >"$T/out" 2>"$T/err"
grep -q "$(printf '\033')" "$T/err" && fail "no progress without a terminal" "it is there" || pass "no progress without a terminal"

# ---- Sums, pins, routing traces -----------------------------------------------------------

cp -r "$DEMO" "$T/model"
check "verify --write-sums" 0 "" "$K3" verify -q --write-sums --model "$T/model"
grep -q "sums written" "$T/out" && [ -s "$T/model/k3.sums" ] && pass "sums beside the model" || fail "sums beside the model" "none"
check "verify with sums" 0 "" "$K3" verify -q --model "$T/model" --mirror "$DEMO"
grep -q "sums too" "$T/out" && pass "verify says so" || fail "verify says so" "$(cat "$T/out")"
check "run with sums" 0 "logits_fnv e872884d0510aac5" "$K3" run --model "$T/model" "$PARIS"
printf '\001' | dd of="$T/model/model-00001-of-000003.safetensors" bs=1 seek=500000 conv=notrunc 2>/dev/null
check "a damaged byte: verify" 5 "model-00001.*offset 0x[0-9a-f]+ do not match their sum" "$K3" verify -q --model "$T/model"
check "a damaged byte: run" 5 "model-00001.*offset 0x[0-9a-f]+ do not match their sum" "$K3" run -q --model "$T/model" "$PARIS"
check "a damaged byte: verify again" 5 "goes on where it was stopped, at [0-9.]+ %.*$T/model/k3.verify" "$K3" verify --model "$T/model"
grep -q "the same command goes on from here; --anew begins again" "$T/err" && pass "verify says what is next" || fail "verify says what is next" "$(cat "$T/err")"
check "a damaged byte: anew" 5 "do not match their sum" "$K3" verify --anew --model "$T/model"
grep -q "goes on where" "$T/err" && fail "anew" "it goes on" || pass "anew"
if [ "$(id -u)" != 0 ]; then
    chmod 555 "$T/model"
    XDG_CACHE_HOME=$T/xdg check "verify in a directory of others" 5 "the same command goes on" "$K3" verify --model "$T/model"
    chmod 755 "$T/model"
    expect "kept in XDG_CACHE_HOME" "$(find "$T/xdg/k3" -name 'verify-*' | wc -l | tr -d ' ')" 1
else
    skip "verify in a directory of others" "this user writes everywhere"
fi
check "a damaged byte: new sums would hide it" 5 "1 of [0-9]+ sums do not match" "$K3" verify -q --write-sums --model "$T/model"
check "a damaged byte: it is not hidden" 5 "do not match their sum" "$K3" verify -q --model "$T/model"
cp "$T/model/k3.sums" "$T/true.sums"
check "a damaged byte: new sums anyway" 0 "" "$K3" verify -q --write-sums --no-check --model "$T/model"
cmp -s "$T/model/k3.sums" "$T/true.sums" && fail "new sums anyway" "not written" || pass "new sums anyway"
cp "$T/true.sums" "$T/model/k3.sums"
check "a damaged byte: from the mirror" 0 "logits_fnv e872884d0510aac5" "$K3" run --model "$T/model" --mirror "$DEMO" "$PARIS"
check "a damaged byte: --no-check" 0 "" "$K3" run -q --no-check --model "$T/model" "$PARIS"
check "sums that are not there" 1 "none.sums: No such file" "$K3" run -q --sums "$T/none.sums" "$PARIS"
head -c 100 "$T/model/k3.sums" >"$T/short.sums"
check "sums cut short" 3 "short.sums.*--write-sums" "$K3" run -q --sums "$T/short.sums" "$PARIS"
check "sums that cannot be written" 1 "/proc/k3.sums.part.*--sums" "$K3" verify -q --write-sums --sums /proc/k3.sums
rm -rf "$T/model"

for ram in $(seq 53000 40 58000); do # a budget with four slots a layer
    "$K3" plan -q --chunk 1 --ram $((ram * 1024)) | grep -q ", 4 for each" && break
done
check "run --trace" 0 "" "$K3" run -q --trace "$T/trace" --chunk 1 --ram $((ram * 1024)) --no-look-ahead --json --no-stop --tokens 40 "Once upon a time"
hits=$(json expert_hits) uses=$(json expert_uses)
expect "trace: a line for each position and layer" "$(wc -l <"$T/trace")" $(((4 + 39) * 8 + 1))
check "bench --replay" 0 "" "$K3" bench --replay "$T/trace" --write-pins "$T/pins"
expect "replay: the engine's own hits" "$(awk '$1 == 4 { print $4, $5 }' "$T/out")" "$uses $hits"
expect "replay: rank beats lru below a token's experts" "$(awk '$1 <= 4 && $5 > $6' "$T/out" | wc -l)" 4
"$K3" run -q --chunk 1 --ram $((ram * 1024)) --no-look-ahead --policy lru --json --no-stop --tokens 40 "Once upon a time" >"$T/out"
lru=$(json expert_hits)
[ "$lru" -lt "$hits" ] && pass "rank beats lru" || fail "rank beats lru" "$hits, $lru"
"$K3" bench --replay "$T/trace" >"$T/out"
expect "replay: the engine's own hits, lru" "$(awk '$1 == 4 { print $6 }' "$T/out")" "$lru"
check "pins" 0 "logits_fnv e872884d0510aac5" "$K3" run --pins "$T/pins" --ram $((ram * 1024)) "$PARIS"
grep -q "pins: the first [0-9]* of [0-9]* fit" "$T/err" && pass "pins that do not fit" || fail "pins that do not fit" "no note"
head -5 "$T/pins" >"$T/few"
check "a few pins" 0 "logits_fnv e872884d0510aac5" "$K3" run --pins "$T/few" --ram $((ram * 1024)) "$PARIS"
printf '# hot\n\n1 2\n1 2 0.5\n  8 31\t7\n' >"$T/few"
check "pins: comments, doubles, weights" 0 "logits_fnv e872884d0510aac5" "$K3" run --pins "$T/few" --ram $((ram * 1024)) "$PARIS"
i=0
for line in "1" "x 1" "1 x" "1 -2" "0 1" "9 1" "1 32" "1 2x" "99999999999999999999 1"; do
    printf '1 1\n%s\n' "$line" >"$T/bad"
    i=$((i + 1))
    check "bad pins $i" 2 "bad: line 2: " "$K3" run -q --pins "$T/bad" "$PARIS"
done
check "pins that are not there" 1 "none: No such file" "$K3" run -q --pins "$T/none" "$PARIS"
i=0
for line in "0 1 1" "0 9 1:1" "0 1 32:1" "0" "0 1 1:1 2:1 3:1 4:1 5" "x"; do
    (head -1 "$T/trace" && echo "$line") >"$T/bad"
    i=$((i + 1))
    check "bad trace $i" 2 "bad: line 2: " "$K3" bench --replay "$T/bad"
done
head -c 300 "$T/trace" >"$T/bad"
check "a trace cut short" 2 "bad: line .* cut short" "$K3" bench --replay "$T/bad"
check "no trace" 2 "no routing trace; make one" "$K3" bench --replay "$DEMO/config.json"
check "--write-pins alone" 2 "needs --replay" "$K3" bench --write-pins "$T/pins"

# A run that fails leaves an old output file as it was; an output that is no regular file is not replaced by one.
echo precious >"$T/keep"
for option in --trace --dump-logits --trace-hash; do
    check "$option, budget too small" 4 "floor" "$K3" run -q --ids 1 --tokens 1 --ram 1 $option="$T/keep"
    expect "$option: the old file is left" "$(cat "$T/keep")" precious
done
check "one file for two outputs" 2 "are one file" "$K3" run -q --ids 1 --tokens 1 --trace "$T/keep" --dump-logits "$T/keep"
expect "one file: left" "$(cat "$T/keep")" precious
# No output may be a file that is read, or another option's output.
echo "hello" >"$T/read"
check "the prompt written over" 2 "are one file.*written over" "$K3" run -q --prompt-file "$T/read" --trace "$T/read"
check "pins written over" 2 "are one file.*written over" "$K3" run -q --ids 1 --pins "$T/read" --dump-logits "$T/../${T##*/}/read"
check "a trace written over" 2 "are one file.*written over" "$K3" bench --replay "$T/read" --write-pins "$T/read"
check "a new file for two outputs" 2 "two outputs need two" "$K3" run -q --ids 1 --save "$T/both" --trace "$T/./both"
expect "what is read is left" "$(cat "$T/read")" hello
check "an empty name" 2 "an empty name" "$K3" run -q --ids 1 --save ""
check "no file called -" 2 "stdout is for the answer" "$K3" run -q --ids 1 --trace -
check "--load and --save in place" 0 "" sh -c "'$K3' run -q --ids 1 --tokens 1 --save '$T/place' >'$T/out' && '$K3' run -q --ids 2 --tokens 1 --load '$T/place' --save '$T/place'"

ln -s "$T/nobody" "$T/dangling"
check "two outputs through a link to nothing" 2 "two outputs need two" "$K3" run -q --ids 1 --trace "$T/dangling" --dump-logits "$T/nobody"
"$K3" run -q --ids 1 --tokens 1 --save "$T/left" >"$T/out" 2>"$T/err"
mv "$T/left" "$T/left.tmp"
check "a state that was left is loaded and saved" 0 "" "$K3" run -q --ids 2 --tokens 1 --load "$T/left.tmp" --save "$T/left"

# --save tries to make its file before anything is computed.
mkdir "$T/dir"
echo precious >"$T/foreign.tmp"
check "--save into no directory" 1 "^k3: --save: .*nodir/x.tmp: No such file" "$K3" run -q --ids 1 --save "$T/nodir/x"
check "--save to a directory" 1 "not a regular file" "$K3" run -q --ids 1 --save "$T/dir"
check "--save beside a file of somebody's" 1 "is in the way" "$K3" run -q --ids 1 --save "$T/foreign"
expect "it is left" "$(cat "$T/foreign.tmp")" precious

# Prompt files without an end, and files that are no text.
check "a prompt without an end" 1 "more than [0-9]+ bytes: no text of that length fits" "$K3" run -q --ram 60M --prompt-file /dev/zero
check "prompts without an end" 1 "more than [0-9]+ bytes" "$K3" bench -q --ram 60M --prompts /dev/zero
check "pins without an end" 1 "zero: not a regular file" "$K3" run -q --ids 1 --pins /dev/zero
check "pins through a pipe" 1 "not a regular file" bash -c "'$K3' run -q --ids 1 --pins <(echo '1 2')"
head -c 1000 /dev/zero >"$T/zeros"
check "pins that are no text" 2 "line 1 is too long, or no text" "$K3" run -q --ids 1 --pins "$T/zeros"
check "a file larger than may be" 1 "File too large" bash -c "ulimit -f 10; exec '$K3' run -q --ids 1 --save '$T/large'"
[ -e "$T/large.tmp" ] && fail "nothing of it is left" "large.tmp" || pass "nothing of it is left"
check "a new file of a failed run" 4 "floor" "$K3" run -q --ids 1 --tokens 1 --ram 1 --trace "$T/new"
[ -e "$T/new" ] && fail "a new file of a failed run goes" "it is there" || pass "a new file of a failed run goes"
mkfifo "$T/fifo"
check "sums to a pipe" 1 "fifo: not a regular file" "$K3" verify -q --write-sums --sums "$T/fifo"
[ -p "$T/fifo" ] && pass "the pipe is left" || fail "the pipe is left" "it is not"
echo old >"$T/target" && ln -s target "$T/link"
check "sums through a link" 0 "" "$K3" verify -q --write-sums --sums "$T/link"
[ -L "$T/link" ] && [ "$(head -c 6 "$T/target")" = K3SUMS ] && pass "the link's target is written" || fail "the link's target is written" "not"
ls "$T" | grep -q "\.part$" && fail "no part is left" "$(ls "$T")" || pass "no part is left"
check "few open files" 1 "ulimit -n" bash -c "ulimit -Sn 8; ulimit -Hn 8; '$K3' run -q --ids 1 --tokens 1"
cp -r "$DEMO" "$T/old" && printf '\377' | dd of="$T/old/model-00003-of-000003.safetensors" bs=1 seek=3000 conv=notrunc 2>/dev/null
check "a damaged original, a good mirror, no sums" 3 "one of the two is damaged" "$K3" run -q --ids 1 --model "$T/old" --mirror "$DEMO"
check "a damaged original, a good mirror, sums" 0 "e872884d0510aac5" "$K3" run --model "$T/old" --mirror "$DEMO" --sums "$T/link" "$PARIS"
printf 'x' >"$T/bad"
check "info with damaged sums" 0 "" "$K3" info -q --model "$DEMO"
check "plan: damaged sums" 3 "no file of sums" "$K3" plan -q --sums "$T/bad"
check "plan: --no-check" 0 "" "$K3" plan -q --sums "$T/bad" --no-check
for head in "k3-routing 1 9 32 0 9792" "k3-routing 1 9 32 33 9792" "k3-routing 1 4294967297 32 4 9792" "k3-routing 1 9 3 4 9792"; do
    printf '%s\n0 1 1:1 2:1 3:1 4:1\n' "$head" >"$T/bad"
    check "bad trace head: $head" 2 "no routing trace" "$K3" bench --replay "$T/bad"
done
for line in "0 1 1:nan 2:1 3:1 4:1" "0 1 1: 2:1 3:1 4:1" "0 1 1:1 1:1 3:1 4:1" "0 1 1:1" "0 1 1:1 2:1 3:1 4:inf" "0 1 1:-1 2:1 3:1 4:1"; do
    (head -1 "$T/trace" && echo "$line") >"$T/bad"
    check "bad trace: $line" 2 "bad: line 2: " "$K3" bench --replay "$T/bad"
done
for i in $(seq 3000); do echo "1 1"; done >"$T/few"
check "one pin many times" 0 "logits_fnv e872884d0510aac5" "$K3" run --pins "$T/few" --ram $((ram * 1024)) "$PARIS"
grep -q "pins: the first" "$T/err" && fail "one pin many times takes one slot" "$(cat "$T/err")" || pass "one pin many times takes one slot"

# ---- Signals and closed pipes --------------------------------------------------------------

# stopped SIGNAL FILE ARGUMENT...: a run that gets the signal once it has written to FILE
stopped() {
    local signal=$1 file=$2
    shift 2
    "$K3" run "$@" >"$T/out" 2>"$T/err" &
    pid=$!
    for _ in $(seq 200); do
        [ -s "$file" ] && break
        sleep 0.05
    done
    kill -$signal $pid
    for _ in $(seq 600); do
        kill -0 $pid 2>/dev/null || break
        sleep 0.05
    done
    kill -9 $pid 2>/dev/null # it has not ended within half a minute
    wait $pid
}
for sig in INT TERM; do
    : >"$T/out" # so that no old output is looked at
    stopped $sig "$T/out" --no-stop --tokens 4000 "$PARIS"
    expect "SIG$sig: exit" $? 130
    grep -aq "^ P" "$T/out" && grep -q "(interrupt)" "$T/err" && pass "SIG$sig: text and statistics" ||
        fail "SIG$sig: text and statistics" "missing"
done
rm -f "$T/rows"
stopped INT "$T/rows" --json --no-stop --tokens 4000 --dump-logits "$T/rows" "$PARIS"
expect "SIGINT with --json: exit" $? 130
expect "SIGINT with --json: reason" "$(json stop_reason)" interrupt
expect "SIGINT: the dump is whole rows" "$(size "$T/rows")" $((($(json n_prompt) + $(json n_gen) - 1) * row))
# The state of an answer that was stopped is kept: the step in hand ends first.
stopped INT "$T/rows2" --json --no-stop --tokens 4000 --save "$T/stopped" --dump-logits "$T/rows2" "$PARIS"
expect "SIGINT with --save: exit" $? 130
n_stopped=$(($(json n_prompt) + $(json n_gen)))
"$K3" run -q --json --tokens 1 --load "$T/stopped" --ids 5 >"$T/out" 2>"$T/err"
expect "SIGINT with --save: the state" "$(json n_loaded)" "$n_stopped"
for option in --psk-file=x --tier-ca=x --tier-cert=x --tier-key=x --tier-audit=1/2 --tier-hedge; do
    misuse "${option%=*} and no box" "of which box" run -q $option x
done
misuse "--tier-hedge and one box" "no second" run -q --tier unix:x --tier-hedge x
misuse "--hop and what it does not do" "are for --tier" bench --hop unix:x --tier-hedge
check "stdout closed" 1 "" bash -c "'$K3' run -q '$PARIS' >&-"
check "stdout closed, dump intact" 1 "" bash -c "'$K3' run -q --tokens 1 --dump-logits '$T/rows' '$PARIS' >&-"
check "plan, stdout closed" 1 "" bash -c "'$K3' plan -q >&-"
check "info, stdout closed" 1 "" bash -c "'$K3' info -q >&-"
check "reader leaves" 0 "" bash -c "'$K3' run -q --no-stop --tokens 4000 '$PARIS' | head -c 3 >/dev/null; [ \${PIPESTATUS[0]} = 1 ]"

echo "test_cli: $n_passed passed, $n_failed failed, $n_skipped skipped"
[ $n_failed = 0 ]

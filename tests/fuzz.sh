#!/bin/bash
# fuzz.sh - SECONDS on each fuzz target with libFuzzer, ASan and UBSan (clang).
#
#   tests/fuzz.sh [SECONDS]
#
# Findings are left in build-fuzz/; minimised ones belong in tests/corpus/.
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-60}
dir=build-fuzz
mkdir -p $dir
command -v clang >/dev/null || { echo "fuzz: SKIP clang is not installed"; exit 77; }
for target in text config header index state tier slice; do
    more="k3_disk.c k3_ledger.c k3_temp.c k3_resume.c experts.c k3_pool.c k3_machine.c tier_client.c tier_dial.c"
    [ $target = text ] || [ $target = slice ] || more="$more k3_mla.c k3_sums.c k3_sample.c" # with the engine
    [ $target != state ] || more="$more k3_model.c k3_state.c"
    [ $target != tier ] || more="k3.c k3_model.c ${more/tier_client.c/} tier_tls.c" # fuzz_tier.c includes client and server
    # shellcheck disable=SC2086
    clang -std=c99 -D_GNU_SOURCE -O1 -g -fsanitize=fuzzer,address,undefined -Wno-unused-function \
        -o $dir/fuzz_$target tests/fuzz_$target.c $more -luring -ljson-c -lzstd -lssl -lcrypto \
        -lpthread -lm
    mkdir -p $dir/corpus_$target
    $dir/fuzz_$target -max_total_time="$seconds" -artifact_prefix=$dir/ -print_final_stats=1 \
        $dir/corpus_$target tests/corpus/$target
done

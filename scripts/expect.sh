#!/bin/sh
# expect.sh - the table of README.md: how long Kimi K3 takes with so much memory and such a disk.
#
#   K3=build/k3 scripts/expect.sh            the table, from `k3 plan --released`
#   MODEL=DIR scripts/expect.sh              the same from the headers of a downloaded model
#   scripts/expect.sh --write                put the table into README.md
#
# `k3 plan` computes all figures from the released geometry; nothing is measured. One thread count is
# named, so that every machine prints the same table.
set -eu
cd "$(dirname "$0")/.."
: "${K3:=build/k3}"

# plan RAM DISK: print the plan for 8 threads of a common speed
plan() {
    if [ -n "${MODEL:-}" ]; then
        "$K3" plan -q --model "$MODEL" --threads 8 --gflops 60 --ram "$1" --disk "$2"
    else
        "$K3" plan -q --released --threads 8 --gflops 60 --ram "$1" --disk "$2"
    fi
}

# cells RAM DISK: print the time to the first token of a prompt of 100 ids, and the time of each token
cells() {
    plan "$1" "$2" | awk '/ a token, where the disk/ { token = sprintf("%.1f s", $4) }
        $1 == 100 && $2 == "ids" { first = $(NF - 1) " " $NF }
        END { if (token == "" || first == "") exit 1; print first ", " token }'
}

table() {
    echo "| \`--ram\` | disk of 3 GB/s | 7 GB/s | 14 GB/s |"
    echo "|---|---|---|---|"
    for ram in 8 24 64 128; do
        slow=$(cells ${ram}G 3) && middle=$(cells ${ram}G 7) && fast=$(cells ${ram}G 14) || exit 1
        echo "| $ram GiB | $slow | $middle | $fast |"
    done
}

if [ "${1:-}" = --write ]; then
    new=$(mktemp)
    trap 'rm -f "$new"' EXIT
    { sed '/^<!-- made by scripts\/expect.sh -->$/q' README.md; table; sed -n '/^<!-- end -->$/,$p' README.md; } >"$new"
    cat "$new" >README.md
else
    table
fi

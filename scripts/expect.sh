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

# field RAM DISK SED-EXPRESSION: one figure of a plan
plan() {
    if [ -n "${MODEL:-}" ]; then
        "$K3" plan -q --model "$MODEL" --threads 8 --ram "$1" --disk "$2"
    else
        "$K3" plan -q --released --threads 8 --ram "$1" --disk "$2"
    fi
}
per_token() { plan "$1" "$2" | sed -n 's/^ *at .* GB\/s  *\([0-9.]*\) s a token.*/\1/p' | awk '{ printf "%.1f s", $1 }'; }

table() {
    echo "| \`--ram\` | a token, disk of 3 GB/s | 7 GB/s | 14 GB/s |"
    echo "|---|---|---|---|"
    for ram in 8G 24G 64G 128G; do
        echo "| ${ram%G} GiB | $(per_token $ram 3) | $(per_token $ram 7) | $(per_token $ram 14) |"
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

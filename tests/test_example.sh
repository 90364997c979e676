#!/bin/sh
# test_example.sh - the usage example at the top of k3.h compiles, links and runs.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${BUILD:=build}" "${CC:=cc}"
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
{
    cat <<'EOF'
#include "k3.h"
#include <stdio.h>
#include <stdlib.h>
static void die(const char *text) { fputs(text, stderr); exit(1); }
int main(void) {
EOF
    sed -n '/^ \*     k3_options o;/,/^ \*     k3_session_free/s/^ \*//p' k3.h
    echo 'printf("%u", next); free(logits); return 0; }'
} >"$dir/example.c"
if $CC -std=c99 -Wall -I. -o "$dir/example" "$dir/example.c" "$BUILD/libk3.a" ${K3_LIBS:--lcurl -luring -ljson-c -lzstd -lssl -lcrypto -lpthread -lm} &&
    [ "$("$dir/example")" = 1379 ]; then # " Paris" of demo/golden.json
    echo "example: 1 passed, 0 failed, 0 skipped"
else
    echo "example: 0 passed, 1 failed, 0 skipped"
    exit 1
fi

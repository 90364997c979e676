#!/bin/bash
# test_couplings.sh - constants that depend on each other: a wrong value does not compile.
#
# Each case changes one constant in a copy of the sources and compiles one file; the compiler must refuse it
# and name the rule (STATIC_ASSERT of k3_common.h). Without the rules some of these values would change the
# bits from run to run without any error.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${CC:=cc}"
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
cp ./*.c ./*.h "$T" && mkdir "$T/cli" && cp cli/*.h "$T/cli" || exit 1
passed=0 failed=0

compiles() { # FILE [FLAGS]: the compiler's messages go to $T/said
    (cd "$T" && $CC -std=c99 -D_GNU_SOURCE -I. -fsyntax-only ${2:-} "$1") >"$T/said" 2>&1
}

# wrong FILE CONSTANT VALUE COMPILED RULE [FLAGS]: with CONSTANT set to VALUE in FILE, COMPILED must break RULE
wrong() {
    cp "$1" "$T/saved"
    sed -E "s/^(#define $2 +).*/\\1$3/" "$1" >"$T/$1"
    if cmp -s "$1" "$T/$1"; then
        echo "FAIL $1 has no #define $2"
        failed=$((failed + 1))
    elif compiles "$4" "${6:-}"; then
        echo "FAIL $2 $3 in $1 compiles"
        failed=$((failed + 1))
    elif ! grep -q "'$5'\|‘$5’\|$5\[" "$T/said"; then
        echo "FAIL $2 $3 in $1: $(head -1 "$T/said")"
        failed=$((failed + 1))
    else
        passed=$((passed + 1))
    fi
    cp "$T/saved" "$T/$1"
}

if compiles k3.c; then passed=$((passed + 1)); else echo "FAIL k3.c as it is: $(head -1 "$T/said")"; failed=$((failed + 1)); fi
wrong experts.h ROW_TILE 48 experts.c row_tile_is_whole_groups
wrong experts.h ROW_TILE 64 experts.c row_tile_is_whole_kernel_rows
wrong experts.h ROW_TILE 288 k3.c halves_of_row_tile_are_whole_kernel_rows
wrong experts.h ROW_TILE 192 k3.c streamed_pieces_are_whole_tiles
wrong k3_inside.h PIECE_ROWS 32 k3.c streamed_pieces_are_whole_tiles
wrong k3_mla.c MLA_BLOCK 512 k3_mla.c mla_block_is_that_of_numerics_3
wrong k3.c CHUNK_SHORT 1024 k3.c a_planned_chunk_fits_a_request
wrong k3_sample.c RADIX_BITS 10 k3_sample.c digits_cover_a_key
wrong k3_sample.c SAMPLE_BINS 131072u k3_sample.c a_bin_fits_its_number
wrong k3_disk.h IO_ALIGN 512u k3_disk.c io_align_is_a_block
wrong kernels.h K3_GROUP 64 k3_model.c mxfp4_group_is_a_packed_group
wrong kernels.h K3_KERNEL_ROWS 9 experts.c row_tile_is_whole_kernel_rows
wrong k3.h K3_MAX_COPIES 9 k3.c copies_fit_a_byte_of_bits
wrong k3.h K3_MAX_TOP_K 64 k3_model.c choices_fit_the_wire
wrong k3.h K3_MAX_LAYERS 2048 k3_model.c layers_fit_the_wire
wrong experts.h K3_MAX_SHARDS 65536 k3.c no_shard_is_none
wrong slice.h SLICE_MAX_EXPERTS 8192u k3_model.c slices_keep_to_the_wire
wrong tier.h TIER_MAX_ROWS 1024 k3.c every_reply_fits_a_frame
wrong tier.h TIER_MAX_CONFIG 65536 k3_model.c every_config_can_be_staged
wrong tier_server.c MAX_STATUS 7 tier_server.c one_place_is_left
wrong tier_keep.h KEEP_MAX_SHARDS 4096u tier_server.c a_kept_directory_can_be_opened
wrong k3_state.h K3_STATE_ROOM 65536 k3_state.c room_suffices
case $($CC -dumpmachine) in
x86_64*)
    wrong kernels_panel.h STRIP 12 kernels_avx2.c strip_is_whole_blocks -mavx2\ -mfma
    wrong kernels_avx2.c TILE_ROWS 4 kernels_avx2.c tiles_fill_the_kernel_rows -mavx2\ -mfma
    ;;
esac
echo "couplings: $passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

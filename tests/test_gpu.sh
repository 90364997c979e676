#!/bin/sh
# test_gpu.sh - the GPU arm: its kernels against the CPU's bits, then a whole answer with a box that
# serves from VRAM, then compute-sanitizer. BUILD is the build directory. Prints SKIP where there is
# no nvcc or no device.
set -u
BUILD=${BUILD:-build} NVCC=${NVCC:-nvcc}
command -v "$NVCC" >/dev/null || { echo "SKIP GPU: no nvcc"; exit 0; }
make --no-print-directory BUILD="$BUILD" NVCC="$NVCC" GPU=1 all "$BUILD/test_gpu" || exit 1
"$BUILD/test_gpu"
rc=$?
[ $rc = 77 ] && exit 0
[ $rc = 0 ] || exit 1
"$BUILD/test_gpu" --million || exit 1
"$BUILD/test_gpu" --lost || exit 1
K3=$BUILD/k3 K3_TIER=$BUILD/k3-tier tests/test_tier_gpu.sh demo --device || exit 1
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if ! command -v "$sanitizer" >/dev/null; then
    echo "SKIP compute-sanitizer: not here"
    exit 0
fi
for tool in memcheck racecheck; do
    "$sanitizer" --tool $tool --error-exitcode 9 "$BUILD/test_gpu" --tiny || {
        echo "FAIL compute-sanitizer $tool"
        exit 1
    }
done

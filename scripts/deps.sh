#!/bin/sh
# deps.sh - install what k3 needs and this machine lacks, on Debian and Ubuntu.
#
#   scripts/deps.sh build [test] [ci]
#
# build: compiler, make, libraries            test: numpy for the reference, zstd, openssl, a bad network
# ci:    clang, cross compiler and emulator for AArch64
#
# Nothing is asked of the network when nothing is missing. On another system the list of
# packages is printed instead.
set -eu

want=""
for set in "${@:-build}"; do
    case $set in
    build) want="$want gcc make libc6-dev libjson-c-dev liburing-dev
           libxxhash-dev libedit-dev libzstd-dev libssl-dev libcurl4-openssl-dev" ;;
    test) want="$want python3 python3-numpy zstd openssl iproute2 nftables" ;;
    ci) want="$want clang libomp-dev libclang-rt-14-dev gcc-aarch64-linux-gnu qemu-user
              libc6-dev-arm64-cross libjson-c-dev:arm64 liburing-dev:arm64
              libzstd-dev:arm64 libssl-dev:arm64" ;;
    *) echo "deps.sh: unknown set '$set': build, test or ci" >&2; exit 2 ;;
    esac
done

if ! command -v dpkg-query >/dev/null; then
    echo "deps.sh: not a Debian system; k3 needs the counterparts of:$want" >&2
    exit 0
fi

missing=""
for package in $want; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$status" = "install ok installed" ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

sudo=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "deps.sh: as root, install:$missing" >&2; exit 1; }
    sudo=sudo
fi
echo "installing:$missing" >&2
case $missing in *:arm64*) $sudo dpkg --add-architecture arm64 ;; esac
$sudo apt-get -qq update
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $sudo apt-get -qq install -y --no-install-recommends $missing >/dev/null

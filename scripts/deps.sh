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
           libxxhash-dev libedit-dev libzstd-dev libssl-dev libcurl4-openssl-dev libmicrohttpd-dev" ;;
    test) want="$want python3 python3-numpy zstd openssl iproute2 nftables pkgconf groff-base" ;;
    ci) want="$want clang @libclang-rt gcc-aarch64-linux-gnu qemu-user
              libc6-dev-arm64-cross libjson-c-dev:arm64 liburing-dev:arm64
              libzstd-dev:arm64 libssl-dev:arm64" ;;
    *) echo "deps.sh: unknown set '$set': build, test or ci" >&2; exit 2 ;;
    esac
done

if ! command -v dpkg-query >/dev/null; then
    echo "deps.sh: not a Debian system; k3 needs the counterparts of:$want" >&2
    exit 0
fi

# clang's runtime of the sanitizers carries clang's version in its name
clang_rt() {
    version=$(dpkg-query -W -f '${Version}' clang 2>/dev/null) ||
        version=$(apt-cache policy clang | sed -n 's/^  Candidate: //p')
    version=${version#*:}
    echo "libclang-rt-${version%%.*}-dev"
}
native=$(dpkg --print-architecture)
missing_of() {
    missing=""
    for package in $want; do
        [ "$package" = @libclang-rt ] && package=$(clang_rt)
        arch=$native # one line for each architecture that the package is installed for
        case $package in *:*) arch=${package#*:} ;; esac
        dpkg-query -W -f '${Status} ${Architecture}\n' "$package" 2>/dev/null |
            grep -Eq "^install ok installed ($arch|all)$" || missing="$missing $package"
    done
}
missing_of
[ -n "$missing" ] || exit 0

sudo=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "deps.sh: as root, install:$missing" >&2; exit 1; }
    sudo=sudo
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# apt ARGUMENT...: run apt-get; where another apt holds a lock, wait for it up to five minutes: apt-get itself waits
# for dpkg's lock, this function for that of the lists
apt() {
    n=0
    until $sudo env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" </dev/null >"$log" 2>&1; do
        if ! grep -q 'Could not get lock' "$log" || [ $n -ge 60 ]; then
            cat "$log" >&2
            echo "deps.sh: apt-get $1 failed; as root, install:$missing" >&2
            exit 1
        fi
        [ $n -gt 0 ] || echo "deps.sh: another apt is at work; waiting for it, up to 5 minutes" >&2
        n=$((n + 1))
        sleep 5
    done
}
echo "installing:$missing" >&2
case $missing in *:arm64*) $sudo dpkg --add-architecture arm64 ;; esac
apt update
missing_of # only the new lists may say which version of clang there is
# shellcheck disable=SC2086
apt install -y --no-install-recommends $missing

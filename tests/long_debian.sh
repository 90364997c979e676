#!/usr/bin/env bash
# long_debian.sh - a stranger's first hour: `make demo` and `make test` on a minimal Debian.
#
#     tests/long_debian.sh [RELEASE ...]                 (default: bookworm trixie)
#
# debootstrap makes a minimal root of each release from the mirror that this machine's apt uses. It
# gets make and this checkout's tracked files. In it:
#   1. root, under nohup, without a terminal, without LANG: `make demo`, then `make test`
#   2. a user without rights, on a terminal, with a UTF-8 locale: `make test TEST_ARGS=--quick`
#   3. deps.sh waits for another apt that holds its locks
# Each must end well, and no process of it may be left when it has ended. Needs root, debootstrap and
# the network; what is missing is skipped. The root is removed at the end. Two variables are for
# repeating it: DEBIAN_BASE=DIR copies DIR/RELEASE, a fresh minimal root, instead of asking the mirror;
# DEBIAN_STEPS chooses steps, one or more of 1, 2 and 3; `make demo` is always done.
set -u
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
releases=${*:-bookworm trixie}
n_passed=0 n_failed=0 n_skipped=0
steps=${DEBIAN_STEPS:-123}

none() { echo "debian: SKIP $1"; exit 77; }
[ "$(id -u)" = 0 ] || none "needs root, for debootstrap and chroot"
for program in debootstrap unshare chroot apt-get git script; do
    command -v $program >/dev/null || none "$program is not installed"
done
# Mounts and processes are in namespaces of this script's own, and end with it.
if [ -z "${K3_DEBIAN_INSIDE:-}" ]; then
    unshare --mount --pid --fork true 2>/dev/null || none "no right to make namespaces"
    K3_DEBIAN_INSIDE=1 exec unshare --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi
git ls-files >/dev/null 2>&1 || none "no git checkout, so no list of its files"
# The mirror of this machine's apt; "SITE" of the first Debian main component.
mirror=$(apt-get indextargets --format '$(SITE)|$(COMPONENT)|$(ORIGIN)|$(CODENAME)' 'Created-By: Packages' |
    awk -F'|' '$2 == "main" && $3 == "Debian" && $4 !~ /-/ { print $1; exit }')
[ -n "${DEBIAN_BASE:-}${mirror}" ] || none "this machine's apt has no Debian mirror"
T=$(mktemp -d "${TMPDIR:-/var/tmp}/k3-debian-XXXXXX") || exit 1
trap 'for R in "$T"/*/; do umount -lR "${R%/}"; done 2>/dev/null; rm -rf --one-file-system "$T"' EXIT

pass() { n_passed=$((n_passed + 1)); echo "debian: $*"; }
fail() { # NAME REASON FILE
    n_failed=$((n_failed + 1))
    echo "FAIL $1: $2"
    tail -n "${4:-40}" "$3" | sed 's/^/     /'
}

# root_make RELEASE: make a minimal root in $R
root_make() {
    R=$T/$1
    if [ -n "${DEBIAN_BASE:-}" ]; then
        cp -a "$DEBIAN_BASE/$1" "$R" || return 1
    else
        timeout 1200 debootstrap --variant=minbase "$1" "$R" "$mirror" >"$T/$1.log" 2>&1 || return 1
    fi
    mount --bind "$R" "$R" || return 1 # ip netns wants / to be a mount
    # the proxy and the name servers that this machine uses
    apt-config dump | grep -E '^Acquire::https?::' >"$R/etc/apt/apt.conf.d/90host"
    cp -L /etc/resolv.conf "$R/etc/resolv.conf" 2>/dev/null
    mount -t proc proc "$R/proc" && mount -t sysfs -o ro sysfs "$R/sys" && mkdir -p "$R/dev/pts" "$R/dev/shm" &&
        mount -t devpts -o newinstance,ptmxmode=666 devpts "$R/dev/pts" && mount -t tmpfs tmpfs "$R/dev/shm" &&
        rm -f "$R/dev/ptmx" && ln -s pts/ptmx "$R/dev/ptmx" || return 1
    mkdir "$R/home/k3" && git ls-files -z | tar --null -T - -c | tar -x --no-same-owner -C "$R/home/k3"
}

# in_root SECONDS [VARIABLE=VALUE...] COMMAND...: run it in the root, as root, with hardly any environment
proxies=$(env | grep -iE '^(https?_proxy|no_proxy)=' | tr '\n' ' ')
in_root() {
    local seconds=$1
    shift
    # shellcheck disable=SC2086
    timeout -k 5 "$seconds" env -i $proxies PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
        chroot "$R" env -C /home/k3 "$@"
}

# left NAME: check that a second later no process of the root is left
left() {
    local p names=
    sleep 1
    for p in /proc/[0-9]*; do
        [ "$(readlink "$p/root")" = "$R" ] && names+="${p#/proc/} $(tr '\0' ' ' <"$p/cmdline"); "
    done
    if [ -z "$names" ]; then pass "$1: nothing is left running"; else
        echo "$names" >"$T/left"
        fail "$1" "processes are left" "$T/left"
    fi
}

# tests NAME LOG RC: check how a run of the tests ended
tests() {
    local last
    last=$(tr -d '\r' <"$2" | grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' | tail -n 1)
    case $3/$last in
    "0/"*" 0 failed,"*) pass "$1: $last" ;;
    *) fail "$1" "exit $3, '$last'" "$2" 150 ;;
    esac
}

bare() { # RELEASE: step 1
    local log=$T/$1.demo rc
    in_root 600 apt-get -qq update >"$log" 2>&1 && in_root 600 apt-get -qq install -y --no-install-recommends make >>"$log" 2>&1 ||
        { fail "$1: make" "apt-get cannot install it" "$log"; return; }
    in_root 1800 setsid -w nohup make demo >"$log" 2>&1 </dev/null
    rc=$?
    if [ $rc = 0 ] && grep -q "ids_fnv 5ba5bc349cf7ef9d logits_fnv e872884d0510aac5" "$log" && grep -q "What to do next" "$log" &&
        ! grep -Eiq "no such file|not found|warning:" "$log"; then
        pass "$1: make demo"
    else
        fail "$1: make demo" "exit $rc, or something that is missing or a warning" "$log" 60
        return
    fi
    case $steps in *1*) ;; *) return ;; esac
    in_root 3600 setsid -w nohup make -j2 test >"$log" 2>&1 </dev/null
    tests "$1: make test without terminal and LANG, under nohup" "$log" $?
    grep -Ei "warning:" "$log" && fail "$1: make test" "the compiler warns" "$log" 0
    left "$1: make test"
}

terminal() { # RELEASE: step 2
    local log=$T/$1.terminal
    in_root 60 useradd -m stranger >"$log" 2>&1
    in_root 60 chown -R stranger: /home/k3
    # shellcheck disable=SC2016
    R=$R timeout -k 5 3600 script -qec 'exec env -i PATH=/usr/local/bin:/usr/bin:/bin TERM=xterm LANG=C.UTF-8 HOME=/home/stranger \
        '"$(command -v chroot)"' --userspec=stranger:stranger "$R" env -C /home/k3 make test TEST_ARGS=--quick' /dev/null >"$log" 2>&1 </dev/null
    tests "$1: make test --quick by a user on a terminal" "$log" $?
    left "$1: make test --quick"
}

# Step 3: a program holds both locks of apt for ten seconds.
locked() {
    local log=$T/$1.locked
    in_root 300 apt-get -qq remove -y zstd >"$log" 2>&1 # a package of the set `test`
    cat >"$R/root/hold.py" <<'PY'
import fcntl, time
files = [open(f, "w") for f in ("/var/lib/apt/lists/lock", "/var/lib/dpkg/lock-frontend")]
for f in files: fcntl.lockf(f, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(10)
PY
    in_root 60 python3 /root/hold.py >"$T/held" 2>&1 &
    for _ in $(seq 500); do grep -q held "$T/held" && break; sleep 0.02; done
    in_root 600 scripts/deps.sh test >"$log" 2>&1
    if [ $? = 0 ] && grep -q "another apt is at work" "$log" && [ -x "$R/usr/bin/zstd" ]; then
        pass "$1: deps.sh waits for another apt"
    else
        fail "$1: deps.sh while another apt is at work" "it did not wait, or said nothing" "$log"
    fi
    wait
}

for release in $releases; do
    if ! root_make "$release"; then
        n_skipped=$((n_skipped + 1))
        echo "debian: SKIP $release: no minimal root: $(tail -n 1 "$T/$release.log" 2>/dev/null)"
        continue
    fi
    bare "$release"
    case $steps in *3*) locked "$release" ;; esac
    case $steps in *2*) terminal "$release" ;; esac
    umount -lR "$R"
    rm -rf --one-file-system "$R"
done
echo "debian: $n_passed passed, $n_failed failed, $n_skipped skipped"
[ $n_failed = 0 ]

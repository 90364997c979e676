#!/bin/sh
# install.sh - install k3 below PREFIX, or uninstall it; `make install` and `make uninstall` run it.
#
#   BUILD=build PREFIX=/usr/local DESTDIR= LIBS="-luring ..." scripts/install.sh install | uninstall
#
# Each file that is written, and each directory that was made for it, is listed in PREFIX/share/k3/installed, a
# name a line, relative to PREFIX (f: file; d: directory; r: how many directories had to be made for PREFIX
# itself). uninstall removes what is listed and nothing else, directories only when they are empty. An install
# over an older one removes files that the older one wrote and this one does not.
set -eu
cd "$(dirname "$0")/.."
: "${BUILD:=build}" "${PREFIX:=/usr/local}" "${DESTDIR:=}" "${LIBS:=}"
root=$DESTDIR$PREFIX
list=$root/share/k3/installed

# Print the names of the list that lie inside of PREFIX, whatever else somebody has written into it.
listed() { [ ! -f "$1" ] || grep -Ev '^/|(^|/)\.\.(/|$)|^[fd] *$' "$1" | grep -E '^[fd] ' || :; }

remove() { # LIST: remove its files, then the directories that were made, the deepest first
    listed "$1" | sed -n 's/^f //p' | while IFS= read -r name; do rm -f -- "$root/$name"; done
    listed "$1" | sed -n 's/^d //p' | sort -r | while IFS= read -r name; do
        rmdir -- "$root/$name" 2>/dev/null || :
    done
}

remove_root() { # LIST: remove PREFIX itself and the directories that were made above it
    up=$root
    for _ in $(seq "$(sed -n 's/^r \([0-9]\)$/\1/p' "$1" | tail -n 1 | grep . || echo 0)"); do
        rmdir -- "$up" 2>/dev/null || return 0
        up=$(dirname "$up")
    done
}

make_root() {
    n=0 up=$root
    while [ ! -d "$up" ]; do n=$((n + 1)) up=$(dirname "$up"); done
    mkdir -p -- "$root"
    [ $n = 0 ] || echo "r $n" >>"$new"
}

# Make DIR, relative to PREFIX, and its parents, and list those that were made.
folder() {
    [ "$1" = . ] || [ -d "$root/$1" ] || {
        folder "$(dirname "$1")"
        mkdir -p -- "$root/$1"
        echo "d $1" >>"$new"
    }
}

put() { # MODE FILE NAME
    folder "$(dirname "$3")"
    install -m "$1" -- "$2" "$root/$3"
    echo "f $3" >>"$new"
}

manual_tier() { # print k3-tier's own help as a manual page
    printf '.TH K3-TIER 1 "" "%s" "User Commands"\n' "$("$BUILD/k3-tier" -V)"
    printf '.SH NAME\nk3\\-tier \\- hold experts of Kimi K3 in memory and answer for them\n.SH DESCRIPTION\n.nf\n'
    "$BUILD/k3-tier" -h | sed "s/\\\\/\\\\e/g; s/-/\\\\-/g; s/^[.']/\\\\\&&/"
    printf '.fi\n.SH SEE ALSO\n.BR k3 (1),\n.BR k3\\-slice (1),\n.BR k3\\-stage (1)\n'
}

completion_tier() {
    echo "complete -o default -W '$("$BUILD/k3-tier" -h | grep -oE -- '--[a-z][a-z-]*' | sort -u | tr '\n' ' ')' k3-tier"
}

pkg_config() {
    version=$(sed -n 's/^#define K3_VERSION *"\(.*\)"/\1/p' k3.h)
    cat <<END
prefix=$PREFIX
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: k3
Description: runs Kimi K3, exact, on a machine that holds a few percent of it
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lk3 $LIBS
END
}

case ${1:-} in
uninstall)
    [ -f "$list" ] || { echo "uninstall: nothing was installed in $root ($list is absent)" >&2; exit 1; }
    T=$(mktemp -d)
    trap 'rm -rf "$T"' EXIT
    cp -- "$list" "$T/list"
    rm -f -- "$list"
    remove "$T/list"
    remove_root "$T/list"
    ;;
install)
    T=$(mktemp -d)
    trap 'rm -rf "$T"' EXIT
    new=$T/new
    : >"$new"
    listed "$list" >"$T/old"
    make_root
    [ ! -f "$list" ] || grep '^[dr] ' "$list" >>"$new" || : # made by an earlier install: still ours
    put 755 "$BUILD/k3" bin/k3
    put 755 "$BUILD/k3-tier" bin/k3-tier
    put 644 "$BUILD/libk3.a" lib/libk3.a
    for header in k3.h k3_cache.h k3_pass.h k3_text.h; do put 644 "$header" "include/$header"; done
    pkg_config >"$T/page"
    put 644 "$T/page" lib/pkgconfig/k3.pc
    "$BUILD/k3" help --man >"$T/page"
    put 644 "$T/page" share/man/man1/k3.1
    for command in $("$BUILD/k3" help --list); do
        "$BUILD/k3" help --man "$command" >"$T/page"
        put 644 "$T/page" "share/man/man1/k3-$command.1"
    done
    manual_tier >"$T/page"
    put 644 "$T/page" share/man/man1/k3-tier.1
    "$BUILD/k3" help --completion >"$T/page"
    put 644 "$T/page" share/bash-completion/completions/k3
    completion_tier >"$T/page"
    put 644 "$T/page" share/bash-completion/completions/k3-tier
    put 644 LICENSE share/doc/k3/LICENSE
    for file in demo/*; do put 644 "$file" "share/k3/$file"; done
    for file in share/Kimi-K3/*; do put 644 "$file" "share/k3/Kimi-K3/${file##*/}"; done
    sort "$new" | uniq >"$T/sorted"
    sort "$T/old" | comm -23 - "$T/sorted" >"$T/gone"
    remove "$T/gone"
    install -m 644 -- "$T/sorted" "$list"
    ;;
*)
    echo "install.sh: install or uninstall" >&2
    exit 2
    ;;
esac

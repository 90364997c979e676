#!/bin/bash
# test_install.sh - what `make install` writes works in its place, and `make uninstall` removes exactly that.
#
#   BUILD=build CC=cc K3_LIBS="..." tests/test_install.sh
#
# scripts/install.sh is run as the Makefile runs it, with PREFIX and DESTDIR of a temporary directory.
set -u
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
: "${BUILD:=build}" "${CC:=cc}" "${K3_SAN:=}"
: "${K3_LIBS:=-lcurl -luring -ljson-c -lzstd -lcrypto -lpthread -lm}"
unset K3_MODEL
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
passed=0 failed=0 skipped=0
ok() { # NAME, then a command that must succeed
    local name=$1
    shift
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "install: FAILED $name"; fi
}
same() { [ "$1" = "$2" ] || { printf "  got  '%.300s'\n  want '%.300s'\n" "$1" "$2"; false; }; }
does() { BUILD=$BUILD PREFIX=$prefix DESTDIR=$dest LIBS="$K3_LIBS" scripts/install.sh "$1"; }

# Install into an empty directory with a blank in its name.
dest="$T/a stage" prefix=/usr
mkdir "$dest"
ok "install" does install
at="$dest/usr"
for file in bin/k3 bin/k3-tier include/k3.h include/k3_cache.h include/k3_pass.h include/k3_text.h lib/libk3.a lib/pkgconfig/k3.pc share/doc/k3/LICENSE \
    share/man/man1/k3.1 share/man/man1/k3-tier.1 share/bash-completion/completions/k3 \
    share/bash-completion/completions/k3-tier share/k3/demo/config.json share/k3/Kimi-K3/config.json; do
    ok "there is $file" test -s "$at/$file"
done
for command in $("$BUILD/k3" help --list); do
    ok "there is k3-$command.1" grep -q '^\.SH EXAMPLES' "$at/share/man/man1/k3-$command.1"
done
ok "every option of run is in its page" same "$(grep -c '^\.TP' "$at/share/man/man1/k3-run.1")" \
    "$(($("$BUILD/k3" help run | grep -cE '^  (-[qv] |--)') + 3))" # and three variables
ok "the list names every file" same "$(sed -n 's/^f //p' "$at/share/k3/installed" | sort)" \
    "$(cd "$at" && find . -type f ! -path ./share/k3/installed | sed 's,^\./,,' | sort)"
if command -v groff >/dev/null; then
    for page in "$at"/share/man/man1/*.1; do
        ok "groff has nothing to say of ${page##*/}" same "$(groff -man -Tutf8 -ww -z "$page" 2>&1)" ""
    done
else
    skipped=$((skipped + 1))
    echo "install: SKIP no groff to read the man pages"
fi

# The installed program finds its files, also after it was moved together with them.
mv "$dest" "$T/moved"
at="$T/moved/usr"
err=$("$at/bin/k3" run --tokens 4 "The capital of France is" 2>&1 >"$T/out")
ok "the installed program answers" same "$(cat "$T/out")" " Paris."
ok "with the demo beside it" grep -q "bundled model, $at/share/k3/demo" <<<"$err"
ok "plan --released" grep -q "82432 experts" <<<"$("$at/bin/k3" plan -q --released --ram 64G --gflops 40)"
rm -r "$at/share/k3/demo"
err=$("$at/bin/k3" run "x" 2>&1)
ok "without it: not the source tree's" same "$? $(grep -c "the bundled model is not at $at/share/k3/demo" <<<"$err")" "2 1"
cp -r demo "$at/share/k3/"

# The example of k3.h, compiled against the installed tree.
if ! command -v pkg-config >/dev/null; then
    skipped=$((skipped + 1))
    echo "install: SKIP no pkg-config to compile the example with"
else
    {
        printf '#include <k3.h>\n#include <stdio.h>\n#include <stdlib.h>\n'
        printf 'static void die(const char *text) { fputs(text, stderr); exit(1); }\nint main(void) {\n'
        sed -n '/^ \*     k3_options o;/,/^ \*     k3_session_free/s/^ \*//p' k3.h
        echo 'printf("%u", next); free(logits); return 0; }'
    } >"$T/example.c"
    flags() { PKG_CONFIG_PATH=$at/lib/pkgconfig pkg-config "--define-variable=prefix=$at" "$@" k3; }
    # shellcheck disable=SC2046
    ok "the example compiles" $CC -std=c99 -Wall -Werror $K3_SAN -o "$T/example" "$T/example.c" $(flags --static --cflags --libs)
    cp -r demo "$T/"
    ok "and runs" same "$(cd "$T" && ./example)" 1379
    ok "its version" same "$(flags --modversion)" "$("$BUILD/k3" -V | cut -d' ' -f2)"
fi

# Completion, called as bash does.
# shellcheck disable=SC1091
completes() { # WORDS...: print the words that may follow
    bash -c 'source "$0"; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _k3; echo "${COMPREPLY[*]}"' \
        "$at/share/bash-completion/completions/k3" "$@"
}
ok "a command" same "$(completes k3 to)" tokenize
ok "an option" same "$(completes k3 run --tok)" --tokens
ok "a choice" same "$(completes k3 run --io "")" "auto pool uring"
ok "a choice behind =" same "$(completes k3 run --io = p)" pool
ok "a file" same "$(completes k3 run --prompt-file LICEN)" LICENSE
ok "a directory" same "$(completes k3 run --model dem)" demo
ok "no option of another command" same "$(completes k3 bench --json)" ""

# Uninstall: files that were there before stay, all that was installed goes.
dest=$T/moved
ok "uninstall" does uninstall
ok "nothing is left" same "$(find "$T/moved")" "$T/moved"
ok "a second time is refused" same "$(does uninstall 2>&1 | grep -c "nothing was installed")" 1
mkdir -p "$T/moved/usr/bin" "$T/moved/usr/share/man"
echo other >"$T/moved/usr/bin/other"
before=$(find "$T/moved" | sort)
ok "beside others" does install
echo "f old-page" >>"$T/moved/usr/share/k3/installed"
echo "f ../../outside" >>"$T/moved/usr/share/k3/installed"
echo "f /etc/passwd" >>"$T/moved/usr/share/k3/installed"
touch "$T/moved/usr/old-page" "$T/outside" "$T/moved/outside"
ok "over an older one" does install
ok "what only the older one wrote goes" test ! -e "$T/moved/usr/old-page"
echo mine >"$T/moved/usr/share/k3/mine"
ok "and away" does uninstall
ok "a stranger's file stays" test -e "$T/moved/usr/share/k3/mine"
ok "so does what the list had no right to name" test -e "$T/outside" -a -e "$T/moved/outside" -a -e /etc/passwd
rm -r "$T/moved/usr/share/k3" "$T/moved/outside"
ok "all else is as before" same "$(find "$T/moved" | sort)" "$before"

echo "install: $passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]

#!/usr/bin/env python3
"""make_unicode.py - k3_unicode.h, the classes of characters that the tokenizer cuts text by.

    scripts/make_unicode.py           write k3_unicode.h
    scripts/make_unicode.py --check   compare with the one that is there: exit 1 when they differ

The reference tokenizer is the Python package tiktoken with the expression of K3-SPEC 4.2. The
Unicode tables inside tiktoken decide what a letter is. tests/test_unicode.py compares the table
written here with tiktoken over every code point; when a newer tiktoken knows a newer Unicode and the
model's owners move to it, VERSION and PACKAGE are what has to change.

The properties come from a published source package, checked by its hash, which pip builds in a
temporary environment (it needs a C compiler and Python's headers). No property is written by hand
but White_Space: the package lacks it, and it is Zs, Zl, Zp and six control characters.
"""
import os
import subprocess
import sys
import tempfile

VERSION = "16.0.0"
PACKAGE = "unicodedataplus==16.0.0.post1"
SHA256 = "f8cd342d91c73b512c229976a82aeb7e448517969d611433a9ea825dc62fed84"
HEADER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "k3_unicode.h")
PAGE = 128  # code points of a page: the sum of both tables is least for it
WORD = 16  # kinds in one 64-bit word, 4 bits each
SPACE_CONTROLS = (0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x85)

KINDS = (  # name, what it holds
    ("OTHER", "none of the others: punctuation, symbols, controls, unassigned"),
    ("SPACE", "White_Space but CR and LF"),
    ("NEWLINE", "CR and LF"),
    ("UPPER", "Lu, Lt"),
    ("LOWER", "Ll"),
    ("LETTER", "Lm, Lo"),
    ("MARK", "Mn, Mc, Me"),
    ("NUMBER", "Nd, Nl, No"),
    ("HAN", "Script=Han, neither L nor N"),
    ("HAN_LETTER", "Script=Han and L"),
    ("HAN_NUMBER", "Script=Han and N"),
)
NUMBER_OF = {name: i for i, (name, _) in enumerate(KINDS)}


def kind(unicode, point):
    """The name of the kind of one code point."""
    category, is_han = unicode.category(chr(point)), unicode.script(chr(point)) == "Han"
    if is_han:
        return {"L": "HAN_LETTER", "N": "HAN_NUMBER"}.get(category[0], "HAN")
    if point in (0x0A, 0x0D):
        return "NEWLINE"
    if point in SPACE_CONTROLS or category[0] == "Z":
        return "SPACE"
    if category[0] == "L":
        return {"Lu": "UPPER", "Lt": "UPPER", "Ll": "LOWER"}.get(category, "LETTER")
    return {"M": "MARK", "N": "NUMBER"}.get(category[0], "OTHER")


def rows(items, per_row):
    return ",\n".join("    " + ", ".join(items[i:i + per_row]) for i in range(0, len(items), per_row))


def header(unicode):
    """The text of k3_unicode.h."""
    assert unicode.unidata_version == VERSION, unicode.unidata_version
    kinds = [NUMBER_OF[kind(unicode, p)] for p in range(0x110000)]
    n_pages = max(p for p in range(0x110000) if kinds[p]) // PAGE + 1
    index, pages = [], {}
    for i in range(n_pages):
        index.append(pages.setdefault(tuple(kinds[i * PAGE:(i + 1) * PAGE]), len(pages)))
    assert len(pages) <= 256 and len(KINDS) <= 16
    words = []
    for page in pages:
        packed = [sum(k << 4 * j for j, k in enumerate(page[i:i + WORD]))
                  for i in range(0, PAGE, WORD)]
        words.append("    {" + ",\n     ".join(
            ", ".join(f"0x{w:x}" for w in packed[i:i + 4]) for i in (0, 4)) + "}")
    enum = "\n".join(f"    UNICODE_{name} = {i}," + f" /* {what} */"
                     for i, (name, what) in enumerate(KINDS))
    return f"""\
/* k3_unicode.h - the kind of every character, as the tokenizer's expression tells them apart.
 *
 * Made by scripts/make_unicode.py; do not edit.
 * Unicode {VERSION}, the version of the reference tokenizer (tiktoken 0.14.0), out of
 * {PACKAGE}, source package, sha256
 * {SHA256}.
 *
 * Every code point has exactly one kind; K3-SPEC 4.2's classes are unions of kinds (k3_text.c).
 */
#ifndef K3_UNICODE_H
#define K3_UNICODE_H

#include <stdint.h>

#define UNICODE_VERSION "{VERSION}"
#define UNICODE_N_PAGES {n_pages}u /* pages of {PAGE} code points; past the last all are OTHER */

/* clang-format off */
enum {{
{enum}
}};

/* By page: its row in unicode_row; many pages have the same. */
static const uint8_t unicode_page[UNICODE_N_PAGES] = {{
{rows([str(i) for i in index], 24)}
}};

/* {PAGE} kinds, {WORD} in a word, 4 bits each, the first code point in the lowest bits. */
static const uint64_t unicode_row[{len(pages)}][{PAGE // WORD}] = {{
{(',' + chr(10)).join(words)}
}};
/* clang-format on */

/* The kind of a code point, UNICODE_OTHER for what is none. */
static inline unsigned unicode_kind(uint32_t point) {{
    uint32_t page = point / {PAGE}u;
    if (page >= UNICODE_N_PAGES)
        return UNICODE_OTHER;
    uint64_t word = unicode_row[unicode_page[page]][point % {PAGE}u / {WORD}u];
    return (unsigned)(word >> point % {WORD}u * 4u) & 15u;
}}

#endif
"""


def install(folder):
    """The package, built and installed in a new environment; returns its python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python, wanted = os.path.join(folder, "bin", "python"), os.path.join(folder, "wanted.txt")
    with open(wanted, "w") as f:
        f.write(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-binary", ":all:",
                    "--require-hashes", "-r", wanted], check=True)
    return python


def main():
    if sys.argv[1:] == ["--print"]:  # inside the environment
        import unicodedataplus
        sys.stdout.write(header(unicodedataplus))
        return 0
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([install(folder), os.path.abspath(__file__), "--print"], check=True,
                              stdout=subprocess.PIPE, text=True).stdout
    if sys.argv[1:] == ["--check"]:
        with open(HEADER) as f:
            same = f.read() == made
        print(f"k3_unicode.h {'is' if same else 'is NOT'} what {PACKAGE} gives")
        return 0 if same else 1
    with open(HEADER, "w") as f:
        f.write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""test_docs.py - what the documents tell a reader to type exists.

    K3=build/k3 tests/test_docs.py

README.md has at most 1,500 words. Every command line in the code blocks of README.md and of the
documents for users names a command, options and make targets that there are, as `k3 help COMMAND`,
`k3-tier --help` and the Makefile have them, and scripts and files that are in the tree. The table of
README.md is what scripts/expect.sh prints.
"""
import os
import re
import shlex
import subprocess
import sys

import checks
from checks import check

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
K3 = os.path.abspath(os.environ.get("K3", os.path.join(TOP, "build/k3")))
TIER = os.environ.get("K3_TIER", K3 + "-tier")
os.chdir(TOP)
DOCS = ["README.md", "docs/USE.md", "docs/TIER.md", "docs/GPU.md", "docs/NUMBERS.md", "CONTRIBUTING.md"]
OTHERS = {"git", "cd", "sudo", "python3", "~/hf/bin/pip", "~/hf/bin/hf", "openssl", "umask", "df", "echo", "cat"}
checks.begin("docs")


def output(*args):
    return subprocess.run(args, capture_output=True, text=True, timeout=60).stdout


def options_of(text):
    return set(re.findall(r"(?<![\w-])(--?[a-z][a-z0-9-]*)", text)) | {"-h", "-V", "--help", "--version"}


def blocks(text):
    """The lines of indented and of fenced code blocks, continued lines joined."""
    fenced, lines = False, []
    for line in text.split("\n"):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            line = line if fenced else line[4:]
            if lines and lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1] + line
            else:
                lines.append(line)
    return lines


def commands(line):
    """The commands of a line as lists of words; none where it is no command line."""
    line = re.sub(r"^\$ ", "", line)
    if not re.match(r"(\(?umask|git |cd |sudo |make\b|k3 |k3-tier |build/k3|scripts/|tests/|\.ci/|python3 |~/|echo |cat |openssl )", line):
        return []
    lexer = shlex.shlex(line.split("  #")[0], posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    out = [[]]
    for word in lexer:
        if re.fullmatch(r"[();|&]+", word):
            out.append([])
        else:
            out[-1].append(word)
    return [c for c in out if c]


TARGETS = set(re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", open("Makefile").read(), re.M).group(1).replace("\\", " ").split())
HELP = {}


def fault(words):
    """Why this command cannot be typed, or None."""
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    if words and words[0] == "sudo":
        words = words[1:]
    if not words:
        return None
    name, rest = words[0], words[1:]
    if name in ("k3", "build/k3"):
        command = rest[0] if rest else ""
        if command not in HELP:
            HELP[command] = output(K3, "help", command)
        if not HELP[command]:
            return f"k3 has no command {command}"
        return unknown(rest[1:], options_of(HELP[command]))
    if name in ("k3-tier", "build/k3-tier"):
        return unknown(rest, options_of(output(TIER, "--help")))
    if name == "make":
        bad = [w for w in rest if "=" not in w and not w.startswith("-") and w not in TARGETS and not w.startswith("build/")]
        return f"make has no target {bad[0]}" if bad else None
    if "/" in name and not name.startswith("~"):
        return None if os.path.exists(name) else f"there is no {name}"
    return None if name in OTHERS else f"{name} is no program that a reader has"


def unknown(words, known):
    for w in words:
        option = w.split("=")[0]
        if w.startswith("-") and w != "-" and w != "--" and option not in known:
            return f"there is no option {option}"
    return None


def test_commands():
    for doc in DOCS:
        n = 0
        text = open(doc, encoding="utf-8").read()
        for line in blocks(text):
            for words in commands(line):
                n += 1
                why = fault(words)
                check(f"{doc}: {line.strip()}", why is None, why)
        # in running text: `k3 run --option`, and files that are named
        for code in re.findall(r"`([^`\n]+)`", text):
            for words in commands(code) if re.match(r"(k3|k3-tier|make) [a-z-]", code) else []:
                why = fault(words)
                check(f"{doc}: `{code}`", why is None, why)
        for path in re.findall(r"\b((?:docs|scripts|tests|demo)/[\w./-]*\w)", text):
            check(f"{doc}: {path}", os.path.exists(path), "there is no such file")
        if doc in ("README.md", "docs/TIER.md", "docs/USE.md"):
            check(f"{doc}: its commands are found", n >= 5, f"{n} found")


def test_detection():
    for line in ("k3 run --tokns 3 x", "k3 runn x", "make tset", "k3-tier --modle x", "scripts/none.sh"):
        check(f"a bad line is found: {line}", any(fault(c) for c in commands(line)), "taken")


def test_readme():
    text = open("README.md", encoding="utf-8").read()
    check("README.md: words", len(text.split()) <= 1500, f"{len(text.split())}, at most 1500")
    table = re.search(r"<!-- made by scripts/expect.sh -->\n(.*?)<!-- end -->", text, re.S)
    check("README.md: the table of scripts/expect.sh", table, "its two markers are gone")
    r = subprocess.run(["scripts/expect.sh"], capture_output=True, text=True, env=dict(os.environ, K3=K3), timeout=120)
    if r.returncode != 0:
        check("scripts/expect.sh", False, r.stderr[-300:])
    else:
        check("README.md: the table is what scripts/expect.sh --write makes", table and table.group(1) == r.stdout, r.stdout)


test_detection()
test_commands()
test_readme()
sys.exit(checks.finish())

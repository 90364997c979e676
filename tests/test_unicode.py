#!/usr/bin/env python3
"""test_unicode.py - the ids of test_unicode.c's texts, by tiktoken, the reference tokenizer.

    tests/test_unicode.py           against tests/data/tiktoken_ids.txt, which `make test` compares
                                    the engine with, and then the engine itself on strings of a new
                                    random seed
    tests/test_unicode.py --venv    the same, with tiktoken installed in a temporary environment
    tests/test_unicode.py --write   write tests/data/tiktoken_ids.txt

Without tiktoken it is skipped (exit 77). BUILD names the folder with test_unicode.
"""
import base64
import hashlib
import os
import struct
import subprocess
import sys
import tempfile

VERSION = "0.14.0"  # of tiktoken, whose tables are those of k3_unicode.h's Unicode
BUILD = os.environ.get("BUILD", "build")
EXPECTED = "tests/data/tiktoken_ids.txt"

# K3-SPEC 4.2, as the official tokenizer joins it.
UPPERISH = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWERISH = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PREFIX, CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((
    r"[\p{Han}]+",
    PREFIX + UPPERISH + "*" + LOWERISH + "+" + CONTRACTION,
    PREFIX + UPPERISH + "+" + LOWERISH + "*" + CONTRACTION,
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))


def skip(why):
    print(f"unicode_reference: SKIP {why}")
    sys.exit(77)


def in_environment():
    """Run this program again in an environment with tiktoken."""
    with tempfile.TemporaryDirectory() as folder:
        python = os.path.join(folder, "bin", "python")
        for command in ([sys.executable, "-m", "venv", folder],
                        [python, "-m", "pip", "install", "-q", f"tiktoken=={VERSION}"]):
            try:
                subprocess.run(command, timeout=600, check=True)
            except (subprocess.SubprocessError, OSError) as why:
                skip(f"tiktoken {VERSION} cannot be installed: {why}")
        return subprocess.run([python, os.path.abspath(__file__)]).returncode


def vocabulary(tiktoken, path):
    with open(path, "rb") as f:
        ranks = {base64.b64decode(word): int(rank) for word, rank in map(bytes.split, f)}
    return tiktoken.Encoding(path, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def reference_lines(tiktoken, folder):
    """The lines that FOLDER/hashes should have."""
    encodings = [vocabulary(tiktoken, f"{folder}/{i:02d}/tiktoken.model") for i in range(16)]
    lines = []
    with open(f"{folder}/texts", "rb") as f:
        groups = f.read().split(b"\xfe")[:-1]
    for group in groups:
        head, *texts = group.split(b"\xff")[:-1]
        name, numbers = head.decode().split()
        texts = [t.decode() for t in texts]
        digest = hashlib.sha256()
        for number in numbers.split(","):
            for t in texts:
                ids = encodings[int(number)].encode_ordinary(t)
                digest.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
        lines.append(f"{name} {digest.hexdigest()[:16]}")
    return lines


def lines_of(path):
    with open(path) as f:
        return [line.rstrip("\n") for line in f if not line.startswith("#")]


def made(tiktoken, seed):
    """For texts of this seed: the lines of the engine and those of tiktoken."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([f"{BUILD}/test_unicode", "--write", folder, str(seed)], check=True)
        return lines_of(f"{folder}/hashes"), reference_lines(tiktoken, folder)


def compare(what, got, want):
    """(passed, failed), and the first groups that differ."""
    wrong = [f"{g} is {w} by tiktoken" for g, w in zip(got, want) if g != w]
    wrong += [f"{len(got)} groups, {len(want)} by tiktoken"] if len(got) != len(want) else []
    for line in wrong[:5]:
        print(f"FAILED {what}: {line}")
    return len(want) - len(wrong), len(wrong)


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    if sys.argv[1:] == ["--venv"]:
        return in_environment()
    try:
        import tiktoken
    except ImportError:
        skip("tiktoken is not installed (tests/test_unicode.py --venv installs it for the test)")
    if tiktoken.__version__ != VERSION:
        skip(f"tiktoken is {tiktoken.__version__}, and the expected ids are those of {VERSION}")
    _, want = made(tiktoken, 1)
    if sys.argv[1:] == ["--write"]:
        with open(EXPECTED, "w") as f:
            f.write(f"# Made by tests/test_unicode.py --write: ids by tiktoken {VERSION}, one hash per\n"
                    "# group of the texts of tests/test_unicode.c, seed 1.\n")
            f.writelines(line + "\n" for line in want)
        return 0
    passed, failed = compare(EXPECTED, lines_of(EXPECTED), want)
    seed = int.from_bytes(os.urandom(4), "little")
    more = compare(f"engine, seed {seed}", *made(tiktoken, seed))
    passed, failed = passed + more[0], failed + more[1]
    print(f"unicode_reference: {passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""test_house.py - measures of the source that keep it readable; each beyond its limit is a failure.

    tests/test_house.py [ROOT]

Files: at most 2,500 lines, k3.c 5,000. k3.h: at most 32 functions. Structs: at most 45 fields. Functions: 90 % at most 30
lines, none above 60. No ten lines that are the same, without white space and comments, in two source files. Each source
file has its place in CONTRIBUTING.md's table. A limit is raised only with its reason in the commit.
"""
import os
import re
import sys

FILE_LINES, K3_LINES, HEADER_FUNCTIONS, FIELDS, P90, MOST, RUN = 2500, 5000, 32, 45, 30, 60, 10
SKIP = {"build", "build-clang", "build-asan", "build-tsan", "build-neon", ".git"}


def sources(root, kinds=(".c", ".h", ".cu")):
    found = []
    for at, dirs, files in os.walk(root):
        dirs[:] = [d for d in dirs if d not in SKIP and not d.startswith("build")]
        found += [os.path.relpath(os.path.join(at, f), root) for f in files if f.endswith(kinds)]
    return sorted(found)


def without_comments(text):
    """Comments become blanks, line ends stay; texts in quotes are left alone."""
    def blank(m):
        s = m.group(0)
        return re.sub(r"[^\n]", " ", s) if s.startswith("/") else s
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def functions(text):
    """Name and number of lines of each function: from the line of its name to the brace that ends it."""
    lines, found, i = without_comments(text).split("\n"), [], 0
    while i < len(lines):
        head = re.match(r"[A-Za-z_][\w\s\*]*?\**\b(\w+)\s*\(", lines[i])
        if not head or lines[i].startswith(("typedef", "#", "struct", "union", "enum")) and "(" not in lines[i]:
            i += 1
            continue
        j = i
        while j < len(lines) and not re.search(r"[;{]\s*$", lines[j].rstrip()) and j < i + 12:
            j += 1
        if j >= len(lines) or not lines[j].rstrip().endswith("{") or "=" in lines[i].split("(")[0]:
            i = j + 1 if j < len(lines) and lines[j].rstrip().endswith(";") else i + 1
            continue
        end = j
        while end < len(lines) and not re.match(r"}", lines[end]):
            end += 1
        found.append((head.group(1), end - i + 1))
        i = end + 1
    return found


def structs(text):
    """Name and number of fields of each struct; the members of a struct inside count too."""
    plain, found = without_comments(text), []
    for m in re.finditer(r"\b(?:typedef\s+)?struct\b\s*(\w*)\s*{", plain):
        depth, i = 1, m.end()
        while depth and i < len(plain):
            depth += {"{": 1, "}": -1}.get(plain[i], 0)
            i += 1
        body, name = plain[m.end():i - 1], m.group(1) or re.match(r"\s*(\w*)", plain[i:]).group(1)
        n = 0
        for part in re.sub(r"\b(?:struct|union|enum)\b\s*\w*\s*{|}", "", body).split(";"):
            part = re.sub(r"\([^()]*\)", "", part)
            n += part.count(",") + 1 if part.strip() else 0
        found.append((name or "(no name)", n))
    return found


def runs(root, files):
    """Pairs of files with RUN equal lines in a row."""
    seen, found = {}, set()
    for f in files:
        lines = []
        for n, line in enumerate(without_comments(open(os.path.join(root, f)).read()).split("\n"), 1):
            line = re.sub(r"\s+", "", line)
            if len(line) > 2 and not line.startswith("#include"):
                lines.append((line, n))
        for i in range(len(lines) - RUN + 1):
            key = "\n".join(x[0] for x in lines[i:i + RUN])
            if key in seen and seen[key][0] != f:
                found.add((seen[key][0], seen[key][1], f, lines[i][1]))
            seen.setdefault(key, (f, lines[i][1]))
    return sorted(found)


def table(root):
    """All that CONTRIBUTING.md's table of files names."""
    names, text = set(), open(os.path.join(root, "CONTRIBUTING.md")).read()
    for row in re.findall(r"^\| ([^|]+) \|", text, flags=re.M):
        last = ""
        for word in re.split(r",\s*", row.strip()):
            word = word.strip()
            if word.startswith("."):
                word = os.path.splitext(last)[0] + word
            elif "/" not in word and "/" in last and not os.path.exists(os.path.join(root, word)):
                word = os.path.join(os.path.dirname(last), word)
            names.add(word)
            last = word
    return names


def is_named(path, names):
    return any(path == n or n.endswith("/") and path.startswith(n) or n.endswith("*.c") and path.startswith(n[:-3])
               for n in names)


def measure(root):
    """(what, figure, limit, where) of each measure."""
    files, out = sources(root), []
    sizes = [(sum(1 for _ in open(os.path.join(root, f))), f) for f in files]
    out.append(("lines of a file but k3.c", *max((s for s in sizes if s[1] != "k3.c"), default=(0, "")), FILE_LINES))
    out.append(("lines of k3.c", dict((f, n) for n, f in sizes).get("k3.c", 0), "k3.c", K3_LINES))
    header = without_comments(open(os.path.join(root, "k3.h")).read()) if "k3.h" in files else ""
    n = len(re.findall(r"^(?!typedef)[\w].*?\b\w+\([^;{]*\);", re.sub(r"\n\s+", " ", header), flags=re.M))
    out.append(("functions of k3.h", n, "k3.h", HEADER_FUNCTIONS))
    text = {f: open(os.path.join(root, f)).read() for f in files}
    fields = [(n, f"{f}: {name}") for f in files for name, n in structs(text[f])]
    out.append(("fields of a struct", *max(fields, default=(0, "")), FIELDS))
    lengths = sorted((n, f"{f}: {name}") for f in files for name, n in functions(text[f]))
    p90 = lengths[int(len(lengths) * 0.9)] if lengths else (0, "")
    out.append((f"lines of a function, 90 % of {len(lengths)}", *p90, P90))
    out.append(("lines of a function, most", *(lengths[-1] if lengths else (0, "")), MOST))
    same = runs(root, files)
    out.append(("runs of ten equal lines", len(same), "; ".join("%s:%d %s:%d" % s for s in same[:4]), 0))
    names = table(root) if os.path.exists(os.path.join(root, "CONTRIBUTING.md")) else set()
    absent = [f for f in files if not is_named(f, names)]
    out.append(("source files without a row in CONTRIBUTING.md", len(absent), ", ".join(absent[:6]), 0))
    return out


def self_test():
    """Each measure, on a tree that breaks it."""
    import tempfile
    with tempfile.TemporaryDirectory() as root:
        def put(name, text):
            open(os.path.join(root, name), "w").write(text)
        body = "".join(f"    x = x * {i} + y;\n" for i in range(61))
        put("a.c", "/* a */\nint big(int x, int y) {\n" + body + "    return x;\n}\n" + "\n" * 2500)
        put("b.c", "int other(int x, int y) {\n" + body[:300] + "    return x;\n}\n" + "struct wide {\n" +
            "".join(f"    int a{i}, b{i}; /* x, y; */\n" for i in range(23)) + "};\n")
        put("k3.h", "".join(f"int k3_f{i}(int x,\n    int y);\n" for i in range(33)))
        put("k3.c", "\n" * 5001)
        put("CONTRIBUTING.md", "| a.c | x |\n| k3.h, .c | y |\n")
        bad = {w.split(",")[0]: n > limit for w, n, _, limit in measure(root)}
        got = {w: (n, where) for w, n, where, _ in measure(root)}
        assert got["fields of a struct"] == (46, "b.c: wide"), got
        assert got["functions of k3.h"][0] == 33, got
        assert got["lines of a function, most"] == (64, "a.c: big"), got
        assert got["source files without a row in CONTRIBUTING.md"] == (1, "b.c"), got
        assert all(bad.values()) and len(bad) == 7, bad


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    self_test()
    passed = failed = 0
    for what, n, where, limit in measure(root):
        print(f"house: {what}: {n} (limit {limit}){' ' + where if n and where else ''}")
        passed, failed = passed + (n <= limit), failed + (n > limit)
        if n > limit:
            print(f"FAIL {what}")
    print(f"house: {passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""test_house.py - the measures of the tree: prints them, and fails where one is passed.

    tests/test_house.py [--all]

    files       at most 2,500 lines; k3.c, the whole engine in the order of a token, at most 5,000
    k3.h        declares at most 32 functions
    structs     at most 45 fields, those of structs inside included
    functions   of C and CUDA: nine of ten take less than 30 lines, head and closing brace included; none over 60
    copies      no ten lines in a row that two files share, without white space, comments and #include
    table       every source file stands in one row of CONTRIBUTING.md's table, and every row names files

A row of the table names files in its first cell: `a.h, a.c`; `a.h, .c` repeats the name with another
ending; `cli/a.c, b.c` stays in the directory; `*` stands for any characters but `/`; a name that ends in
`/` is a directory. A full name goes before a `*`, and a `*` before a directory.

KNOWN lists what passes a limit today, with its figure: a figure may shrink, never grow. --all prints every
function over 45 lines and every copied run with its lines. The measures themselves are tried first, on made-up trees.
"""
import bisect
import fnmatch
import os
import re
import sys
import tempfile
import tokenize

import checks
from checks import check, equal

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAX_FILE, MAX_FILE_OF = 2500, {"k3.c": 5000}
MAX_DOOR = 32
MAX_FIELDS = 45
MAX_P90, MAX_FUNCTION = 29, 60
RUN = 10
KNOWN = {
    "tier_server.c": 3087,
}
C = (".c", ".h", ".cu", ".cuh")
SOURCES = C + (".py", ".sh")
checks.begin("house")

# ---- Reading ------------------------------------------------------------------------


def sources(top):
    """{path from the top: text} of every source file outside of builds and hidden directories."""
    found = {}
    for where, dirs, names in os.walk(top):
        dirs[:] = sorted(d for d in dirs if not d.startswith((".", "build", "__")))
        for name in sorted(names):
            if name.endswith(SOURCES) or name == "Makefile":
                path = os.path.join(where, name)
                found[os.path.relpath(path, top)] = open(path, encoding="utf-8").read()
    return found


C_TOKENS = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def c_code(text, keep_strings):
    """C with spaces for comments (and, unless kept, for what stands in quotes), line for line."""

    def blank(m):
        token = m.group(0)
        if token[0] in "\"'":
            return token if keep_strings else token[0] + "_" * (len(token) - 2) + token[0]
        return re.sub(r"[^\n]", " ", token)

    return C_TOKENS.sub(blank, text)


def c_shape(text):
    """C with spaces for comments, strings and preprocessor lines: what its braces are counted in."""
    text = c_code(text, False)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.M)


def python_lines(path, text):
    """{line number: code} of Python without comments and the strings that stand alone."""
    lines, kept = text.split("\n"), {}
    before = tokenize.NEWLINE
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.COMMENT)
    source = iter([line + "\n" for line in lines])
    for token in tokenize.generate_tokens(lambda: next(source, "")):
        alone = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type not in skipped and not alone:
            for i in range(token.start[0], token.end[0] + 1):
                kept[i] = lines[i - 1] if i <= len(lines) else ""
        if token.type == tokenize.COMMENT and token.start[0] in kept:
            kept[token.start[0]] = kept[token.start[0]][: token.start[1]]
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type
    return kept


def code_lines(path, text):
    """[(line number, the line without white space)] of every line that holds code."""
    if path.endswith(C):
        lines = dict(enumerate(c_code(text, True).split("\n"), 1))
        lines = {i: line for i, line in lines.items() if not re.match(r"\s*#\s*include\b", line)}
    elif path.endswith(".py"):
        lines = {i: line for i, line in python_lines(path, text).items() if not re.match(r"(import|from) ", line)}
    else:
        lines = {i: line for i, line in enumerate(text.split("\n"), 1) if not re.match(r"\s*#", line)}
    return [(i, packed) for i, packed in ((i, re.sub(r"\s+", "", line)) for i, line in sorted(lines.items())) if packed]


# ---- Measures: each a list of (what, figure, limit), those within the limit included ------


def measure_files(files):
    for path, text in files.items():
        yield path, text.count("\n"), MAX_FILE_OF.get(path, MAX_FILE)


def measure_door(files):
    if "k3.h" in files:
        shape = re.sub(r"\{[^{}]*\}", "", c_shape(files["k3.h"]))
        n = sum(1 for s in shape.split(";") if re.match(r"[\w\s*]*\w\s*\([^*]", s) and not re.search(r"\btypedef\b|STATIC_ASSERT", s))
        yield "k3.h, functions", n, MAX_DOOR


def blocks(shape):
    """(head, where the head starts, where its brace closes) of every block outside of all others."""
    depth, start, opened = 0, 0, None
    for m in re.finditer(r"[{};]", shape):
        c = m.group(0)
        if c == "{":
            if depth == 0 and re.fullmatch(r'\s*extern\s+"_*"\s*', shape[start : m.start()]):
                start = m.end()  # what it holds is outside of all blocks, too
                continue
            if depth == 0:
                opened = m.start()
            depth += 1
        elif c == "}":
            depth = max(0, depth - 1)
            if depth == 0 and opened is not None:
                yield shape[start:opened], start, m.end()
                opened = None
                start = m.end()
        elif depth == 0:
            start = m.end()


def function_name(head):
    """The function that this head begins, or None: a type, a table."""
    flat = re.sub(r"__attribute__\s*\(\(.*?\)\)|__launch_bounds__\s*\([^)]*\)", " ", head, flags=re.S)
    while re.search(r"\([^()]*\)", flat) and "=" not in flat:
        outer = re.search(r"(\w+)\s*\(([^()]|\([^()]*\))*\)\s*$", flat)
        return outer.group(1) if outer else None
    return None


def measure_functions(files):
    for path, text in files.items():
        if path.endswith(C):
            shape = c_shape(text)
            ends = [m.start() for m in re.finditer("\n", shape)]
            for head, start, end in blocks(shape):
                name = function_name(head)
                if name:
                    first = start + len(head) - len(head.lstrip())
                    n = bisect.bisect(ends, end - 1) - bisect.bisect_left(ends, first) + 1
                    yield f"{path} {name}()", n, MAX_FUNCTION


def n_fields(body):
    """Fields that a struct's body declares; those of a struct inside count, its own name does not."""
    n = 0
    body = re.sub(r"\benum\s*\w*\s*\{[^{}]*\}", "int", body)
    while re.search(r"\{([^{}]*)\}", body):  # innermost first
        inner = re.search(r"\b(?:struct|union)\s*\w*\s*\{([^{}]*)\}[^;]*;", body)
        if not inner:
            break
        n += n_fields(inner.group(1))
        body = body[: inner.start()] + body[inner.end() :]
    while re.search(r"[(\[][^()\[\]]*[)\]]", body):
        body = re.sub(r"[(\[][^()\[\]]*[)\]]", "", body)
    return n + sum(len(line.split(",")) for line in body.split(";") if line.strip() and "STATIC_ASSERT" not in line)


def measure_structs(files):
    for path, text in files.items():
        if path.endswith(C):
            shape = c_shape(text)
            for head, start, end in blocks(shape):
                if re.search(r"\b(struct|union)\b", head) and "(" not in head and "=" not in head:
                    body = shape[start + len(head) + 1 : end - 1]
                    after = re.match(r"\s*(\w*)", shape[end:]).group(1)
                    name = re.search(r"\b(?:struct|union)\s+(\w+)", head)
                    yield f"{path} struct {after or (name.group(1) if name else '?')}", n_fields(body), MAX_FIELDS


def copied_runs(files):
    """(path, line, path, line, lines) of every longest run of at least RUN code lines that two files share."""
    lines = {path: code_lines(path, text) for path, text in files.items() if path != "Makefile"}
    places = {}
    for path, code in lines.items():
        for i in range(len(code) - RUN + 1):
            places.setdefault(tuple(line for _, line in code[i : i + RUN]), []).append((path, i))
    pairs = set()
    for where in places.values():
        for a in where:
            pairs.update((a, b) for b in where if a[0] < b[0])
    for (pa, a), (pb, b) in sorted(pairs):
        if ((pa, a - 1), (pb, b - 1)) not in pairs:
            n = RUN
            while ((pa, a + n - RUN + 1), (pb, b + n - RUN + 1)) in pairs:
                n += 1
            yield pa, lines[pa][a][0], pb, lines[pb][b][0], n


def measure_copies(files):
    total = {}
    for pa, _, pb, _, n in copied_runs(files):
        total[pa, pb] = total.get((pa, pb), 0) + n
    for (pa, pb), n in sorted(total.items()):
        yield f"{pa} and {pb} share lines", n, 0


def table_names(text):
    """[(row, name)] of the first cells of the table of files."""
    rows = re.search(r"^\| file \| what \|\n\|[-|]*\n((?:\|.*\n)*)", text, re.M)
    for row in (rows.group(1) if rows else "").splitlines():
        cell, last = row.split("|")[1], ""
        for word in re.split(r",\s*", cell.strip()):
            if re.fullmatch(r"\.\w+", word):
                word = os.path.splitext(last)[0] + word
            elif "/" not in word and "/" in last:
                word = os.path.dirname(last) + "/" + word
            last = word
            yield row, word


def matches(name, path):
    """How well: 3 a full name, 2 a pattern, 1 a directory, 0 not."""
    if name == path:
        return 3
    if name.endswith("/"):
        return 1 if path.startswith(name) else 0
    return 2 if name.count("/") == path.count("/") and fnmatch.fnmatchcase(path, name) else 0


def measure_table(files, text, top):
    """Rows beyond one, or 1 where there is none, for each file; names of the table that are nothing."""
    names = list(table_names(text))
    for path in files:
        if path != "Makefile":
            best = max([matches(name, path) for _, name in names] + [0])
            rows = {row for row, name in names if best and matches(name, path) == best}
            yield f"CONTRIBUTING.md, rows for {path} beside one", abs(len(rows) - 1), 0
    for _, name in names:
        there = os.path.exists(os.path.join(top, name)) or any(matches(name, path) for path in files)
        yield f"CONTRIBUTING.md, {name} is not there", int(not there), 0


def measures(top):
    """{kind: [(what, figure, limit)]} of the tree at `top`."""
    files = sources(top)
    path = os.path.join(top, "CONTRIBUTING.md")
    table = open(path, encoding="utf-8").read() if os.path.exists(path) else ""
    functions = list(measure_functions(files))
    sizes = sorted(n for _, n, _ in functions)
    p90 = [("the tree, function p90", sizes[(len(sizes) * 9 + 9) // 10 - 1], MAX_P90)] if sizes else []
    return {
        "files": list(measure_files(files)),
        "k3.h": list(measure_door(files)),
        "structs": list(measure_structs(files)),
        "functions": functions + p90,
        "copies": list(measure_copies(files)),
        "table": list(measure_table(files, table, top)),
    }


# ---- The measures, tried ------------------------------------------------------------------


def tree_of(files):
    """A directory that holds `files`."""
    top = tempfile.TemporaryDirectory()
    for path, text in files.items():
        os.makedirs(os.path.dirname(os.path.join(top.name, path)), exist_ok=True)
        open(os.path.join(top.name, path), "w", encoding="utf-8").write(text)
    return top


def offences(files):
    with tree_of(files) as top:
        return [f"{what} {n}" for kind in measures(top).values() for what, n, limit in kind if n > limit]


def table_of(*cells):
    return "| file | what |\n|---|---|\n" + "".join(f"| {cell} | x |\n" for cell in cells)


def function_of(n, name="f", line="    x++;"):
    return f"static int {name}(int x) {{ /* {{ */\n" + f"{line}\n" * (n - 3) + "    return x;\n}\n"


def struct_of(n):
    return "struct s {\n    int a, (*b)(int, int), c[2]; /* d, e; */\n" + "    struct { int f; } g;\n" * (n - 3) + "};\n"


def lines_of(n, start=0):
    return "".join(f"int v{start + i}; /* {start + i} */\n" for i in range(n))


def test_measures():
    small = [function_of(9, f"g{i}") for i in range(20)]
    ok = {"a.c": function_of(60) + "".join(small), "cli/b.h": struct_of(45), "CONTRIBUTING.md": table_of("a.c", "cli/b.h, c.c"),
          "cli/c.c": "", "k3.h": ""}
    ok["CONTRIBUTING.md"] += "| k3.h | x |\n"
    cases = [
        ("nothing wrong", {}, []),
        ("a file over its limit", {"a.c": "\n" * 2501}, ["a.c 2501"]),
        ("a file at its limit", {"a.c": "\n" * 2500}, []),
        ("k3.h with 33 functions", {"k3.h": "int f(int (*g)(int), int);\ntypedef int (*h)(int);\nstruct k { int n; };\n" * 33},
         ["k3.h, functions 33"]),
        ("k3.h with 32", {"k3.h": "int f(int a,\n   int b);\n" * 32}, []),
        ("a struct of 46 fields", {"cli/b.h": struct_of(46)}, ["cli/b.h struct s 46"]),
        ("a typedef of 46 fields", {"cli/b.h": "typedef struct {\n" + "int a;\n" * 46 + "} big;\n"}, ["cli/b.h struct big 46"]),
        ("a function of 61 lines", {"a.c": function_of(61) + "".join(small)}, ["a.c f() 61"]),
        ("such a function between #if and #endif", {"a.c": "#if 1\n#define X(a) \\\n { a\n" + function_of(61) + "#endif\n" + "".join(small)},
         ["a.c f() 61"]),
        ("braces in a string", {"a.c": function_of(60, line='    p("{\\"", \'{\');') + "".join(small)}, []),
        ("a head over two lines", {"a.c": function_of(60).replace("(int x)", "(int x,\n     int y)") + "".join(small)}, ["a.c f() 61"]),
        ("a function of CUDA", {"a.c": "".join(small), "k.cu": "extern \"C\" {\n" + function_of(61, "__launch_bounds__(9) f") + "}\n",
                                "CONTRIBUTING.md": ok["CONTRIBUTING.md"] + "| k.cu | x |\n"}, ["k.cu f() 61"]),
        ("a table is no function", {"a.c": "static int a[] = {\n" + "f(1),\n" * 70 + "};\n" + "".join(small)}, []),
        ("long functions, two of ten", {"a.c": function_of(30, "p") + function_of(30, "q") + "".join(small[:8])},
         ["the tree, function p90 30"]),
        ("long functions, one of ten", {"a.c": function_of(30, "p") + "".join(small[:9])}, []),
        ("ten copied lines", {"a.c": lines_of(10), "cli/c.c": lines_of(3, 20) + lines_of(10).replace("int ", " int   ").replace("/*", "/* x\n\n")},
         ["a.c and cli/c.c share lines 10"]),
        ("nine", {"a.c": lines_of(9), "cli/c.c": lines_of(9)}, []),
        ("copied comments and includes", {"a.c": "/* a\n" * 20 + "*/\n" + "#include <a>\n" * 20, "cli/c.c": "/* a\n" * 20 + "*/\n" + "#include <a>\n" * 20}, []),
        ("copied shell, beside a comment", {"t/a.sh": "# a\n" + lines_of(12), "t/b.sh": "# b\n" + lines_of(6) + "# c\n" + lines_of(6, 6).replace("/* ", "/*"),
                                            "CONTRIBUTING.md": ok["CONTRIBUTING.md"] + "| t/ | x |\n"}, ["t/a.sh and t/b.sh share lines 12"]),
        ("copied Python, with other docstrings",
         {f"t/{n}.py": f'"""{n} says."""\n\n\ndef f():\n    """{n}."""\n' + "".join(f"    x = {i}  # {n}\n" for i in range(9)) for n in "ab"} |
         {"CONTRIBUTING.md": ok["CONTRIBUTING.md"] + "| t/*.py | x |\n"}, ["t/a.py and t/b.py share lines 10"]),
        ("a file without a row", {"d.c": ""}, ["CONTRIBUTING.md, rows for d.c beside one 1"]),
        ("a file with two rows", {"CONTRIBUTING.md": ok["CONTRIBUTING.md"] + "| a.c | y |\n"}, ["CONTRIBUTING.md, rows for a.c beside one 1"]),
        ("a row without a file", {"CONTRIBUTING.md": ok["CONTRIBUTING.md"] + "| e.c | x |\n"}, ["CONTRIBUTING.md, e.c is not there 1"]),
        ("a name goes before a pattern", {"CONTRIBUTING.md": ok["CONTRIBUTING.md"] + "| *.c | x |\n| cli/ | x |\n"}, []),
    ]
    for name, changed, wanted in cases:
        got = offences({**ok, **changed})
        equal(f"measures: {name}", got, wanted)


def test_known():
    kinds = {"files": [("a", 11, 10), ("b", 12, 10), ("c", 13, 10), ("d", 9, 10)]}
    got = verdicts(kinds, {"a": 11, "b": 11, "gone": 3, "d": 12})
    check("measures: a known figure may not grow", got == (["b is 12; KNOWN allows 11", "c is 13, over 10"], ["d", "gone"]), got)


# ---- This tree ---------------------------------------------------------------------------


def verdicts(kinds, known):
    """(what fails and why, known entries that are no longer needed)"""
    bad, needed = [], set()
    for kind in kinds.values():
        for what, n, limit in kind:
            if n > limit:
                needed.add(what)
                if what not in known:
                    bad.append(f"{what} is {n}, over {limit}")
                elif n > known[what]:
                    bad.append(f"{what} is {n}; KNOWN allows {known[what]}")
    return bad, sorted(set(known) - needed)


def report(kinds):
    for kind, rows in kinds.items():
        what, n, limit = max(rows, key=lambda r: r[1] / max(r[2], 1), default=("none", 0, 0))
        print(f"  {kind:<10} {len(rows):>5} measured, largest: {what}: {n} of {limit}")
    print(f"  functions  p90 {kinds['functions'][-1][1]} lines")


def report_all(top, kinds):
    for what, n, _ in sorted(kinds["functions"], key=lambda r: -r[1]):
        if n > 45:
            print(f"  {n} {what}")
    for pa, a, pb, b, n in copied_runs(sources(top)):
        print(f"  {n} lines of code: {pa}:{a} {pb}:{b}")


def test_tree():
    kinds = measures(TOP)
    report(kinds)
    if "--all" in sys.argv:
        report_all(TOP, kinds)
    bad, stale = verdicts(kinds, KNOWN)
    for line in bad:
        check("measures", False, line)
    for what in stale:
        print(f"  KNOWN lists {what}, which passes no limit any more: take the entry out")
    for kind, rows in kinds.items():
        check(f"measures: {kind} are found", rows or kind == "copies", "none")
    check("measures: the tree", not bad, f"{len(bad)} over their limits")


test_measures()
test_known()
test_tree()
sys.exit(checks.finish())

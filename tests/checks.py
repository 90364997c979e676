"""checks.py - counting checks for the tests in Python; test.h is the same for C.

    import checks
    from checks import check, equal, skip

    checks.begin("chat")
    check("two and two", 2 + 2 == 4, "arithmetic")
    sys.exit(checks.finish())

A failed check prints its name and why, is counted, and the program goes on. What is missing is a skip with its
reason, never a pass.
"""
subject = "test"
n_passed = n_failed = n_skipped = 0


def begin(name):
    """Name what is tested."""
    global subject
    subject = name


def check(name, ok, why=""):
    """Count one check. Returns `ok`."""
    global n_passed, n_failed
    if ok:
        n_passed += 1
    else:
        n_failed += 1
        print(f"FAIL {name}: {str(why)[-600:]}")
    return ok


def equal(name, got, want):
    return check(name, got == want, f"got {got!r}, want {want!r}")


def skip(name, why):
    global n_skipped
    n_skipped += 1
    print(f"{subject}: SKIP {name}: {why}")


def finish():
    """Print the count. Returns the exit status: 0, or 1 when a check failed."""
    print(f"{subject}: {n_passed} passed, {n_failed} failed, {n_skipped} skipped")
    return int(n_failed > 0)

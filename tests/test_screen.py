#!/usr/bin/env python3
# test_screen.py - what a terminal shows: progress cut to its width, a slow token's status, notes.
#
#     K3=build/k3 tests/test_screen.py
#
# The program runs on a pseudo terminal; what it writes goes through a small terminal (class Screen), so that
# what is compared is what a person sees. A token is made slow by stopping the process for a while.
import fcntl, os, pty, select, signal, struct, sys, termios, time

import checks
from checks import check

K3 = os.environ.get("K3", "build/k3")
HELPER = os.path.join(os.path.dirname(os.path.abspath(K3)), "test_screen")
checks.begin("test_screen")


class Screen:
    """Rows of text; \\r \\n, ESC 7 8 D M, CSI K. Wraps at the last column as terminals do."""

    def __init__(self, rows, columns):
        self.rows, self.columns = rows, columns
        self.cell = [[" "] * columns for _ in range(rows)]
        self.y = self.x = 0
        self.kept, self.held, self.n_wraps, self.history = (0, 0), "", 0, []

    def down(self):
        if self.y < self.rows - 1:
            self.y += 1
        else:
            self.history.append("".join(self.cell.pop(0)).rstrip())
            self.cell.append([" "] * self.columns)
            self.kept = (max(self.kept[0] - 1, 0), self.kept[1])

    def put(self, c):
        if self.held:
            self.held += c
            if self.held in ("\0337", "\0338", "\033D", "\033M"):
                if c == "7":
                    self.kept = (self.y, self.x)
                elif c == "8":
                    self.y, self.x = self.kept
                elif c == "D":
                    self.down()
                elif c == "M":
                    assert self.y > 0, "up from the first row"
                    self.y -= 1
                self.held = ""
            elif self.held == "\033[K":
                self.cell[self.y][self.x:] = [" "] * (self.columns - self.x)
                self.held = ""
            assert len(self.held) < 4, f"unknown sequence {self.held!r}"
        elif c == "\033":
            self.held = c
        elif c == "\r":
            self.x = 0
        elif c == "\n":
            self.down()
        else:
            if self.x == self.columns:
                self.x = 0
                self.n_wraps += 1
                self.down()
            self.cell[self.y][self.x] = c
            self.x += 1

    def feed(self, data):
        for c in data.decode("utf-8", "replace"):
            self.put(c)

    def text(self):
        return self.history + ["".join(row).rstrip() for row in self.cell]


class Program:
    def __init__(self, argv, rows, columns, env=None):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # the size is set before the program begins
            fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.environ.update({"TERM": "xterm"}, **(env or {}))
            os.execv(argv[0], argv)
        self.data = b""

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, until=None, seconds=60):
        """Read until the text is there, or the program ends."""
        start, end = len(self.data), time.time() + seconds
        while time.time() < end:
            if until and until in self.data[start:]:
                return True
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    got = os.read(self.fd, 65536)
                except OSError:
                    got = b""
                if not got:
                    return until is None
                self.data += got
        return False

    def close(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def lines_of(data):
    """The texts that were drawn in place: each one from the erasing of its row to the next erasing."""
    return [piece.split(b"\r")[0].split(b"\033")[0] for piece in data.split(b"\r\033[K")[1:]]


def test_width():
    ids = ",".join(str(3 + i % 900) for i in range(3000))
    argv = [K3, "run", "-q", "--kernels", "ref", "--threads", "1", "--tokens", "0", "--ids", ids]
    p = Program(argv, 10, 30)
    drawn = p.read(b"\033[Kprompt: layer", 60) and p.read(b"\033[K", 10)
    check("progress is shown", drawn, p.data[-200:])
    first = len(p.data)
    narrow = [len(line) for line in lines_of(p.data)]
    check("progress fits 30 columns", narrow and max(narrow) == 29, narrow)
    p.resize(10, 50)
    for _ in range(4):
        p.read(b"\r\033[K", 20)
    wide = [len(line) for line in lines_of(p.data[first:])]
    check("a wider window is used", wide and 29 < max(wide) <= 49, wide)
    p.close()


def test_slow():
    argv = [K3, "run", "-q", "--no-stop", "--tokens", "4000", "--draft", "off", "--threads", "1", "Once upon a time"]
    p = Program(argv, 6, 100)
    p.read(b" ", 60)
    shown = False
    for _ in range(10): # a stop between two tokens shows nothing
        p.read(seconds=0.05)
        os.kill(p.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(p.pid, signal.SIGCONT)
        if p.read(b"\033D\r\033[Kanswer: layer", 0.3):
            shown = True
            break
    check("a slow token shows its status", shown, p.data[-300:])
    status = p.data.split(b"\033D\r\033[Kanswer:")[-1].split(b"\033")[0]
    check("with layer, ids and rate", b"layer " in status and b" ids" in status and b"tok/s" in status, status)
    os.kill(p.pid, signal.SIGINT)
    p.read(seconds=20)
    screen = Screen(6, 100)
    screen.feed(p.data)
    text = "".join(screen.text())
    check("nothing of the status is left", "answer:" not in text, text)
    p.close()
    p = Program(argv[:5] + ["40"] + argv[6:], 6, 100)  # 40 tokens: too few for a slow one
    p.read(seconds=20)
    screen = Screen(6, 100)
    screen.feed(p.data)
    want = "".join(screen.text()).strip()[:60]
    check("the answer is what it is without", want and want in text, (want, text[:200]))
    p.close()


def test_dumb():
    argv = [K3, "run", "-q", "--no-stop", "--tokens", "4000", "--draft", "off", "--threads", "1", "Once upon a time"]
    p = Program(argv, 6, 60, {"TERM": "dumb"})
    p.read(b" ", 60)
    os.kill(p.pid, signal.SIGSTOP)
    time.sleep(1.2)
    os.kill(p.pid, signal.SIGCONT)
    p.read(seconds=0.5)
    check("a terminal that moves no cursor gets no status", b"\033" not in p.data.split(b"\033[K")[-1], p.data[-200:])
    p.close()


def test_notes():
    """tests/test_screen.c writes an answer and notes as cli/screen.c lets it."""
    p = Program([HELPER], 12, 60)
    p.read(seconds=10)
    screen = Screen(12, 60)
    screen.feed(p.data)
    got = [row for row in screen.text() if row]
    want = ["The capital", "k3: note: first", "k3: note: second", " of France", "k3: note: at once", "is Par",
            "k3: an error", "is."]
    check("notes wait for the end of a word", got == want, got)
    p.close()


for test in (test_width, test_slow, test_dumb, test_notes):
    test()
sys.exit(checks.finish())

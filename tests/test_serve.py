#!/usr/bin/env python3
"""test_serve.py - k3 serve as its clients see it, on the bundled model.

    K3=build/k3 tests/test_serve.py

What is answered is compared with what `k3 chat --json` says to the same messages and seed. Requests are written by
hand, so that framing, wrong input and clients that go away are tested too.
"""
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

K3 = os.environ.get("K3", "build/k3")
passed = failed = 0


def check(name, ok, detail=""):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print(f"FAIL {name}: {str(detail)[:300]}")


class Server:
    def __init__(self, *options):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = tempfile.TemporaryFile()
        self.child = subprocess.Popen([K3, "serve", "--listen", f"127.0.0.1:{self.port}", *options],
                                      stdout=subprocess.DEVNULL, stderr=self.log)
        for _ in range(400):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit("the server does not start")

    def ask(self, method, path, body=None, headers=None, timeout=60):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        c.request(method, path, body, headers or {})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, dict(r.getheaders()), data

    def chat(self, **request):
        request.setdefault("messages", [{"role": "user", "content": "What is the capital of France?"}])
        status, _, data = self.ask("POST", "/v1/chat/completions", request)
        return status, json.loads(data)

    def stream(self, **request):
        request.setdefault("messages", [{"role": "user", "content": "What is the capital of France?"}])
        status, headers, data = self.ask("POST", "/v1/chat/completions", dict(request, stream=True))
        events = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
        return status, headers, events

    def close(self):
        self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return None


def by_chat(messages, *options, **fields):
    """What k3 chat says to a whole conversation."""
    out = subprocess.run([K3, "chat", "-q", "--json", *options], input=json.dumps(dict(fields, messages=messages)) + "\n",
                         capture_output=True, text=True, timeout=60)
    return json.loads(out.stdout.splitlines()[-1])


def test_small(s):
    status, headers, data = s.ask("GET", "/health")
    check("health", status == 200 and json.loads(data) == {"status": "ok"}, data)
    status, headers, data = s.ask("GET", "/")
    check("the page", status == 200 and headers["Content-Type"].startswith("text/html") and data.endswith(b"</script>\n"), data[-80:])
    check("the page asks nobody else", b"http://" not in data and b"https://" not in data and b"src=" not in data)
    status, _, data = s.ask("GET", "/v1/models")
    models = json.loads(data)
    check("models", status == 200 and models["object"] == "list" and models["data"][0]["id"] == "demo", data)
    check("one model", json.loads(s.ask("GET", "/v1/models/demo")[2])["object"] == "model")
    check("no such model", s.ask("GET", "/v1/models/x")[0] == 404)
    props = json.loads(s.ask("GET", "/props")[2])
    check("props", props["n_ctx"] == 512 and props["model"] == "demo", props)
    status, _, data = s.ask("GET", "/metrics")
    check("metrics", status == 200 and b"k3_requests_total " in data, data)
    ids = json.loads(s.ask("POST", "/tokenize", {"content": "The capital of France"})[2])["tokens"]
    check("tokenize", ids == [343, 336, 327, 444, 1489][:len(ids)] and ids, ids)
    back = json.loads(s.ask("POST", "/detokenize", {"tokens": ids})[2])
    check("detokenize", back == {"content": "The capital of France"}, back)


def test_answers(s):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for options, fields in (([], {"temperature": 0}), (["--seed", "7"], {"temperature": 1, "seed": 7})):
        want = by_chat(messages, "--temperature", str(fields["temperature"]), *options)
        status, got = s.chat(messages=messages, **fields)
        m = got["choices"][0]["message"]
        check("the answer of k3 chat", status == 200 and m["content"] == want["content"], (got, want))
        check("its thinking", m.get("reasoning_content") == want["reasoning_content"], m)
        check("counts", got["usage"]["completion_tokens"] == want["n_gen"] and
              got["usage"]["prompt_tokens"] == want["n_kept"] + want["n_prompt"], got["usage"])
        status, headers, events = s.stream(messages=messages, stream_options={"include_usage": True}, **fields)
        check("a stream's type", status == 200 and headers["Content-Type"] == "text/event-stream", headers)
        check("[DONE]", events[-1] == "[DONE]", events[-1:])
        chunks = [json.loads(e) for e in events[:-1]]
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        check("the role comes first", deltas[0] == {"role": "assistant", "content": ""}, deltas[0])
        check("streamed text", "".join(d.get("content") or "" for d in deltas) == want["content"], deltas)
        check("streamed thinking", "".join(d.get("reasoning_content") or "" for d in deltas) == want["reasoning_content"])
        check("finish reason", [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop")
        check("usage comes last", chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0, chunks[-1])
    check("max_tokens of k3 chat", by_chat(messages, max_tokens=5)["n_gen"] == 5)
    status, got = s.chat(temperature=0, max_tokens=5)
    check("max_tokens", got["choices"][0]["finish_reason"] == "length" and got["usage"]["completion_tokens"] == 5, got)
    more = messages + [{"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain?"}]
    status, got = s.chat(messages=more, temperature=0)
    check("a second turn", status == 200 and got["choices"][0]["message"]["content"] ==
          by_chat(more, "--temperature", "0")["content"], got)
    a, b = s.chat(temperature=1)[1], None
    b = s.chat(temperature=1, seed=a["seed"])[1]
    check("a drawn seed gives the text again", a["choices"][0]["message"] == b["choices"][0]["message"], (a, b))
    check("cached ids", b["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, b["usage"])


def test_stop(s):
    want = s.chat(temperature=0)[1]["choices"][0]["message"]["content"]
    stop = want[len(want) // 2:len(want) // 2 + 3]
    status, got = s.chat(temperature=0, stop=[stop])
    cut = want[:want.index(stop)]
    check("stop", got["choices"][0]["message"]["content"] == cut and got["choices"][0]["finish_reason"] == "stop", got)
    _, _, events = s.stream(temperature=0, stop=stop)
    text = "".join(json.loads(e)["choices"][0]["delta"].get("content") or "" for e in events[:-1])
    check("stop, streamed", text == cut, text)


def test_wrong(s):
    def refused(name, status, text, path="/v1/chat/completions", method="POST", **request):
        body = request.pop("body", request)
        got, _, data = s.ask(method, path, body, request.pop("headers", None))
        try:
            message = json.loads(data)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = "no error of OpenAI's form"
        check(name, got == status and text in message, (got, data))
    user = [{"role": "user", "content": "Hello"}]
    refused("no JSON", 400, "byte", body='{"messages":')
    refused("a list", 400, "no JSON object", body="[]")
    refused("no messages", 400, "messages is not a list", model="x")
    refused("a role", 400, "role", messages=[{"role": "king", "content": "x"}])
    refused("temperature", 400, "temperature", messages=user, temperature="hot")
    refused("n", 400, "n ", messages=user, n=2)
    refused("penalty", 400, "presence_penalty", messages=user, presence_penalty=1)
    refused("too long", 400, "the context holds 512", messages=[{"role": "user", "content": "word " * 2000}])
    refused("an image", 400, "text", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    refused("another address", 404, "no such address", path="/v1/embeddings")
    refused("another method", 405, "POST", method="DELETE")
    status, _, _ = s.ask("GET", "/health", headers={"Host": "evil.example"})
    check("a foreign Host", status == 403, status)
    status, _, _ = s.ask("GET", "/health", headers={"Origin": "http://evil.example"})
    check("a foreign Origin", status == 403, status)
    status, got = s.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}], "x": 1}], temperature=0,
                         max_tokens=3, user="u", metadata={}, parallel_tool_calls=True)
    check("unknown fields are passed over", status == 200, got)
    check("and it still answers", s.ask("GET", "/health")[0] == 200)


def test_many(s):
    """Texts of one never reach another."""
    want = {i: by_chat([{"role": "user", "content": f"Say {i}"}], "--temperature", "0", "--tokens", "20") for i in range(4)}
    bad = []

    def client(i):
        for _ in range(5):
            status, got = s.chat(messages=[{"role": "user", "content": f"Say {i % 4}"}], temperature=0, max_tokens=20)
            if status != 200 or (got["choices"][0]["message"]["content"] or "") != want[i % 4]["content"]:
                bad.append((i, status, got))
    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    check("eight clients at once", not bad, bad[:1])


def test_left(s):
    """Clients that go away at any moment: the server goes on."""
    body = json.dumps({"messages": [{"role": "user", "content": "Tell me a long story"}], "stream": True, "temperature": 1})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    for cut in (10, len(head), len(head) + 20, None, None, None):
        c = socket.create_connection(("127.0.0.1", s.port))
        c.sendall((head + body)[:cut].encode())
        if cut is None:
            c.settimeout(10)
            c.recv(100)
        c.close()
    start = time.time()
    status, got = s.chat(temperature=0, max_tokens=3)
    check("after clients that left", status == 200 and time.time() - start < 10, got)


def test_keys():
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as f:
        f.write("# who\nann 0123456789abcdef0123\nbob fedcba9876543210ffff\n")
        f.flush()
        s = Server("--context", "512", "--api-keys", f.name)
        check("no key", s.ask("GET", "/v1/models")[0] == 401)
        check("the page needs none", s.ask("GET", "/")[0] == 200)
        check("a wrong key", s.ask("GET", "/v1/models", headers={"Authorization": "Bearer 0123456789abcdef0124"})[0] == 401)
        check("a key", s.ask("GET", "/v1/models", headers={"Authorization": "Bearer fedcba9876543210ffff"})[0] == 200)
        check("another header", s.ask("GET", "/v1/models", headers={"x-api-key": "0123456789abcdef0123"})[0] == 200)
        s.close()
    for options, text in ((["--listen", "0.0.0.0:0"], "--api-keys"), (["--listen", "here"], "ADDR:PORT"),
                          (["--api-keys", "/dev/null"], "names no key")):
        out = subprocess.run([K3, "serve", "-q", *options], capture_output=True, text=True, timeout=60)
        check("refused: " + " ".join(options), out.returncode != 0 and text in out.stderr, out.stderr)


def main():
    if subprocess.run([K3, "help", "serve"], capture_output=True).returncode != 0:
        print("serve: SKIP this k3 was built without libmicrohttpd\nserve: 0 passed, 0 failed, 1 skipped")
        return 0
    s = Server("--context", "512")
    for test in (test_small, test_answers, test_stop, test_wrong, test_many, test_left):
        test(s)
    check("ends by SIGTERM", s.close() in (0, 130), s.child.returncode)
    test_keys()
    print(f"serve: {passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

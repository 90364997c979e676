#!/usr/bin/env bash
# test_tier_tls.sh - one hash over TLS, through proxies and by every kind of address; who gets in.
#
#     K3=build/k3 K3_TIER=build/k3-tier tests/test_tier_tls.sh MODEL
#
# Certificates are made here with the openssl program: an authority, a box, a client; strangers, one
# that has expired, one for another name. Proxies and peers that misbehave are a few lines of Python.
# Every run must give the logits_fnv of a run without boxes (with the bundled model: of demo/bits.tsv),
# also where a peer was refused. The experts served say whether the box was used.
suite=tier_tls
# shellcheck source=tests/boxes.sh
. "$(dirname "$0")/boxes.sh"
limit() { timeout -k 1 60 "$@"; }
K3_SAN=${K3_SAN:-}
unset http_proxy https_proxy all_proxy no_proxy HTTPS_PROXY ALL_PROXY NO_PROXY
command -v openssl >/dev/null || { echo "tier_tls: SKIP the openssl program is not installed (scripts/deps.sh test)"; exit 77; }
command -v python3 >/dev/null || { echo "tier_tls: SKIP python3 is not installed (scripts/deps.sh test)"; exit 77; }
"$K3" run --model "$MODEL" --tier tls:localhost x 2>&1 | grep -q "without libcurl" &&
    { echo "tier_tls: SKIP built without libcurl, so without TLS and proxies"; exit 77; }
prompt=$(awk '$1 == 0 { print $2 }' tests/data/golden_prompts.tsv)
args=(-q --json --no-stop --model "$MODEL" --ids "$prompt" --tokens 32 --threads 1)

# ---- Certificates ----

key=(-nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256)
authority() { # NAME
    openssl req -x509 "${key[@]}" -keyout "$T/$1.key" -out "$T/$1.pem" -days 2 -subj "/CN=$1"
}
certificate() { # NAME AUTHORITY NAMES DAYS
    openssl req -new "${key[@]}" -keyout "$T/$1.key" -out "$T/$1.csr" -subj "/CN=$1" &&
        printf 'subjectAltName=%s\n' "$3" >"$T/ext" &&
        openssl x509 -req -in "$T/$1.csr" -CA "$T/$2.pem" -CAkey "$T/$2.key" -CAcreateserial \
            -out "$T/$1.pem" -extfile "$T/ext" -days "$4"
}
{
    here=DNS:localhost,DNS:box.test,IP:127.0.0.1,IP:::1
    authority ca && authority strangers &&
        certificate box ca $here 2 &&
        certificate late ca $here 0 && # expired when it is used; OpenSSL 3.5 takes no -1
        certificate elsewhere ca DNS:elsewhere.test 2 &&
        certificate client ca DNS:client 2 &&
        certificate stranger strangers DNS:client 2 &&
        openssl req -x509 "${key[@]}" -keyout "$T/self.key" -out "$T/self.pem" -days 2 -subj /CN=self \
            -addext subjectAltName=$here &&
        openssl pkey -in "$T/client.key" -aes256 -passout pass:secret -out "$T/sealed.key"
} >"$T/err" 2>&1 || { cat "$T/err"; echo "tier_tls: 0 passed, 1 failed, 0 skipped"; exit 1; }
cat "$T/client.key" "$T/client.pem" >"$T/both.pem"
printf 'a key of more than sixteen bytes\n' >"$T/psk"
printf 'a key of more than sixteen bytes, to stage\n' >"$T/psk.stage"
chmod 600 "$T"/*.key "$T/both.pem" "$T/psk" "$T/psk.stage"

# ---- Peers of a few lines ----

cat >"$T/net.py" <<'EOF'
import os, random, socket, struct, sys, threading, time
what, port, log = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None

def pump(a, b):
    try:
        while data := a.recv(65536): b.sendall(data)
    except OSError: pass
    for s in (a, b):
        try: s.shutdown(socket.SHUT_RDWR)
        except OSError: pass

def exactly(s, n):
    data = b""
    while len(data) < n: data += s.recv(n - len(data)) or sys.exit()
    return data

def join(client, host, port, yes):          # only the proxy can resolve the names
    with open(log, "a") as f: f.write("%s:%d\n" % (host, port))
    box = socket.create_connection(("127.0.0.1", port))
    for s in (box, client): s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(yes)
    threading.Thread(target=pump, args=(box, client), daemon=True).start()
    pump(client, box)

def connect(c):
    head = b""
    while b"\r\n\r\n" not in head: head += c.recv(1) or sys.exit()
    method, place, _ = head.split(b"\r\n")[0].split()
    host, port = place.decode().rsplit(":", 1)
    if method != b"CONNECT" or what == "forbid":
        with open(log, "a") as f: f.write("forbidden\n")
        c.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 9\r\n\r\nforbidden")
        return c.close()
    join(c, host, int(port), b"HTTP/1.1 200 Yes\r\nX-Noise: on stdout?\r\n\r\n")

def socks(c):
    exactly(c, exactly(c, 2)[1])
    c.sendall(b"\5\0")
    if exactly(c, 4) != b"\5\1\0\3": return c.close()    # must be a name: the client must not resolve it
    host = exactly(c, exactly(c, 1)[0]).decode()
    join(c, host, struct.unpack(">H", exactly(c, 2))[0], b"\5\0\0\1\0\0\0\0\0\0")

def serve(each):
    ear = socket.socket()
    ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    ear.bind(("127.0.0.1", port))
    ear.listen(16)
    while True: threading.Thread(target=each, args=(ear.accept()[0],), daemon=True).start()

HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(32)         # begins a ClientHello
def garbage():
    random.seed(7)
    rows = [random.randbytes(n) for n in (1, 5, 6, 32, 500, 20000)]
    rows += [b"GET / HTTP/1.0\r\n\r\n", HELLO[:3], HELLO + random.randbytes(200), b"\x16\x03\x01\xff\xff" + bytes(70000),
             b"\x80\x2e\x01\0\2\0\x15\0\0\0\x10" + bytes(40), b"\x15\3\3\0\2\2\x28", b"\x17\3\3\0\x10" + bytes(16), b"K3", b""]
    for row in rows:
        with socket.create_connection(("127.0.0.1", port)) as s:
            try:
                s.sendall(row)
                s.shutdown(socket.SHUT_WR)
                s.settimeout(3)
                while s.recv(4096): pass
            except TimeoutError: raise                  # the box keeps the connection
            except OSError: pass
def stall():
    def one(n):
        s, start = socket.create_connection(("127.0.0.1", port)), time.time()
        s.sendall(HELLO[:n])
        s.settimeout(20)
        try: s.recv(1)
        except ConnectionError: pass
        with open(log, "a") as f: f.write("%.0f\n" % (time.time() - start))
    threads = [threading.Thread(target=one, args=(n,)) for n in (0, 2, 20, 43)]
    for t in threads: t.start()
    for t in threads: t.join()

def trusting(authority): # Python 3.13 asks authorities for extensions that ours do without
    import ssl
    context = ssl.create_default_context(cafile=authority)
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
    return context

def ahead():                                # log: a box's --dump; hello and 40 questions in one record
    import re, ssl
    frames = {}
    for m in re.finditer(r"-> (hello|stats), (\d+) bytes.*\n((?:  [0-9a-f]{6}  .*\n)+)", open(log, errors="replace").read()):
        rows = [line[9:57].split() for line in m[3].splitlines()]
        frame = bytes.fromhex("".join("".join(row) for row in rows))
        if len(frame) == int(m[2]) and (m[1] == "stats" or frame[32 + 72] == 1): frames[m[1]] = frame
    s = trusting(sys.argv[4]).wrap_socket(
        socket.create_connection(("127.0.0.1", port)), server_hostname="localhost")
    s.sendall(frames["hello"] + 40 * frames["stats"])
    s.settimeout(5)
    exactly(s, 32 + 32 + 40 * (32 + 128))   # a welcome, 40 answers; a timeout is an error

def between(c):                             # log, our certificate and key, the box's port and authority
    import ssl
    cert, key, box_port, ca = sys.argv[4:8]
    us = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    us.load_cert_chain(cert, key)
    c = us.wrap_socket(c, server_side=True)
    box = trusting(ca).wrap_socket(
        socket.create_connection(("127.0.0.1", int(box_port))), server_hostname="localhost")
    with open(log, "a") as f: f.write("between\n")
    threading.Thread(target=pump, args=(box, c), daemon=True).start()
    pump(c, box)

if what in ("connect", "forbid"): serve(connect)
elif what == "between": serve(between)
elif what == "socks": serve(socks)
elif what == "silent": serve(lambda c: time.sleep(60))
elif what == "garbage": garbage()
elif what == "stall": stall()
elif what == "ahead": ahead()
EOF
# peer WHAT: start one that listens on $port; its pid is in $peer
peer() {
    new_port
    : >"$T/log"
    python3 "$T/net.py" "$1" "$port" "$T/log" "${@:2}" 2>"$T/peer.err" &
    peer=$!
    pids+=($peer)
    for _ in $(seq 100); do { : <>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null && break; sleep 0.05; done
}

# ---- Boxes and runs ----

port=$((20000 + $$ % 20000))
new_port() { # set $port to one that nobody listens on
    port=$((port + 1))
    while { : <>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null; do port=$((port + 1)); done
}
# box ADDR OPTION...: start a server; @ in ADDR becomes its $port; its pid is in $box
box() {
    local addr=$1
    shift
    new_port
    addr=${addr//@/$port}
    listen_box "$addr" "$@"
    mine=(--tls-ca "$T/ca.pem" --tls-cert "$T/client.pem" --tls-key "$T/client.key")
    case $addr in tls:*) ;; *) mine=() ;; esac
    case $* in *--psk-file*) mine+=(--psk-file "$T/psk") ;; esac
    addr=${addr//0.0.0.0/127.0.0.1}
    for _ in $(seq 300); do
        "$K3_TIER" status "$addr" "${mine[@]}" >"$T/status" 2>&1
        grep -q "experts_held.256" "$T/status" && return
        grep -q "trust\|expired\|is not for\|refused: another key" "$T/status" && return # it runs, and lets in other peers
        [ ${#holds[@]} = 0 ] && grep -q "experts_held" "$T/status" && return
        sleep 0.02
    done
    echo "box $addr does not start:"
    cat "$T/box.err" "$T/status"
    exit 1
}
holds=(--model "$MODEL") # what boxes are started with; (): they wait for `k3 stage`
listen_box() {
    local addr=$1
    shift
    "$K3_TIER" "${holds[@]}" --ram 1G --threads 1 --listen "$addr" "$@" 2>"$T/box.err" &
    box=$!
    pids+=($box)
}
tls=(--tls-cert "$T/box.pem" --tls-key "$T/box.key")

# a name with two addresses that only one run knows: needs root
printf '::1 box.test\n127.0.0.1 box.test localhost\n' >"$T/hosts"
two=(unshare -m sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$T/hosts")
"${two[@]}" true 2>/dev/null || two=()
via=()

# check NAME SERVED NOTE OPTION...: check the hash, that SERVED experts or more ("none": none) came, NOTE on stderr
check() {
    [ -z "${TIMES:-}" ] || date "+%M:%S.%N $1"
    local name=$1 least=$2 note=$3 rc got served
    shift 3
    timeout -k 1 60 "${via[@]}" "$K3" run "${args[@]:1}" --ram "$ram" --tier-wait 200000 "$@" >"$T/out" 2>"$T/err"
    rc=$? got=$(field logits_fnv) served=$(field far_served)
    if [ $rc != 0 ]; then
        fail "$name" "exit $rc"
    elif [ "$got" != "$want" ]; then
        fail "$name" "logits_fnv $got, not $want"
    elif [ "$(wc -l <"$T/out")" != 1 ]; then
        fail "$name" "more than the answer on stdout"
    elif [ "$least" = none ] && [ "${served:-x}" != 0 ]; then
        fail "$name" "$served experts served by a box that should not be used"
    elif [ "$least" != none ] && [ "${served:-0}" -lt "$least" ]; then
        fail "$name" "$served experts served, not $least or more"
    elif ! grep -q -- "$note" "$T/err"; then
        fail "$name" "no word of '$note'"
        grep -a "note:" "$T/err"
    else
        pass
    fi
}
quick() { # NAME MS: check that no more than MS have passed since `start`; a sanitizer may be slow
    local took=$((($(date +%s%N) - start) / 1000000))
    [ "$took" -lt $(($2 * (${#K3_SAN} ? 3 : 1))) ] && pass || fail "$1" "took $took ms"
}

alone tls:localhost tls:localhost
if [ "$MODEL" = demo ]; then
    [ "$want" = "$(awk '$1 == 0 { print $3 }' demo/bits.tsv)" ] && pass || fail "no box" "not the hash of demo/bits.tsv"
fi

# ---- TLS: the box is known, anybody comes in ----

trust=(--tier-ca "$T/ca.pem")
box tls:127.0.0.1:@ "${tls[@]}"
python3 "$T/net.py" stall "$port" "$T/stalled" & # runs beside the tests that follow, and is checked later
staller=$!
pids+=($staller)
check "TLS" 300 "up, holds 256" --tier "tls:127.0.0.1:$port" "${trust[@]}"
check "TLS, by a name" 300 "" --tier "tls:localhost:$port" "${trust[@]}"
via=("${two[@]}")
[ ${#via[@]} = 0 ] && skip "a name with two addresses, one of them dead: needs root" ||
    check "TLS, by a name with two addresses" 300 "" --tier "tls:box.test:$port" "${trust[@]}"
via=()
check "TLS, chunks of 3" 300 "" --tier "tls:127.0.0.1:$port" "${trust[@]}" --chunk 3
check "TLS, chunks of 64" 100 "" --tier "tls:127.0.0.1:$port" "${trust[@]}" --chunk 64 --ram $((ram + (8 << 20)))
check "TLS, no spinning" 300 "" --tier "tls:127.0.0.1:$port" "${trust[@]}" --spin-us 0
check "TLS, each answer compared" 300 "" --tier "tls:127.0.0.1:$port" "${trust[@]}" --tier-audit 1/1
check "a stranger's authority" none "no trust in the box's certificate.*--tier-ca" --tier "tls:127.0.0.1:$port" --tier-ca "$T/strangers.pem"
check "the system's authorities" none "no trust in the box's certificate.*--tier-ca" --tier "tls:127.0.0.1:$port"
start=$(date +%s%N)
check "plain where TLS is spoken" none "write tls: before its address" --tier "127.0.0.1:$port"
check "and beside it a box that is well" 300 "write tls:" --tier "127.0.0.1:$port" --tier "tls:127.0.0.1:$port" "${trust[@]}"
quick "plain where TLS is spoken" 3000
timeout -k 1 60 python3 "$T/net.py" garbage "$port" 2>"$T/err" && pass || fail "garbage in the handshake" "a connection stays"
kill -0 $box 2>/dev/null && pass || fail "garbage in the handshake" "the box is gone"
check "TLS after garbage" 300 "" --tier "tls:127.0.0.1:$port" "${trust[@]}"
# what openssl's own client reports
: | openssl s_client -connect "127.0.0.1:$port" -CAfile "$T/ca.pem" -verify_return_error >"$T/out" 2>"$T/err"
grep -q "Verify return code: 0" "$T/out" && grep -q "TLSv1.3" "$T/out" && pass || fail "s_client" "no TLS 1.3"
grep -q "New Session Ticket" "$T/out" && fail "s_client" "session tickets" || pass
: | timeout -k 1 10 openssl s_client -tls1_2 -connect "127.0.0.1:$port" >"$T/out" 2>"$T/err" && fail "TLS 1.2" "is spoken" || pass
stalled_box=$box stalled_port=$port

box tls:127.0.0.1:@ --tls-cert "$T/self.pem" --tls-key "$T/self.key" --dump "$T/dump"
"$K3_TIER" status "tls:localhost:$port" --tls-ca "$T/self.pem" >"$T/status" 2>"$T/err"
grep -q "experts_held.256" "$T/status" && pass || fail "a certificate that signed itself" "no figures"
check "a certificate that signed itself" 300 "" --tier "tls:127.0.0.1:$port" --tier-ca "$T/self.pem"
python3 "$T/net.py" ahead "$port" "$T/dump" "$T/self.pem" 2>"$T/err" && pass || fail "questions that do not wait" "not all are answered"
stop $box
box tls:127.0.0.1:@ --tls-cert "$T/late.pem" --tls-key "$T/late.key"
check "an expired certificate" none "has expired" --tier "tls:127.0.0.1:$port" "${trust[@]}"
stop $box
box tls:127.0.0.1:@ --tls-cert "$T/elsewhere.pem" --tls-key "$T/elsewhere.key"
check "a certificate for another name" none "is not for localhost" --tier "tls:localhost:$port" "${trust[@]}"
check "a certificate for another address" none "is not for 127.0.0.1" --tier "tls:127.0.0.1:$port" "${trust[@]}"
stop $box
box tls:127.0.0.1:@ "${tls[@]}" --psk-file "$T/psk"
check "TLS and a key" 300 "" --tier "tls:127.0.0.1:$port" "${trust[@]}" --psk-file "$T/psk"
box_port=$port
peer between "$T/box.pem" "$T/box.key" "$box_port" "$T/ca.pem"
check "TLS with somebody in between" none "refused: another key, or somebody between us" --tier "tls:127.0.0.1:$port" "${trust[@]}" --psk-file "$T/psk"
"$K3_TIER" status "tls:127.0.0.1:$port" "${mine[@]}" >"$T/status" 2>"$T/err" && fail "status with somebody in between" "figures" || pass
grep -q "^between$" "$T/log" && pass || fail "somebody in between" "was not asked"
stop $peer
port=$box_port
check "TLS without the key" none "wants a key" --tier "tls:127.0.0.1:$port" "${trust[@]}"
stop $box

# ---- Mutual TLS; addresses of other machines ----

box tls:0.0.0.0:@ "${tls[@]}" --tls-ca "$T/ca.pem"
me=(--tier-cert "$T/client.pem" --tier-key "$T/client.key")
check "mutual TLS" 300 "up, holds 256" --tier "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}"
check "mutual TLS, key and certificate in one file" 300 "" --tier "tls:127.0.0.1:$port" "${trust[@]}" --tier-cert "$T/both.pem"
check "mutual TLS without a certificate" none "wants a certificate of ours: give --tier-cert" --tier "tls:127.0.0.1:$port" "${trust[@]}"
check "mutual TLS with a stranger's" none "does not know who signed our certificate" \
    --tier "tls:127.0.0.1:$port" "${trust[@]}" --tier-cert "$T/stranger.pem" --tier-key "$T/stranger.key"
check "mutual TLS with an expired one" none "our certificate has expired" \
    --tier "tls:127.0.0.1:$port" "${trust[@]}" --tier-cert "$T/late.pem" --tier-key "$T/late.key"
kill -0 $box 2>/dev/null && pass || fail "mutual TLS" "the box is gone"

# ---- `k3 bench --hop` over TLS, TCP and a unix socket ----

# hop NAME EXIT PATTERN OPTION...: check the exit code, and PATTERN in the output
hop() {
    local name=$1 want_rc=$2 pattern=$3 rc
    shift 3
    # a sanitizer keeps freed memory, so there a box does grow
    timeout -k 1 60 "$K3" bench --model "$MODEL" --requests 200 --sustain "$((${#K3_SAN} ? 0 : 1))" "$@" >"$T/out" 2>"$T/err"
    rc=$?
    if [ $rc = "$want_rc" ] && cat "$T/out" "$T/err" | grep -q -- "$pattern"; then pass; else fail "hop: $name" "exit $rc"; fi
}
vain=()
hop "mutual TLS" 0 "0 requests without a whole answer, 0 wrong" --hop "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}"
# vain N OPTION...: start, beside the other tests, a hop that never gets in; vain_end N NAME PATTERN checks how it ended
vain() {
    local n=$1
    shift
    { "$K3" bench --model "$MODEL" --requests 200 "$@" >"$T/vain.$n" 2>&1; echo "exit $?" >>"$T/vain.$n"; } &
    pids+=($!)
    vain[n]=$!
}
vain_end() {
    wait "${vain[$1]}"
    grep -qx "exit 1" "$T/vain.$1" && grep -q -- "$3" "$T/vain.$1" && pass || { cp "$T/vain.$1" "$T/err"; fail "hop: $2" "was let in, or not told why"; }
}
vain 1 --hop "tls:127.0.0.1:$port" "${trust[@]}"
vain 2 --hop "tls:127.0.0.1:$port"
hop "certificates without tls:" 2 "write --hop tls:ADDR" --hop "127.0.0.1:$port" "${trust[@]}"
box_port=$port mutual_box=$box
new_port
plain_port=$port
box tls:127.0.0.1:@ "${tls[@]}" --psk-file "$T/psk" --listen "127.0.0.1:$plain_port" --listen "unix:$T/hop.sock"
hops=("tls:127.0.0.1:$port" "127.0.0.1:$plain_port" "unix:$T/hop.sock")
vain 3 --hop "${hops[0]}" "${trust[@]}"
vain_end 1 "mutual TLS without a certificate" "wants a certificate of ours: give --tier-cert"
vain_end 2 "the system's authorities" "no trust in the box's certificate.*--tier-ca"
vain_end 3 "TLS without the key" "wants a key"
hop "three addresses" 0 "0 requests without" --hop "${hops[0]}" --hop "${hops[1]}" --hop "${hops[2]}" "${trust[@]}" --psk-file "$T/psk"
for addr in "${hops[@]}"; do
    [ "$(grep -c "^$addr	" "$T/out")" = 6 ] && grep -q "^# $addr: 0 requests without a whole answer, 0 wrong" "$T/out" &&
        { [ -n "$K3_SAN" ] || grep -q "^# $addr: sustain.*: 0.000 bytes a request; 0 timeouts" "$T/out"; } && pass || fail "hop: $addr" "no 6 rows, or not well"
done
stop $box
box=$mutual_box

# ---- Proxies ----

peer connect
proxy=$port
ALL_PROXY=http://127.0.0.1:$proxy check "TLS through CONNECT" 300 "" --tier "tls:box.test:$box_port" "${trust[@]}" "${me[@]}"
grep -qx "box.test:$box_port" "$T/log" && pass || fail "CONNECT" "the proxy was not asked"
: >"$T/log"
ALL_PROXY=http://127.0.0.1:$proxy NO_PROXY=other,box.test check "NO_PROXY" none "resolve" --tier "tls:box.test:$box_port" "${trust[@]}" "${me[@]}"
via=("${two[@]}")
[ ${#via[@]} = 0 ] || ALL_PROXY=http://127.0.0.1:$proxy NO_PROXY=other,box.test check "NO_PROXY, and the name is known" 300 "" \
    --tier "tls:box.test:$box_port" "${trust[@]}" "${me[@]}"
via=()
ALL_PROXY=http://127.0.0.1:$proxy check "no proxy to this machine" 300 "" --tier "tls:127.0.0.1:$box_port" "${trust[@]}" "${me[@]}"
ALL_PROXY=http://127.0.0.1:$proxy check "nor by a name in capitals" 300 "" --tier "tls:LOCALHOST:$box_port" "${trust[@]}" "${me[@]}"
[ -s "$T/log" ] && fail "NO_PROXY" "the proxy was asked for $(head -1 "$T/log")" || pass
stop $peer
peer socks
proxy=$port
ALL_PROXY=socks5h://127.0.0.1:$proxy check "TLS through SOCKS" 300 "" --tier "tls:box.test:$box_port" "${trust[@]}" "${me[@]}"
grep -qx "box.test:$box_port" "$T/log" && pass || fail "SOCKS" "the proxy was not asked"
stop $box
box 127.0.0.1:@
box_port=$port
ALL_PROXY=socks5h://127.0.0.1:$proxy check "plain through SOCKS" 300 "" --tier "box.test:$box_port"
grep -qx "box.test:$box_port" "$T/log" && pass || fail "SOCKS" "the proxy was not asked"
stop $peer
peer connect
ALL_PROXY=http://127.0.0.1:$port check "plain through CONNECT" 300 "" --tier "box.test:$box_port"
grep -qx "box.test:$box_port" "$T/log" && pass || fail "CONNECT" "the proxy was not asked"
stop $peer
peer forbid
ALL_PROXY=http://127.0.0.1:$port check "a proxy that says no" none "403.*see ALL_PROXY" --tier "box.test:$box_port"
grep -qx "forbidden" "$T/log" && pass || fail "a proxy that says no" "was not asked"
stop $peer

# ---- Staging ----

# stage NAME EXIT PATTERN ADDR OPTION...: check the exit code and the output of `k3 stage`
stage() {
    local name=$1 code=$2 pattern=$3 addr=$4
    shift 4
    ends "$name" "$code" "$pattern" "$K3" stage -q --model "$MODEL" --to "$addr" "$@"
}
plain_box=$box plain_port=$box_port holds=()
expert=9792 # bytes of one expert of the demo
box tls:127.0.0.1:@ "${tls[@]}" --tls-ca "$T/ca.pem" --psk-file "$T/psk" --stage-psk-file "$T/psk.stage"
asker=(--psk-file "$T/psk")
key=(--psk-file "$T/psk.stage")
stage "stage over TLS with a key to ask" 1 "refused: another key" "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}" "${asker[@]}"
stage "stage over TLS without a certificate" 1 "wants a certificate of ours: give --tier-cert" "tls:127.0.0.1:$port" "${trust[@]}" "${key[@]}"
stage "stage over TLS with a stranger's" 1 "does not know who signed" \
    "tls:127.0.0.1:$port" "${trust[@]}" --tier-cert "$T/stranger.pem" --tier-key "$T/stranger.key" "${key[@]}"
stage "stage over TLS to a stranger" 1 "no trust in the box's certificate" "tls:127.0.0.1:$port" --tier-ca "$T/strangers.pem" "${me[@]}" "${key[@]}"
stage "stage plain where TLS is spoken" 1 "write tls: before its address" "127.0.0.1:$port"
stage "stage over TLS without the key" 1 "give --psk-file" "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}"
stage "stage certificates without TLS" 2 "write tls:ADDR" "127.0.0.1:$port" "${trust[@]}"
stage "stage with an authority that is none" 2 "no certificate" "tls:127.0.0.1:$port" --tier-ca "$T/psk"
stage "stage TLS where none is spoken" 1 "no TLS 1.3 there" "tls:127.0.0.1:$plain_port" "${trust[@]}"
expect_held() { # NAME N
    "$K3_TIER" status "tls:127.0.0.1:$port" "${mine[@]}" >"$T/status" 2>"$T/err"
    grep -q "experts_held.$2$" "$T/status" && grep -q "experts_staged_total.$2$" "$T/status" && pass || fail "$1" "not $2 experts"
}
expect_held "nobody has staged" 0
[ "$MODEL" != demo ] || stage "stage a few over TLS" 0 ": 40 experts sent .*, 0 skipped" \
    "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}" "${key[@]}" --size $((40 * expert))
box_port=$port
peer connect
ALL_PROXY=http://127.0.0.1:$port stage "stage over TLS through CONNECT" 0 "experts sent .*, 0 left out" \
    "tls:box.test:$box_port" "${trust[@]}" "${me[@]}" "${key[@]}"
grep -qx "box.test:$box_port" "$T/log" && pass || fail "stage through CONNECT" "the proxy was not asked"
stop $peer
port=$box_port
stage "stage over TLS once more" 0 ": 0 experts sent .*, 256 skipped" "tls:localhost:$port" "${trust[@]}" --tier-cert "$T/both.pem" "${key[@]}"
expect_held "all are staged" 256
check "what was staged over TLS" 300 "up, holds 256" --tier "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}" "${asker[@]}"
stop $box
box tls:127.0.0.1:@ "${tls[@]}" --listen "unix:$T/own.sock"
stage "stage over TLS without a right" 1 "refused: may not stage" "tls:127.0.0.1:$port" "${trust[@]}"
stop $box
box tls:127.0.0.1:@ "${tls[@]}" --tls-ca "$T/ca.pem" --stage-name client --listen "unix:$T/own.sock"
stage "stage over TLS with another name" 1 "refused: may not stage: .*--stage-name" "tls:127.0.0.1:$port" "${trust[@]}" --tier-cert "$T/box.pem" --tier-key "$T/box.key"
stage "stage without TLS where a name is wanted" 1 "refused: may not stage: .*--stage-name" "unix:$T/own.sock"
for n in 1 2 3; do
    "$K3" stage -q --model "$MODEL" --to "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}" >/dev/null 2>&1 &
    pid=$!
    sleep 0.0$((3 + n))
    { kill -9 $pid; wait $pid; } 2>/dev/null
done
stage "stage over TLS after kills" 0 "experts sent .*, 0 left out" "tls:127.0.0.1:$port" "${trust[@]}" "${me[@]}"
expect_held "after kills" 256
kill -0 $box 2>/dev/null && pass || fail "staging over TLS" "the box is gone"
stop $box
holds=(--model "$MODEL") box=$plain_box port=$plain_port box_port=$plain_port

# ---- Names, address families, peers that do not answer ----

port=$box_port
check "plain, by a name" 300 "" --tier "localhost:$port"
start=$(date +%s%N)
check "TLS where none is spoken" none "no TLS 1.3 there" --tier "tls:127.0.0.1:$port" "${trust[@]}"
quick "TLS where none is spoken" 3000
kill -0 $box 2>/dev/null && pass || fail "TLS where none is spoken" "the box is gone"
stop $box
if python3 -c 'import socket; socket.socket(socket.AF_INET6).bind(("::1", 0))' 2>/dev/null; then
    box '[::1]:@'
    check "plain on IPv6" 300 "" --tier "[::1]:$port"
    stop $box
    box 'tls:[::1]:@' "${tls[@]}"
    check "TLS on IPv6" 300 "" --tier "tls:[::1]:$port" "${trust[@]}"
    via=("${two[@]}")
    [ ${#via[@]} = 0 ] || check "TLS on the other address of a name" 300 "" --tier "tls:box.test:$port" "${trust[@]}"
    via=()
    stop $box
else
    skip "no IPv6 here"
fi
peer silent
start=$(date +%s%N)
check "a handshake that nobody answers" none "" --tier "tls:127.0.0.1:$port" "${trust[@]}"
quick "a handshake that nobody answers" 2500
check "the same twice, and a box that is not there" none "" --tier "tls:127.0.0.1:$port" --tier "tls:localhost:$port" "${trust[@]}"
stop $peer
check "a name that does not resolve" none "resolve" --tier "tls:no.such.name.invalid:1" "${trust[@]}"

# ---- A box killed and started again while one text is made ----

new_port
: >"$T/restarts"
touch "$T/go"
(
    n=0
    trap 'kill -9 $box; exit' TERM
    while [ -e "$T/go" ]; do
        "$K3_TIER" -q --model "$MODEL" --ram 1G --threads 1 --listen "tls:127.0.0.1:$port" "${tls[@]}" 2>/dev/null &
        box=$!
        sleep "${K3_SAN:+0.6}" 2>/dev/null || sleep 0.$((15 + n % 4))
        kill -9 $box
        wait $box
        n=$((n + 1))
        echo $n >"$T/restarts"
    done
) 2>/dev/null &
killer=$!
pids+=($killer)
short=$want
"$K3" run "${args[@]}" --tokens 900 >"$T/out" 2>"$T/err"
want=$(field logits_fnv)
check "killed and started again" 1 "" --tokens 900 --tier "tls:127.0.0.1:$port" "${trust[@]}"
rm "$T/go"
wait $killer 2>/dev/null
[ "$(cat "$T/restarts")" -ge 2 ] && pass || fail "killed and started again" "only $(cat "$T/restarts") times"
echo "tier_tls: the box was killed $(cat "$T/restarts") times in one run, $(field far_served) of $(field far_asked) experts served"
want=$short

# ---- Handshakes that stopped half way ----

wait $staller 2>/dev/null
[ "$(wc -l <"$T/stalled")" = 4 ] && ! grep -qv '^[567]$' "$T/stalled" && pass || fail "stalled handshakes" "cut off after $(xargs <"$T/stalled") s, not 5"
python3 "$T/net.py" stall "$stalled_port" "$T/away" 2>/dev/null &
staller=$!
sleep 0.3
start=$(date +%s%N)
stop $stalled_box
quick "SIGTERM with stalled handshakes" 1500
stop $staller

# ---- Options that are refused before anything begins ----

refused() { # NAME PATTERN PROGRAM OPTION...
    local name=$1 pattern=$2 rc
    shift 2
    timeout -k 1 10 "$@" >"$T/out" 2>"$T/err" </dev/null
    rc=$?
    if [ $rc = 2 ] && grep -q -- "$pattern" "$T/err" && [ "$(wc -l <"$T/err")" = 1 ]; then pass; else fail "$name" "exit $rc"; fi
}
server=("$K3_TIER" --model "$MODEL" --ram 1G)
client=("$K3" run "${args[@]}" --tier tls:localhost:1)
cp "$T/box.key" "$T/open.key" && chmod 644 "$T/open.key"
cp "$T/client.key" "$T/mine.key" && chmod 640 "$T/mine.key"
refused "an open address, clients unknown" "--tls-ca" "${server[@]}" --listen tls:0.0.0.0:0 "${tls[@]}"
refused "an open address without TLS" "--psk-file" "${server[@]}" --listen 0.0.0.0:0 --listen tls:0.0.0.0:0 "${tls[@]}" --tls-ca "$T/ca.pem"
refused "tls: without a certificate" "--tls-cert" "${server[@]}" --listen tls:127.0.0.1:0
refused "a certificate for no address" "no --listen begins with tls:" "${server[@]}" --listen 127.0.0.1:0 "${tls[@]}"
refused "figures over TLS" "without TLS" "${server[@]}" --listen tls:127.0.0.1:0 "${tls[@]}" --metrics tls:127.0.0.1:0
refused "a key that others may read" "chmod 600" "${server[@]}" --listen tls:127.0.0.1:0 --tls-cert "$T/box.pem" --tls-key "$T/open.key"
refused "another certificate's key" "not the key of" "${server[@]}" --listen tls:127.0.0.1:0 --tls-cert "$T/box.pem" --tls-key "$T/client.key"
refused "a certificate that is none" "no certificate" "${server[@]}" --listen tls:127.0.0.1:0 --tls-cert "$T/psk" --tls-key "$T/box.key"
refused "a certificate that is not there" "No such file" "${server[@]}" --listen tls:127.0.0.1:0 --tls-cert "$T/none" --tls-key "$T/box.key"
refused "an authority without a certificate" "which certificate is ours" "${server[@]}" --listen tls:127.0.0.1:0 --tls-ca "$T/ca.pem"
{ cat "$T/ca.pem" && printf -- '-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n'; } >"$T/torn.pem"
refused "an authority that is torn" "--tls-ca .*torn.pem: " "${server[@]}" --listen tls:127.0.0.1:0 "${tls[@]}" --tls-ca "$T/torn.pem"
refused "status: certificates without tls:" "write tls:ADDR" "$K3_TIER" status localhost:1 --tls-ca "$T/ca.pem"
refused "an empty address" "is no address" "${server[@]}" --listen tls: "${tls[@]}"
refused "client: a key that others may read" "chmod 600" "${client[@]}" --tier-cert "$T/client.pem" --tier-key "$T/mine.key"
refused "client: a certificate without its key" "--tier-cert.*no private key" "${client[@]}" --tier-cert "$T/client.pem"
cat "$T/both.pem" >"$T/open.pem" && chmod 644 "$T/open.pem"
refused "client: a key in a certificate that others may read" "chmod 600" "${client[@]}" --tier-cert "$T/open.pem"
refused "client: a key without its certificate" "--tier-cert" "${client[@]}" --tier-key "$T/client.key"
refused "client: a key under a passphrase" "passphrase" "${client[@]}" --tier-cert "$T/client.pem" --tier-key "$T/sealed.key"
refused "client: an authority that is none" "no certificate" "${client[@]}" --tier-ca "$T/psk"
refused "client: a directory" "not a regular file" "${client[@]}" --tier-ca "$T"
refused "client: certificates without tls:" "write tls:ADDR" "$K3" run "${args[@]}" --tier localhost:1 --tier-ca "$T/ca.pem"
for addr in tls: tls:7383 tls:unix:/x tls:::1 'tls:a b' 'tls:u@h' 'tls:h/p:1' tls:tls:h:1 'h?q' 'h%41' 'h#'; do
    refused "the address '$addr'" "is no address" "$K3" run "${args[@]}" --tier "$addr"
done

report

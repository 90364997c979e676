/* tier_chaos.c - a far box that lies, stalls and breaks: a proxy before a real one.
 *
 *     tier_chaos LISTEN_PATH TARGET_PATH MODE [SEED]
 *
 * Listens on a unix socket, connects each client to the box at TARGET_PATH and passes frames both
 * ways, but for what MODE does to them. Where a lie has to look honest the frame is sealed again.
 * Ends on SIGTERM. One child for each client.
 *
 *   delay      each reply waits 2 ms           stall     after 20 replies nothing more comes
 *   drop       a third of the replies          blackhole accepts, and that is all
 *   mute       no reply ever, but all else     flood     empty news without end for a reply
 *   truncate   replies end early, stream goes on
 *   corrupt    a flipped bit in a reply        upcorrupt a flipped bit in a request
 *   reorder    a reply and the next swapped    duplicate each reply twice
 *   ids        ids of other requests           oversize  a head that promises 4 GiB
 *   midframe   the connection ends in a reply  counts    another number of experts
 *   layer      another layer                   range     sums beyond what terms allow
 *   announce   claims to hold everything       model     another fingerprint in the hello
 *   garbage    sums off by one, sealed: only an audit can see it
 *   lie        sums that change the text, sealed
 *   pieces     a flipped bit in a piece of an expert, sealed: its sum must see it
 *   verdicts   on another expert than was offered
 *   random     any from delay to range but blackhole and stall, frame by frame
 *   pass       nothing
 */
#define TIER_WIRE
#include "../tier.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

enum { ROOM = 1 << 22 };

static uint64_t seed = 1;
static const char *mode;
static uint32_t n_replies;
static uint8_t kept[ROOM]; /* a reply that is held back */
static size_t n_kept;

static uint32_t dice(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static int unix_socket(const char *path, bool listens) {
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strncpy(sa.sun_path, path, sizeof sa.sun_path - 1);
    if (listens) unlink(path);
    int rc = listens ? bind(fd, (struct sockaddr *)&sa, sizeof sa) || listen(fd, 16)
                     : connect(fd, (struct sockaddr *)&sa, sizeof sa);
    if (rc == 0) return fd;
    close(fd);
    return -1;
}

static void write_all(int fd, const uint8_t *p, size_t n) {
    while (n > 0) {
        ssize_t put = send(fd, p, n, MSG_NOSIGNAL);
        if (put <= 0) _exit(0);
        p += put;
        n -= (size_t)put;
    }
}

static void seal_again(uint8_t *f) {
    tier_seal(f, (enum tier_type)f[4], tier_get64(f + 16), tier_get32(f + 8));
}

static bool is_mode(const char *name) { return strcmp(mode, name) == 0; }

static const char *pick_mode(void) {
    static const char *const any[] = {"pass",      "drop",  "truncate", "corrupt",
                                      "duplicate", "ids",   "oversize", "midframe",
                                      "counts",    "layer", "range",    "pass"};
    return dice(6) ? "pass" : any[dice(sizeof any / sizeof *any)];
}

/* Change the frame's payload as mode `how` says; its length stays. */
static void spoil(uint8_t *f, size_t n, const char *how) {
    uint8_t *p = f + TIER_HEAD_BYTES;
    if (strcmp(how, "corrupt") == 0) {
        f[dice((uint32_t)n)] ^= (uint8_t)(1u << dice(8));
        return;
    }
    if (strcmp(how, "oversize") == 0) {
        tier_put32(f + 8, 0xffffffffu);
        return;
    }
    if (strcmp(how, "ids") == 0) tier_put64(f + 16, tier_get64(f + 16) + dice(3) - 1);
    if (strcmp(how, "counts") == 0) tier_put16(p + 4, tier_get16(p + 4) ^ 1u);
    if (strcmp(how, "layer") == 0) tier_put16(p, tier_get16(p) ^ 1u);
    if (strcmp(how, "range") == 0 && tier_get16(p + 2) > 0)
        tier_put64(f + n - 8 * (1 + dice(8)), dice(2) ? 1ull << 62 : 1ull << 63);
    if (strcmp(how, "garbage") == 0 && tier_get16(p + 2) > 0)
        for (size_t at = n - 8 * 8; at < n; at += 8)
            tier_put64(f + at, tier_get64(f + at) + (1 << 20));
    if (strcmp(how, "lie") == 0 && tier_get16(p + 2) > 0)
        for (size_t at = n - 8 * 32; at < n; at += 8)
            tier_put64(f + at, tier_get64(f + at) + (1ull << 44));
    seal_again(f);
}

static void flood(int to) {
    uint8_t many[128 * TIER_HEAD_BYTES];
    for (int i = 0; i < 128; i++) tier_seal(many + i * TIER_HEAD_BYTES, TIER_RESIDENT, 0, 0);
    for (;;) write_all(to, many, sizeof many); /* until the client hangs up */
}

static void pass_reply(int to, uint8_t *f, size_t n) {
    const char *how = is_mode("random") ? pick_mode() : mode;
    n_replies++;
    if (is_mode("mute") || (is_mode("stall") && n_replies > 20)) return;
    if (is_mode("flood")) flood(to);
    if (strcmp(how, "delay") == 0) usleep(2000);
    if (strcmp(how, "drop") == 0 && dice(3) == 0) return;
    if (strcmp(how, "midframe") == 0 && (is_mode("random") || dice(10) == 0)) {
        write_all(to, f, n / 2);
        _exit(0);
    }
    if (strcmp(how, "reorder") == 0) {
        if (n_kept == 0) {
            memcpy(kept, f, n);
            n_kept = n;
            return;
        }
        write_all(to, f, n);
        write_all(to, kept, n_kept);
        n_kept = 0;
        return;
    }
    bool is_rare = is_mode("random") || is_mode("garbage") || is_mode("lie") || dice(4) == 0;
    if (is_rare) spoil(f, n, how);
    if (strcmp(how, "truncate") == 0 && is_rare) n -= 1 + dice((uint32_t)n - 1);
    write_all(to, f, n);
    if (strcmp(how, "duplicate") == 0) write_all(to, f, n);
}

/* Pass on one whole frame, from the box (`is_down`) or from the client. */
static void pass(int to, uint8_t *f, size_t n, bool is_down) {
    if (is_down && f[4] == TIER_REPLY) {
        pass_reply(to, f, n);
        return;
    }
    if (is_down && f[4] == TIER_RESIDENT && is_mode("announce")) {
        size_t map = 4; /* bytes of a bitmap of 32 experts, as demo has */
        for (size_t at = TIER_HEAD_BYTES; at < n; at += 4 + map) memset(f + at + 4, 0xff, map);
        seal_again(f);
    }
    if (!is_down && f[4] == TIER_HELLO && is_mode("model")) {
        f[TIER_HEAD_BYTES + 32] ^= 1;
        seal_again(f);
    }
    if (!is_down && f[4] == TIER_PIECE && is_mode("pieces") && dice(10) == 0) {
        f[TIER_HEAD_BYTES + 8 + dice((uint32_t)n - TIER_HEAD_BYTES - 8)] ^=
            (uint8_t)(1u << dice(8));
        seal_again(f);
    }
    if (is_down && f[4] == TIER_VERDICT && is_mode("verdicts") && dice(10) == 0) {
        f[TIER_HEAD_BYTES + 2] ^= 1;
        seal_again(f);
    }
    if (!is_down && f[4] == TIER_REQUEST && is_mode("upcorrupt") && dice(5) == 0)
        f[dice((uint32_t)n)] ^= (uint8_t)(1u << dice(8));
    write_all(to, f, n);
}

static void proxy(int client, const char *target) {
    static uint8_t buf[2][ROOM];
    size_t have[2] = {0, 0};
    while (is_mode("blackhole") && recv(client, buf, 1, 0) > 0) {
    }
    if (is_mode("blackhole")) return;
    int box = unix_socket(target, false);
    int from[2] = {client, box}, to[2] = {box, client};
    while (box >= 0) {
        struct pollfd p[2] = {{.fd = client, .events = POLLIN}, {.fd = box, .events = POLLIN}};
        if (poll(p, 2, -1) < 0) return;
        for (int d = 0; d < 2; d++) {
            if (!p[d].revents) continue;
            ssize_t n = recv(from[d], buf[d] + have[d], ROOM - have[d], 0);
            if (n <= 0) return;
            have[d] += (size_t)n;
            while (have[d] >= TIER_HEAD_BYTES) {
                size_t all = TIER_HEAD_BYTES + tier_get32(buf[d] + 8);
                static uint8_t frame[ROOM];
                if (have[d] < all) break;
                memcpy(frame, buf[d], all);
                memmove(buf[d], buf[d] + all, have[d] -= all);
                pass(to[d], frame, all, d == 1);
            }
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: tier_chaos LISTEN_PATH TARGET_PATH MODE [SEED]\n");
        return 2;
    }
    mode = argv[3];
    seed = argc > 4 ? strtoull(argv[4], NULL, 10) : 1;
    signal(SIGCHLD, SIG_IGN);
    int fd = unix_socket(argv[1], true);
    if (fd < 0) {
        perror(argv[1]);
        return 1;
    }
    for (;;) {
        int client = accept(fd, NULL, NULL);
        if (client < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (client < 0) return perror("accept"), 1;
        seed = seed * 31 + 7;
        if (fork() == 0) {
            close(fd);
            proxy(client, argv[2]);
            _exit(0);
        }
        close(client);
    }
}

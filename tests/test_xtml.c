/* test_xtml.c - replies read by their ids, and messages stopped anywhere.
 *
 * A reply is rendered from an OpenAI message, read back by its ids and compared; cut at every id
 * and closed; damaged and shuffled. What reply_close adds must always end the message in one
 * well-formed way. Notes of a state file are taken only when all of them are right. Includes
 * the files of `k3 chat`, to reach their statics; the rest of the program is linked without its main.
 */
#include "test.h"

#include "../cli/json.c"
#include "../cli/xtml.c"
#include "../cli/messages.c"
#include "../cli/talk.c"
#include "../cli/show.c"
#include "../cli/chat_commands.c"
#include "../cli/edit.c"
#include "../cli/chat.c"

static k3_tokenizer *t;
static chat_marks marks;
static k3_error err;

static json_object *parse(const char *text) {
    size_t at;
    const char *why;
    json_object *o = json_read(text, strlen(text), &at, &why);
    if (why) printf("    %s at %zu of %s\n", why, at, text);
    return o;
}

/* Render an assistant message behind the prompt that asks for it. Returns its ids. */
static xtml reply_ids(json_object *message, bool thinks, size_t *first) {
    render_state s = {.thinks = thinks};
    xtml x = {0}, prompt = {0};
    json_object *messages = json_object_new_array();
    json_object_array_add(messages, json_object_get(message));
    CHECK_EQ_INT(render_messages(&x, messages, &s, &err), K3_OK);
    CHECK_EQ_INT(xtml_encode(&x, t, &err), K3_OK);
    xtml_prompt(&prompt, thinks);
    CHECK_EQ_INT(xtml_encode(&prompt, t, &err), K3_OK);
    *first = prompt.n_id;
    CHECK(x.n_id > prompt.n_id && memcmp(x.id, prompt.id, prompt.n_id * sizeof *x.id) == 0);
    xtml_free(&prompt);
    json_object_put(messages);
    json_object_put(s.calls);
    return x;
}

static bool has_text(const buf *b, const char *want) { return strcmp(buf_text(b), want) == 0; }

static const char CALLS[] =
    "{\"role\":\"assistant\",\"reasoning_content\":\"Two calls: 東京 & <|sep|>.\\n\",\"content\":"
    "\"Let me see \\ud83d\\ude00\",\"tool_calls\":[{\"id\":\"call_1\",\"type\":\"function\","
    "\"function\":{\"name\":\"get \\\"weather\\\" & more\",\"arguments\":\"{\\\"city\\\": "
    "\\\"S\\u00e3o "
    "\\\\\\\"P\\\\\\\"\\\", \\\"n\\\": 12345678901234567890123, \\\"d\\\": 1.50, \\\"deep\\\": "
    "{\\\"b\\\": [1, null], \\\"a\\\": true}, \\\"none\\\": null}\"}},{\"id\":\"call_2\",\"type\":"
    "\"function\",\"function\":{\"name\":\"raw\",\"arguments\":\"not {json\"}},{\"id\":\"call_3\","
    "\"type\":\"function\",\"function\":{\"name\":\"empty\",\"arguments\":\"{}\"}}]}";

static void test_round_trip(void) {
    json_object *message = parse(CALLS);
    size_t first = 0;
    xtml x = reply_ids(message, true, &first);
    reply r;
    reply_init(&r, &marks, t, true, 0);
    for (size_t i = first; i < x.n_id; i++) reply_push(&r, x.id[i]);
    reply_flush(&r);
    CHECK(r.is_over && r.tag == NO_TAG && r.depth == 0);
    CHECK(has_text(&r.think, json_string(message, "reasoning_content")));
    CHECK(has_text(&r.answer, json_string(message, "content")));
    buf got = {0}, want = {0};
    json_write(&got, r.call.finished, true);
    json_write(&want, json_field(message, "tool_calls"), true);
    CHECK_EQ_STR(buf_text(&got), buf_text(&want));
    xtml rest = {0};
    reply_close(&r, &rest);
    CHECK_EQ_INT(rest.n_segment, 0);
    buf_free(&got);
    buf_free(&want);
    reply_free(&r);
    xtml_free(&x);
    json_object_put(message);
}

/* One element of delta.tool_calls, added to the calls told so far as a client does it. */
static bool told_add(json_object *told, json_object *part) {
    int64_t i = json_object_get_int64(json_field(part, "index"));
    json_object *piece = json_field(json_field(part, "function"), "arguments");
    const char *text = json_object_get_string(piece);
    size_t n = (size_t)json_object_get_string_len(piece), n_told = json_object_array_length(told);
    buf whole = {0}, valid = {0};
    bool is_first = json_field(part, "id") != NULL;
    bool ok = is_first ? (size_t)i == n_told && n == 0 : (size_t)i + 1 == n_told && n > 0;
    buf_add_valid(&valid, text, n);
    ok = ok && valid.n == n && memcmp(buf_text(&valid), text, n) == 0;
    if (ok && is_first) {
        json_object_object_del(part, "index");
        json_object_array_add(told, json_object_get(part));
    } else if (ok) {
        json_object *function = json_field(json_object_array_get_idx(told, (size_t)i), "function");
        json_object *before = json_field(function, "arguments");
        buf_add(&whole, json_object_get_string(before), (size_t)json_object_get_string_len(before));
        buf_add(&whole, text, n);
        json_put(function, "arguments", json_text(&whole));
    }
    buf_free(&whole);
    buf_free(&valid);
    json_object_put(part);
    return ok;
}

/* Read the ids, ask for deltas behind each id that `asks` names (NULL: all), close the message:
 * what the deltas told must be the final object. *n_parts: how many deltas came. */
static bool tells_all(const uint32_t *id, size_t n, bool thinks, const bool *asks,
                      size_t *n_parts) {
    json_object *told = json_object_new_array(), *want = json_object_new_array(), *part;
    xtml added = {0};
    reply r;
    bool ok = true;
    *n_parts = 0;
    reply_init(&r, &marks, t, thinks, 4);
    for (size_t i = 0; i < n; i++) {
        reply_push(&r, id[i]);
        while ((!asks || asks[i]) && ok && (part = calls_delta(&r.call)) != NULL) {
            ok = told_add(told, part);
            ++*n_parts;
        }
    }
    reply_flush(&r);
    reply_close(&r, &added);
    while (ok && (part = calls_delta(&r.call)) != NULL) ok = told_add(told, part);
    for (size_t i = 0; i < r.call.n_finished; i++)
        json_object_array_add(want, json_object_get(json_object_array_get_idx(r.call.finished, i)));
    json_object *rest = calls_unfinished(&r.call);
    if (rest) {
        json_object_object_del(rest, "index");
        json_object_array_add(want, rest);
    }
    buf a = {0}, b = {0};
    json_write(&a, told, true);
    json_write(&b, want, true);
    ok = ok && strcmp(buf_text(&a), buf_text(&b)) == 0 && !reply_is_short(&r);
    if (!ok) printf("    told %s\n    want %s\n", buf_text(&a), buf_text(&b));
    buf_free(&a);
    buf_free(&b);
    json_object_put(told);
    json_object_put(want);
    xtml_free(&added);
    reply_free(&r);
    return ok;
}

/* Deltas of tool calls add up to the calls, wherever the ids are cut and whenever they are asked
 * for. */
static void test_deltas(void) {
    json_object *message = parse(CALLS);
    size_t first = 0, n_bad = 0, n_parts = 0, n_most = 0;
    xtml x = reply_ids(message, true, &first);
    const uint32_t *id = x.id + first;
    size_t n = x.n_id - first;
    bool *asks = calloc(n + 1, sizeof *asks);
    for (size_t cut = 0; cut <= n; cut++) {
        n_bad += !tells_all(id, cut, true, NULL, &n_parts);
        n_most = n_parts > n_most ? n_parts : n_most;
    }
    CHECK_EQ_INT(n_bad, 0);
    CHECK(n_most > 20);                         /* deltas came in pieces, not one for each call */
    for (size_t at = 0; asks && at < n; at++) { /* two pieces, cut at every id */
        asks[at] = true;
        n_bad += !tells_all(id, n, true, asks, &n_parts);
        asks[at] = false;
    }
    CHECK_EQ_INT(n_bad, 0);
    free(asks);
    xtml_free(&x);
    json_object_put(message);
}

/* Read ids, close the message, read them again with the ids that were added: the message has ended,
 * nothing is open. */
static bool closes(const uint32_t *id, size_t n, bool thinks, xtml *added, size_t *n_calls,
                   bool *has_response) {
    reply r, again;
    reply_init(&r, &marks, t, thinks, 0);
    reply_init(&again, &marks, t, thinks, 0);
    for (size_t i = 0; i < n; i++) reply_push(&r, id[i]);
    for (size_t i = 0; i < n; i++) reply_push(&again, id[i]);
    reply_flush(&r);
    bool was_over = r.is_over;
    reply_close(&r, added);
    bool ok = xtml_encode(added, t, &err) == K3_OK;
    for (size_t i = 0; ok && i < added->n_id; i++) reply_push(&again, added->id[i]);
    reply_flush(&again);
    ok = ok && again.is_over && (was_over || (again.tag == NO_TAG && again.depth == 0));
    ok = ok && strcmp(buf_text(&r.think), buf_text(&again.think)) == 0;
    ok = ok && (added->n_id == 0) == was_over;
    *n_calls = (size_t)again.call.n_finished;
    *has_response = again.has_response;
    reply_free(&r);
    reply_free(&again);
    return ok;
}

static void test_cuts(void) {
    json_object *message = parse(CALLS),
                *plain = parse("{\"role\":\"assistant\",\"content\":\"Hi\"}");
    for (int thinks = 0; thinks < 2; thinks++) {
        bool has = false;
        size_t first = 0, n_bad = 0, n_most = 0, n_calls = 0;
        xtml x = reply_ids(message, thinks, &first);
        for (size_t n = 0; n + first <= x.n_id; n++) {
            xtml added = {0};
            if (!closes(x.id + first, n, thinks, &added, &n_calls, &has) || !has) {
                printf("    cut after %zu ids\n", n);
                n_bad++;
            }
            n_most = added.n_id > n_most ? added.n_id : n_most;
            xtml_free(&added);
        }
        CHECK_EQ_INT(n_bad, 0);
        CHECK_EQ_INT(n_calls, 3);
        CHECK(n_most > 10 && n_most < 40);
        xtml_free(&x);
        x = reply_ids(plain, thinks, &first); /* stopped before the first id: the empty message */
        xtml added = {0}, empty = {0};
        CHECK(closes(NULL, 0, thinks, &added, &n_calls, &has) && has);
        if (thinks) {
            xtml_close(&empty, "think");
            xtml_open(&empty, "response");
        }
        xtml_close(&empty, "response");
        xtml_end_message(&empty);
        CHECK_EQ_INT(xtml_encode(&empty, t, &err), K3_OK);
        if (CHECK_EQ_INT(added.n_id, empty.n_id))
            CHECK_EQ_MEM(added.id, empty.id, added.n_id * sizeof *added.id);
        xtml_free(&added);
        xtml_free(&empty);
        xtml_free(&x);
    }
    json_object_put(message);
    json_object_put(plain);
}

/* Replies that no encoder wrote: ids of a real one, shuffled, doubled and left out. */
static void test_noise(void) {
    json_object *message = parse(CALLS);
    bool has = false;
    size_t first = 0, n_bad = 0, n_calls = 0;
    xtml x = reply_ids(message, true, &first);
    uint32_t id[256];
    bool asks[256];
    size_t n_parts = 0;
    uint64_t seed = 3;
    for (int round = 0; round < 3000; round++) {
        size_t n = test_random(&seed) % 256;
        for (size_t i = 0; i < n; i++) {
            uint64_t pick = test_random(&seed);
            asks[i] = pick % 5 == 0;
            const uint32_t mark[] = {marks.open, marks.close, marks.sep};
            id[i] = pick % 3 == 0   ? mark[(pick >> 8) % 3]
                    : pick % 7 == 0 ? (uint32_t)((pick >> 8) % k3_tokenizer_size(t))
                                    : x.id[(pick >> 8) % x.n_id];
        }
        xtml added = {0};
        bool ok = closes(id, n, round % 2, &added, &n_calls, &has);
        if (!ok || !tells_all(id, n, round % 2, round % 4 < 2 ? asks : NULL, &n_parts)) {
            if (n_bad++ == 0) printf("    round %d, %zu ids\n", round, n);
        }
        xtml_free(&added);
    }
    CHECK_EQ_INT(n_bad, 0);
    xtml_free(&x);
    json_object_put(message);
}

/* Arguments whose text is not of their type, or ends inside of a character. */
static void test_odd_arguments(void) {
    static const struct {
        const char *type, *body, *want;
    } odd[] = {{"number", "12x", "{\"k\": \"12x\"}"},
               {"number", "1e2", "{\"k\": 1e2}"},
               {"object", "{\"a\":1}", "{\"k\": {\"a\": 1}}"},
               {"string", "12", "{\"k\": \"12\"}"},
               {"boolean", "", "{\"k\": \"\"}"},
               {"string", "\xe6\x9d", "{\"k\": \"\xef\xbf\xbd\"}"}};
    for (size_t i = 0; i < COUNT(odd); i++) {
        xtml x = {0};
        reply r;
        xtml_close(&x, "think");
        xtml_open(&x, "tools");
        xtml_begin(&x, "call");
        xtml_attribute_text(&x, "tool", "f");
        xtml_sep(&x);
        xtml_begin(&x, "argument");
        xtml_attribute_text(&x, "key", "k");
        xtml_attribute_text(&x, "type", odd[i].type);
        xtml_sep(&x);
        xtml_puts(&x, odd[i].body);
        xtml_close(&x, "argument");
        xtml_close(&x, "call");
        CHECK_EQ_INT(xtml_encode(&x, t, &err), K3_OK);
        reply_init(&r, &marks, t, true, 0);
        for (size_t j = 0; j < x.n_id; j++) reply_push(&r, x.id[j]);
        json_object *call = json_field(json_object_array_get_idx(r.call.finished, 0), "function");
        CHECK_EQ_STR(json_string(call, "arguments"), odd[i].want);
        reply_free(&r);
        xtml_free(&x);
    }
}

/* One letter an element: c call, a argument of type string, j json, x another; upper case closes it.
 * Digits are text. */
static const struct {
    const char *said, *want; /* the calls that are understood: names and arguments */
} ODD_CALL[] = {
    {"ca1AC", "f{\"k\": \"1\"};"},
    {"ca1x2X3AC", "f{\"k\": \"13\"};"}, /* the text of an inner element is not the argument's */
    {"ca1Aj2JC", "f{\"k\": \"1\"};"},   /* keys came first */
    {"cj1Ja2AC", "f1;"},                /* one text came first */
    {"cj1Jj2JC", "f1;"},                /* ... and is not replaced */
    {"cca1ACC", "f{};"},                /* a call in a call is none */
    {"ca1Aca2ACC", "f{\"k\": \"1\"};"}, /* ... and changes nothing of the one around it */
    {"ca1C", "f{\"k\": \"1\"};"},       /* the call's end ends its argument */
    {"ca1ACca2AC", "f{\"k\": \"1\"};f{\"k\": \"2\"};"},
    {"xxxxxxca1AC", "f{};"}, /* deeper than is followed: no argument */
    {"xxxxxxxca1AC", ""},    /* deeper still: no call */
    {"a1AcC", "f{};"},       /* an argument of no call */
};

static void odd_element(xtml *x, char letter) {
    const char lower = (char)(letter | 32);
    const char *tag = lower == 'c'   ? "call"
                      : lower == 'a' ? "argument"
                      : lower == 'j' ? "json"
                                     : "x";
    if (letter < 'a') {
        xtml_close(x, tag);
        return;
    }
    xtml_begin(x, tag);
    if (letter == 'c') xtml_attribute_text(x, "tool", "f");
    if (letter == 'a') xtml_attribute_text(x, "key", "k");
    if (letter == 'a') xtml_attribute_text(x, "type", "string");
    xtml_sep(x);
}

static void test_odd_calls(void) {
    for (size_t i = 0; i < COUNT(ODD_CALL); i++) {
        xtml x = {0};
        buf got = {0};
        reply r;
        size_t n_parts;
        xtml_close(&x, "think");
        for (const char *p = ODD_CALL[i].said; *p; p++)
            if (*p <= '9')
                xtml_text(&x, p, 1);
            else
                odd_element(&x, *p);
        CHECK_EQ_INT(xtml_encode(&x, t, &err), K3_OK);
        reply_init(&r, &marks, t, true, 0);
        for (size_t j = 0; j < x.n_id; j++) reply_push(&r, x.id[j]);
        for (size_t j = 0; j < r.call.n_finished; j++) {
            json_object *call =
                json_field(json_object_array_get_idx(r.call.finished, j), "function");
            buf_puts(&got, json_string(call, "name"));
            buf_puts(&got, json_string(call, "arguments"));
            buf_puts(&got, ";");
        }
        if (!CHECK_EQ_STR(buf_text(&got), ODD_CALL[i].want))
            printf("    of %s\n", ODD_CALL[i].said);
        CHECK(tells_all(x.id, x.n_id, true, NULL, &n_parts));
        buf_free(&got);
        reply_free(&r);
        xtml_free(&x);
    }
}

/* Attributes whose values look like attributes, and text that ends inside a character. */
static void test_odd_attributes(void) {
    static const struct {
        const char *tag, *key, *want;
    } odd[] = {{"argument key=\"x type=\" type=\"string\"", "type", "string"},
               {"argument key=\"x type=\" type=\"string\"", "key", "x type="},
               {"call tool=\"a &quot;b&quot; &amp;amp; c\" index=\"1\"", "tool", "a \"b\" &amp; c"},
               {"call tool=\"a", "tool", "a"},
               {"call tool", "tool", ""},
               {"call  tool=\"a\"", "tool", ""},
               {"call", "tool", ""}};
    for (size_t i = 0; i < COUNT(odd); i++) {
        buf tag = {0}, value = {0};
        buf_puts(&tag, odd[i].tag);
        tag_attribute(&tag, odd[i].key, &value);
        CHECK_EQ_STR(buf_text(&value), odd[i].want);
        buf_free(&tag);
        buf_free(&value);
    }
    static const char emoji[] = "\xf0\x9f\x98\x80";
    xtml x = {0};
    reply r;
    xtml_text(&x, emoji, 2); /* in think, then on in response: two halves, no character */
    xtml_close(&x, "think");
    xtml_open(&x, "response");
    xtml_text(&x, emoji + 2, 2);
    xtml_text(&x, emoji, 2); /* then in response, and on behind it */
    xtml_close(&x, "response");
    xtml_text(&x, emoji + 2, 2);
    xtml_text(&x, "!", 1);
    CHECK_EQ_INT(xtml_encode(&x, t, &err), K3_OK);
    reply_init(&r, &marks, t, true, 0);
    for (size_t j = 0; j < x.n_id; j++) reply_push(&r, x.id[j]);
    CHECK(has_text(&r.think, "\xef\xbf\xbd"));
    CHECK(!strstr(buf_text(&r.answer), emoji) && strstr(buf_text(&r.answer), "!"));
    reply_free(&r);
    xtml_free(&x);
}

/* What a file says of a conversation of 4 ids, 2 of them run: taken, or refused by the key. */
static const char NOTES[] =
    "{\"k3_chat\":1,\"waiting\":[5,6],\"turns\":[0,3],\"n_header\":1,\"n_call\":2,\"n_tool\":1,"
    "\"calls\":[{\"id\":\"call_1\"}],\"before\":[{\"n_call\":0,\"n_tool\":0,\"calls\":null},"
    "{\"n_call\":1,\"n_tool\":0,\"calls\":[]}],\"queue\":[{\"role\":\"system\",\"content\":\"x\"}],"
    "\"tools\":[1],\"system\":\"s\",\"thinking\":true,\"effort\":\"low\",\"temperature\":0.5,"
    "\"top_p\":1,\"top_k\":7,\"seed\":\"18446744073709551615\"}";

static const struct {
    const char *key, *value;
} BAD_NOTE[] = {{"k3_chat", "2"},
                {"k3_chat", "\"1\""},
                {"waiting", "{}"},
                {"waiting", "[5,-1]"},
                {"waiting", "[5,4294967296]"},
                {"waiting", "[5,\"6\"]"},
                {"turns", "[]"},
                {"turns", "[1,3]"},
                {"turns", "[0,0]"},
                {"turns", "[0,4]"},
                {"turns", "[0,\"3\"]"},
                {"n_header", "4"}, /* beyond the second turn's start */
                {"n_header", "-1"},
                {"n_header", "1.0"},
                {"n_call", "9223372036854775807"},
                {"n_tool", "4294967295"},
                {"calls", "\"x\""},
                {"calls", "[1]"},
                {"before", "[]"},
                {"before", "[{},{}]"},
                {"before", "[1,2]"},
                {"queue", "{}"},
                {"queue", "[\"x\"]"},
                {"queue", "[{\"role\":\"user\",\"content\":\"x\"}]"},
                {"queue", "[{\"role\":\"system\",\"content\":5}]"},
                {"tools", "{}"},
                {"system", "5"},
                {"thinking", "1"},
                {"effort", "\"huge\""},
                {"effort", "null"},
                {"temperature", "101"},
                {"temperature", "-1"},
                {"temperature", "\"1\""},
                {"top_p", "1.5"},
                {"top_k", "4294967296"},
                {"seed", "5"},
                {"seed", "\"-5\""}};

static int notes_try(k3_session *s, size_t n_vocab, json_object *o, const char **bad, chat *c) {
    memset(c, 0, sizeof *c);
    c->s = s;
    c->n_vocab = n_vocab;
    *bad = NULL;
    return notes_take(c, o, bad);
}

/* Texts whose reading differs from one version of json-c to the next, and the byte at which each is
 * refused; -1: it is read. */
static void test_json(void) {
    static const struct {
        const char *text;
        int at;
    } row[] = {
        {"\"\xe6\x9d\xb1\xe4\xba\xac \xf0\x9f\x98\x80 \xc3\xa9\"", -1}, /* 2, 3 and 4 bytes */
        {"{\"\xe6\x9d\xb1\":1,\"a\":\"\xe6\x9d\xb1\\n\"}", -1},
        {"[12345678901234567890123,-9223372036854775809,0,-0,1.50]", -1},
        {"[\"\xe6\x9d\xb1\xe4\xba\xac\",x]", 10},
        {"[\"\xe6\x9d\xb1\xe4\xba\xac\",1,]", 12},
        {"\"\xc0\xaf\"", 1},         /* not the shortest */
        {"\"\xed\xa0\x80\"", 1},     /* a surrogate */
        {"\"\xf4\x90\x80\x80\"", 1}, /* beyond the last code point */
        {"\"a\xe6\x9d\"", 2},        /* cut short */
        {"\"\x80\"", 1},
        {"\xc3\xa9", 0},
        {"[01]", -2}, /* at 2 or 3 */
    };
    for (size_t i = 0; i < COUNT(row); i++) {
        const char *why = NULL;
        size_t at = 0;
        json_object *o = json_read(row[i].text, strlen(row[i].text), &at, &why);
        CHECK((why == NULL) == (row[i].at == -1));
        /* that byte, or the one behind it: versions of json-c differ */
        if (row[i].at >= 0 && !CHECK(at == (size_t)row[i].at || at == (size_t)row[i].at + 1))
            printf("    row %zu: at %zu: %s\n", i, at, why ? why : "read");
        if (i == 0) {
            json_object *plain = json_parse_strict(row[i].text, strlen(row[i].text), 9, &at, &why);
            CHECK(plain && json_object_equal(plain, o));
            json_object_put(plain);
        }
        json_object_put(o);
    }
    const char *why;
    size_t at;
    json_object *o = json_read(row[0].text, strlen(row[0].text), &at, &why);
    CHECK(o && strcmp(json_object_get_string(o), "\xe6\x9d\xb1\xe4\xba\xac \xf0\x9f\x98\x80 \xc3\xa9") == 0);
    json_object_put(o);
    buf got = {0};
    o = json_read(row[2].text, strlen(row[2].text), &at, &why);
    json_write(&got, o, true);
    CHECK_EQ_STR(buf_text(&got), "[12345678901234567890123,-9223372036854775809,0,-0,1.50]");
    json_object_put(o);
    buf_free(&got);
}

static void test_notes(void) {
    static const uint32_t run[] = {3, 4};
    k3_options o;
    k3_engine *e = NULL;
    k3_session *s = NULL;
    chat c;
    const char *bad = NULL, *why;
    size_t at;
    k3_options_default(&o);
    o.model_dir = "demo";
    if (!CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_OK)) return;
    CHECK_EQ_INT(k3_session_new(&s, e, 0, &err), K3_OK);
    CHECK_EQ_INT(k3_session_feed(s, run, COUNT(run), K3_ROWS_NONE, NULL, &err), K3_OK);
    size_t n_vocab = k3_engine_shape(e)->vocab_size;
    json_object *notes = json_parse_strict(NOTES, strlen(NOTES), NOTES_DEPTH, &at, &why);
    CHECK(notes && !why);
    CHECK_EQ_INT(notes_try(s, n_vocab, notes, &bad, &c), DONE);
    CHECK(!bad && c.n == 4 && c.id[3] == 6 && c.n_turn == 2 && c.turns[1].start == 3);
    CHECK(c.turns[1].n_call == 1 && c.n_header == 1 && c.n_call == 2 && c.render.n_tool == 1);
    CHECK(c.render.thinks && strcmp(c.render.effort, "low") == 0 && c.sampler.top_k == 7);
    CHECK(c.sampler.seed == UINT64_MAX && has_text(&c.system, "s"));
    chat_forget(&c);
    for (size_t i = 0; i < COUNT(BAD_NOTE); i++) {
        json_object *one = json_parse_strict(NOTES, strlen(NOTES), NOTES_DEPTH, &at, &why);
        json_object *value = json_tokener_parse(BAD_NOTE[i].value);
        json_object_object_add(one, BAD_NOTE[i].key, value);
        notes_try(s, n_vocab, one, &bad, &c);
        bool inner = strcmp(BAD_NOTE[i].key, "before") == 0 && bad && bad[0] == 'n';
        if (!CHECK(bad && (inner || strcmp(bad, BAD_NOTE[i].key) == 0)))
            printf("    %s: %s, refused: %s\n", BAD_NOTE[i].key, BAD_NOTE[i].value,
                   bad ? bad : "not at all");
        chat_forget(&c);
        json_object_put(one);
    }
    json_object_put(notes);
    k3_session_free(s);
    k3_engine_close(e);
}

/* Defaults follow from the model, and the time of a reply from the plan. Shape and plan are those of
 * the released model on a machine that keeps none of the trunk. */
static void test_reply_times(void) {
    static const k3_shape large = {.n_layers = 93,
                                   .n_dense = 1,
                                   .n_experts = 896,
                                   .top_k = 16,
                                   .expert_bytes = 17547264,
                                   .trunk_bytes = 113509540864};
    static const k3_shape small = {.n_layers = 13,
                                   .n_dense = 1,
                                   .n_experts = 32,
                                   .top_k = 4,
                                   .expert_bytes = 1 << 14,
                                   .trunk_bytes = 1 << 22};
    k3_plan p = {.context = 4096, .streamed_bytes = 111200000000, .disk_bytes_per_s = 7e9};
    chat c;
    buf text = {0};
    memset(&c, 0, sizeof c);
    CHECK(is_large_model(&large) && !is_large_model(&small));
    CHECK_EQ_INT((int64_t)(reply_id_bytes(&large, &p) / 1e8), 1370); /* 137.0 GB */
    c.render.thinks = true;
    c.render.effort = "low";
    c.most = LARGE_MODEL_TOKENS;
    replies_describe(&text, &c, &large, &p);
    CHECK(strstr(buf_text(&text), "effort low, at most 2048 ids"));
    CHECK(strstr(buf_text(&text),
                 "about 20 s: a reply of 200 ids 65 min, the longest of 2048 11.1 h"));
    buf_clear(&text);
    p.disk_bytes_per_s = 0;
    replies_describe(&text, &c, &large, &p);
    CHECK(strstr(buf_text(&text), "not measured") && !strstr(buf_text(&text), "about"));
    buf_clear(&text);
    p.streamed_bytes = 0;
    p.quota = 896; /* all experts in memory: nothing is read, and no time is told */
    c.most = 0;
    replies_describe(&text, &c, &large, &p);
    CHECK(strstr(buf_text(&text), "as long as the context holds") &&
          !strstr(buf_text(&text), "time"));
    buf_free(&text);
}

/* A note of the engine waits until the line that is being shown has ended. */
static void test_note_waits(void) {
    chat c;
    memset(&c, 0, sizeof c);
    c.con.hides_compute = true;
    for (int i = 0; i < 2000; i++) chat_note(&c.con, "a box went away");
    CHECK(strncmp(buf_text(&c.notes), "note: a box went away\nk3: note: a box", 37) == 0);
    CHECK(c.notes.n <= MOST_NOTES + 32 && c.n_left > 0);
    buf_clear(&c.notes);
    c.n_left = 0;
    chat_note(&c.con, "said behind the text: this line is meant to be here");
    say_notes(&c);
    CHECK(c.notes.n == 0);
    c.con.hides_compute = false;
    c.con.is_quiet = true;
    chat_note(&c.con, "not kept");
    CHECK(c.notes.n == 0);
    buf_free(&c.notes);
}

int main(void) {
    test_begin("xtml");
    if (!CHECK_EQ_INT(k3_tokenizer_open(&t, "demo", &err), K3_OK)) return test_finish();
    CHECK_EQ_INT(marks_find(&marks, t, &err), K3_OK);
    test_round_trip();
    test_cuts();
    test_deltas();
    test_noise();
    test_odd_calls();
    test_odd_attributes();
    test_odd_arguments();
    test_json();
    test_notes();
    test_reply_times();
    test_note_waits();
    k3_tokenizer_close(t);
    return test_finish();
}

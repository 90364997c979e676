/* messages.c - OpenAI's messages, rendered in K3's chat format.
 *
 * Messages as the API takes them, to segments. What the format cannot say (pictures, a role it does
 * not have, a tool result that answers no call) is an error that names the place; nothing is
 * dropped in silence.
 */
#include "cli/messages.h"

#include "cli/calls.h"
#include "cli/console.h"
#include "cli/json.h"
#include "cli/output.h"
#include "cli/xtml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Text of a content: a string, null, or an array of text parts, which are joined. */
static int content_read(buf *out, json_object *content, const char *where, k3_error *err) {
    if (!content) return K3_OK;
    if (json_is(content, json_type_string)) {
        buf_add(out, json_object_get_string(content), (size_t)json_object_get_string_len(content));
        return out->is_short ? error_memory(err) : K3_OK;
    }
    if (!json_is(content, json_type_array))
        return error_set(err, K3_EUSAGE, "%s.content: neither text nor an array of parts", where);
    for (size_t i = 0; i < json_object_array_length(content); i++) {
        json_object *part = json_object_array_get_idx(content, i), *text = json_field(part, "text");
        const char *type = json_string(part, "type");
        if (!type || strcmp(type, "text") != 0)
            return error_set(err, K3_EUSAGE,
                             "%s.content[%zu]: '%.*s' is not text, and k3 reads "
                             "text only",
                             where, i, text_cut(type ? type : "(no type)", 40),
                             type ? type : "(no type)");
        if (!json_is(text, json_type_string))
            return error_set(err, K3_EUSAGE, "%s.content[%zu]: has no text", where, i);
        buf_add(out, json_object_get_string(text), (size_t)json_object_get_string_len(text));
    }
    return out->is_short ? error_memory(err) : K3_OK;
}

static int field_check(json_object *o, const char *const *known, const char *where, k3_error *err) {
    for (struct lh_entry *e = json_object_get_object(o)->head; e; e = e->next) {
        size_t i = 0;
        while (known[i] && strcmp(known[i], lh_entry_k(e)) != 0) i++;
        if (!known[i] && lh_entry_v(e))
            return error_set(err, K3_EUSAGE, "%s: k3 knows no field '%.*s' here", where,
                             text_cut(lh_entry_k(e), 60), (const char *)lh_entry_k(e));
    }
    return K3_OK;
}

/* user, and system without tools. */
static int render_plain(xtml *x, json_object *m, const char *role, const char *where,
                        k3_error *err) {
    json_object *name = json_field(m, "name");
    buf body = {0};
    int rc = content_read(&body, json_field(m, "content"), where, err);
    if (rc == K3_OK && !json_object_object_get_ex(m, "content", NULL))
        rc = error_set(err, K3_EUSAGE, "%s: a message of role %s without content", where, role);
    if (rc == K3_OK && name && !json_is(name, json_type_string))
        rc = error_set(err, K3_EUSAGE, "%s.name: not a text", where);
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", role);
    if (name)
        xtml_attribute(x, "name", json_object_get_string(name),
                       (size_t)json_object_get_string_len(name));
    xtml_sep(x);
    xtml_text(x, body.p, body.n);
    xtml_end_message(x);
    buf_free(&body);
    return rc;
}

bool has_tools(json_object *tools) {
    return json_is(tools, json_type_array) && json_object_array_length(tools) > 0;
}

int render_system(xtml *x, json_object *m, const char *where, k3_error *err) {
    json_object *tools = json_field(m, "tools"), *content = json_field(m, "content");
    if (!has_tools(tools)) return render_plain(x, m, "system", where, err);
    if (content && !json_equals(content, ""))
        return error_set(err, K3_EUSAGE,
                         "%s: a system message that declares tools has no content; "
                         "give it in one of its own",
                         where);
    xtml_system_json(x, "tool-declare",
                     "## New Tools Available\nThe system dynamically extends the toolset via "
                     "lazy-loading.\nYou have access to all existing and extended tools.\nHere are "
                     "the specs for the extended tools.\n\n```json\n",
                     tools, "\n```");
    return K3_OK;
}

static void render_argument(xtml *x, const char *key, json_object *value) {
    static const char *const type[] = {
        [json_type_null] = "null",     [json_type_boolean] = "boolean",
        [json_type_double] = "number", [json_type_int] = "number",
        [json_type_object] = "object", [json_type_array] = "array",
        [json_type_string] = "string"};
    buf body = {0};
    xtml_begin(x, "argument");
    xtml_attribute_text(x, "key", key);
    xtml_attribute_text(x, "type", type[json_object_get_type(value)]);
    xtml_sep(x);
    if (json_is(value, json_type_string))
        xtml_text(x, json_object_get_string(value), (size_t)json_object_get_string_len(value));
    else
        json_write(&body, value, false);
    xtml_text(x, body.p, body.n);
    xtml_close(x, "argument");
    if (body.is_short) x->text.is_short = true;
    buf_free(&body);
}

/* call tool="NAME" index="i" with its arguments, or with their text when that is no JSON object. */
static int render_call(xtml *x, json_object *call, size_t i, const char *where, k3_error *err) {
    json_object *function = json_field(call, "function"),
                *given = json_field(function, "arguments");
    const char *name = json_string(function, "name"), *why = NULL;
    char index[24];
    size_t at;
    if (!name)
        return error_set(err, K3_EUSAGE, "%s.tool_calls[%zu]: has no function with a name", where,
                         i);
    if (given && !json_is(given, json_type_string) && !json_is(given, json_type_object))
        return error_set(err, K3_EUSAGE,
                         "%s.tool_calls[%zu]: arguments are neither a text nor an "
                         "object",
                         where, i);
    snprintf(index, sizeof index, "%zu", i + 1);
    xtml_begin(x, "call");
    xtml_attribute_text(x, "tool", name);
    xtml_attribute_text(x, "index", index);
    xtml_sep(x);
    json_object *arguments = json_object_get(given);
    if (json_is(given, json_type_string)) {
        json_object_put(arguments);
        arguments = json_read(json_object_get_string(given),
                              (size_t)json_object_get_string_len(given), &at, &why);
    }
    if (json_is(arguments, json_type_object)) {
        for (struct lh_entry *e = json_object_get_object(arguments)->head; e; e = e->next)
            render_argument(x, lh_entry_k(e), (json_object *)lh_entry_v(e));
    } else if (given) {
        xtml_begin(x, "json");
        xtml_attribute_text(x, "type", "object");
        xtml_sep(x);
        xtml_text(x, json_object_get_string(given), (size_t)json_object_get_string_len(given));
        xtml_close(x, "json");
    }
    json_object_put(arguments);
    xtml_close(x, "call");
    return K3_OK;
}

static int render_assistant(xtml *x, json_object *m, render_state *s, const char *where,
                            k3_error *err) {
    json_object *calls = json_field(m, "tool_calls"), *reason = json_field(m, "reasoning_content");
    buf think = {0}, body = {0};
    if (!reason) reason = json_field(m, "reasoning");
    int rc = content_read(&body, json_field(m, "content"), where, err);
    if (rc == K3_OK) rc = content_read(&think, reason, where, err);
    if (rc == K3_OK && calls && !json_is(calls, json_type_array))
        rc = error_set(err, K3_EUSAGE, "%s.tool_calls: not an array", where);
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "assistant");
    xtml_sep(x);
    if (s->thinks) {
        xtml_open(x, "think");
        xtml_text(x, think.p, think.n);
        xtml_close(x, "think");
    }
    xtml_open(x, "response");
    xtml_text(x, body.p, body.n);
    xtml_close(x, "response");
    if (has_tools(calls)) xtml_open(x, "tools");
    for (size_t i = 0; rc == K3_OK && has_tools(calls) && i < json_object_array_length(calls); i++)
        rc = render_call(x, json_object_array_get_idx(calls, i), i, where, err);
    if (has_tools(calls)) xtml_close(x, "tools");
    xtml_end_message(x);
    buf_free(&think);
    buf_free(&body);
    json_object_put(s->calls);
    s->calls = json_object_get(calls);
    s->n_tool = 0;
    return rc;
}

/* Which call of the last assistant message the result `m` answers; -1: none. */
static int call_index(const render_state *s, json_object *m) {
    const char *id = json_string(m, "tool_call_id");
    for (size_t i = 0; id && has_tools(s->calls) && i < json_object_array_length(s->calls); i++) {
        const char *call_id = json_string(json_object_array_get_idx(s->calls, i), "id");
        if (call_id && strcmp(call_id, id) == 0) return (int)i;
    }
    return -1;
}

static int render_tool(xtml *x, json_object *m, render_state *s, const char *where, k3_error *err) {
    int call = call_index(s, m);
    const char *name = json_string(m, "name");
    char index[24];
    buf body = {0};
    if (call >= 0)
        name = json_string(
            json_field(json_object_array_get_idx(s->calls, (size_t)call), "function"), "name");
    if (!name)
        return error_set(err, K3_EUSAGE,
                         "%s: this tool result names no tool, and its tool_call_id "
                         "is none of the calls of the last assistant message",
                         where);
    int rc = content_read(&body, json_field(m, "content"), where, err);
    snprintf(index, sizeof index, "%u", ++s->n_tool);
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "tool");
    xtml_attribute_text(x, "tool", name);
    xtml_attribute_text(x, "index", index);
    xtml_sep(x);
    xtml_text(x, body.p, body.n);
    xtml_end_message(x);
    buf_free(&body);
    return rc;
}

int message_check(json_object *m, const char *role, const char *where, k3_error *err) {
    static const char *const plain[] = {"role", "content", "name", NULL};
    static const char *const system[] = {"role", "content", "name", "tools", NULL};
    static const char *const assistant[] = {
        "role", "content", "name", "tool_calls", "reasoning_content", "reasoning", NULL};
    static const char *const tool[] = {"role", "content", "name", "tool_call_id", NULL};
    if (strcmp(role, "system") == 0) return field_check(m, system, where, err);
    if (strcmp(role, "assistant") == 0) return field_check(m, assistant, where, err);
    return field_check(m, strcmp(role, "tool") == 0 ? tool : plain, where, err);
}

/* messages[from, to), all of them tool results: in the order of the calls if all answer one. */
static int render_tools(xtml *x, json_object *messages, size_t from, size_t to, render_state *s,
                        k3_error *err) {
    size_t n = to - from;
    size_t *order = malloc(n * sizeof *order);
    bool is_known = true;
    char where[48];
    int rc = K3_OK;
    if (!order) return error_memory(err);
    for (size_t i = 0; i < n; i++) {
        order[i] = from + i;
        if (call_index(s, json_object_array_get_idx(messages, from + i)) < 0) is_known = false;
    }
    for (size_t i = 1; is_known && i < n; i++) { /* few, and stable */
        size_t moved = order[i], j = i;
        int at = call_index(s, json_object_array_get_idx(messages, moved));
        for (; j > 0 && call_index(s, json_object_array_get_idx(messages, order[j - 1])) > at; j--)
            order[j] = order[j - 1];
        order[j] = moved;
    }
    for (size_t i = 0; i < n && rc == K3_OK; i++) {
        snprintf(where, sizeof where, "messages[%zu]", order[i]);
        rc = message_check(json_object_array_get_idx(messages, order[i]), "tool", where, err);
        if (rc == K3_OK)
            rc = render_tool(x, json_object_array_get_idx(messages, order[i]), s, where, err);
    }
    free(order);
    return rc;
}

int render_messages(xtml *x, json_object *messages, render_state *s, k3_error *err) {
    char where[48];
    int rc = K3_OK;
    if (!json_is(messages, json_type_array))
        return error_set(err, K3_EUSAGE, "messages: not an array");
    size_t n = json_object_array_length(messages);
    for (size_t i = 0, to; i < n && rc == K3_OK; i = to) {
        json_object *m = json_object_array_get_idx(messages, i);
        const char *role = json_string(m, "role");
        snprintf(where, sizeof where, "messages[%zu]", i);
        to = i + 1;
        if (role) rc = message_check(m, role, where, err);
        if (rc != K3_OK) break;
        if (!role)
            rc = error_set(err, K3_EUSAGE, "%s: has no role", where);
        else if (strcmp(role, "user") == 0)
            rc = render_plain(x, m, "user", where, err);
        else if (strcmp(role, "system") == 0)
            rc = render_system(x, m, where, err);
        else if (strcmp(role, "assistant") == 0)
            rc = render_assistant(x, m, s, where, err);
        else if (strcmp(role, "tool") == 0) {
            while (to < n &&
                   json_equals(json_field(json_object_array_get_idx(messages, to), "role"), "tool"))
                to++;
            rc = render_tools(x, messages, i, to, s, err);
        } else
            rc = error_set(err, K3_EUSAGE, "%s: role '%.*s' is not system, user, assistant or tool",
                           where, text_cut(role, 40), role);
    }
    return rc;
}

int render_choices(xtml *x, json_object *root, k3_error *err) {
    json_object *choice = json_field(root, "tool_choice"), *format;
    if (json_equals(choice, "required"))
        xtml_system_type(x, "tool-choice",
                         "The system is invoked with `tool_choice=required`.\nYou MUST call tools "
                         "in the next message.");
    else if (json_equals(choice, "none"))
        xtml_system_type(x, "tool-choice",
                         "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any "
                         "tools in the next message.");
    else if (choice && !json_equals(choice, "auto"))
        return error_set(err, K3_EUSAGE, "tool_choice: not auto, none or required");
    format = json_field(root, "response_format");
    if (!format || json_equals(json_field(format, "type"), "text")) return K3_OK;
    if (json_equals(json_field(format, "type"), "json_object")) {
        xtml_system_type(x, "response-format",
                         "The system is invoked with `response_format=json_object`.\nYour response "
                         "must be raw JSON data without markdown code blocks (```json) or any "
                         "additional formatting.");
        return K3_OK;
    }
    json_object *schema = json_field(json_field(format, "json_schema"), "schema");
    if (!json_equals(json_field(format, "type"), "json_schema") || !schema)
        return error_set(err, K3_EUSAGE,
                         "response_format: not text, json_object, or json_schema "
                         "with a json_schema.schema");
    xtml_system_json(
        x, "response-format",
        "The system is invoked with `response_format=json_schema`.\nYour response must "
        "be raw JSON data without markdown code blocks (```json) or any additional "
        "formatting.\nThe JSON data must match the following schema:\n```json\n",
        schema, "\n```");
    return K3_OK;
}

void render_header(xtml *x, json_object *tools, const render_state *s) {
    if (has_tools(tools))
        xtml_system_json(x, "tool-declare",
                         "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
                         "```json\n",
                         tools, "\n```");
    if (s->thinks && s->effort) xtml_effort(x, s->effort);
}

const char *const EFFORT[] = {"low", "medium", "high", "max", NULL};

int effort_read(render_state *s, json_object *value, const char *key, k3_error *err) {
    s->effort = NULL;
    if (!value || json_equals(value, "none")) return K3_OK;
    for (size_t i = 0; EFFORT[i]; i++)
        if (json_equals(value, EFFORT[i])) s->effort = EFFORT[i];
    return s->effort ? K3_OK
                     : error_set(err, K3_EUSAGE, "%s: not low, medium, high, max or none", key);
}

int render_settings(render_state *s, json_object *root, k3_error *err) {
    static const char *const key[] = {"reasoning_effort", "thinking_effort"};
    json_object *thinking = json_field(root, "thinking"), *value;
    if (json_is(thinking, json_type_object)) {
        if (!json_equals(json_field(thinking, "type"), "enabled") &&
            !json_equals(json_field(thinking, "type"), "disabled"))
            return error_set(err, K3_EUSAGE, "thinking.type: not enabled or disabled");
        s->thinks = json_equals(json_field(thinking, "type"), "enabled");
    } else if (json_is(thinking, json_type_boolean)) {
        s->thinks = json_object_get_boolean(thinking);
    } else if (thinking) {
        return error_set(err, K3_EUSAGE, "thinking: not true, false or an object");
    }
    for (size_t i = 0; i < COUNT(key); i++) {
        if (!json_object_object_get_ex(root, key[i], &value)) continue;
        int rc = effort_read(s, value, key[i], err);
        if (rc < 0) return rc;
    }
    return K3_OK;
}

int request_messages(json_object *root, json_object **messages, k3_error *err) {
    static const char *const known[] = {
        "messages", "tools",    "tool_choice",     "response_format",
        "stream",   "thinking", "thinking_effort", "reasoning_effort",
        "max_tokens", "max_completion_tokens", NULL};
    *messages = json_field(root, "messages");
    if (json_is(root, json_type_string)) {
        json_object *m = json_object_new_object();
        json_put(m, "role", json_object_new_string("user"));
        json_put(m, "content", json_object_get(root));
        *messages = json_object_new_array();
        json_object_array_add(*messages, m);
        return K3_OK;
    }
    if (json_string(root, "role")) {
        *messages = json_object_new_array();
        json_object_array_add(*messages, json_object_get(root));
        return K3_OK;
    }
    if (json_is(root, json_type_array)) *messages = root;
    json_object_get(*messages);
    if (!*messages)
        return error_set(err, K3_EUSAGE,
                         "neither a text, a message with a role, an array of "
                         "messages nor an object with one");
    if (!json_is(*messages, json_type_array))
        return error_set(err, K3_EUSAGE, "messages: not an array");
    if (*messages == root) return K3_OK;
    json_object *tools = json_field(root, "tools"), *stream = json_field(root, "stream");
    if (tools && !json_is(tools, json_type_array))
        return error_set(err, K3_EUSAGE, "tools: not an array");
    if (stream && !json_is(stream, json_type_boolean))
        return error_set(err, K3_EUSAGE, "stream: not true or false");
    return field_check(root, known, "request", err);
}

bool is_request(json_object *root) {
    return json_is(root, json_type_object) && !json_string(root, "role");
}

int render_request(xtml *x, json_object *root, render_state *s, k3_error *err) {
    json_object *messages = NULL;
    int rc = request_messages(root, &messages, err);
    if (rc == K3_OK && is_request(root)) rc = render_settings(s, root, err);
    if (rc == K3_OK) {
        render_header(x, is_request(root) ? json_field(root, "tools") : NULL, s);
        rc = render_messages(x, messages, s, err);
    }
    if (rc == K3_OK && is_request(root)) rc = render_choices(x, root, err);
    xtml_prompt(x, s->thinks);
    json_object_put(messages);
    return rc;
}

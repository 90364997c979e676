/* k3_json.h - what json-c does not say of a text: that an object has a key twice, or that it is no JSON.
 *
 * json-c keeps the last of them and other readers the first, so two programs would see two files. Each
 * member of an object has one colon that is in no string: a text with more colons than its value has
 * members says something twice, however the key is escaped.
 *
 * Where it is not strict json-c also takes comments and strings in single quotes. Other readers do not, and
 * a double quote in one of them would hide what follows from the count: both are refused. (Its strict mode
 * refuses the official tokenizer_config.json, for a number of 28 digits.) */
#ifndef K3_JSON_H
#define K3_JSON_H

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>

/* Members of all objects in v. As deep as the tokener that made it allows. */
static inline size_t json_count_members(json_object *v) {
    size_t n = 0;
    if (json_object_is_type(v, json_type_array))
        for (size_t i = 0; i < json_object_array_length(v); i++)
            n += json_count_members(json_object_array_get_idx(v, i));
    if (!json_object_is_type(v, json_type_object)) return n;
    struct json_object_iterator at = json_object_iter_begin(v), end = json_object_iter_end(v);
    for (; !json_object_iter_equal(&at, &end); json_object_iter_next(&at))
        n += 1 + json_count_members(json_object_iter_peek_value(&at));
    return n;
}

/* NULL, or what is wrong with the n bytes of text that json-c parsed to v. */
static inline const char *json_fault(const char *text, size_t n, json_object *v) {
    size_t n_colons = 0;
    bool is_string = false;
    for (size_t i = 0; i < n; i++) {
        if (is_string && text[i] == '\\')
            i++;
        else if (text[i] == '"')
            is_string = !is_string;
        else if (!is_string && (text[i] == '\'' || text[i] == '/'))
            return "a comment or a single quote";
        else
            n_colons += !is_string && text[i] == ':';
    }
    return n_colons != json_count_members(v) ? "an object has a key twice" : NULL;
}

#endif

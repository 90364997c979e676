/* output.h - what the `k3` program writes: stdout, JSON, files that are whole or absent.
 *
 * stdout carries the answer and nothing else. A function that returns an exit code has already said why.
 */
#ifndef K3_CLI_OUTPUT_H
#define K3_CLI_OUTPUT_H

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* ---- stdout ---- */

/* FAIL_IO, with the reason of `error` (an errno). A reader that left (`k3 ... | head`) or was never there
 * (`>&-`) wants no message. */
int fail_stdout(int error);

/* Write to stdout now, so that text appears as it is made. */
int out_write(const char *p, size_t n_bytes);

/* One line of JSON; the object is given up. */
int out_json_line(json_object *o);

/* Bytes to stdout, escaped as in C where they are not printable UTF-8: a line stays a line. */
void put_escaped(const char *bytes, size_t n);

/* ---- JSON ---- */

void json_put(json_object *o, const char *key, json_object *value); /* gives `value` away */
void json_put_hash(json_object *o, const char *key, uint64_t fnv);  /* 16 hex digits     */
void json_put_real(json_object *o, const char *key, double value);  /* six decimals      */
void json_put_count(json_object *o, const char *key, uint64_t n);   /* below 2^63        */

/* A path may hold any bytes and JSON may not: what is no UTF-8 is replaced. */
void json_put_path(json_object *o, const char *key, const char *path);

/* ---- Files ----
 *
 * An output file is whole, or as it was before. It is opened early, so that hours of work do not end
 * in a place that cannot be written, and emptied when there is something to write. Devices and pipes
 * are never removed. All functions do nothing with a file that is not open (f NULL). */
typedef struct {
    FILE *f;
    const char *path;
    bool is_new, is_begun;
} outfile;

int outfile_open(outfile *o, const char *path);

/* The run has begun: what was in the file is given up. */
int outfile_begin(outfile *o);

/* Two outputs in one file, through links perhaps, would be neither. */
int outfile_differ(const outfile *a, const outfile *b);
int outfile_write(outfile *o, const void *p, size_t n_bytes);

/* Close; `keep` false, or a failure to write the rest, removes what was begun. */
int outfile_close(outfile *o, bool keep);

#endif

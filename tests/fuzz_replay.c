/* fuzz_replay.c - give a fuzz target the files, or the files of the directories, that are named.
 *
 *     fuzz_header tests/corpus/header
 *
 * Stands in for libFuzzer's main, so that any compiler can run a corpus: link it with one
 * fuzz_*.c. Exits 0 when all inputs were taken, 1 when a file cannot be read, 2 with no
 * arguments; a target that finds a fault aborts. Each input is malloc'd to its exact size, for
 * the address sanitizer. Directories are read in no order and not recursively.
 */
#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned long n_inputs;
static int n_unread;
static const char *volatile current; /* for a debugger */

static int complain(const char *path) {
    n_unread++;
    fprintf(stderr, "fuzz_replay: %s: %s\n", path, strerror(errno));
    return 1;
}

static int replay_file(const char *path, size_t size) {
    uint8_t *data = malloc(size ? size : 1);
    FILE *f = fopen(path, "rb");
    int rc = 0;
    if (!f || !data || fread(data, 1, size, f) != size) {
        rc = complain(path);
    } else {
        current = path;
        LLVMFuzzerTestOneInput(data, size);
        n_inputs++;
    }
    if (f) fclose(f);
    free(data);
    return rc;
}

static int replay(const char *path, int depth) {
    struct stat st;
    if (stat(path, &st) != 0) return complain(path);
    if (!S_ISDIR(st.st_mode)) return replay_file(path, (size_t)st.st_size);
    DIR *d = depth == 0 ? opendir(path) : NULL;
    int rc = 0;
    if (!d) return depth == 0 ? complain(path) : 0;
    for (struct dirent *e; (e = readdir(d));) {
        char inner[4096];
        if (e->d_name[0] == '.') continue;
        snprintf(inner, sizeof inner, "%s/%s", path, e->d_name);
        rc |= replay(inner, depth + 1);
    }
    closedir(d);
    return rc;
}

int main(int argc, char **argv) {
    int rc = 0;
    if (argc < 2) {
        fprintf(stderr, "usage: %s FILE_OR_DIRECTORY...\n", argv[0]);
        return 2;
    }
    for (int i = 1; i < argc; i++) rc |= replay(argv[i], 0);
    const char *slash = strrchr(argv[0], '/');
    printf("%s: %lu passed, %d failed, 0 skipped\n", slash ? slash + 1 : argv[0], n_inputs, n_unread);
    return rc;
}

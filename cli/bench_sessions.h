/* bench_sessions.h - `k3 bench --sessions N`. */
#ifndef K3_CLI_BENCH_SESSIONS_H
#define K3_CLI_BENCH_SESSIONS_H

#include "cli/inputs.h"

/* Print what n sessions, each with one of the prompts, get together of one pass a token, against one alone. The engine was
 * planned for n sessions. Returns an exit code whose reason is said. */
int bench_sessions(k3_engine *e, size_t n, const id_list *prompt, size_t n_prompt, uint64_t tokens);

#endif

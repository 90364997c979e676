/* where.h - `k3 bench --where`: what a prompt and a decoded token spend their time on. */
#ifndef K3_CLI_WHERE_H
#define K3_CLI_WHERE_H

#include "k3.h"

typedef struct {
    uint64_t n_pos;    /* positions, or tokens                    */
    uint64_t wall_ns;  /* inside k3_session_feed                  */
    uint64_t stall_ns; /* of it, waiting for the disk            */
    uint64_t expert_uses;
    uint64_t part_ns[K3_N_PARTS], part_busy_ns[K3_N_PARTS];
} where_sum;

typedef struct {
    where_sum prompt, decode;
} where;

/* Add what was counted between two looks at a session whose engine was opened is_timed. */
void where_add(where_sum *w, const k3_stats *from, const k3_stats *to);

/* Lines that begin with "# where" to stdout: a head, then for prompt and decode each part's seconds, its share of
 * the whole, how many threads were busy in it on average, and for matrices and experts the rate at which weights
 * went by with its ratio to a plain read by the same threads. Returns DONE, or an exit code. */
int where_print(const where *w, const k3_engine *e);

#endif

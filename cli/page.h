/* page.h - the page of `k3 serve`. */
#ifndef K3_CLI_PAGE_H
#define K3_CLI_PAGE_H

/* Its lines, NULL behind the last. */
extern const char *const PAGE[];

#endif

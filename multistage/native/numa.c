/* Memory of NUMA nodes (MCDRAM, HBM, CXL), without libnuma: binding, and where the process may go. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core.h"

/* Policies and flags, as in linux/mempolicy.h. */
enum { PREFERRED = 1, BIND = 2, PREFERRED_MANY = 5, MODE_FLAGS = 7 << 13, STRICT = 1 };
enum { MOST_NODES = 1024, BITS = 8 * sizeof(unsigned long) };

/* Let the pages of [address, address + nbytes) come from one node only.
 *
 * `address` is page-aligned; pages that were touched already are not moved.
 * Returns 0 or an errno.
 */
int64_t ms_bind(void *address, int64_t nbytes, int64_t node)
{
#if defined(__linux__) && defined(SYS_mbind)
    unsigned long mask[MOST_NODES / BITS] = {0};
    if (node < 0 || node >= MOST_NODES)
        return EINVAL;
    mask[node / BITS] = 1ul << (node % BITS);
    if (syscall(SYS_mbind, address, (unsigned long)nbytes, BIND, mask, MOST_NODES + 1ul,
                (unsigned)STRICT))
        return errno;
    return 0;
#else
    (void)address, (void)nbytes, (void)node;
    return ENOSYS;
#endif
}

/* List the nodes that the calling thread is bound to or prefers, as by numactl.
 *
 * Writes at most `room` numbers to `nodes` and returns how many there are: 0
 * where no policy says so, or the kernel does not tell.
 */
int64_t ms_nodes_wanted(int64_t *nodes, int64_t room)
{
    int64_t count = 0;
#if defined(__linux__) && defined(SYS_get_mempolicy)
    unsigned long mask[MOST_NODES / BITS] = {0};
    int mode = 0;
    if (syscall(SYS_get_mempolicy, &mode, mask, MOST_NODES + 0ul, (void *)0, 0ul))
        return 0;
    mode &= ~MODE_FLAGS;
    if (mode != PREFERRED && mode != BIND && mode != PREFERRED_MANY)
        return 0;
    for (int64_t node = 0; node < MOST_NODES; node++)
        if (mask[node / BITS] >> (node % BITS) & 1 && count < room)
            nodes[count++] = node;
#else
    (void)nodes, (void)room;
#endif
    return count;
}

/* Binding memory to a NUMA node (MCDRAM, HBM, CXL), without libnuma. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { BIND = 2, STRICT = 1, MOST_NODES = 1024, BITS = 8 * sizeof(unsigned long) };

/* Let the pages of [address, address + nbytes) come from one node only.
 *
 * `address` is page-aligned; pages that were touched already are not moved.
 * Returns 0 or an errno.
 */
EXPORT int64_t ms_bind(void *address, int64_t nbytes, int64_t node)
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

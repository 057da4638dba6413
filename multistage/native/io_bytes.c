/* Bytes of extents: gathered from arrays, moved in whole pages; a file allocated ahead. */
#define _GNU_SOURCE
#include "io_bytes.h"

#if defined(__linux__)
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { GROW = 64 << 20 };
static const uint32_t TMPFS = 0x01021994u, RAMFS = 0x858458f6u;

void io_copy_past(char *to, const char *from, int64_t nbytes)
{
#if defined(__SSE2__)
    if (!((uintptr_t)to % 16)) {
        for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64)
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128((__m128i *)(void *)(to + i),
                                 _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
    }
#endif
    memcpy(to, from, (size_t)nbytes);
}

void io_fence(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

int64_t io_is_direct(int64_t fd)
{
    int flags = fcntl((int)fd, F_GETFL);
    return flags >= 0 && flags & O_DIRECT && !ms_io_in_memory(fd);
}

int64_t io_pwrite(int64_t fd, void *data, int64_t nbytes, int64_t position)
{
    ssize_t done = pwrite((int)fd, data, (size_t)nbytes, position);
    return done < 0 ? -errno : done;
}

int64_t io_pread(int64_t fd, void *data, int64_t nbytes, int64_t position)
{
    ssize_t done = pread((int)fd, data, (size_t)nbytes, position);
    return done < 0 ? -errno : done;
}

int64_t io_transfer(transfer_t *move, int64_t fd, char *data, int64_t nbytes, int64_t position,
                    int64_t at_end)
{
    while (nbytes > 0) {
        int64_t done = move(fd, data, nbytes, position);
        if (done == -EINTR)
            continue;
        if (done < 0)
            return -done;
        if (done > nbytes)
            return EIO;
        if (done < nbytes)
            done -= done % PAGE; /* what goes past the page cache must begin at a page */
        if (done == 0)
            return at_end;
        data += done, position += done, nbytes -= done;
    }
    return 0;
}

int64_t io_grow(int64_t fd, int64_t *allocated, int64_t most_bytes, int64_t end)
{
    int64_t ahead = *allocated + GROW;
    if (most_bytes >= 0)
        ahead = min64(ahead, most_bytes);
    for (int64_t size = ahead > end ? ahead : end;; size = end) {
        int failed;
        do
            failed = fallocate((int)fd, 0, *allocated, size - *allocated) ? errno : 0;
        while (failed == EINTR);
        if (failed == EOPNOTSUPP || failed == ENOSYS)
            failed = 0, size = end; /* then it grows by being written */
        if (!failed)
            *allocated = size;
        if (!failed || size == end)
            return failed;
    }
}

/* Whether a file lies in memory, as on tmpfs, whatever its flags. */
int64_t ms_io_in_memory(int64_t fd)
{
    struct statfs found;
    if (fstatfs((int)fd, &found))
        return 0;
    return (uint32_t)found.f_type == TMPFS || (uint32_t)found.f_type == RAMFS;
}

#else /* the portable engines take over */

int64_t ms_io_in_memory(int64_t fd) { return (void)fd, 0; }
#endif

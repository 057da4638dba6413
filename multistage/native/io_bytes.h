/* Bytes of extents: gathered from arrays, moved in whole pages; a file allocated ahead. */
#ifndef MS_IO_BYTES_H
#define MS_IO_BYTES_H
#include "core.h"

#include <time.h>

enum { PAGE = 4096 };

static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t pages_of(int64_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

/* Copy bytes offset .. offset+nbytes of the record; `piece` is where the last call ended. */
void io_gather(const job_t *job, int64_t *piece, char *to, int64_t offset, int64_t nbytes);

/* Write or read what the system takes in one call; returns the bytes, or an errno, negated. */
int64_t io_pwrite(int64_t fd, void *data, int64_t nbytes, int64_t position);
int64_t io_pread(int64_t fd, void *data, int64_t nbytes, int64_t position);

/* Move whole pages, however the system divides them; returns 0 or an errno, `at_end` at the
 * end of the file. */
int64_t io_transfer(transfer_t *move, int64_t fd, char *data, int64_t nbytes, int64_t position,
                    int64_t at_end);

/* Allocate the file up to `end`, and some more at a time, so that a full disk shows early;
 * never beyond `most_bytes` unless that is negative.  Returns 0 or an errno. */
int64_t io_grow(int64_t fd, int64_t *allocated, int64_t most_bytes, int64_t end);
#endif

/* The file store's engine; see io.c. */
#ifndef MULTISTAGE_IO_H
#define MULTISTAGE_IO_H

#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Moves up to nbytes at `position` of the file; returns how many, or -errno. */
typedef int64_t transfer_t(int64_t fd, void *data, int64_t nbytes, int64_t position);

enum { IO_QUEUED, IO_DONE, IO_FAILED };
enum { IO_WRITE, IO_READ };

/* One array of a state that is written by reference, and its place in the record. */
typedef struct {
    const char *data;
    int64_t offset, nbytes;
} piece_t;

/* One extent to move.  The caller's from submission until `state` is not IO_QUEUED
 * it may only look at `state`. */
typedef struct job {
    struct job *next;          /* the engine's */
    const struct job *written; /* a read: the write it waits for and takes `sum` of, or NULL */
    char *data;                /* whole pages written or read; NULL: a write gathers `pieces` */
    const piece_t *pieces;     /* by ascending offset */
    int64_t n_pieces;
    int64_t nbytes;   /* of the record; whole pages are moved */
    int64_t position; /* in the file, whole extents */
    int64_t sum;      /* XXH64 of the record: a write's result, what a read must find */
    int64_t start_ns, stop_ns; /* CLOCK_MONOTONIC */
    int64_t error;             /* errno; EBADMSG if the sum is another */
    _Atomic int64_t state;
} job_t;

typedef struct io io_t;

/* How threads are set up; the caller's until ms_io_start returns, `bounce` until ms_io_stop. */
typedef struct {
    int64_t fd;
    int64_t extent_bytes; /* whole pages */
    int64_t most_bytes;   /* never allocate more than that ahead of use; negative: no limit */
    char *bounce;         /* n_bounces buffers of chunk_bytes, whole pages, for gathering */
    int64_t chunk_bytes, n_bounces;
    int64_t nice;                /* added to the threads' own */
    transfer_t *pwrite, *pread; /* NULL: the system's */
} io_options_t;

EXPORT int64_t ms_io_len(void);
EXPORT int64_t ms_io_start(io_t *io, const io_options_t *options);
EXPORT void ms_io_submit(io_t *io, job_t *job, int64_t kind);
EXPORT int64_t ms_io_state(const job_t *job);
EXPORT int64_t ms_io_wait(io_t *io, int64_t seen, int64_t timeout_ms);
EXPORT void ms_io_stop(io_t *io);
EXPORT int64_t ms_io_in_memory(int64_t fd);
EXPORT int64_t ms_xxh64(const char *data, int64_t nbytes);

#endif

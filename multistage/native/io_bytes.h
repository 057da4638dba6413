/* The engine that moves extents, and their bytes: gathered from arrays, moved in whole pages. */
#ifndef MS_IO_BYTES_H
#define MS_IO_BYTES_H
#include "core.h"
#include "stream.h"

#include <time.h>

enum { PAGE = 4096 };

enum { IO_QUEUED, IO_DONE, IO_FAILED };
enum { IO_WRITE, IO_READ };

/* Bytes of the file, whole pages. */
typedef struct {
    int64_t position, nbytes;
} span_t;

/* One extent to move.  The caller's from submission until `state` is not IO_QUEUED
 * it may only look at `state`. */
typedef struct job {
    struct job *next;          /* the engine's */
    const struct job *written; /* a read: the write it waits for and takes `sum` of, or NULL */
    char *data;                /* whole pages written or read; NULL: a write gathers `pieces` */
    const piece_t *pieces;     /* by ascending offset */
    int64_t n_pieces;
    int64_t nbytes;    /* of the record; whole pages are moved */
    const span_t *spans; /* where it lies, one part after the other */
    int64_t n_spans;
    uint64_t sum;     /* XXH3 of the record: a write's result, what a read must find */
    int64_t start_ns, stop_ns; /* CLOCK_MONOTONIC */
    int64_t error;             /* errno; EBADMSG if the sum is another */
    _Atomic int64_t cancelled; /* 1: it fails at its next chunk; 2: a read that has begun */
    _Atomic int64_t state;
} job_t;

typedef struct io io_t;

/* How threads are set up; the caller's until ms_io_start returns, `bounce` until ms_io_stop. */
typedef struct {
    int64_t fd;
    int64_t most_bytes;   /* never allocate more than that ahead of use; negative: no limit */
    char *bounce;         /* n_bounces buffers of chunk_bytes, whole pages, for gathering */
    int64_t chunk_bytes, n_bounces;
    int64_t nice;       /* added to the threads' own */
    int64_t single;     /* one thread each way, not two */
    int64_t outside;    /* two threads of the caller's run ms_io_work, with whole records to read */
    int64_t unverified; /* any sum is taken of what is read */
    transfer_t *pwrite, *pread; /* NULL: the system's */
} io_options_t;

int64_t ms_io_len(void);
int64_t ms_io_start(io_t *io, const io_options_t *options);
void ms_io_submit(io_t *io, job_t *job, int64_t kind);
int64_t ms_io_cancel(job_t *job);
int64_t ms_io_state(const job_t *job);
int64_t ms_io_wait(io_t *io, int64_t seen, int64_t timeout_ms);
void ms_io_work(io_t *io, int64_t kind);
void ms_io_end(io_t *io);
void ms_io_stop(io_t *io);

static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t pages_of(int64_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

/* Add bytes to a state of XXH3, XXH3_state_t. */
typedef void sum_t(void *sum, const char *data, int64_t nbytes);
/* What adds them by wider registers where the processor has them, else `plain`. */
sum_t *io_faster_sum(sum_t *plain);

/* Copy bytes that a device reads next, past the caches: it would take them out of these one by one,
 * at twice the time for the copy that follows. */
void io_copy_past(char *to, const char *from, int64_t nbytes);
/* To be called before another thread or a device is told of such bytes. */
void io_fence(void);
/* Whether a device reads and writes memory itself, for a file. */
int64_t io_is_direct(int64_t fd);

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

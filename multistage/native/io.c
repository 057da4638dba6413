/* The file store's engine: extents moved by threads that never see the interpreter.
 *
 * Two lanes, one each way, of two threads each:
 *
 *   write   front: sum the arrays, gather them in a bounce buffer   back: pwrite
 *   read    front: pread into the caller's pages                    back: sum, compare
 *
 * so that the disk works while bytes are copied and summed.  A lane moves its
 * jobs in the order of submission, chunk by chunk, through a ring of a few
 * chunks between its two threads.  With `single` the front does the work of the
 * back as well, and a lane never takes more than one core.
 *
 * Submission takes no lock: a job is pushed on a list and a semaphore posted.
 * The front takes the whole list at once and turns it round.  A completion is
 * told by the job's state, which whoever waits looks at again whenever the
 * count of completions has changed.
 *
 * The caller allocates everything and keeps it until ms_io_stop.  A forked
 * child has the memory but no threads: it must not call anything here.
 */
#define _GNU_SOURCE
#include "io_bytes.h"

#if defined(__linux__)
#define XXH_INLINE_ALL /* into this file: nothing to link, no symbols of another copy */
#define XXH_NO_STDLIB  /* its states are on our stacks */
#include "xxhash/xxhash.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4 << 10, RING = 4, STACK = 512 << 10 };

/* Part of a job on its way through a lane; job NULL: stop. */
typedef struct {
    job_t *job;
    char *data;
    int64_t offset, nbytes; /* in the record */
    int64_t error, last;
} chunk_t;

typedef struct lane {
    io_t *io;
    pthread_t front, back;
    void (*finish)(struct lane *lane, const chunk_t *chunk); /* what the back does */
    int has_front, has_back;
    _Atomic int outside; /* one of them is the caller's, and there */
    _Atomic(job_t *) inbox; /* newest first */
    job_t *ready;           /* oldest first; the front's */
    sem_t jobs;             /* submitted, and one more to stop */
    chunk_t ring[RING];
    int64_t length, head, tail; /* of the ring; head the back's, tail the front's */
    sem_t room, chunks;
    XXH3_state_t sum; /* from here on the back's: of a read so far */
    int64_t error;    /* of a write so far */
    int64_t stop_ns;  /* of the job before */
} lane_t;

struct io {
    io_options_t o;
    int64_t allocated, running, ending, past;
    sum_t *add;
    lane_t lane[2];
    _Atomic int64_t completed, waiters;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
};

static void add_plain(void *sum, const char *data, int64_t nbytes)
{
    XXH3_64bits_update(sum, data, (size_t)nbytes);
}

static void take(sem_t *semaphore)
{
    while (sem_wait(semaphore))
        ;
}

/* --- completion ------------------------------------------------------------------- */

static void complete(lane_t *lane, job_t *job, int64_t error)
{
    io_t *io = lane->io;
    job->error = error;
    /* The next job's front may have begun before this one's back was done: the
     * records of a lane do not overlap. */
    if (job->start_ns < lane->stop_ns)
        job->start_ns = lane->stop_ns;
    job->stop_ns = lane->stop_ns = now_ns();
    atomic_store_explicit(&job->state, error ? IO_FAILED : IO_DONE, memory_order_release);
    /* From here on the job is the caller's.  Either we see the waiter, or it,
     * counted in before it looks, sees the new count. */
    atomic_fetch_add(&io->completed, 1);
    if (atomic_load(&io->waiters)) {
        pthread_mutex_lock(&io->mutex);
        pthread_cond_broadcast(&io->changed);
        pthread_mutex_unlock(&io->mutex);
    }
}

/* The job's state; what else it holds can be read once it is not IO_QUEUED. */
int64_t ms_io_state(const job_t *job)
{
    return atomic_load_explicit(&((job_t *)job)->state, memory_order_acquire);
}

/* Have a transfer fail (ECANCELED) at its next chunk, if there is one.  Takes no lock.
 * Whether a read had not begun: then its memory is the caller's at once. */
int64_t ms_io_cancel(job_t *job)
{
    return atomic_exchange(&job->cancelled, 1) == 0;
}

/* Wait until the count of completions is not `seen`, at most so long; returns the count.
 * A negative timeout is none. */
int64_t ms_io_wait(io_t *io, int64_t seen, int64_t timeout_ms)
{
    int64_t completed = atomic_load(&io->completed);
    if (completed != seen || timeout_ms == 0)
        return completed;
    int64_t until_ns = now_ns() + timeout_ms * 1000000;
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    int failed = 0;
    pthread_mutex_lock(&io->mutex);
    atomic_fetch_add(&io->waiters, 1);
    while ((completed = atomic_load(&io->completed)) == seen && failed != ETIMEDOUT)
        failed = timeout_ms < 0 ? pthread_cond_wait(&io->changed, &io->mutex)
                                : pthread_cond_timedwait(&io->changed, &io->mutex, &until);
    atomic_fetch_sub(&io->waiters, 1);
    pthread_mutex_unlock(&io->mutex);
    return completed;
}

/* --- the threads ------------------------------------------------------------------ */

/* Let compute go before the calling thread, as Linux can for one thread alone. */
static void yield_to_compute(const io_t *io)
{
    id_t thread = (id_t)syscall(SYS_gettid);
    if (io->o.nice > 0)
        setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + (int)io->o.nice);
}

static job_t *next_job(lane_t *lane)
{
    take(&lane->jobs);
    if (!lane->ready) {
        job_t *job = atomic_exchange(&lane->inbox, NULL);
        while (job) {
            job_t *older = job->next;
            job->next = lane->ready;
            lane->ready = job;
            job = older;
        }
    }
    job_t *job = lane->ready;
    if (job)
        lane->ready = job->next;
    return job;
}

static void send(lane_t *lane, chunk_t chunk)
{
    lane->ring[lane->tail++ % lane->length] = chunk;
    if (!lane->io->o.single)
        sem_post(&lane->chunks);
    else if (chunk.job) {
        lane->finish(lane, &chunk);
        sem_post(&lane->room);
    }
}

/* Move a chunk to or from its places in the file, which grows for what is written; returns 0
 * or an errno, `at_end` at the end of the file. */
static int64_t move_chunk(io_t *io, transfer_t *move, const chunk_t *chunk, int64_t at_end)
{
    int64_t offset = chunk->offset, left = pages_of(chunk->nbytes), error = 0;
    char *data = chunk->data;
    const span_t *span = chunk->job->spans, *end = span + chunk->job->n_spans;
    for (; left && !error && span < end; span++) {
        int64_t nbytes = min64(left, span->nbytes - offset), position = span->position + offset;
        if (nbytes <= 0) {
            offset -= span->nbytes;
            continue;
        }
        if (move == io->o.pwrite && position + nbytes > io->allocated)
            error = io_grow(io->o.fd, &io->allocated, io->o.most_bytes, position + nbytes);
        if (!error)
            error = io_transfer(move, io->o.outside ? pages_of(chunk->job->nbytes) : io->o.fd, data,
                                nbytes, position, at_end);
        data += nbytes, left -= nbytes, offset = 0;
    }
    return error;
}

/* Block by block, so that what is copied comes from the cache. */
static void sum_and_copy(const io_t *io, char *to, const char *from, int64_t nbytes, XXH3_state_t *sum)
{
    for (int64_t n; nbytes; to += n, from += n, nbytes -= n) {
        n = min64(nbytes, BLOCK);
        io->add(sum, from, n);
        io->past ? io_copy_past(to, from, n) : (void)memcpy(to, from, (size_t)n);
    }
}

static void sum_zeros(const io_t *io, char *to, int64_t nbytes, XXH3_state_t *sum)
{
    memset(to, 0, (size_t)nbytes);
    io->add(sum, to, nbytes);
}

/* Copy bytes offset .. offset+nbytes of a record, and sum them; `piece` is where the last call
 * ended. */
static void gather(const io_t *io, const job_t *job, int64_t *piece, char *to, int64_t offset,
                   int64_t nbytes, XXH3_state_t *sum)
{
    int64_t at = offset, stop = offset + nbytes;
    for (; *piece < job->n_pieces; ++*piece) {
        const piece_t *p = &job->pieces[*piece];
        int64_t end = p->offset + p->nbytes;
        if (p->offset >= stop)
            break;
        if (p->offset > at) {
            sum_zeros(io, to + (at - offset), p->offset - at, sum);
            at = p->offset;
        }
        if (end > at) {
            int64_t n = min64(end, stop) - at;
            sum_and_copy(io, to + (at - offset), p->data + (at - p->offset), n, sum);
            at += n;
        }
        if (end > stop)
            break;
    }
    if (stop > at)
        sum_zeros(io, to + (at - offset), stop - at, sum);
    if (io->past)
        io_fence();
}

static void *write_front(void *argument)
{
    lane_t *lane = argument;
    io_t *io = lane->io;
    job_t *job;
    yield_to_compute(io);
    while ((job = next_job(lane))) {
        job->start_ns = now_ns();
        XXH3_state_t sum;
        XXH3_64bits_reset(&sum);
        int64_t piece = 0;
        for (int64_t offset = 0, last = 0; !last;) {
            int64_t nbytes = min64(job->nbytes - offset, io->o.chunk_bytes);
            last = offset + nbytes == job->nbytes;
            take(&lane->room);
            if (atomic_load_explicit(&job->cancelled, memory_order_relaxed)) {
                send(lane, (chunk_t){job, NULL, 0, 0, ECANCELED, 1});
                break;
            }
            char *data = job->data ? job->data + offset
                                   : io->o.bounce + lane->tail % lane->length * io->o.chunk_bytes;
            if (job->data)
                io->add(&sum, data, nbytes);
            else
                gather(io, job, &piece, data, offset, nbytes, &sum);
            if (last)
                job->sum = XXH3_64bits_digest(&sum);
            send(lane, (chunk_t){job, data, offset, nbytes, 0, last});
            offset += nbytes;
        }
    }
    take(&lane->room);
    send(lane, (chunk_t){0});
    return NULL;
}

static void finish_write(lane_t *lane, const chunk_t *chunk)
{
    io_t *io = lane->io;
    if (!lane->error)
        lane->error = chunk->error;
    if (!lane->error)
        lane->error = move_chunk(io, io->o.pwrite, chunk, EIO);
    if (chunk->last) {
        complete(lane, chunk->job, lane->error);
        lane->error = 0;
    }
}

static void *read_front(void *argument)
{
    lane_t *lane = argument;
    io_t *io = lane->io;
    job_t *job;
    yield_to_compute(io);
    while ((job = next_job(lane))) {
        int64_t error = 0;
        if (job->written) {
            int64_t seen = ms_io_wait(io, 0, 0);
            while (ms_io_state(job->written) == IO_QUEUED)
                seen = ms_io_wait(io, seen, -1);
            error = job->written->error;
            job->sum = job->written->sum;
        }
        job->start_ns = now_ns();
        int64_t fresh = 0;
        if (!atomic_compare_exchange_strong(&job->cancelled, &fresh, 2))
            error = ECANCELED;
        for (int64_t offset = 0, last = 0; !last;) {
            int64_t nbytes = io->o.outside ? job->nbytes
                                           : min64(job->nbytes - offset, io->o.chunk_bytes);
            char *data = job->data + offset;
            take(&lane->room);
            if (!error && atomic_load_explicit(&job->cancelled, memory_order_relaxed) == 1)
                error = ECANCELED;
            chunk_t chunk = {job, data, offset, nbytes, 0, 0};
            if (!error)
                error = move_chunk(io, io->o.pread, &chunk, ENODATA);
            last = error || offset + nbytes == job->nbytes;
            chunk.error = error, chunk.last = last;
            send(lane, chunk);
            offset += nbytes;
        }
    }
    take(&lane->room);
    send(lane, (chunk_t){0});
    return NULL;
}

static void finish_read(lane_t *lane, const chunk_t *chunk)
{
    int64_t error = chunk->error;
    if (!error)
        lane->io->add(&lane->sum, chunk->data, chunk->nbytes);
    if (!chunk->last)
        return;
    if (!error && !lane->io->o.unverified && XXH3_64bits_digest(&lane->sum) != chunk->job->sum)
        error = EBADMSG;
    complete(lane, chunk->job, error);
    XXH3_64bits_reset(&lane->sum);
}

static void *back(void *argument)
{
    lane_t *lane = argument;
    yield_to_compute(lane->io);
    for (;; sem_post(&lane->room)) {
        take(&lane->chunks);
        chunk_t chunk = lane->ring[lane->head++ % lane->length];
        if (!chunk.job)
            return NULL;
        lane->finish(lane, &chunk);
    }
}

/* --- life ------------------------------------------------------------------------- */

static int start_thread(lane_t *lane, pthread_t *thread, void *(*run)(void *))
{
    pthread_attr_t attributes;
    sigset_t all, before;
    /* Signals are for the interpreter's threads, but for those that tell of a
     * fault of this very thread. */
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    int failed = pthread_attr_init(&attributes);
    if (failed)
        return failed;
    /* The usual 8 MiB each would count against a limit on data. */
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(thread, &attributes, run, lane);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!failed)
        pthread_setname_np(*thread, "multistage-io");
    return failed;
}

/* Every job submitted is moved first. */
static void stop_lane(lane_t *lane)
{
    if (!lane->has_front && !lane->outside && lane->has_back) { /* it was not started */
        take(&lane->room);
        send(lane, (chunk_t){0});
    }
    if (lane->has_front)
        pthread_join(lane->front, NULL);
    if (lane->has_back)
        pthread_join(lane->back, NULL);
    sem_destroy(&lane->jobs);
    sem_destroy(&lane->room);
    sem_destroy(&lane->chunks);
}

int64_t ms_io_len(void) { return sizeof(io_t); }

/* Start the threads; `io` is the caller's memory, of ms_io_len() bytes.
 * Returns 0 or an errno; after an error nothing is left to stop. */
int64_t ms_io_start(io_t *io, const io_options_t *options)
{
    static void *(*const FRONT[])(void *) = {write_front, read_front};
    if (options->chunk_bytes <= 0 || options->chunk_bytes % PAGE || options->n_bounces < 1)
        return EINVAL;
    memset(io, 0, sizeof *io);
    io->o = *options;
    if (io->o.outside) /* nothing of a file is allocated */
        io->allocated = INT64_MAX;
    else
        io->past = io_is_direct(io->o.fd);
    io->add = io_faster_sum(add_plain);
    if (!io->o.pwrite)
        io->o.pwrite = io_pwrite;
    if (!io->o.pread)
        io->o.pread = io_pread;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&io->mutex, NULL);
    pthread_cond_init(&io->changed, &clock);
    pthread_condattr_destroy(&clock);
    int failed = 0;
    io->running = 1;
    for (int kind = IO_WRITE; kind <= IO_READ; kind++) {
        lane_t *lane = &io->lane[kind];
        lane->io = io;
        lane->finish = kind == IO_WRITE ? finish_write : finish_read;
        XXH3_64bits_reset(&lane->sum);
        lane->length = kind == IO_WRITE ? min64(io->o.n_bounces, RING) : RING;
        sem_init(&lane->jobs, 0, 0);
        sem_init(&lane->room, 0, (unsigned)lane->length);
        sem_init(&lane->chunks, 0, 0);
        /* The caller's thread of a lane is the one that calls pwrite or pread. */
        int its_back = io->o.outside && kind == IO_WRITE && !io->o.single;
        int its_front = io->o.outside && !its_back;
        if (!its_back && !io->o.single && !failed && !(failed = start_thread(lane, &lane->back, back)))
            lane->has_back = 1;
        if (!its_front && !failed && !(failed = start_thread(lane, &lane->front, FRONT[kind])))
            lane->has_front = 1;
    }
    if (failed)
        ms_io_stop(io);
    return failed;
}

/* Be the thread of a lane that calls pwrite or pread, until ms_io_end; that must have been
 * returned from before ms_io_stop. */
void ms_io_work(io_t *io, int64_t kind)
{
    lane_t *lane = &io->lane[kind];
    lane->outside = 1;
    if (kind == IO_READ)
        read_front(lane);
    else
        io->o.single ? write_front(lane) : back(lane);
}

/* Queue a job, behind those of its kind: a write (IO_WRITE) or a read (IO_READ).
 * Takes no lock and never waits. */
void ms_io_submit(io_t *io, job_t *job, int64_t kind)
{
    lane_t *lane = &io->lane[kind];
    atomic_store_explicit(&job->state, IO_QUEUED, memory_order_relaxed);
    job->next = atomic_load_explicit(&lane->inbox, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&lane->inbox, &job->next, job))
        ;
    sem_post(&lane->jobs);
}

/* Have the threads end after what is submitted now; nothing the second time. */
void ms_io_end(io_t *io)
{
    if (!io->running || io->ending)
        return;
    io->ending = 1;
    for (int kind = IO_WRITE; kind <= IO_READ; kind++)
        sem_post(&io->lane[kind].jobs);
}

/* Finish every job and stop the threads; nothing the second time, nor of zeroed memory that
 * was never started. */
void ms_io_stop(io_t *io)
{
    if (!io->running)
        return;
    ms_io_end(io);
    io->running = 0;
    stop_lane(&io->lane[IO_WRITE]); /* first: a read may wait for a write */
    stop_lane(&io->lane[IO_READ]);
    pthread_cond_destroy(&io->changed);
    pthread_mutex_destroy(&io->mutex);
}

#endif

/* A record stream: states of any size to a file and back, by one call for a put and one for a get.
 *
 * Small records (`n_buffers` > 0) are gathered in extents, in buffers of the caller's arena; only a
 * full extent is written.  They can be read from its buffer until that is used again; a read brings
 * a whole extent and the one before it, since checkpoints come back in descending order.  A large
 * record (`n_buffers` 0) is an extent of its own: it is gathered from the caller's arrays by the
 * engine's threads, and read into memory of the caller's, whole pages of it.
 *
 * One thread calls all but ms_stream_work.  Only ms_stream_wait, ms_stream_stop and ms_stream_close
 * wait; every other call answers at once, STREAM_WAIT where it could do more after a wait.  What
 * failed is told once, by the get or ms_stream_written of a record: STREAM_LOST, and why in `error`:
 * an errno, 0 where there is no such record.  That record is gone then.
 *
 * The arena, the bounce buffers and the view are the caller's, and stay until ms_stream_close, which
 * is the only one that frees; extents and the index, whose number is not known ahead, are the
 * stream's.  A forked child must not call anything here.  For Linux alone.
 */
#ifndef MULTISTAGE_STREAM_H
#define MULTISTAGE_STREAM_H

typedef struct stream stream_t;

enum { STREAM_WAIT = -1, STREAM_LOST = -2, STREAM_MEMORY = -3, STREAM_TELL = -4, STREAM_FULL = -5 };

/* What a stream shows; it changes in its calls alone. */
typedef struct {
    int64_t buffer, at; /* where the next small record is put; buffer -1: ms_stream_room finds one */
    int64_t place;      /* of the small record that was got last, in its extent */
    int64_t bytes_written, bytes_read, stored_bytes, peak_stored_bytes, lost;
    int64_t news;       /* becomes 1 when a transfer has ended, or something was lost or freed */
    int64_t written, read; /* arrays of puts, memory of reads, are the caller's up to these ids */
    int64_t error, write_failed; /* of the record that was lost last */
    int64_t full; /* the medium took no more: what it held then is its capacity */
    const piece_t *pieces; /* the caller's: what ms_stream_put puts */
    int64_t n_pieces;
    int64_t records; /* transfers that ms_stream_record tells of; the oldest of thousands fall off */
} stream_view_t;

typedef struct {
    int64_t fd;          /* of the file; not used with `outside` */
    int64_t most_bytes;  /* of extents, as many as are whole pages; negative: no limit */
    int64_t count;       /* small records that share an extent */
    int64_t record_bytes, extent_bytes; /* of small ones; an extent is whole pages */
    int64_t depth;       /* writes of large records in flight */
    int64_t head;        /* not 0: arrays of large records are objects, with their address so far on */
    char *arena;         /* n_buffers extents to gather in; from `landing` on as many to read into */
    int64_t landing, n_buffers; /* 0: records are of any size, an extent each */
    char *bounce; /* n_bounces buffers of chunk_bytes, whole pages: large records pass through them */
    int64_t chunk_bytes, n_bounces;
    int64_t nice;       /* added to that of the threads */
    int64_t single;     /* one thread each way, which copies and transfers in turn, not two */
    int64_t unverified; /* what is read need not have the checksum of what was written */
    /* Not a file: two threads of the caller run ms_stream_work, and pwrite and pread are called
     * by them, with the bytes of the extent for `fd`, and its number << STREAM_PLACE | the place in
     * it for a position.  All of an extent is read at once. */
    int64_t outside;
    transfer_t *pwrite, *pread; /* NULL: the system's */
    stream_view_t *view;
} stream_options_t;

/* A transfer that has ended; times by CLOCK_MONOTONIC. */
typedef struct {
    int64_t is_read, key, start_ns, stop_ns, nbytes;
} stream_record_t;

enum { STREAM_PLACE = 36 };

/* Returns 0 or an errno; the stream is at *stream, NULL after an error. */
EXPORT int64_t ms_stream_open(const stream_options_t *options, stream_t **stream);

/* Put a record of view.pieces: 1 if it is taken, else STREAM_WAIT (its queue is full), STREAM_FULL
 * or STREAM_TELL (it may have room after ms_stream_freed).  The arrays of a large one stay as they
 * are until view.written is at least `id`: ascending. */
EXPORT int64_t ms_stream_put(stream_t *s, int64_t key, int64_t id);
/* Find a place for the next small record; answers as a put.  Put what was copied there. */
EXPORT int64_t ms_stream_room(stream_t *s);
EXPORT int64_t ms_stream_fill(stream_t *s, int64_t key);
/* Put small records in another stream of such, the first ones that are in memory, as many as go in
 * the extent that is filled there, and forget them here: how many. */
EXPORT int64_t ms_stream_pass(stream_t *s, stream_t *to, const int64_t *keys, int64_t n);
/* Whether the arrays of a record are the caller's: 1, STREAM_WAIT, STREAM_LOST. */
EXPORT int64_t ms_stream_written(stream_t *s, int64_t key);
/* Whether the write of a record has ended, or a put would not wait: 1 or 0. */
EXPORT int64_t ms_stream_ended(stream_t *s, int64_t key);
EXPORT int64_t ms_stream_ready(stream_t *s);
/* Have the write of a large record fail (ECANCELED) at its next chunk. */
EXPORT void ms_stream_cancel(stream_t *s, int64_t key);

/* Queue the read of a record, behind its write, if it is not in memory: of a small one, or of a
 * large one into `into`, whole pages, which stay until view.read is at least `id`, ascending, or a
 * drop says so. */
EXPORT void ms_stream_prefetch(stream_t *s, int64_t key);
EXPORT void ms_stream_read(stream_t *s, int64_t key, int64_t id, const char *into);
/* Whether the read of a record has ended: 1, STREAM_WAIT, or STREAM_MEMORY: read it. */
EXPORT int64_t ms_stream_arrived(stream_t *s, int64_t key);
/* Get a record that has been read: which extent of the arena a small one is in until the next call,
 * those to gather in counted first; 0 of a large one, which lies where it was read to.  Else
 * STREAM_WAIT, STREAM_LOST or STREAM_MEMORY. */
EXPORT int64_t ms_stream_get(stream_t *s, int64_t key);
/* Forget a record; 1 if memory that it was read into is in use until view.read tells. */
EXPORT int64_t ms_stream_drop(stream_t *s, int64_t key);

/* The next transfer that has ended: 1, or 0 if there is none. */
EXPORT int64_t ms_stream_record(stream_t *s, stream_record_t *record);
/* With `outside`: the next extent that was freed, -1 if there is none.  Its number is used again. */
EXPORT int64_t ms_stream_freed(stream_t *s);
EXPORT void ms_stream_poll(stream_t *s);
/* Wait until a transfer has ended since the last call, at most so long; negative: no limit. */
EXPORT void ms_stream_wait(stream_t *s, int64_t timeout_ms);

/* With `outside`: do the transfers of a kind, IO_WRITE or IO_READ, until ms_stream_end. */
EXPORT void ms_stream_work(stream_t *s, int64_t kind);
/* Let what is queued be done, and the threads end then; wait for that, once the caller's threads
 * have ended; free everything and set *stream to NULL.  Each again does nothing. */
EXPORT void ms_stream_end(stream_t *s);
EXPORT void ms_stream_stop(stream_t *s);
EXPORT void ms_stream_close(stream_t **stream);

#endif

/* The record stream: which extent holds which record, where it lies, what is in memory. */
#define _GNU_SOURCE
#include "stream_parts.h"

#if defined(__linux__)
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { FILLING, QUEUED, DONE, FAILED, NONE };
enum { RECORDS = 4096, ALIGN = 64 };

struct extent {
    job_t write, read; /* first: the engine works on them until they have ended */
    home_t home;
    uint32_t number, filled; /* of the index; records in it, dropped ones too */
    int64_t first, nbytes, live;
    int64_t state, read_state, error;
    int64_t id, read_id;
    int64_t age;             /* its write or its last use, in the order they ended */
    int64_t buffer, landing; /* of the arena, -1: none */
    int cancelled, homeless, write_failed, used;
    piece_t *pieces;
    struct extent *previous, *after; /* gathered before it and after it */
    struct extent *next_write, *next_read, *next_zombie;
};
typedef struct extent extent_t;

typedef struct {
    extent_t *first, *last;
} queue_t;

struct stream {
    stream_options_t o;
    stream_view_t *view;
    io_t *io;
    index_t index;
    room_t room;
    extent_t *all, *filling, *latest, *last_read, **held, **landed;
    queue_t writing, reading;
    extent_t *zombies; /* without a record */
    int64_t waiting, age, seen;
    stream_record_t *records; /* a ring: the oldest fall off */
    int64_t first_record;
};

static int is_full(int64_t error)
{
    return error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM;
}

/* --- what has ended ---------------------------------------------------------------- */

static void note(stream_t *s, const extent_t *e, int64_t is_read)
{
    const job_t *job = is_read ? &e->read : &e->write;
    s->records[(s->first_record + s->view->records) % RECORDS] =
        (stream_record_t){is_read, e->first, job->start_ns, job->stop_ns, e->nbytes};
    if (s->view->records < RECORDS)
        s->view->records++;
    else
        s->first_record++;
}

static void wrote(stream_t *s, extent_t *e)
{
    int failed = ms_io_state(&e->write) == IO_FAILED;
    e->error = failed ? e->write.error : 0;
    e->write_failed = failed;
    if (failed && is_full(e->error)) {
        e->homeless = s->view->full = 1;
        room_close(&s->room);
    }
    e->age = ++s->age;
    e->state = failed ? FAILED : DONE;
    free(e->pieces);
    e->pieces = NULL;
    if (!s->o.n_buffers)
        s->waiting--, s->view->written = e->id;
    if (!failed)
        s->view->bytes_written += e->nbytes;
    if (!failed || !e->cancelled) /* that took no time */
        note(s, e, 0);
}

static void let_land(stream_t *s, extent_t *e) /* what it landed in is another's */
{
    if (e->landing >= 0)
        s->landed[e->landing] = NULL;
    e->landing = -1;
}

static void landed(stream_t *s, extent_t *e)
{
    int failed = ms_io_state(&e->read) == IO_FAILED;
    e->read_state = failed ? FAILED : DONE;
    e->age = ++s->age;
    if (failed) {
        e->error = e->read.error;
        e->write_failed = 0;
        let_land(s, e);
    } else
        s->view->bytes_read += e->nbytes;
    if (!s->o.n_buffers)
        s->view->read = e->read_id;
    if (!failed || e->live) /* not of one that was given up */
        note(s, e, 1);
}

/* A lane ends its jobs in order. */
void ms_stream_poll(stream_t *s)
{
    extent_t *e;
    s->seen = ms_io_wait(s->io, 0, 0);
    while ((e = s->writing.first) && ms_io_state(&e->write) != IO_QUEUED) {
        s->writing.first = e->next_write;
        wrote(s, e);
        s->view->news = 1;
    }
    while ((e = s->reading.first) && ms_io_state(&e->read) != IO_QUEUED) {
        s->reading.first = e->next_read;
        landed(s, e);
        s->view->news = 1;
    }
}

void ms_stream_wait(stream_t *s, int64_t timeout_ms) { ms_io_wait(s->io, s->seen, timeout_ms); }

int64_t ms_stream_record(stream_t *s, stream_record_t *record)
{
    if (!s->view->records)
        return 0;
    *record = s->records[s->first_record++ % RECORDS];
    s->view->records--;
    return 1;
}

/* --- extents ------------------------------------------------------------------------ */

static void forget(stream_t *s, extent_t *e)
{
    if (e->buffer >= 0)
        s->held[e->buffer] = NULL;
    let_land(s, e);
    if (e->previous)
        e->previous->after = NULL;
    if (e->after)
        e->after->previous = NULL; /* what came before it is not read with it */
    if (s->latest == e)
        s->latest = NULL;
    if (s->last_read == e)
        s->last_read = NULL;
    index_forget(&s->index, e->number);
    free(e->home.spans);
    free(e->pieces);
    free(e);
}

/* Free the extents without a record that no thread is at. */
static void bury(stream_t *s)
{
    ms_stream_poll(s);
    for (extent_t **at = &s->zombies; *at;) {
        extent_t *e = *at;
        if (e->state == QUEUED || e->read_state == QUEUED) {
            at = &e->next_zombie;
            continue;
        }
        *at = e->next_zombie;
        if (e->homeless)
            s->room.lost += e->home.nbytes;
        else
            room_give(&s->room, &e->home);
        s->view->stored_bytes = s->room.taken - s->room.lost;
        s->view->news |= s->o.outside != 0;
        forget(s, e);
    }
}

/* An extent has a record less; 1 if memory of the caller's that it was read into is in use. */
static int64_t release(stream_t *s, extent_t *e)
{
    int64_t in_use = 0;
    if (--e->live)
        return 0;
    if (e == s->filling) { /* every record in it is gone: fill it again */
        e->filled = 0;
        s->view->at = 0;
        return 0;
    }
    if (e->read_state == QUEUED)
        in_use = !ms_io_cancel(&e->read);
    e->next_zombie = s->zombies;
    s->zombies = e;
    bury(s);
    return in_use;
}

int64_t ms_stream_freed(stream_t *s)
{
    int64_t number = room_told(&s->room);
    s->view->stored_bytes = s->room.taken - s->room.lost;
    return number;
}

/* An extent with room for so many bytes. */
static int64_t new_extent(stream_t *s, int64_t nbytes, extent_t **made)
{
    if (s->zombies)
        bury(s);
    extent_t *e = calloc(1, sizeof *e);
    int64_t fits = e ? room_take(&s->room, pages_of(nbytes), &e->home) : STREAM_FULL;
    if (fits > 0 && !(e->number = index_extent(&s->index, e))) {
        room_give(&s->room, &e->home);
        fits = STREAM_FULL;
    }
    if (fits < 0) {
        if (e)
            free(e->home.spans);
        free(e);
        return fits;
    }
    e->nbytes = nbytes;
    e->read_state = NONE;
    e->buffer = e->landing = -1;
    stream_view_t *view = s->view;
    view->stored_bytes = s->room.taken - s->room.lost;
    if (view->peak_stored_bytes < view->stored_bytes)
        view->peak_stored_bytes = view->stored_bytes;
    *made = e;
    return 1;
}

static extent_t *find(stream_t *s, int64_t key, int64_t *place)
{
    const entry_t *entry = index_find(&s->index, key);
    if (!entry)
        return NULL;
    *place = entry->place;
    return s->index.extents[entry->extent];
}

/* --- writes ------------------------------------------------------------------------- */

static char *bytes_of(const stream_t *s, const char *array)
{
    char *bytes = (char *)array;
    if (s->o.head)
        memcpy(&bytes, array + s->o.head, sizeof bytes);
    return bytes;
}

static void queue_write(stream_t *s, extent_t *e, char *data)
{
    e->write = (job_t){.data = data, .nbytes = e->nbytes, .pieces = e->pieces,
                       .n_pieces = e->write.n_pieces, .spans = e->home.spans,
                       .n_spans = e->home.n_spans};
    e->state = QUEUED;
    e->next_write = NULL;
    if (s->writing.first)
        s->writing.last->next_write = e;
    else
        s->writing.first = e;
    s->writing.last = e;
    ms_io_submit(s->io, &e->write, IO_WRITE);
}

/* A buffer whose extent is written, the oldest first; -1 if there is none. */
static int64_t free_buffer(const stream_t *s)
{
    int64_t best = -1;
    for (int64_t i = 0; i < s->o.n_buffers; i++) {
        const extent_t *e = s->held[i];
        if (!e)
            return i;
        if ((e->state == DONE || e->state == FAILED) && (best < 0 || e->age < s->held[best]->age))
            best = i;
    }
    return best;
}

int64_t ms_stream_room(stream_t *s)
{
    extent_t *e = NULL;
    if (s->view->buffer >= 0)
        return 1;
    ms_stream_poll(s);
    int64_t buffer = free_buffer(s);
    if (buffer < 0)
        return STREAM_WAIT;
    int64_t fits = new_extent(s, s->o.count * s->o.record_bytes, &e);
    if (fits < 0)
        return fits;
    if (s->held[buffer])
        s->held[buffer]->buffer = -1; /* it is read from the file from now on */
    s->held[buffer] = e;
    e->buffer = buffer;
    if ((e->previous = s->latest))
        s->latest->after = e;
    s->filling = s->latest = e;
    s->view->buffer = buffer, s->view->at = 0;
    return 1;
}

static int64_t put_small(stream_t *s, int64_t key, const piece_t *pieces, int64_t n_pieces)
{
    int64_t fits = ms_stream_room(s);
    if (fits < 0)
        return fits;
    extent_t *e = s->filling;
    char *to = s->o.arena + e->buffer * s->o.extent_bytes + e->filled * s->o.record_bytes;
    for (int64_t i = 0; i < n_pieces; i++)
        memcpy(to + pieces[i].offset, pieces[i].data, (size_t)pieces[i].nbytes);
    const entry_t *before = index_find(&s->index, key);
    extent_t *old = before ? s->index.extents[before->extent] : NULL;
    if (!index_enter(&s->index, key, e->number, e->filled))
        return STREAM_FULL;
    if (!e->filled++)
        e->first = key;
    e->live++;
    s->view->at = e->filled;
    if (e->filled == s->o.count) {
        s->filling = NULL;
        s->view->buffer = -1;
        queue_write(s, e, s->o.arena + e->buffer * s->o.extent_bytes);
    }
    if (old) /* last: it may be the same extent */
        release(s, old);
    return 1;
}

int64_t ms_stream_fill(stream_t *s, int64_t key) { return put_small(s, key, NULL, 0); }

int64_t ms_stream_put(stream_t *s, int64_t key, int64_t id)
{
    const piece_t *pieces = s->view->pieces;
    extent_t *e = NULL;
    int64_t nbytes = ALIGN, n_pieces = s->view->n_pieces;
    if (s->o.n_buffers)
        return put_small(s, key, pieces, n_pieces);
    ms_stream_drop(s, key);
    ms_stream_poll(s);
    if (s->waiting >= s->o.depth)
        return STREAM_WAIT;
    for (int64_t i = 0; i < n_pieces; i++)
        if (nbytes < pieces[i].offset + pieces[i].nbytes)
            nbytes = pieces[i].offset + pieces[i].nbytes;
    int64_t fits = new_extent(s, (nbytes + ALIGN - 1) / ALIGN * ALIGN, &e);
    if (fits < 0)
        return fits;
    e->pieces = malloc((size_t)(n_pieces ? n_pieces : 1) * sizeof *pieces);
    if (!e->pieces || !index_enter(&s->index, key, e->number, 0)) {
        room_give(&s->room, &e->home);
        forget(s, e);
        return STREAM_FULL;
    }
    for (int64_t i = 0; i < n_pieces; i++) {
        e->pieces[i] = pieces[i];
        e->pieces[i].data = bytes_of(s, pieces[i].data);
    }
    e->first = key, e->id = id, e->live = e->filled = 1;
    e->write.n_pieces = n_pieces;
    s->waiting++;
    queue_write(s, e, NULL);
    return 1;
}

int64_t ms_stream_pass(stream_t *s, stream_t *to, const int64_t *keys, int64_t n)
{
    int64_t done = 0, place;
    for (; done < n && to->view->buffer >= 0; done++) {
        const extent_t *e = find(s, keys[done], &place);
        if (!e || (e->buffer < 0 && e->read_state != DONE))
            break;
        const char *data = e->buffer >= 0
                               ? s->o.arena + e->buffer * s->o.extent_bytes
                               : s->o.arena + s->o.landing + e->landing * s->o.extent_bytes;
        piece_t piece = {data + place * s->o.record_bytes, 0, s->o.record_bytes};
        if (put_small(to, keys[done], &piece, 1) < 0)
            break;
        ms_stream_drop(s, keys[done]);
    }
    return done;
}

/* Say why a record is lost, and forget it. */
static int64_t lose(stream_t *s, int64_t key, const extent_t *e)
{
    s->view->error = e->error;
    s->view->write_failed = e->write_failed;
    s->view->lost += !(e->cancelled && e->state == FAILED);
    s->view->news = 1;
    ms_stream_drop(s, key);
    return STREAM_LOST;
}

int64_t ms_stream_written(stream_t *s, int64_t key)
{
    int64_t place;
    ms_stream_poll(s);
    extent_t *e = find(s, key, &place);
    s->view->error = 0;
    if (!e)
        return STREAM_LOST;
    if (!s->o.n_buffers && e->state == QUEUED)
        return STREAM_WAIT;
    return e->state == FAILED ? lose(s, key, e) : 1;
}

int64_t ms_stream_ended(stream_t *s, int64_t key)
{
    int64_t place;
    ms_stream_poll(s);
    extent_t *e = find(s, key, &place);
    return !e || s->o.n_buffers || e->state != QUEUED;
}

int64_t ms_stream_ready(stream_t *s)
{
    ms_stream_poll(s);
    return s->o.n_buffers ? s->filling || free_buffer(s) >= 0 : s->waiting < s->o.depth;
}

void ms_stream_cancel(stream_t *s, int64_t key)
{
    int64_t place;
    if (ms_stream_ended(s, key))
        return;
    extent_t *e = find(s, key, &place);
    e->cancelled = 1;
    ms_io_cancel(&e->write);
}

/* --- reads -------------------------------------------------------------------------- */

/* Memory for an extent of small records to be read into; where it `must` be had, that of
 * one which has been read, but not yet used, is taken. */
static int take_landing(stream_t *s, extent_t *e, int must)
{
    int64_t best = -1;
    for (int64_t i = 0; i < s->o.n_buffers; i++) {
        const extent_t *other = s->landed[i];
        if (!other) {
            best = i;
            break;
        }
        if (other->read_state != DONE || (!must && (!other->used || other == s->last_read)))
            continue;
        const extent_t *found = best < 0 ? NULL : s->landed[best];
        if (!found || (other->used && !found->used) ||
            (other->used == found->used && other->age < found->age))
            best = i;
    }
    if (best < 0)
        return 0;
    if (s->landed[best])
        s->landed[best]->read_state = NONE, s->landed[best]->landing = -1;
    s->landed[best] = e;
    e->landing = best;
    return 1;
}

static void queue_read(stream_t *s, extent_t *e, int64_t id, char *into, int must)
{
    if (!e || e->buffer >= 0 || e->read_state != NONE || !e->live)
        return;
    if (e->state == FAILED) { /* as its error says */
        e->read_state = FAILED;
        return;
    }
    if (s->o.n_buffers) {
        if (!take_landing(s, e, must))
            return;
        into = s->o.arena + s->o.landing + e->landing * s->o.extent_bytes;
    }
    e->read = (job_t){.written = e->state == QUEUED ? &e->write : NULL, .data = into,
                      .nbytes = e->nbytes, .spans = e->home.spans, .n_spans = e->home.n_spans,
                      .sum = e->state == QUEUED ? 0 : e->write.sum};
    e->read_id = id;
    e->read_state = QUEUED;
    e->used = 0;
    e->next_read = NULL;
    if (s->reading.first)
        s->reading.last->next_read = e;
    else
        s->reading.first = e;
    s->reading.last = e;
    ms_io_submit(s->io, &e->read, IO_READ);
}

void ms_stream_prefetch(stream_t *s, int64_t key)
{
    int64_t place;
    extent_t *e = find(s, key, &place);
    if (e && s->o.n_buffers) {
        queue_read(s, e, 0, NULL, 0);
        queue_read(s, e->previous, 0, NULL, 0);
    }
}

void ms_stream_read(stream_t *s, int64_t key, int64_t id, const char *into)
{
    int64_t place;
    queue_read(s, find(s, key, &place), id, bytes_of(s, into), 0);
}

/* Have the read of a record, which is not in a buffer, end. */
static int64_t reading(stream_t *s, extent_t *e)
{
    if (e->read_state == NONE) {
        if (!s->o.n_buffers)
            return STREAM_MEMORY;
        queue_read(s, e, 0, NULL, 1);
        queue_read(s, e->previous, 0, NULL, 0);
    }
    return e->read_state == DONE || e->read_state == FAILED ? 1 : STREAM_WAIT;
}

int64_t ms_stream_arrived(stream_t *s, int64_t key)
{
    int64_t place;
    ms_stream_poll(s);
    extent_t *e = find(s, key, &place);
    return !e || e->buffer >= 0 ? 1 : reading(s, e);
}

int64_t ms_stream_get(stream_t *s, int64_t key)
{
    int64_t place;
    if (s->writing.first || s->reading.first)
        ms_stream_poll(s);
    extent_t *e = find(s, key, &place);
    if (!e) {
        s->view->error = 0;
        return STREAM_LOST;
    }
    s->view->place = place;
    if (e->buffer >= 0)
        return e->buffer;
    int64_t ended = reading(s, e);
    if (ended < 0)
        return ended;
    if (e->read_state == FAILED)
        return lose(s, key, e);
    if (!s->o.n_buffers) { /* landed for this reader alone: a later get reads again */
        e->read_state = NONE;
        return 0;
    }
    extent_t *last = s->last_read;
    e->used = 1;
    s->last_read = e;
    if (last && last != e && last != e->previous && last->read_state == DONE) {
        let_land(s, last); /* though its keys may live on */
        last->read_state = NONE;
    }
    return s->o.n_buffers + e->landing;
}

int64_t ms_stream_drop(stream_t *s, int64_t key)
{
    uint32_t number = index_pop(&s->index, key);
    return number ? release(s, s->index.extents[number]) : 0;
}

/* --- life --------------------------------------------------------------------------- */

int64_t ms_stream_open(const stream_options_t *options, stream_t **stream)
{
    stream_t *s = *stream = calloc(1, sizeof *s);
    if (!s)
        return ENOMEM;
    s->o = *options;
    s->view = options->view;
    s->view->buffer = -1;
    s->room.most = s->o.most_bytes < 0 ? -1 : s->o.most_bytes - s->o.most_bytes % PAGE;
    s->room.outside = s->o.outside != 0;
    s->records = malloc(RECORDS * sizeof *s->records);
    s->held = calloc((size_t)s->o.n_buffers + 1, sizeof *s->held);
    s->landed = calloc((size_t)s->o.n_buffers + 1, sizeof *s->landed);
    int64_t failed = ENOMEM;
    if (s->records && s->held && s->landed && !posix_memalign((void **)&s->io, ALIGN, (size_t)ms_io_len()))
        failed = ms_io_start(s->io, &(io_options_t){
            .fd = s->o.fd, .most_bytes = s->o.most_bytes, .bounce = s->o.bounce,
            .chunk_bytes = s->o.chunk_bytes, .n_bounces = s->o.n_bounces, .nice = s->o.nice,
            .single = s->o.single, .outside = s->o.outside, .unverified = s->o.unverified,
            .pwrite = s->o.pwrite, .pread = s->o.pread});
    if (failed) {
        free(s->io);
        s->io = NULL;
        ms_stream_close(stream);
    }
    return failed;
}

void ms_stream_work(stream_t *s, int64_t kind) { ms_io_work(s->io, kind); }

void ms_stream_end(stream_t *s) { ms_io_end(s->io); }

void ms_stream_stop(stream_t *s) { ms_io_stop(s->io); }

void ms_stream_close(stream_t **stream)
{
    stream_t *s = *stream;
    if (!s)
        return;
    if (s->io) {
        ms_io_stop(s->io);
        for (int64_t i = 1; i < s->index.n_extents; i++)
            if (s->index.extents[i])
                forget(s, s->index.extents[i]);
    }
    free(s->io), free(s->records), free(s->held), free(s->landed);
    room_free(&s->room), index_free(&s->index);
    free(s);
    *stream = NULL;
}

#endif

/* Runs of loops inside compiled programs: which state is where, and what to wait for. */
#define _GNU_SOURCE
#include "io_bytes.h"
#include "loop.h"

#if defined(__linux__)
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LINE = 64, EXTENT = 1 << 20, HUGE = 2 << 20, LEAST_BUFFERS = 2, MOST_BUFFERS = 4, NICE = 5 };
enum { AHEAD = 3, MOST_RUNS = 1 << 16 };

static const int64_t PATIENCE_NS = 250000000; /* the least that a read is waited for at first */

typedef struct site site_t;

/* A record stream for states of one size, on one tier. */
typedef struct engine {
    pthread_mutex_t lock; /* one thread calls the stream */
    stream_t *stream;
    stream_view_t view;
    char *arena;
    int64_t arena_bytes, record, extent, fd;
    const site_t *of; /* the first that asked for it, whose folder and limits it has */
    int64_t n_runs;
    struct engine *next;
} engine_t;

struct site {
    loop_options_t o;
    char *folder;
    int64_t step_ns, write_ns, read_ns, record; /* as its last run has seen them */
    site_t *next;
};

typedef struct run {
    site_t *site;
    engine_t *engine;
    int64_t *keys, n_keys, keys_len; /* blocks whose states are in the stream, ascending */
    int64_t end;                     /* states from here on were asked for */
    int64_t begin_ns, turn_ns, inside_ns, bytes_written, bytes_read, left_out;
    loop_report_t report;
    int busy; /* a call is at it */
    struct run *next, *older, *newer;
} run_t;

enum { BUCKETS = 256 };
static pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;
static site_t *sites[BUCKETS];
static engine_t *engines;
static run_t *runs[BUCKETS], *oldest, *newest;
static int64_t n_runs, next_run = 1;
static int watched, forked;
static loop_report_t last_report;
static transfer_t *write_hook, *read_hook;

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t record_bytes(const piece_t *pieces, int64_t n)
{
    int64_t end = LINE;
    for (int64_t i = 0; i < n; i++)
        end = max64(end, pieces[i].offset + pieces[i].nbytes);
    return (end + LINE - 1) / LINE * LINE;
}

static int64_t key_of(const run_t *r, int64_t k) { return r->report.run << 32 | k; }

/* --- the stream of a site ----------------------------------------------------------- */

static int64_t open_tier(const char *folder)
{
    if (!*folder)
        return memfd_create("multistage", MFD_CLOEXEC);
    int fd = open(folder, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    if (fd >= 0) {
        char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int takes = page != MAP_FAILED && !(pwrite(fd, page, PAGE, 0) < 0 && errno == EINVAL);
        if (page != MAP_FAILED)
            munmap(page, PAGE);
        if (takes)
            return fd;
        close(fd); /* its blocks are larger */
    } else if (errno != EINVAL)
        return fd;
    return open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
}

static void close_engine(engine_t *e)
{
    ms_stream_close(&e->stream);
    if (e->arena)
        munmap(e->arena, (size_t)e->arena_bytes);
    if (e->fd >= 0)
        close((int)e->fd);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

/* Returns 0 or an errno. */
static int64_t open_engine(const site_t *s, int64_t record, engine_t **made)
{
    engine_t *e = calloc(1, sizeof *e);
    if (!e)
        return ENOMEM;
    pthread_mutex_init(&e->lock, NULL);
    int64_t count = max64(1, EXTENT / record);
    while (count > 1 && 2 * LEAST_BUFFERS * pages_of(count * record) > s->o.buffer_bytes)
        count /= 2;
    e->record = record;
    e->extent = pages_of(count * record);
    int64_t buffers = max64(LEAST_BUFFERS, min64(MOST_BUFFERS, s->o.buffer_bytes / (2 * e->extent)));
    e->arena_bytes = (2 * buffers * e->extent + HUGE - 1) / HUGE * HUGE;
    e->fd = open_tier(s->folder);
    int64_t failed = e->fd < 0 ? errno : 0;
    if (!failed) {
        void *area = mmap(NULL, (size_t)e->arena_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (area == MAP_FAILED)
            failed = ENOMEM;
        else {
            e->arena = area;
            madvise(area, (size_t)e->arena_bytes, MADV_HUGEPAGE);
            failed = ms_stream_open(
                &(stream_options_t){.fd = e->fd, .most_bytes = s->o.capacity_bytes, .count = count,
                                    .record_bytes = record, .extent_bytes = e->extent,
                                    .arena = e->arena, .landing = buffers * e->extent,
                                    .n_buffers = buffers, .chunk_bytes = min64(e->extent, EXTENT),
                                    .n_bounces = 2, .nice = NICE, .view = &e->view,
                                    .pwrite = write_hook, .pread = read_hook},
                &e->stream);
        }
    }
    if (failed)
        close_engine(e);
    else
        *made = e;
    return failed;
}

/* The stream for a run's states, which runs of other sites may have, too; `tables` is held. */
static int64_t find_engine(run_t *r)
{
    const site_t *s = r->site;
    int64_t failed = 0;
    engine_t *e = engines;
    while (e && !(e->record == r->report.record_bytes && !strcmp(e->of->folder, s->folder) &&
                  e->of->o.capacity_bytes == s->o.capacity_bytes &&
                  e->of->o.buffer_bytes == s->o.buffer_bytes))
        e = e->next;
    if (!e && !(failed = open_engine(s, r->report.record_bytes, &e)))
        e->of = s, e->next = engines, engines = e;
    if (!failed)
        e->n_runs++, r->engine = e;
    return failed;
}

/* --- runs ---------------------------------------------------------------------------- */

static run_t *find_run(int64_t number)
{
    run_t *r = runs[number % BUCKETS];
    while (r && r->report.run != number)
        r = r->next;
    return r;
}

static void drop_all(run_t *r)
{
    while (r->n_keys > 0)
        ms_stream_drop(r->engine->stream, key_of(r, r->keys[--r->n_keys]));
}

/* Take a run out of the tables, which are locked; what it had in the stream was dropped. */
static void remove_run(run_t *r)
{
    run_t **at = &runs[r->report.run % BUCKETS];
    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
    *(r->older ? &r->older->newer : &oldest) = r->newer;
    *(r->newer ? &r->newer->older : &newest) = r->older;
    if (r->engine)
        r->engine->n_runs--;
    n_runs--;
    free(r->keys), free(r);
}

static void forget(run_t *r)
{
    if (r->engine) {
        pthread_mutex_lock(&r->engine->lock);
        drop_all(r);
        pthread_mutex_unlock(&r->engine->lock);
    }
    remove_run(r);
}

/* Forget the oldest run that no call is at: 1, or 0 if there is none. */
static int evict(void)
{
    run_t *r = oldest;
    while (r && r->busy)
        r = r->newer;
    if (r)
        forget(r);
    return r != NULL;
}

static int same_site(const site_t *s, const char *folder, int64_t length, const loop_options_t *o)
{
    return !memcmp(&s->o, o, sizeof *o) && (int64_t)strlen(s->folder) == length &&
           !memcmp(s->folder, folder, (size_t)length);
}

static site_t *find_site(const char *folder, int64_t length, const loop_options_t *o)
{
    site_t **bucket = &sites[(uint64_t)o->site % BUCKETS], *s = *bucket;
    while (s && !same_site(s, folder, length, o))
        s = s->next;
    if (s || !(s = calloc(1, sizeof *s)))
        return s;
    if (!(s->folder = strndup(folder, (size_t)length))) {
        free(s);
        return NULL;
    }
    s->o = *o;
    s->next = *bucket;
    return *bucket = s;
}

/* Steps of a block of which a state, there and back, takes a twentieth of the time: a step forward,
 * run again and turned takes some five forward.  As many, at least, as have all states fit in the
 * tier. */
static int64_t interval(const site_t *s)
{
    int64_t move_ns = s->write_ns + s->read_ns, most = s->o.most_every;
    if (most >= s->o.steps || !s->step_ns || !move_ns)
        return most;
    int64_t fit = s->o.capacity_bytes < 0 ? s->o.steps : max64(1, s->o.capacity_bytes / s->record);
    int64_t least = max64((s->o.steps + fit - 1) / fit, 1 + 4 * move_ns / s->step_ns);
    return max64(s->o.least_every, min64(most, least));
}

static int is_idle(const run_t *r, int64_t site) { return !r->busy && !r->turn_ns && r->site->o.site == site; }

/* Forget the newest run of a site that nothing was asked of: its number is lost, since no member of
 * a batch has taken the branch that has it.  Of another run that is meant nothing is lost but time. */
static void abandon(int64_t site)
{
    run_t *r = newest;
    while (r && !is_idle(r, site))
        r = r->older;
    if (r)
        forget(r);
}

static void in_child(void) { forked = 1; }

/* A run with that number, in the tables, which are locked; NULL if there is no memory. */
static run_t *enter_run(site_t *s, int64_t number, int64_t every)
{
    run_t *r = s ? calloc(1, sizeof *r) : NULL;
    if (!r)
        return NULL;
    r->site = s;
    r->end = INT64_MAX;
    r->report.run = number;
    r->report.every = every;
    r->begin_ns = now_ns();
    r->next = runs[number % BUCKETS];
    runs[number % BUCKETS] = r;
    r->older = newest;
    *(newest ? &newest->newer : &oldest) = r;
    newest = r;
    if (n_runs++ >= MOST_RUNS)
        evict(); /* its pullback was never called */
    return r;
}

static int64_t new_number(void)
{
    next_run += !(next_run & UINT32_MAX); /* 0 is no number */
    return next_run++ & UINT32_MAX;       /* as programs hold it */
}

int64_t ms_loop_begin(const char *folder, int64_t length, const loop_options_t *options, int64_t *run,
                      int64_t *every)
{
    if (forked)
        return ECHILD;
    pthread_mutex_lock(&tables);
    if (!watched)
        watched = !pthread_atfork(NULL, NULL, in_child);
    site_t *s = find_site(folder, length, options);
    *run = new_number();
    *every = s ? interval(s) : 1;
    const run_t *r = enter_run(s, *run, *every);
    pthread_mutex_unlock(&tables);
    return r ? 0 : ENOMEM;
}

int64_t ms_loop_turn(const char *folder, int64_t length, const loop_options_t *options,
                     const uint32_t *numbers, int64_t n, int64_t *run, int64_t *every)
{
    if (forked)
        return ECHILD;
    int64_t number = 0, differ = 0;
    for (int64_t i = 0; i < n; i++)
        if (numbers[i])
            differ |= number && number != numbers[i], number = numbers[i];
    *run = *every = 0;
    pthread_mutex_lock(&tables);
    run_t *r = differ ? NULL : find_run(number);
    int ours = r && r->site->o.site == options->site;
    if (ours && r->report.every <= options->most_every)
        *run = number, *every = r->report.every;
    else {
        for (int64_t i = 0; i < n; i++)
            if ((r = find_run(numbers[i])) && is_idle(r, options->site))
                forget(r);
        if (!number || !(ours || differ))
            abandon(options->site);
        site_t *s = find_site(folder, length, options);
        if (number && (differ || ours || !find_run(number)))
            *run = new_number(), *every = s ? interval(s) : 1;
    }
    pthread_mutex_unlock(&tables);
    return 0;
}

/* A run stays while a call is at it; of two calls one does without. */
static run_t *taken(run_t *r)
{
    if (r && r->busy)
        return NULL;
    if (r)
        r->busy = 1;
    return r;
}

static void leave(run_t *r)
{
    pthread_mutex_lock(&tables);
    r->busy = 0;
    pthread_mutex_unlock(&tables);
}

/* --- saves --------------------------------------------------------------------------- */

/* Wait for a place in the stream, no longer than to run again what would be left out. */
static int64_t wait_for_room(run_t *r, int64_t block_ns)
{
    stream_t *s = r->engine->stream;
    int64_t until = now_ns() + (r->left_out + 1) * block_ns, fits, left;
    while ((fits = ms_stream_room(s)) == STREAM_WAIT && (left = until - now_ns()) > 0)
        ms_stream_wait(s, 1 + min64(left / 1000000, 1000));
    return fits;
}

static int64_t keep(run_t *r, int64_t k, const piece_t *pieces, int64_t n)
{
    engine_t *e = r->engine;
    int64_t began = now_ns();
    if (!r->turn_ns) /* of the blocks so far */
        r->report.step_ns = max64(1, (began - r->begin_ns - r->inside_ns) / k / r->report.every);
    if (r->n_keys == r->keys_len) {
        int64_t len = 2 * r->keys_len + 64, *keys = realloc(r->keys, (size_t)len * sizeof *keys);
        if (!keys)
            return ENOMEM;
        r->keys = keys, r->keys_len = len;
    }
    pthread_mutex_lock(&e->lock);
    int64_t fits = wait_for_room(r, r->report.step_ns * r->report.every);
    if (fits > 0) {
        char *to = e->arena + e->view.buffer * e->extent + e->view.at * e->record;
        for (int64_t i = 0; i < n; i++)
            memcpy(to + pieces[i].offset, pieces[i].data, (size_t)pieces[i].nbytes);
        fits = ms_stream_fill(e->stream, key_of(r, k));
    }
    pthread_mutex_unlock(&e->lock);
    if (fits > 0)
        r->keys[r->n_keys++] = k, r->left_out = 0, r->report.kept++;
    else
        r->left_out++, r->report.refused++;
    r->inside_ns += now_ns() - began;
    return 0;
}

static int64_t save(run_t *r, int64_t k, const piece_t *pieces, int64_t n)
{
    int64_t nbytes = record_bytes(pieces, n);
    if (!r->report.record_bytes)
        r->report.record_bytes = nbytes;
    if (k <= (r->n_keys ? r->keys[r->n_keys - 1] : 0) || k >= r->end || nbytes != r->report.record_bytes)
        return 0; /* it is there, or will not be asked for */
    if (!r->engine) {
        pthread_mutex_lock(&tables);
        int64_t failed = find_engine(r);
        pthread_mutex_unlock(&tables);
        if (failed)
            return failed;
        r->bytes_written = r->engine->view.bytes_written;
        r->bytes_read = r->engine->view.bytes_read;
    }
    return keep(r, k, pieces, n);
}

int64_t ms_loop_save(int64_t run, int64_t k, const piece_t *pieces, int64_t n_pieces)
{
    if (forked)
        return ECHILD;
    pthread_mutex_lock(&tables);
    run_t *r = taken(find_run(run));
    pthread_mutex_unlock(&tables);
    if (!r)
        return 0;
    int64_t failed = save(r, k, pieces, n_pieces);
    leave(r);
    return failed;
}

/* --- loads --------------------------------------------------------------------------- */

/* The extent a record is in, or STREAM_LOST; STREAM_WAIT if it was waited for too long. */
static int64_t read_back(run_t *r, int64_t k)
{
    stream_t *s = r->engine->stream;
    int64_t at = r->n_keys - 1, key = r->keys[at], extent, left;
    for (int64_t i = at; i >= 0 && i > at - AHEAD; i--)
        ms_stream_prefetch(s, key_of(r, r->keys[i]));
    int64_t blocks = k - (at ? r->keys[at - 1] : 0);
    int64_t began = now_ns(), again_ns = blocks * r->report.every * r->report.step_ns;
    int64_t patience = max64(PATIENCE_NS >> min64(r->report.late, 20), 2 * again_ns);
    while ((extent = ms_stream_get(s, key_of(r, key))) == STREAM_WAIT) {
        if ((left = began + patience - now_ns()) <= 0)
            break;
        ms_stream_wait(s, 1 + min64(left / 1000000, 1000));
    }
    r->report.waited_ns += now_ns() - began;
    return extent;
}

static void fetch(const char *from, const piece_t *pieces, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        memcpy((char *)pieces[i].data, from + pieces[i].offset, (size_t)pieces[i].nbytes);
}

static int64_t load_kept(run_t *r, int64_t k, const piece_t *pieces, int64_t n)
{
    engine_t *e = r->engine;
    int64_t found = 0;
    pthread_mutex_lock(&e->lock);
    while (r->n_keys && !found) {
        int64_t key = r->keys[r->n_keys - 1];
        int64_t extent = key > k ? STREAM_MEMORY : read_back(r, k);
        if (extent >= 0) {
            fetch(e->arena + extent * e->extent + e->view.place * e->record, pieces, n);
            found = key;
            break;
        }
        r->report.lost += extent == STREAM_LOST;
        r->report.late += extent == STREAM_WAIT;
        ms_stream_drop(e->stream, key_of(r, key));
        r->n_keys--;
    }
    pthread_mutex_unlock(&e->lock);
    return found;
}

static void learn(run_t *r)
{
    engine_t *e = r->engine;
    site_t *s = r->site;
    loop_report_t *t = &r->report;
    stream_record_t record;
    int64_t ns[2] = {0, 0}, bytes[2] = {0, 0};
    if (e) {
        pthread_mutex_lock(&e->lock);
        drop_all(r);
        while (ms_stream_record(e->stream, &record)) {
            ns[record.is_read] += record.stop_ns - record.start_ns;
            bytes[record.is_read] += record.nbytes;
        }
        t->bytes_written = e->view.bytes_written - r->bytes_written;
        t->bytes_read = e->view.bytes_read - r->bytes_read;
        pthread_mutex_unlock(&e->lock);
    }
    t->write_ns = bytes[0] ? (int64_t)((double)ns[0] * (double)t->record_bytes / (double)bytes[0]) : 0;
    t->read_ns = bytes[1] ? (int64_t)((double)ns[1] * (double)t->record_bytes / (double)bytes[1]) : 0;
    if (s->record != t->record_bytes)
        s->write_ns = s->read_ns = 0;
    s->record = t->record_bytes;
    s->step_ns = t->step_ns;
    s->write_ns = t->write_ns ? t->write_ns : s->write_ns;
    s->read_ns = t->read_ns ? t->read_ns : s->read_ns;
}

static void end_run(run_t *r)
{
    r->report.reverse_ns = now_ns() - r->turn_ns;
    pthread_mutex_lock(&tables);
    learn(r);
    last_report = r->report;
    remove_run(r);
    pthread_mutex_unlock(&tables);
}

static void load(run_t *r, loop_load_t *asked, const piece_t *pieces, int64_t n)
{
    int64_t nbytes = record_bytes(pieces, n);
    if (!r->report.record_bytes)
        r->report.record_bytes = nbytes;
    if (!r->turn_ns) {
        r->turn_ns = now_ns();
        r->report.forward_ns = r->turn_ns - r->begin_ns;
        r->report.steps = asked->steps;
        if (!r->report.step_ns) /* of one block; else up to the last save: what follows may be idle */
            r->report.step_ns = max64(1, r->report.forward_ns / max64(1, asked->steps));
    }
    r->end = asked->k;
    if (asked->k && r->engine && nbytes == r->report.record_bytes)
        asked->found = load_kept(r, asked->k, pieces, n);
    r->report.again += asked->found != asked->k;
}

int64_t ms_loop_load(const char *folder, int64_t length, const loop_options_t *options,
                     loop_load_t *asked, const piece_t *pieces, int64_t n_pieces)
{
    asked->found = 0;
    if (forked)
        return ECHILD;
    pthread_mutex_lock(&tables);
    run_t *r = find_run(asked->run);
    if (!r && asked->k) { /* it has ended, or was forgotten */
        r = enter_run(find_site(folder, length, options), asked->run, asked->every);
        if (r)
            r->report.step_ns = r->site->step_ns;
    }
    r = taken(r);
    pthread_mutex_unlock(&tables);
    if (!r)
        return 0;
    load(r, asked, pieces, n_pieces);
    if (asked->k)
        leave(r);
    else
        end_run(r);
    return 0;
}

/* --- what is known, and the end ------------------------------------------------------- */

int64_t ms_loop_report(loop_report_t *report)
{
    pthread_mutex_lock(&tables);
    *report = last_report;
    pthread_mutex_unlock(&tables);
    return report->run != 0;
}

int64_t ms_loop_open_runs(void)
{
    pthread_mutex_lock(&tables);
    int64_t found = n_runs;
    pthread_mutex_unlock(&tables);
    return found;
}

void ms_loop_hooks(transfer_t *pwrite, transfer_t *pread)
{
    write_hook = pwrite, read_hook = pread;
}

void ms_loop_clear(void)
{
    if (forked)
        return;
    pthread_mutex_lock(&tables);
    while (evict())
        ;
    for (engine_t **at = &engines, *e; (e = *at);) {
        if (e->n_runs)
            at = &e->next;
        else
            *at = e->next, close_engine(e);
    }
    pthread_mutex_unlock(&tables);
}

#endif

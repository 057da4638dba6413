/* The room in a record stream's file, taken and given back in runs of bytes, and its index. */
#define _GNU_SOURCE
#include "stream_parts.h"

#if defined(__linux__)
#include <stdlib.h>
#include <string.h>

/* Have room for one more of `count` things; 0 if there is no memory. */
static int more(void **array, int64_t *len, int64_t count, size_t size)
{
    if (count < *len)
        return 1;
    void *larger = realloc(*array, (size_t)(2 * count + 16) * size);
    if (!larger)
        return 0;
    *array = larger, *len = 2 * count + 16;
    return 1;
}

/* --- room --------------------------------------------------------------------------- */

static int add(home_t *home, int64_t position, int64_t nbytes)
{
    span_t *spans = realloc(home->spans, (size_t)(home->n_spans + 1) * sizeof *spans);
    if (!spans)
        return 0;
    home->spans = spans;
    spans[home->n_spans++] = (span_t){position, nbytes};
    return 1;
}

static int64_t grown(room_t *r, int64_t nbytes)
{
    r->end += nbytes;
    if (r->written < r->end)
        r->written = r->end;
    return r->end - nbytes;
}

static int64_t cut(room_t *r, int64_t i, int64_t nbytes) /* from the beginning of a free run */
{
    span_t *run = &r->free[i];
    int64_t position = run->position;
    run->position += nbytes, run->nbytes -= nbytes;
    if (!run->nbytes)
        memmove(run, run + 1, (size_t)(--r->n_free - i) * sizeof *run);
    return position;
}

/* One run if any is long enough, the shortest such; else the longest first. */
static int take_runs(room_t *r, int64_t nbytes, home_t *home)
{
    int64_t fitting = -1;
    for (int64_t i = 0; i < r->n_free; i++)
        if (r->free[i].nbytes >= nbytes &&
            (fitting < 0 || r->free[i].nbytes < r->free[fitting].nbytes))
            fitting = i;
    if (fitting >= 0)
        return add(home, cut(r, fitting, nbytes), nbytes);
    while (nbytes) {
        int64_t left = r->most < 0 ? nbytes : r->most - r->end, longest = -1;
        for (int64_t i = 0; i < r->n_free; i++)
            if (longest < 0 || r->free[i].nbytes > r->free[longest].nbytes)
                longest = i;
        int grows = left >= nbytes || longest < 0 || left > r->free[longest].nbytes;
        int64_t part = min64(nbytes, grows ? left : r->free[longest].nbytes);
        if (part <= 0 || !add(home, grows ? grown(r, part) : cut(r, longest, part), part))
            return 0;
        nbytes -= part;
    }
    return 1;
}

static void give_run(room_t *r, int64_t start, int64_t nbytes)
{
    int64_t at = 0, stop = start + nbytes;
    while (at < r->n_free && r->free[at].position < start)
        at++;
    if (at < r->n_free && r->free[at].position == stop)
        stop += r->free[at].nbytes, cut(r, at, r->free[at].nbytes);
    if (at && r->free[at - 1].position + r->free[at - 1].nbytes == start)
        start = r->free[--at].position, cut(r, at, r->free[at].nbytes);
    if (stop == r->end) {
        r->end = start;
        return;
    }
    if (!more((void **)&r->free, &r->free_len, r->n_free, sizeof *r->free))
        return; /* it is not used again */
    memmove(&r->free[at + 1], &r->free[at], (size_t)(r->n_free++ - at) * sizeof *r->free);
    r->free[at] = (span_t){start, stop - start};
}

int64_t room_take(room_t *r, int64_t nbytes, home_t *home)
{
    if (r->most >= 0 && r->taken + nbytes > r->most)
        return r->n_gone ? STREAM_TELL : STREAM_FULL;
    if (r->outside) {
        int64_t number = r->n_free ? r->free[r->n_free - 1].position : r->end;
        if (!add(home, number << STREAM_PLACE, nbytes))
            return STREAM_FULL;
        r->n_free ? r->n_free-- : r->end++;
    } else if (!take_runs(r, nbytes, home)) {
        room_give(r, home);
        return STREAM_FULL;
    }
    home->nbytes = nbytes;
    r->taken += nbytes;
    if (r->peak < r->taken)
        r->peak = r->taken;
    return 1;
}

void room_give(room_t *r, const home_t *home)
{
    if (!r->outside) {
        r->taken -= home->nbytes;
        for (int64_t i = 0; i < home->n_spans; i++)
            give_run(r, home->spans[i].position, home->spans[i].nbytes);
    } else if (more((void **)&r->gone, &r->gone_len, r->n_gone, sizeof *r->gone)) {
        r->gone[r->n_gone] = *home;
        r->gone[r->n_gone++].n_spans = home->spans[0].position >> STREAM_PLACE;
    }
}

int64_t room_told(room_t *r)
{
    if (!r->n_gone)
        return -1;
    home_t home = r->gone[--r->n_gone];
    r->taken -= home.nbytes;
    if (more((void **)&r->free, &r->free_len, r->n_free, sizeof *r->free))
        r->free[r->n_free++].position = home.n_spans;
    return home.n_spans;
}

void room_close(room_t *r) { r->most = r->peak; }

void room_free(room_t *r) { free(r->free), free(r->gone); }

/* --- index -------------------------------------------------------------------------- */

static int64_t slot(const index_t *x, int64_t key) /* where it is, or would be */
{
    int64_t at = (int64_t)((uint64_t)key * 0x9E3779B97F4A7C15u >> 20) & (x->len - 1);
    while (x->entries[at].extent && x->entries[at].key != key)
        at = (at + 1) & (x->len - 1);
    return at;
}

const entry_t *index_find(const index_t *x, int64_t key)
{
    if (!x->count)
        return NULL;
    const entry_t *entry = &x->entries[slot(x, key)];
    return entry->extent ? entry : NULL;
}

int index_enter(index_t *x, int64_t key, uint32_t extent, uint32_t place)
{
    if (8 * (x->count + 1) > 7 * x->len) {
        index_t larger = *x;
        larger.len = x->len ? 2 * x->len : 64;
        if (!(larger.entries = calloc((size_t)larger.len, sizeof *larger.entries)))
            return 0;
        for (int64_t i = 0; i < x->len; i++)
            if (x->entries[i].extent)
                larger.entries[slot(&larger, x->entries[i].key)] = x->entries[i];
        free(x->entries);
        *x = larger;
    }
    entry_t *entry = &x->entries[slot(x, key)];
    x->count += !entry->extent;
    *entry = (entry_t){key, extent, place};
    return 1;
}

uint32_t index_pop(index_t *x, int64_t key)
{
    if (!index_find(x, key))
        return 0;
    int64_t mask = x->len - 1, hole = slot(x, key);
    uint32_t extent = x->entries[hole].extent;
    x->entries[hole].extent = 0;
    x->count--;
    /* Those behind it that are found no more go where they would be entered now. */
    for (int64_t at = (hole + 1) & mask; x->entries[at].extent; at = (at + 1) & mask) {
        entry_t moved = x->entries[at];
        x->entries[at].extent = 0;
        x->entries[slot(x, moved.key)] = moved;
    }
    return extent;
}

uint32_t index_extent(index_t *x, void *extent)
{
    if (!x->n_unused) {
        int64_t least = x->n_extents ? x->n_extents : 1; /* 0 means none */
        if (least >= UINT32_MAX || !more((void **)&x->extents, &x->extents_len, least, sizeof *x->extents) ||
            !more((void **)&x->unused, &x->unused_len, least, sizeof *x->unused))
            return 0;
        x->n_extents = least + 1;
        x->unused[x->n_unused++] = (uint32_t)least;
    }
    uint32_t number = x->unused[--x->n_unused];
    x->extents[number] = extent;
    return number;
}

void index_forget(index_t *x, uint32_t extent)
{
    x->extents[extent] = NULL;
    x->unused[x->n_unused++] = extent;
}

void index_free(index_t *x) { free(x->entries), free(x->extents), free(x->unused); }
#endif

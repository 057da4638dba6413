/* What a record stream is made of: the room in its file, and the index of its records. */
#ifndef MS_STREAM_PARTS_H
#define MS_STREAM_PARTS_H
#include "io_bytes.h"

/* Where an extent lies: parts of the file, or a number and one part that means it. */
typedef struct {
    span_t *spans;
    int64_t n_spans, nbytes;
} home_t;

typedef struct {
    int64_t most, taken, peak; /* bytes; most negative: no limit */
    int64_t lost;              /* of taken, what was never there: its write found no room */
    int outside;
    span_t *free; /* of the file: ascending, none adjacent; outside: numbers of no extent */
    int64_t n_free, free_len;
    home_t *gone; /* outside: freed, but not told */
    int64_t n_gone, gone_len;
    int64_t end, written; /* of the file: from here on none is taken, none ever was; numbers */
} room_t;

/* Take room for so many bytes, whole pages: 1, STREAM_FULL, or STREAM_TELL. */
int64_t room_take(room_t *r, int64_t nbytes, home_t *home);
/* Give it back, but for the memory of the spans; outside: once it was told. */
void room_give(room_t *r, const home_t *home);
int64_t room_told(room_t *r);
/* What it has held is all that it takes from now on. */
void room_close(room_t *r);
void room_free(room_t *r);

typedef struct {
    int64_t key;
    uint32_t extent, place; /* extent 0: no entry */
} entry_t;

typedef struct {
    entry_t *entries; /* open addressing; a power of two of them */
    int64_t len, count;
    void **extents; /* by number, from 1 on */
    int64_t n_extents, extents_len;
    uint32_t *unused; /* numbers */
    int64_t n_unused, unused_len;
} index_t;

const entry_t *index_find(const index_t *x, int64_t key);
/* Say that an extent holds `key`, from now on; 0 if there is no memory. */
int index_enter(index_t *x, int64_t key, uint32_t extent, uint32_t place);
/* Forget `key`; the number of its extent, or 0. */
uint32_t index_pop(index_t *x, int64_t key);
/* Give an extent a number; 0 if there is no memory. */
uint32_t index_extent(index_t *x, void *extent);
void index_forget(index_t *x, uint32_t extent);
void index_free(index_t *x);
#endif

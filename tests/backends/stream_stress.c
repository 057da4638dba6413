/* Drives record streams without Python, for the sanitizers: small records and large ones, put,
 * cancelled, dropped, read ahead and behind their writes, in a file with little room, which is no
 * whole number of pages and takes whole pages alone, in one whose writes fail now and then, and outside a file.  Exits 0 if every byte came back that was put. */
#define _GNU_SOURCE
#include "../../multistage/native/io_bytes.h"
#define XXH_INLINE_ALL
#include "../../multistage/native/xxhash/xxhash.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEYS = 40, TURNS = 4000, SMALL = 1000 / 64 * 64 + 64, COUNT = 5, LARGE = 5 * PAGE, CHUNK = 2 * PAGE };
enum { EXTENT = 2 * PAGE, ROOM = 80 * PAGE + 1800, SLOTS = 4 * KEYS };

static char arena[6 * EXTENT] __attribute__((aligned(4096)));
static char bounce[2 * CHUNK] __attribute__((aligned(4096)));
static char landing[KEYS][LARGE] __attribute__((aligned(4096)));
static char extents[SLOTS][LARGE];
static unsigned calls;

static int64_t failing_pwrite(int64_t fd, void *data, int64_t nbytes, int64_t position)
{
    if (++calls % 37 == 0)
        return -EIO;
    ssize_t done = pwrite((int)fd, data, (size_t)(nbytes > PAGE ? PAGE : nbytes), position);
    return done < 0 ? -errno : done;
}

static int64_t paged_pwrite(int64_t fd, void *data, int64_t nbytes, int64_t position)
{
    return nbytes % PAGE || position % PAGE ? -EINVAL : io_pwrite(fd, data, nbytes, position);
}

static int64_t outside_write(int64_t all, void *data, int64_t nbytes, int64_t position)
{
    int64_t at = position & ((1ll << STREAM_PLACE) - 1);
    if (at + nbytes > all || position >> STREAM_PLACE >= SLOTS)
        return -EINVAL;
    memcpy(extents[position >> STREAM_PLACE] + at, data, (size_t)nbytes);
    return nbytes;
}

static int64_t outside_read(int64_t all, void *data, int64_t nbytes, int64_t position)
{
    if (nbytes != all)
        return -EINVAL;
    memcpy(data, extents[position >> STREAM_PLACE], (size_t)nbytes);
    return nbytes;
}

static stream_t *stream;

static void *work(void *kind)
{
    ms_stream_work(stream, kind == NULL ? IO_WRITE : IO_READ);
    return NULL;
}

static void wait_and_tell(void)
{
    stream_record_t record;
    while (ms_stream_record(stream, &record))
        ;
    while (ms_stream_freed(stream) >= 0)
        ;
    ms_stream_wait(stream, 50);
}

static int same(const char *found, int64_t nbytes, char value)
{
    return found[0] == value && !memcmp(found, found + 1, (size_t)nbytes - 1);
}

/* Returns how many records came back wrong, or were lost though nothing failed. */
static int run(int fd, int64_t count, int64_t room, transfer_t *write_with, int outside, int single)
{
    static stream_view_t view;
    static char source[KEYS][LARGE];
    int held[KEYS] = {0}, wrong = 0;
    int64_t id = 0, reads = 0, read[KEYS] = {0}, answer;
    memset(&view, 0, sizeof view);
    stream_options_t o = {.fd = fd, .most_bytes = room, .count = count, .record_bytes = SMALL,
                          .extent_bytes = EXTENT, .depth = 3, .arena = arena, .landing = 3 * EXTENT,
                          .n_buffers = count > 1 ? 3 : 0, .bounce = bounce, .chunk_bytes = CHUNK, .n_bounces = 2,
                          .single = single, .outside = outside, .view = &view,
                          .pwrite = outside ? outside_write : write_with,
                          .pread = outside ? outside_read : NULL};
    pthread_t threads[2];
    if (ms_stream_open(&o, &stream))
        return 1;
    for (size_t kind = 0; outside && kind < 2; kind++)
        pthread_create(&threads[kind], NULL, work, kind ? &id : NULL);
    srand(7);
    for (int turn = 0; turn < TURNS; turn++) {
        int key = rand() % KEYS, what = rand() % 8;
        int64_t nbytes = count > 1 ? SMALL : (1 + key % 5) * PAGE - 100;
        if (what < 3 && !held[key]) {
            piece_t pieces[] = {{source[key], 0, 600}, {source[key] + 640, 640, nbytes - 640}};
            /* Those of a record that was dropped may still be read. */
            while (count == 1 && ms_stream_ready(stream) != 1)
                wait_and_tell();
            while (view.written < id) {
                ms_stream_poll(stream);
                if (view.written < id)
                    wait_and_tell();
            }
            memset(source[key], turn % 100 + 1, LARGE);
            id += count == 1;
            view.pieces = pieces, view.n_pieces = 2;
            while ((answer = ms_stream_put(stream, key, id)) == STREAM_WAIT || answer == STREAM_TELL)
                wait_and_tell();
            held[key] = answer > 0;
            id -= count == 1 && answer < 0;
        } else if (what == 3 && held[key] && count == 1 && turn % 3 == 0) {
            ms_stream_cancel(stream, key);
            while ((answer = ms_stream_written(stream, key)) == STREAM_WAIT)
                wait_and_tell();
            held[key] = answer > 0;
        } else if (what == 4) {
            ms_stream_prefetch(stream, key);
        } else if (what == 5 && !view.full) {
            if (ms_stream_drop(stream, key)) /* its memory is in use */
                while (ms_stream_poll(stream), view.read < read[key])
                    wait_and_tell();
            held[key] = 0;
        } else if (held[key]) {
            while ((answer = ms_stream_get(stream, key)) == STREAM_WAIT || answer == STREAM_MEMORY)
                answer == STREAM_WAIT ? wait_and_tell()
                                      : ms_stream_read(stream, key, read[key] = ++reads, landing[key]);
            char *found = count > 1 ? arena + answer * EXTENT + view.place * SMALL : landing[key];
            if (answer < 0)
                wrong += write_with != failing_pwrite, held[key] = 0;
            else
                wrong += !same(found, 600, source[key][0]) ||
                         !same(found + 640, nbytes - 640, source[key][0]);
        }
    }
    ms_stream_end(stream);
    for (size_t kind = 0; outside && kind < 2; kind++)
        pthread_join(threads[kind], NULL);
    ms_stream_stop(stream);
    ms_stream_close(&stream);
    ms_stream_close(&stream);
    return wrong + (stream != NULL);
}

static void add(void *sum, const char *data, int64_t nbytes)
{
    XXH3_64bits_update(sum, data, (size_t)nbytes);
}

/* Checksums by whatever registers, of bytes in other portions. */
static int sums(void)
{
    int wrong = 0;
    for (int i = 0; i < LARGE; i++)
        landing[0][i] = (char)rand();
    for (int turn = 0; turn < TURNS; turn++) {
        XXH3_state_t plain, faster;
        XXH3_64bits_reset(&plain), XXH3_64bits_reset(&faster);
        int64_t begin = rand() % 99, stop = begin + rand() % (LARGE - 99);
        add(&plain, landing[0] + begin, stop - begin);
        for (int64_t at = begin, n; at < stop; at += n) {
            n = min64(stop - at, 1 + rand() % PAGE);
            io_faster_sum(add)(&faster, landing[0] + at, n);
        }
        wrong += XXH3_64bits_digest(&plain) != XXH3_64bits_digest(&faster);
    }
    return wrong;
}

int main(void)
{
    FILE *file = tmpfile();
    if (!file)
        return 2;
    int fd = fileno(file), wrong = sums();
    for (int64_t count = 1; count <= COUNT; count += COUNT - 1)
        for (int single = 0; single < 2; single++) {
            wrong += run(fd, count, -1, NULL, 0, single);
            wrong += run(fd, count, ROOM, paged_pwrite, 0, single);
            wrong += run(fd, count, -1, failing_pwrite, 0, single);
            wrong += run(fd, count, ROOM, NULL, 1, single);
        }
    fclose(file);
    printf("%d wrong\n", wrong);
    return wrong != 0;
}

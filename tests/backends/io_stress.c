/* Drives the native engine without Python, for ThreadSanitizer and helgrind:
 * writes, some of them cancelled, reads queued behind writes still in flight, and waits,
 * in a file that is gone at the end.  Exits 0 if every byte came back that was written. */
#define _GNU_SOURCE
#include "../../multistage/native/core.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { JOBS = 24, TURNS = 20, BYTES = 5 * 4096 - 100, EXTENT = 5 * 4096, CHUNK = 2 * 4096 };

static char source[JOBS][BYTES], bounce[2 * CHUNK] __attribute__((aligned(4096)));
static char landing[JOBS][EXTENT] __attribute__((aligned(4096)));

static int64_t failing_pwrite(int64_t fd, void *data, int64_t nbytes, int64_t position)
{
    ssize_t done = pwrite((int)fd, data, (size_t)(nbytes > 4096 ? 4096 : nbytes), position);
    return position == 3 * 2 * 4096 ? -5 : done;
}

static int run(int fd, transfer_t *write_with)
{
    static piece_t pieces[JOBS][2];
    static span_t spans[JOBS][2];
    static job_t writes[JOBS], reads[JOBS];
    io_options_t options = {fd, -1, bounce, CHUNK, 2, 5, write_with, NULL};
    void *io = calloc(1, (size_t)ms_io_len());
    int wrong = 0;
    if (!io || ms_io_start(io, &options))
        return 1;
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < JOBS; i++) {
            memset(source[i], turn * JOBS + i, BYTES);
            pieces[i][0] = (piece_t){source[i], 0, 9000};
            pieces[i][1] = (piece_t){source[i] + 9000, 9000, BYTES - 9000};
            /* Two pages, and the others beyond those of all other jobs. */
            spans[i][0] = (span_t){(int64_t)i * 2 * 4096, 2 * 4096};
            spans[i][1] = (span_t){(int64_t)(JOBS * 2 + i * 3) * 4096, 3 * 4096};
            writes[i] = (job_t){.pieces = pieces[i], .n_pieces = 2, .nbytes = BYTES,
                                .spans = spans[i], .n_spans = 2};
            ms_io_submit(io, &writes[i], IO_WRITE);
            reads[i] = (job_t){.written = &writes[i], .data = landing[i], .nbytes = BYTES,
                               .spans = spans[i], .n_spans = 2};
            ms_io_submit(io, &reads[i], IO_READ);
            if (i % 5 == 4)
                ms_io_cancel(&writes[i - turn % 4]);
        }
        for (int i = JOBS; i-- > 0;) {
            /* The last one's state alone tells that the job may be looked at. */
            int64_t seen = i < JOBS - 1 ? ms_io_wait(io, 0, 0) : 0;
            while (ms_io_state(&reads[i]) == IO_QUEUED)
                if (i < JOBS - 1)
                    seen = ms_io_wait(io, seen, i % 2 ? 50 : -1);
            wrong += reads[i].stop_ns < reads[i].start_ns;
            int64_t error = writes[i].error; /* it has ended: the read waited for it */
            wrong += ms_io_state(&writes[i]) == IO_QUEUED || reads[i].error != error;
            if (error == ECANCELED && writes[i].cancelled)
                continue;
            int fails = write_with && i == 3;
            wrong += ms_io_state(&reads[i]) != (fails ? IO_FAILED : IO_DONE);
            wrong += !fails && memcmp(source[i], landing[i], BYTES) != 0;
        }
    }
    ms_io_stop(io);
    free(io);
    return wrong;
}

int main(void)
{
    FILE *file = tmpfile();
    if (!file)
        return 2;
    int wrong = run(fileno(file), NULL) + run(fileno(file), failing_pwrite);
    fclose(file);
    printf("%d wrong\n", wrong);
    return wrong != 0;
}

/* States of loops that run inside compiled programs: saved and loaded by the program itself.
 *
 * A run is one execution of a loop of at most n steps, in blocks of `every` steps.  Its program saves the
 * state before block 0, 1, 2, ... and loads those of the last block, the one before it, ..., 0; a load
 * of state 0, which is the program's own, ends the run.  The others go to a record stream, one for
 * all runs with states of one size on one tier.  What does not fit, what is lost and what would be
 * waited for longer than it takes to run the steps again is left out: a load answers with the last
 * state there is, 0 at least, from which the program runs on, and saves what it makes on the way.  So
 * whatever is asked for in whatever order, states of a run that has ended too, an answer is right.
 *
 * Any thread may call, one at a time for a run.  Streams, with their files and threads, live until ms_loop_clear.  A forked
 * child must not call anything here (ECHILD).  For Linux alone.
 */
#ifndef MULTISTAGE_LOOP_H
#define MULTISTAGE_LOOP_H

/* A call site: what its runs have in common. */
typedef struct {
    int64_t site;                    /* its number */
    int64_t steps;                   /* n, the most */
    int64_t least_every, most_every; /* steps of a block, as the program has room for */
    int64_t buffer_bytes;            /* of the stream, at least four records */
    int64_t capacity_bytes;          /* of the tier; negative: no limit */
} loop_options_t;

/* What a run did. */
typedef struct {
    int64_t run, steps, every, record_bytes;
    int64_t kept, refused;     /* states in memory or on their way; left out */
    int64_t lost, late, again;    /* not read back; not read in time; blocks run from one before */
    int64_t bytes_written, bytes_read; /* of all runs of the stream in this one's time */
    int64_t forward_ns, reverse_ns, waited_ns;
    int64_t step_ns, write_ns, read_ns; /* a step; a state there, and back */
} loop_report_t;

/* Begin a run: its number, and the steps of its blocks.  `folder` is that of the tier's file;
 * empty: the tier is memory.  Returns 0 or an errno. */
EXPORT int64_t ms_loop_begin(const char *folder, int64_t length, const loop_options_t *options,
                             int64_t *run, int64_t *every);
/* The run to load of, and the steps of its blocks, from the numbers that the members of a batch hold.
 * Where branches of a batch are a select, some hold 0, or what another branch holds in the same
 * place: if they differ, whose the run is that they mean cannot be told, so that it is a new one.
 * It is a new one, too, if theirs has ended, or has blocks of more steps than there is room for; 0 if
 * none has run this loop.  Runs that are left are forgotten.  Returns 0 or an errno. */
EXPORT int64_t ms_loop_turn(const char *folder, int64_t length, const loop_options_t *options,
                            const uint32_t *numbers, int64_t n, int64_t *run, int64_t *every);
/* Save the state before block k, in an ascending order; its pieces follow one another.  Returns 0 or
 * an errno. */
EXPORT int64_t ms_loop_save(int64_t run, int64_t k, const piece_t *pieces, int64_t n_pieces);

/* What a load asks for: of a run with so many steps, the last state there is up to that before
 * block k. */
typedef struct {
    int64_t run, k, steps, every;
    int64_t found; /* the answer: before which block it is; of state 0 nothing is copied */
} loop_load_t;

/* Load a state into memory of the caller's.  A run that is not there begins at this site.  Returns 0
 * or an errno. */
EXPORT int64_t ms_loop_load(const char *folder, int64_t length, const loop_options_t *options,
                            loop_load_t *load, const piece_t *pieces, int64_t n_pieces);
/* The run that ended last: 1, or 0 if none has. */
EXPORT int64_t ms_loop_report(loop_report_t *report);
/* Runs that have begun and not ended. */
EXPORT int64_t ms_loop_open_runs(void);
/* What moves the bytes of streams that are opened from now on; NULL: the system's.  For tests. */
EXPORT void ms_loop_hooks(transfer_t *pwrite, transfer_t *pread);
/* Forget the runs that no call is at; close the files, end the threads and free the memory of the
 * streams that no run has. */
EXPORT void ms_loop_clear(void);

#endif

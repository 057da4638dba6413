/* What the C core offers: every function that Python calls, and every structure it hands over.
 *
 * header.py reads this file when the package is imported and declares all of it to ctypes, so it
 * keeps to a small part of C: fields of int64_t, uint64_t, double and pointers, and functions that
 * start with EXPORT.  Plain C, arrays in and out; all memory belongs to the caller.
 */
#ifndef MULTISTAGE_CORE_H
#define MULTISTAGE_CORE_H

#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* A number made of all sources of the core; 0 where they were compiled by hand. */
EXPORT int64_t ms_sources(void);

/* ------------------------------------------------------------- revolve.c */

EXPORT int64_t ms_revolve_state_len(void);
EXPORT int64_t ms_revolve_stack_len(int64_t slots);
EXPORT void ms_revolve_init(int64_t *state, int64_t *stack, int64_t start, int64_t end,
                            int64_t slots, int64_t keep_first);
EXPORT int64_t ms_revolve_fill(int64_t *state, int64_t *stack, int64_t *out, int64_t room);
EXPORT void ms_revolve_accesses(int64_t n, int64_t slots, int64_t trajectory, int64_t *writes,
                                int64_t *reads, int64_t *stack);

/* --------------------------------------------------------------- bound.c */

EXPORT int64_t ms_priced_work_len(int64_t n, int64_t slots);
EXPORT double ms_priced(int64_t n, int64_t slots, const double *prices, double *work);

/* ----------------------------------------------------------- hierarchy.c */

EXPORT int64_t ms_hierarchy_blocks(int64_t n);
EXPORT void ms_hierarchy_row(int64_t n, int64_t first, int64_t last, const double *ahead,
                             double write, const double *below, const double *right, double *left,
                             double *row, double *over, int32_t *depth, int32_t *over_depth,
                             double *blocks, int64_t isa);

/* ---------------------------------------------- chain.c, chain_schedules.c */

/* A chain in slots.  Stages 0..n-1; state and grad have n+1 entries. */
typedef struct {
    int64_t n;
    const int64_t *state, *grad;              /* of state i, in slots */
    const int64_t *tape, *advance, *taping, *reverse; /* tape and overheads of stage i */
    const float *prefix;                      /* P, n+1 entries, P[n] = 1 */
    const float *leaf; /* what taping stage i alone costs beyond running it: at most 0 */
    int64_t tapes; /* 0: a tape is made right before its adjoint only (Revolve) */
    int64_t band;  /* pairs s..t with t - s below it are in the table; n: all pairs */
    int64_t equal; /* 1: stages are equal, and pairs in the table by their length alone */
    /* Null, or the ends t of the runs in the table, by 16 first stages each: a row of n ascending
     * ends, one of their n places there (-1: none), and where the cells of each first stage begin. */
    const int32_t *ends, *places;
    const int64_t *begins;
    /* In how many ways a tape may be kept, at least 1: so many rows of n tapes, tapings, reverses
     * and what each costs beyond the first, as shares; infinite where a stage has fewer. */
    int64_t ways;
    const float *again;
    /* Null, or what it costs to have state k or tape s out of memory while what is behind
     * them is processed, as shares: written to a slower tier and read again. */
    const float *move_state, *move_tape;
} chain_t;

EXPORT int64_t ms_chain_isa(void);
EXPORT int64_t ms_chain_solve(const chain_t *chain, const int32_t *none, float *table,
                              int64_t plane, int64_t first, int64_t last, int64_t isa,
                              int64_t threads);
EXPORT void ms_chain_none(const chain_t *c, int32_t *none, int64_t most);
EXPORT int64_t ms_chain_trace(const chain_t *chain, const int32_t *none, const float *table,
                              int64_t first, int64_t last, int64_t m, int64_t *out, int64_t *stack);
EXPORT void ms_chain_curve(const chain_t *chain, const chain_t *bytes, const double *forward_s,
                           const double *reverse_s, const double *spared_s, const int32_t *none,
                           float *table, int64_t first, int64_t last, int64_t *trace,
                           int64_t *stack, double *seconds, int64_t *peak_bytes);
EXPORT void ms_chain_smallest(const chain_t *c, int64_t first, int64_t last, int64_t *peak,
                              int32_t *choices);

/* ------------------------- joint.c, joint_traces.c, joint_search.c */

/* A chain with a slow tier: its table, a limit and the tier. */
typedef struct {
    const chain_t *slots; /* the chain of the table */
    const chain_t *bytes; /* the chain with true sizes, whose sums fit an int64 */
    const int32_t *none;
    const float *table;
    int64_t memories; /* of the table: 0..memories */
    double unit;      /* bytes of a slot */
    const double *forward_s, *reverse_s, *spared_s;
    int64_t limit; /* bytes, the chain's input not counted */
    double write_bytes_per_s, read_bytes_per_s;
    double write_s, read_s;                   /* of each transfer, whatever its bytes */
    double write_overhead_s, read_overhead_s; /* of the computing thread, for each transfer */
    int64_t capacity; /* bytes of the tier */
    int64_t shared;   /* both directions are one channel */
    const uint8_t *may; /* whether state i and tape i may travel */
    int64_t *work;      /* of ms_joint_work_len entries, the first 0 before the first call */
} joint_t;

EXPORT int64_t ms_joint_work_len(int64_t n);
EXPORT double ms_joint_judge(const joint_t *x, const uint8_t *fates, int64_t *summary,
                             double *waited);
EXPORT void ms_joint_layout(const joint_t *x, int64_t *ops, int64_t *items, int64_t *nodes);
EXPORT double ms_joint_improve(const joint_t *x, uint8_t *fates, double seconds, int64_t moves,
                               int64_t seed);
EXPORT int64_t ms_joint_cross(const joint_t *x, const uint8_t *first, const uint8_t *rest,
                              double below, uint8_t *made, double *seconds);

/* --------------------------- joint_program.c, joint_rounding.c */

/* How the dynamic program rounds and what it charges. */
typedef struct {
    double read_price; /* of a second of reading */
    double staging;    /* of the largest recent tape, that a write in flight holds besides */
    double fineness;   /* steps of time a mean tape takes to write; 0: as the limit has it */
    double speed;      /* the tier's times are multiplied by it */
    int64_t reserve;   /* slots kept free beside a segment, for landing */
    int64_t steps;     /* of the backlog */
    int64_t stride;    /* memories of the table in a slot of the program */
    int64_t isa;
} program_t;

EXPORT int64_t ms_joint_program_len(const joint_t *x, const program_t *p);
EXPORT void ms_joint_program(const joint_t *x, const program_t *p, int64_t *work,
                             const double *shares, int64_t count, uint8_t *fates, uint8_t *found);

/* --------------------------------------------------------- joint_bound.c */

/* A chain in slots, and prices. */
typedef struct {
    int64_t n, slots;
    const int64_t *state, *tape; /* of state s and tape s, in slots */
    const int64_t *taping;       /* slots that taping and reversing stage s takes */
    const int64_t *passing;      /* (s, k): slots that running s..k-1 forward takes */
    const float *table;          /* of chain.c: later(s, e, m) as shares of `total` */
    const double *forward;       /* seconds before stage s, n + 1 entries */
    double total, work;          /* work: the price of a second of work after the turn */
    const double *fast_state, *fast_tape; /* prices of being in memory at the turn */
    const double *move_state, *move_tape; /* of being moved */
    const double *late_state;             /* of being moved after the right part */
    const double *again_state;            /* of one more read */
    /* What waits for the write of tape s that is moved: taping the next stage, or running it. */
    const double *wait_taped, *wait_passed;
} dual_t;

EXPORT int64_t ms_joint_dual_len(int64_t n, int64_t slots);
EXPORT double ms_joint_dual(const dual_t *x, double *area);

/* ----------------------------------------------- sweep.c, sweep_reserve.c */

/* A streaming schedule and its costs. */
typedef struct {
    int64_t n, online, slots, tail_start, depth, queue_depth, drain_steps;
    int64_t keep_from, end_start, capacity, reserve, backlog;
    uint64_t extra, skip; /* steps below 64 */
    double spacing, end_spacing;
    double forward, taping, reverse, turn, action;
    double write, read, write_overhead, read_overhead;
} sweep_t;

EXPORT int64_t ms_sweep_len(int64_t room, int64_t slots);
EXPORT int64_t ms_sweep_tables_len(void);
EXPORT int64_t ms_sweep(const sweep_t *p, int64_t room, void *work, int64_t *tables, double *out);

/* ---------------------------------------------------------------- numa.c */

EXPORT int64_t ms_bind(void *address, int64_t nbytes, int64_t node);
EXPORT int64_t ms_nodes_wanted(int64_t *nodes, int64_t room);

/* ------------------------------------- stream.c, stream_parts.c, io.c, io_bytes.c */

/* Moves up to nbytes at `position` of the file; returns how many, or -errno. */
typedef int64_t transfer_t(int64_t fd, void *data, int64_t nbytes, int64_t position);

/* One array of a record, and its place in it. */
typedef struct {
    const char *data;
    int64_t offset, nbytes;
} piece_t;

EXPORT int64_t ms_io_in_memory(int64_t fd);

#endif

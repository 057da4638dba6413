/* The work array in which plans of a chain with a slow tier are judged. */
#ifndef MS_JOINT_WORK_H
#define MS_JOINT_WORK_H
#include "joint.h"

enum { TRACES = 1 << 15, ROOMS = 1 << 16, OPS = 1 << 20, TRACE_OPS = 1 << 18 };

typedef struct {
    int64_t key; /* (s, t, m), one added */
    int64_t peak;
    int32_t first, count;
} trace_t;

typedef struct {
    int64_t key, room;
    int32_t slots, padding; /* INFEASIBLE if none fits */
} room_t;

typedef struct {
    int64_t ready, traces, rooms, held;
    int64_t nodes, items, ops, turn;
    int64_t peak;
} head_t;

typedef struct {
    head_t *head;
    trace_t *trace;
    room_t *room;
    op_t *held; /* of the traces */
    op_t *op;
    int64_t *request; /* of an operation: bytes below which no resident thing may start */
    int32_t *cut;     /* of an operation: things not yet given back */
    int64_t *stack;
    node_t *node;
    item_t *item;
    int64_t *before; /* bytes of the things before one */
    int32_t *soonest;
    double *written, *landed;
    uint8_t *fates, *other; /* for the search */
} work_t;

/* --------------------------------------------------------- joint_traces.c */

/* The parts of a chain's work array. */
work_t joint_work_of(const joint_t *x);
/* Forget all traces, or begin with none. */
void joint_forget(work_t *w);
/* The operations that reverse stages s..t within m slots of the table. */
const trace_t *joint_trace_of(const joint_t *x, work_t *w, int64_t s, int64_t t, int64_t m);
/* The most slots with which s..t is reversed within `room` bytes, or INFEASIBLE. */
int64_t joint_slots_within(const joint_t *x, work_t *w, int64_t s, int64_t t, int64_t room);

/* --------------------------------------------------------- joint_layout.c */

/* Lay a plan out as operations, things of the tier and nodes; 0 if it does not fit. */
int joint_lay_out(const joint_t *x, work_t *w, const uint8_t *fates);

/* ---------------------------------------------------------------- joint.c */

/* The makespan of a plan, infinite if it does not fit; things moved, seconds waited. */
double joint_judged(const joint_t *x, work_t *w, const uint8_t *fates, int64_t *moved,
                    double *waited);

#endif

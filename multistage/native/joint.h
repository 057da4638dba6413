/* A chain with a slow tier: its plan as fates of stages, and what judges it. */
#ifndef MS_JOINT_H
#define MS_JOINT_H
#include "chain.h"

/* The fate of stage i, one byte.  The forward sweep is cut into nodes: a stage that keeps its
 * tape, or a segment of stages, of which the state before the first is kept. */
enum {
    KEEPS_TAPE = 1,
    STARTS = 2,      /* a segment; those that no flag starts begin where they must */
    TAPE_AWAY = 4,   /* its tape goes to the tier */
    STATE_AWAY = 8,  /* state i goes to the tier, where it is kept apart from a tape */
    APART = 16,      /* state i is kept apart though tape i-1 went to the tier with a copy */
    RESERVE_AT = 5,  /* two bits: so many things of the tier find room beside a segment */
    MAY_STATE = 1,
    MAY_TAPE = 2
};

/* One operation: what runs, and the bytes it needs besides the things of the tier. */
enum { ADVANCE, TAPE, TAPE_LAST, REVERSE };
typedef struct {
    int64_t need;
    int32_t kind, stage;
} op_t;

/* A thing that may go to the tier, in the order of making. */
typedef struct {
    int64_t bytes, again; /* of it, counted elsewhere until it is evicted */
    double write_s, read_s;
    int32_t tape, step;
    int32_t made, used;    /* the operations of the forward sweep that make it and use it last */
    int32_t first, last;   /* the operations of the reverse sweep that need it */
    int32_t evicted, got;  /* the operations before which it leaves and comes back, or NEVER */
} item_t;

typedef struct {
    int32_t start, stop, tape, apart; /* stages start..stop; `apart`: state `start` is kept apart */
    int32_t own, input;               /* items: its tape, what holds its input, or -1 */
    int32_t slots;                    /* of the table, with which a segment is reversed */
    int32_t things;                   /* made for the nodes before it */
    int64_t left;                     /* fast bytes kept for it and the nodes before it */
} node_t;

enum { NEVER = INT32_MAX };
#endif

/* A streaming schedule that runs in virtual time: what is held where, and its transfers.
 *
 * Steps ascend wherever they are queued, so a queue is a stretch of an array.  Functions
 * are here that every part of a sweep calls at each action.
 */
#ifndef MS_SWEEP_RUN_H
#define MS_SWEEP_RUN_H
#include <stdint.h>

#include "core.h"

enum { DONE = 0, FULL = -1, STUCK = -2 };

#define EXACT_LENGTH 512 /* of planners/streaming/reserve.py */
#define N_SPINES 8

typedef struct {
    int64_t *step;
    double *done; /* when the write ends; null where that is known to be past */
    int64_t head, tail;
} queue_t;

typedef struct {
    const sweep_t *p;
    int64_t room;
    double now, stall, forward_steps;
    int64_t writes, reads, peak;
    double write_free, read_free;
    queue_t fresh;    /* held, not offered or not taken; of a tail: queued */
    queue_t pins;     /* held, under a write */
    queue_t written;  /* held, and known to be in the tier */
    queue_t writing;  /* writes not awaited; step * 4 + 2 where parked + staged */
    queue_t readable; /* in the tier and in no slot */
    queue_t pending;  /* reads in flight */
    queue_t leftover; /* used up, but under a write */
    int64_t *leftover_end;
    int64_t waiting; /* writes that end at or before now, counted from the first */
    double *waiting_done;
    int64_t used, staged, stored, ended, end;
    int64_t depth; /* 1 while an interval is reversed in parts */
    int64_t backlog; /* most that may be queued; 0 once the tail is over */
    int64_t *stack;
    int64_t *tables; /* the next one to be made, free slots of each, choices of each */
    double *scratch;
    struct {
        int64_t length, free, left, above;
        double seconds, steps;
    } spines[N_SPINES]; /* spines of long segments gone down before */
    int64_t nu_length, nu_slots, actions_length, actions_slots, actions;
    double nu_value;
    int status;
} run_t;

static inline int64_t count(const queue_t *q) { return q->tail - q->head; }
static inline int64_t last(const queue_t *q) { return q->tail > q->head ? q->step[q->tail - 1] : -1; }

static inline void push(run_t *r, queue_t *q, int64_t step, double done)
{
    if (q->tail >= r->room && q != &r->leftover && q->head > 0) {
        for (int64_t k = q->head; k < q->tail; k++) {
            q->step[k - q->head] = q->step[k];
            if (q->done)
                q->done[k - q->head] = q->done[k];
        }
        q->tail -= q->head;
        q->head = 0;
    }
    if (q->tail >= r->room) {
        r->status = FULL;
        return;
    }
    q->step[q->tail] = step;
    if (q->done)
        q->done[q->tail] = done;
    q->tail++;
}

static inline void take(run_t *r)
{
    r->used++;
    if (r->used > r->peak)
        r->peak = r->used;
}

static inline void act(run_t *r) { r->now += r->p->action; }

static inline void advance(run_t *r, int64_t steps)
{
    act(r);
    r->now += (double)steps * r->p->forward;
    r->forward_steps += (double)steps;
}

static inline void await_until(run_t *r, double at, double overhead)
{
    act(r);
    if (at > r->now) {
        r->stall += at - r->now;
        r->now = at;
    }
    r->now += overhead;
}

/* Await the oldest write. */
static inline void settle(run_t *r)
{
    if (!count(&r->writing)) {
        r->status = STUCK;
        return;
    }
    int64_t entry = r->writing.step[r->writing.head];
    await_until(r, r->writing.done[r->writing.head++], 0.0);
    if (entry & 1) {
        if (entry & 2)
            act(r);
        r->used--;
        r->staged--;
    } else if (count(&r->pins)) { /* else it is used up already */
        r->pins.head++;
        push(r, &r->written, entry / 4, 0.0);
    }
}

enum { LIVE, HELD, QUEUED };

static inline int offer(run_t *r, int64_t step, int from)
{
    const sweep_t *p = r->p;
    act(r);
    while (r->waiting < r->writes && r->waiting_done[r->waiting] <= r->now)
        r->waiting++;
    if (r->writes - r->waiting >= p->queue_depth || (p->capacity >= 0 && r->stored >= p->capacity))
        return 0;
    if (r->writes >= r->room) {
        r->status = FULL;
        return 0;
    }
    r->now += p->write_overhead;
    const double start = r->now > r->write_free ? r->now : r->write_free, stop = start + p->write;
    r->write_free = stop;
    r->waiting_done[r->writes++] = stop;
    r->stored++;
    push(r, &r->writing, 4 * step + 2 * (from == QUEUED) + (from != HELD), stop);
    if (from != HELD) {
        if (from == QUEUED)
            r->fresh.head++;
        else
            take(r);
        r->staged++;
        push(r, &r->readable, step, stop);
    } else {
        push(r, &r->pins, step, 0.0);
    }
    while (count(&r->writing) > p->queue_depth && !r->status)
        settle(r);
    return 1;
}

static inline void prefetch(run_t *r)
{
    act(r);
    const double done = r->readable.done[--r->readable.tail];
    double start = r->now > r->read_free ? r->now : r->read_free;
    start = start > done ? start : done;
    r->read_free = start + r->p->read;
    r->reads++;
    take(r);
    push(r, &r->pending, r->readable.step[r->readable.tail], r->read_free);
}

/* Keep a parked state where it is, if it is one; return whether it was. */
static inline int hold_parked(run_t *r, int64_t step)
{
    int64_t at = r->writing.head;
    while (at < r->writing.tail && r->writing.step[at] != 4 * step + 3)
        at++;
    if (at == r->writing.tail)
        return 0;
    r->writing.step[at] = 4 * step;
    queue_t *readable = &r->readable;
    for (at = readable->head; readable->step[at] != step; at++)
        ;
    for (readable->tail--; at < readable->tail; at++) {
        readable->step[at] = readable->step[at + 1];
        readable->done[at] = readable->done[at + 1];
    }
    r->staged--;
    push(r, &r->pins, step, 0.0);
    if (r->status)
        return 1;
    int64_t *pins = r->pins.step;
    for (at = r->pins.tail - 1; at > r->pins.head && pins[at - 1] > step; at--) {
        pins[at] = pins[at - 1]; /* the next anchor is held already */
        pins[at - 1] = step;
    }
    return 1;
}

static inline void drop(run_t *r)
{
    act(r);
    r->stored--;
}

static inline void clear_leftover(run_t *r)
{
    const int64_t step = r->leftover.step[r->leftover.head++];
    /* Writes end in order: until this one is settled. */
    while (count(&r->writing) && r->writing.step[r->writing.head] <= 4 * step && !r->status)
        settle(r);
    act(r);
    r->used--;
    drop(r);
}

static inline int64_t queued(const run_t *r) { return r->backlog ? count(&r->fresh) : 0; }

/* Offer what is queued, the oldest first, until the tier refuses. */
static inline void send_queued(run_t *r)
{
    while (queued(r) && !r->status && offer(r, r->fresh.step[r->fresh.head], QUEUED))
        ;
}

static inline void make_room(run_t *r)
{
    send_queued(r);
    while (r->used >= r->p->slots && !r->status) {
        if (count(&r->leftover)) {
            clear_leftover(r);
        } else if (queued(r) && !count(&r->writing)) {
            act(r); /* the tier is full: the oldest is given up */
            r->fresh.head++;
            r->used--;
        } else {
            settle(r);
            send_queued(r);
        }
    }
}

static inline int64_t reclaimable(const run_t *r)
{
    return r->p->slots - r->used + r->staged + count(&r->leftover) + queued(r);
}

static inline void first_reverse(run_t *r)
{
    act(r);
    r->now += r->p->taping;
    r->forward_steps += 1;
    act(r);
    r->ended = 1;
    act(r);
    r->now += r->p->reverse;
}

static inline void turn(run_t *r)
{
    act(r);
    r->now += r->p->turn;
}

/* --------------------------------------------------------- sweep_reserve.c */

/* `Reservation.advance`: where the spine continues, or 0 to give up the slot now. */
int64_t sweep_spine_advance(run_t *r, int64_t length, int64_t free);
/* `Reservation.again`: when the first state leaves its slot and is read again, or 0. */
int64_t sweep_read_again(run_t *r, int64_t length, int64_t free);

/* -------------------------------------------------------- sweep_segments.c */

/* Reverse `length` steps by Revolve; with `keep_first` the first state has a slot already. */
void sweep_revolve(run_t *r, int64_t length, int64_t slots, int64_t keep_first);
/* Reverse start..end-1, state `start` live, queueing reads on the way. */
void sweep_segment(run_t *r, int64_t start, int64_t end);

/* --------------------------------------------------------- sweep_forward.c */

/* The two forward sweeps; r->end is where the reverse sweep starts. */
void sweep_ring(run_t *r);
void sweep_tail(run_t *r);

#endif

/* The streaming schedule in virtual time, without making its actions one by one.
 *
 * One loop does what `planners/streaming/sweep.py` decides and `schedule/simulation.py`
 * times: the same actions in the same order at the same times, no checkpoint
 * lost.  Names are those of the Python twin.  A reversal by Revolve that can wait for
 * nothing is added as one sum (sweep_segments.c), which makes the work
 * proportional to the states offered or kept, not to the steps.
 *
 * The caller owns the work area of ms_sweep_len(room, slots) int64 or doubles,
 * and the tables of ms_sweep_tables_len(), zero at first and good for as long as
 * the times of a step, a turn and a read stay as they are.
 */
#include "sweep_run.h"

enum { MAKESPAN, STALL, FORWARD_STEPS, WRITES, READS, PEAK, N_OUT };

/* -------------------------------------------------------------- reverse sweep */

static void reverse_sweep(run_t *r)
{
    const sweep_t *p = r->p;
    while (r->end > 0 && !r->status) {
        while (count(&r->leftover) &&
               r->leftover_end[r->leftover.head] - r->end >= p->drain_steps && !r->status)
            clear_leftover(r);
        const int64_t fresh = last(&r->fresh), pin = last(&r->pins), old = last(&r->written);
        int64_t top = fresh > pin ? fresh : pin;
        top = old > top ? old : top;
        const int64_t coming = count(&r->pending) ? r->pending.step[r->pending.head]
                                                  : last(&r->readable);
        const int64_t anchor = top > coming ? top : coming;
        if (anchor < 0) {
            act(r);
            sweep_revolve(r, r->end, reclaimable(r), 1);
            return;
        }
        if (coming > top) {
            if (!count(&r->pending)) {
                make_room(r);
                prefetch(r);
            }
            if (r->status)
                return;
            await_until(r, r->pending.done[r->pending.head++], p->read_overhead);
            if (!count(&r->pending))
                r->pending.head = r->pending.tail = 0;
            while (count(&r->writing) && r->writing.step[r->writing.head] / 4 <= anchor &&
                   !r->status)
                settle(r);
        }
        act(r);
        const int kept = count(&r->fresh) || count(&r->pins) || count(&r->written);
        const int alone = coming > top && !count(&r->pending) && !kept;
        const int64_t part =
            p->reserve && alone ? sweep_read_again(r, r->end - anchor, reclaimable(r)) : 0;
        if (part) {
            r->depth = 1;
            act(r);
            r->used--;
            push(r, &r->readable, anchor, 0.0);
            advance(r, part);
            make_room(r);
            act(r);
            take(r);
            sweep_segment(r, anchor + part, r->end);
            act(r);
            r->used--;
            r->end = anchor + part;
            continue;
        }
        if (r->end - anchor > 1) {
            /* The anchor is at hand: it is among the held until it is used up. */
            sweep_segment(r, anchor, r->end);
        } else {
            while (count(&r->readable) && r->used < p->slots && count(&r->pending) < r->depth &&
                   !r->status)
                prefetch(r);
            turn(r);
        }
        r->depth = p->depth;
        if (coming > top) {
            act(r);
            r->used--;
            drop(r);
        } else if (last(&r->pins) == anchor) {
            push(r, &r->leftover, anchor, 0.0);
            if (r->status)
                return;
            r->leftover_end[r->leftover.tail - 1] = r->end;
            r->pins.tail--;
        } else {
            act(r);
            r->used--;
            if (last(&r->fresh) == anchor) {
                r->fresh.tail--;
            } else {
                r->written.tail--;
                drop(r);
            }
        }
        r->end = anchor;
    }
}

/* ------------------------------------------------------------------ interface */

enum { ARRAYS = 13 };

/* Numbers of eight bytes the caller has to provide; `room` bounds the states offered or kept. */
int64_t ms_sweep_len(int64_t room, int64_t slots)
{
    if (room < 1 || slots < 1 || room > INT64_MAX / 256 || slots > INT64_MAX / 256)
        return -1;
    return ARRAYS * room + 2 * (slots + 3) + 2 * (EXACT_LENGTH + 1);
}

/* Run the schedule; return DONE, FULL where `room` does not suffice, or STUCK. */
int64_t ms_sweep(const sweep_t *p, int64_t room, void *work, int64_t *tables, double *out)
{
    run_t r = {
        .p = p, .room = room, .backlog = p->backlog, .depth = p->depth, .tables = tables, .nu_length = -1,
        .actions_length = -1};
    int64_t *whole = work;
    queue_t *queues[] = {&r.fresh, &r.pins, &r.written, &r.writing, &r.readable, &r.pending,
                         &r.leftover};
    for (int k = 0; k < 7; k++, whole += room)
        queues[k]->step = whole;
    r.leftover_end = whole;
    whole += room;
    queue_t *timed[] = {&r.writing, &r.readable, &r.pending};
    for (int k = 0; k < 3; k++, whole += room)
        timed[k]->done = (double *)whole;
    r.waiting_done = (double *)whole;
    whole += room;
    r.scratch = (double *)whole;
    r.stack = whole + 2 * (EXACT_LENGTH + 1);
    if (p->n == 1 && !p->online) {
        first_reverse(&r);
    } else {
        if (p->tail_start < 0)
            sweep_ring(&r);
        else
            sweep_tail(&r);
        reverse_sweep(&r);
    }
    while (count(&r.leftover) && !r.status)
        clear_leftover(&r);
    while (count(&r.writing) && !r.status)
        settle(&r);
    r.now += (double)r.stored * p->action;
    out[MAKESPAN] = r.now;
    out[STALL] = r.stall;
    out[FORWARD_STEPS] = r.forward_steps;
    out[WRITES] = (double)r.writes;
    out[READS] = (double)r.reads;
    out[PEAK] = (double)r.peak;
    return r.status;
}

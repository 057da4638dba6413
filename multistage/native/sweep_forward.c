/* The forward sweeps of the streaming schedule: the ring, and offers before a tail. */
#include "sweep_run.h"

static int in(uint64_t steps, int64_t step) { return step < 64 && (steps >> step & 1); }

/* The next nominal position after the one at `at` was taken at `position`. */
static double later(double at, int64_t position, double spacing)
{
    const double next = (double)position + spacing - 1;
    return at + spacing > next ? at + spacing : next;
}

static double offer_until(run_t *r, int64_t stop)
{
    const sweep_t *p = r->p;
    int64_t live = 0, position = 0;
    double at = 0;
    while (position < stop && !r->status) {
        if (p->capacity >= 0 && r->stored >= p->capacity && !p->skip && !p->extra && !r->backlog) {
            /* The tier stays full: every step offers in vain, once a slot is there. */
            const double steps = (double)(stop - position);
            if (position > live)
                advance(r, position - live);
            make_room(r);
            r->now += steps * (p->forward + 2 * p->action);
            r->forward_steps += steps;
            return at;
        }
        if (position > live) {
            advance(r, position - live);
            live = position;
        }
        int taken = in(p->skip, position);
        if (!taken) {
            send_queued(r);
            if (!queued(r)) {
                make_room(r);
                taken = offer(r, position, LIVE);
            }
            if (!taken && queued(r) < r->backlog && r->used < p->slots) {
                act(r);
                take(r);
                push(r, &r->fresh, position, 0.0);
                taken = 1;
            }
        }
        if (position >= (int64_t)at && taken) {
            const double before = at;
            at = later(before, position, p->spacing);
            if (r->backlog && at > (double)p->end_start) {
                at = later(before, position, p->end_spacing);
                at = at > (double)p->end_start ? at : (double)p->end_start;
            }
        }
        int64_t next = (int64_t)at;
        for (int64_t k = position + 1; k < 64 && k < next; k++)
            if (in(p->extra, k))
                next = k;
        position = position + 1 > next ? position + 1 : next;
    }
    if (stop > live)
        advance(r, stop - live);
    return at;
}

static void evict(run_t *r)
{
    const sweep_t *p = r->p;
    while (r->used >= p->slots && !r->status) {
        if (!count(&r->written) && r->staged && !count(&r->fresh) && !count(&r->pins)) {
            settle(r);
            continue;
        }
        while (!count(&r->written) && !count(&r->fresh) && !r->status)
            settle(r); /* all are under a write */
        if (r->status)
            return;
        if (count(&r->written))
            push(r, &r->readable, r->written.step[r->written.head++], 0.0);
        else
            r->fresh.head++;
        r->used--;
        act(r);
    }
}

void sweep_ring(run_t *r)
{
    const sweep_t *p = r->p;
    int64_t i = p->keep_from < p->n - 1 ? p->keep_from : p->n - 1;
    if (p->online)
        i = 0;
    double at = offer_until(r, i), spacing = p->spacing;
    while ((p->online || i < p->n - 1) && !r->status) {
        if (i == p->end_start)
            spacing = p->end_spacing;
        int64_t steps = p->n - i - 1;
        const int full = r->stored == p->capacity && i >= (int64_t)at;
        if (!full)
            steps = at - (double)i < (double)steps ? (int64_t)at - i : steps;
        if (p->online && steps > count(&r->fresh) && r->used == p->slots && !r->staged &&
            !count(&r->written) && count(&r->fresh) &&
            r->fresh.step[r->fresh.head] == i - count(&r->fresh)) {
            /* Nothing is written for a while, or any more: the last states move through the
             * slots, each step a save, a free, an advance, and an offer where the tier is full. */
            r->now += (double)steps * (p->forward + (full ? 4 : 3) * p->action);
            r->forward_steps += (double)steps;
            for (int64_t k = r->fresh.head; k < r->fresh.tail; k++)
                r->fresh.step[k] += steps;
            i += steps;
        }
        evict(r);
        act(r);
        take(r);
        int kept = 1;
        if (i >= (int64_t)at || in(p->extra, i)) {
            const int skipped = in(p->skip, i), taken = !skipped && offer(r, i, HELD);
            kept = !taken;
            if (skipped || taken) {
                const double next = (double)i + spacing - 1;
                at = at + spacing > next ? at + spacing : next;
            }
        }
        if (kept)
            push(r, &r->fresh, i, 0.0);
        advance(r, 1);
        i++;
        if (p->online && i == p->n) {
            act(r);
            r->ended = 1;
            r->end = i;
            return;
        }
    }
    first_reverse(r);
    r->end = i;
}

void sweep_tail(run_t *r)
{
    const sweep_t *p = r->p;
    offer_until(r, p->tail_start);
    if (p->tail_start == p->n - 1) {
        first_reverse(r);
    } else {
        make_room(r);
        act(r);
        take(r);
        sweep_segment(r, p->tail_start, p->n);
        act(r);
        r->used--;
    }
    /* What the tail left no time to write stays in its slot. */
    for (int64_t k = r->writing.head; k < r->writing.tail; k++)
        hold_parked(r, r->writing.step[k] / 4);
    r->backlog = 0;
    r->end = p->tail_start;
}

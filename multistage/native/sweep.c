/* The streaming schedule in virtual time, without making its actions one by one.
 *
 * One loop does what `planners/streaming/sweep.py` decides and `schedule/simulation.py`
 * times: the same actions in the same order at the same times, no checkpoint
 * lost.  Names are those of the Python twin.  Steps ascend wherever they are
 * queued, so a queue is a stretch of an array.  A reversal by Revolve that can
 * wait for nothing is a sum and is added as one, which makes the work
 * proportional to the states offered or kept, not to the steps; only the
 * number of actions of a long one is an estimate, and counts only where the
 * driver's time per action does.
 *
 * The caller owns the work area of ms_sweep_len(room, slots) int64 or doubles,
 * and the tables of ms_sweep_tables_len(), zero at first and good for as long as
 * the times of a step, a turn and a read stay as they are.
 */
#include <stdint.h>

#include "revolve.h"

enum { MAKESPAN, STALL, FORWARD_STEPS, WRITES, READS, PEAK, N_OUT };
enum { DONE = 0, FULL = -1, STUCK = -2 };

#define EXACT_LENGTH 512 /* of planners/streaming/reserve.py */
#define AGAIN_ACTIONS 6  /* of planners/streaming/reserve.py */
#define N_TABLES 8
#define N_SPINES 8
#define COUNTED 512  /* longer reversals have as many actions per step as this one */
#define PATIENCE 4096 /* actions run one by one, at most, while a write may be waited for */
#define SHORT 128    /* reversals up to this length are run action by action */

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

static int64_t count(const queue_t *q) { return q->tail - q->head; }
static int64_t last(const queue_t *q) { return q->tail > q->head ? q->step[q->tail - 1] : -1; }

static void push(run_t *r, queue_t *q, int64_t step, double done)
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

static void take(run_t *r)
{
    r->used++;
    if (r->used > r->peak)
        r->peak = r->used;
}

static void act(run_t *r) { r->now += r->p->action; }

static void advance(run_t *r, int64_t steps)
{
    act(r);
    r->now += (double)steps * r->p->forward;
    r->forward_steps += (double)steps;
}

static void await_until(run_t *r, double at, double overhead)
{
    act(r);
    if (at > r->now) {
        r->stall += at - r->now;
        r->now = at;
    }
    r->now += overhead;
}

/* Await the oldest write. */
static void settle(run_t *r)
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

static int offer(run_t *r, int64_t step, int from)
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

static void prefetch(run_t *r)
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
static int hold_parked(run_t *r, int64_t step)
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

static void drop(run_t *r)
{
    act(r);
    r->stored--;
}

static void clear_leftover(run_t *r)
{
    const int64_t step = r->leftover.step[r->leftover.head++];
    /* Writes end in order: until this one is settled. */
    while (count(&r->writing) && r->writing.step[r->writing.head] <= 4 * step && !r->status)
        settle(r);
    act(r);
    r->used--;
    drop(r);
}

static int64_t queued(const run_t *r) { return r->backlog ? count(&r->fresh) : 0; }

/* Offer what is queued, the oldest first, until the tier refuses. */
static void send_queued(run_t *r)
{
    while (queued(r) && !r->status && offer(r, r->fresh.step[r->fresh.head], QUEUED))
        ;
}

static void make_room(run_t *r)
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

static int64_t reclaimable(const run_t *r)
{
    return r->p->slots - r->used + r->staged + count(&r->leftover) + queued(r);
}

/* ----------------------------------------------------------------- reversals */

static double nu(run_t *r, int64_t length, int64_t slots)
{
    if (length != r->nu_length || slots != r->nu_slots) {
        r->nu_length = length;
        r->nu_slots = slots;
        r->nu_value = revolve_nu(length, slots);
    }
    return r->nu_value;
}

/* Actions of a reversal of `length` steps; an estimate beyond COUNTED. */
static double count_actions(run_t *r, int64_t length, int64_t slots, int64_t keep_first)
{
    const int64_t counted = length < COUNTED ? length : COUNTED;
    slots = slots < counted ? slots : counted;
    if (counted != r->actions_length || 2 * slots + keep_first != r->actions_slots) {
        int64_t state[16], out[3 * 64], made;
        ms_revolve_init(state, r->stack, 0, counted, slots, keep_first);
        r->actions = 0;
        while ((made = ms_revolve_fill(state, r->stack, out, 64)))
            r->actions += made;
        r->actions_length = counted;
        r->actions_slots = 2 * slots + keep_first;
    }
    return (double)r->actions * ((double)length / (double)counted);
}

static void first_reverse(run_t *r)
{
    act(r);
    r->now += r->p->taping;
    r->forward_steps += 1;
    act(r);
    r->ended = 1;
    act(r);
    r->now += r->p->reverse;
}

static void turn(run_t *r)
{
    act(r);
    r->now += r->p->turn;
}

static void revolve(run_t *r, int64_t length, int64_t slots, int64_t keep_first)
{
    const sweep_t *p = r->p;
    int64_t left = length, held = 0;
    double steps = 0, actions = 0;
    slots = slots < length ? slots : length;
    if (length <= SHORT || r->staged || queued(r) || count(&r->leftover)) {
        int64_t state[16], out[3 * 64], made;
        const int64_t most = length <= SHORT ? INT64_MAX : PATIENCE;
        ms_revolve_init(state, r->stack, 0, length, slots, keep_first);
        while ((made = ms_revolve_fill(state, r->stack, out, 64)) && !r->status) {
            for (int64_t k = 0; k < 3 * made; k += 3) {
                if (out[k] == REVOLVE_SAVE) {
                    make_room(r);
                    act(r);
                    take(r);
                    held++;
                } else if (out[k] == REVOLVE_FREE) {
                    act(r);
                    r->used--;
                    held--;
                } else if (out[k] == REVOLVE_ADVANCE) {
                    advance(r, out[k + 2] - out[k + 1]);
                    steps += (double)(out[k + 2] - out[k + 1]);
                } else if (out[k] == REVOLVE_LOAD) {
                    act(r);
                } else if (r->ended) {
                    turn(r);
                    left--;
                } else {
                    first_reverse(r);
                    left--;
                }
            }
            actions += (double)made;
            if (actions > (double)most)
                break;
        }
        if (!left)
            return;
    }
    /* Nothing to wait for any more, or too much to continue one by one. */
    const int64_t most = slots < length - 1 - keep_first ? slots : length - 1 - keep_first;
    const double forward_steps = nu(r, length, slots + keep_first) - steps;
    if (r->used - held + most > r->peak)
        r->peak = r->used - held + most < p->slots ? r->used - held + most : p->slots;
    r->used -= held;
    if (p->action > 0) {
        const double rest = count_actions(r, length, slots, keep_first) - actions;
        r->now += rest * p->action;
    }
    if (!r->ended) {
        first_reverse(r);
        r->now -= p->action;
        left--;
    }
    r->now += forward_steps * p->forward + (double)left * p->turn;
    r->forward_steps += forward_steps;
}

/* `Reservation._read_again`. */
static void fill_again(const run_t *r, const double *value, double *least, int64_t *again)
{
    const sweep_t *p = r->p;
    const double extra = AGAIN_ACTIONS * p->action + p->read_overhead;
    for (int64_t k = 0; k <= EXACT_LENGTH; k++) {
        double best = 0;
        int64_t where = 0;
        for (int64_t m = 1; m < k - 1; m++) {
            const double parts = (double)m * p->forward + value[k - m] + least[m];
            if (!where || parts < best) {
                best = parts;
                where = m;
            }
        }
        least[k] = value[k];
        again[k] = 0;
        if (where && best + extra < value[k] - 1e-12) {
            least[k] = best + extra;
            again[k] = where;
        }
    }
}

/* `Reservation._table`: choices of the spine for every length, then those of a second read. */
static const int64_t *choices(run_t *r, int64_t free)
{
    const sweep_t *p = r->p;
    int64_t at = 0;
    while (at < N_TABLES && r->tables[1 + at] != free)
        at++;
    if (at == N_TABLES) {
        at = r->tables[0]++ % N_TABLES;
        r->tables[1 + at] = free;
        double *less = r->scratch, *value = less + EXACT_LENGTH + 1;
        int64_t *choice = r->tables + 1 + N_TABLES + at * 2 * (EXACT_LENGTH + 1);
        for (int64_t k = 0; k <= EXACT_LENGTH; k++)
            less[k] = (double)k * p->turn + revolve_nu(k, free) * p->forward;
        value[0] = 0;
        choice[0] = 0;
        for (int64_t k = 1; k <= EXACT_LENGTH; k++) {
            double best = 0;
            int64_t where = 0;
            for (int64_t m = 1; m < k; m++) {
                const double deeper = (double)m * p->forward + less[k - m] + value[m];
                if (!where || deeper < best) {
                    best = deeper;
                    where = m;
                }
            }
            value[k] = less[k] > p->read ? less[k] : p->read;
            choice[k] = 0;
            if (where && best < value[k] - 1e-12) {
                value[k] = best;
                choice[k] = where;
            }
        }
        fill_again(r, value, less, choice + EXACT_LENGTH + 1);
    }
    return r->tables + 1 + N_TABLES + at * 2 * (EXACT_LENGTH + 1);
}

/* `Reservation.advance`: where the spine continues, or 0 to give up the slot now. */
static int64_t spine_advance(run_t *r, int64_t length, int64_t free)
{
    if (length <= 1 || free < 1)
        return 0;
    if (length > EXACT_LENGTH)
        return revolve_first_advance(length, free + 1);
    return choices(r, free)[length];
}

/* `Reservation.again`: when the first state leaves its slot and is read again, or 0. */
static int64_t read_again(run_t *r, int64_t length, int64_t free)
{
    if (length <= 2 || length > EXACT_LENGTH || free < 1)
        return 0;
    return choices(r, free)[EXACT_LENGTH + 1 + length];
}

/* Reverse the upper parts of `length` steps with every slot; return how many are left.
 *
 * A long spine has many parts.  Where nothing is waited for, segments of the
 * same length and slots cost the same, and there are few of them. */
static int64_t down_the_spine(run_t *r, int64_t length)
{
    const int64_t free = reclaimable(r), whole = length, at = length % N_SPINES;
    const int known = r->spines[at].length == length && r->spines[at].free == free;
    const int alike = r->ended && !r->staged && !count(&r->leftover) && length > EXACT_LENGTH;
    if (alike && known) {
        r->now += r->spines[at].seconds;
        r->forward_steps += r->spines[at].steps;
        if (r->used + r->spines[at].above > r->peak)
            r->peak = r->used + r->spines[at].above;
        return r->spines[at].left;
    }
    const double now = r->now, steps = r->forward_steps;
    const int64_t peak = r->peak;
    int64_t part;
    r->peak = r->used;
    while (!r->status && (part = spine_advance(r, length, reclaimable(r)))) {
        advance(r, part);
        revolve(r, length - part, reclaimable(r), 0);
        act(r);
        length = part;
    }
    if (alike) {
        r->spines[at].length = whole;
        r->spines[at].free = free;
        r->spines[at].left = length;
        r->spines[at].above = r->peak - r->used;
        r->spines[at].seconds = r->now - now;
        r->spines[at].steps = r->forward_steps - steps;
    }
    r->peak = r->peak > peak ? r->peak : peak;
    return length;
}

static void segment(run_t *r, int64_t start, int64_t end)
{
    const sweep_t *p = r->p;
    const int64_t need = end - start - 1;
    const int held = count(&r->fresh) > queued(r) || count(&r->pins) || count(&r->written);
    if (r->ended)
        while (count(&r->readable) && p->slots - r->used > need &&
               count(&r->pending) < r->depth && !r->status)
            prefetch(r);
    if (!count(&r->pending) && !held && count(&r->readable)) {
        if (p->reserve)
            end = start + down_the_spine(r, end - start);
        if (r->ended && reclaimable(r) > 0) {
            make_room(r);
            if (!hold_parked(r, last(&r->readable)))
                prefetch(r);
        }
    }
    revolve(r, end - start, reclaimable(r), 1);
}

/* ------------------------------------------------------------ forward sweeps */

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

static void ring(run_t *r)
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

static void tail(run_t *r)
{
    const sweep_t *p = r->p;
    offer_until(r, p->tail_start);
    if (p->tail_start == p->n - 1) {
        first_reverse(r);
    } else {
        make_room(r);
        act(r);
        take(r);
        segment(r, p->tail_start, p->n);
        act(r);
        r->used--;
    }
    /* What the tail left no time to write stays in its slot. */
    for (int64_t k = r->writing.head; k < r->writing.tail; k++)
        hold_parked(r, r->writing.step[k] / 4);
    r->backlog = 0;
    r->end = p->tail_start;
}

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
            revolve(r, r->end, reclaimable(r), 1);
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
            p->reserve && alone ? read_again(r, r->end - anchor, reclaimable(r)) : 0;
        if (part) {
            r->depth = 1;
            act(r);
            r->used--;
            push(r, &r->readable, anchor, 0.0);
            advance(r, part);
            make_room(r);
            act(r);
            take(r);
            segment(r, anchor + part, r->end);
            act(r);
            r->used--;
            r->end = anchor + part;
            continue;
        }
        if (r->end - anchor > 1) {
            /* The anchor is at hand: it is among the held until it is used up. */
            segment(r, anchor, r->end);
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

int64_t ms_sweep_tables_len(void)
{
    return 1 + N_TABLES + N_TABLES * 2 * (EXACT_LENGTH + 1);
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
            ring(&r);
        else
            tail(&r);
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

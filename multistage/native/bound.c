/* The priced two-level dynamic program behind the priced lower bound.
 *
 * A segment of l steps with f free slots besides that of its first state.  The
 * first state is HELD in a slot and not written, in BOTH places, or AWAY: in
 * the tier only.  In later sweeps, and in the FIRST one:
 *
 *   cost(l, f) = min over m of  m step(f) + right(l-m, f) + left(m, f)
 *
 * right is the upper part, whose first state goes into a slot or is written,
 * or is reversed at once (one step); left is the lower part, for which the
 * first state is still in its slot, or leaves it for the tier, or is read and
 * then kept in a slot or not.
 *
 * A read takes a slot from its beginning until its state is needed.  So each
 * segment has a mode: no read is on its way that outlasts it (NONE), one
 * begins in it (BEGUN), or one has taken a slot, not among the f, all along
 * (THROUGH).  Before a state is read, the right part is BEGUN.
 *
 * Every sum is a (min,+) convolution over m; the operands are kept ready, so
 * that the inner loop is one add and one min.  f runs from -1, no segment at
 * all, to slots + 1.
 *
 * The caller owns the work area of ms_priced_work_len(n, slots) doubles.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "core.h"

enum { HELD, BOTH, AWAY, FIRST_HELD, FIRST_AWAY, N_KINDS };
enum { LATER, FIRST, N_SWEEPS };
enum { NONE, BEGUN, THROUGH, N_MODES };
/* Modes of the steps and of the left part: a read begins before the left part, or in it. */
enum { NONE_NONE, NONE_BEGUN, NONE_THROUGH, THROUGH_THROUGH, N_LEFTS };

/* Number for number `Prices` of multistage/planners/bound.py. */
typedef struct {
    double step, turn, first, second, reading;
    double write_1, keep_1, write_2, read;
} prices_t;

/* Least sum left[m] + right[m], m = 1 .. l-1; four running minima hide the latency. */
static double least_sum(const double *left, const double *right, int64_t l)
{
    double a = INFINITY, b = INFINITY, c = INFINITY, d = INFINITY;
    int64_t m = 1;
    for (; m + 3 < l; m += 4) {
        double w = left[m] + right[m], x = left[m + 1] + right[m + 1];
        double y = left[m + 2] + right[m + 2], z = left[m + 3] + right[m + 3];
        a = w < a ? w : a;
        b = x < b ? x : b;
        c = y < c ? y : c;
        d = z < d ? z : d;
    }
    for (; m < l; m++)
        a = left[m] + right[m] < a ? left[m] + right[m] : a;
    return fmin(fmin(a, b), fmin(c, d));
}

/* The tables; one number for each sweep or kind, mode and number of free slots. */
typedef struct {
    const prices_t *p;
    int64_t n, slots;
    double *cost, *lefts, *rights;
} work_t;

static double *cost_of(const work_t *w, int mode, int kind, int64_t f)
{
    return w->cost + (mode * N_KINDS + kind) * (w->slots + 3) + f + 1;
}

static double *left_of(const work_t *w, int pair, int kind, int64_t f)
{
    return w->lefts + ((pair * N_KINDS + kind) * (w->slots + 1) + f) * (w->n + 1);
}

/* right[n - q] holds the right part of q steps: with q = l - m it advances with m. */
static double *right_of(const work_t *w, int sweep, int mode, int64_t f)
{
    return w->rights + ((sweep * N_MODES + mode) * (w->slots + 1) + f) * (w->n + 1);
}

/* What a second after the first sweep costs: a write needs a slot, a read has one. */
static double second_with(const prices_t *p, int mode, int64_t f)
{
    const double rest = 1 - (f > 0 ? p->second : 0.0);
    return mode == THROUGH ? rest - p->reading : rest;
}

/* The same where a read may begin: at once, if a slot is left for it, or later. */
static double second_begun(const prices_t *p, int64_t f)
{
    const double rest = second_with(p, NONE, f);
    return f > 0 ? fmin(rest, second_with(p, THROUGH, f - 1)) : rest;
}

/* The segment of one step: the slot of a first state is given back before the turn. */
static void fill_turns(const work_t *w, int64_t f)
{
    const prices_t *p = w->p;
    for (int kind = HELD; kind <= AWAY; kind++) {
        const int64_t left = kind == AWAY ? f : f + 1;
        if (kind == AWAY && f < 1)
            continue;
        *cost_of(w, NONE, kind, f) = p->turn * second_with(p, NONE, left);
        *cost_of(w, BEGUN, kind, f) = p->turn * second_begun(p, left);
        *cost_of(w, THROUGH, kind, f) = p->turn * second_with(p, THROUGH, left);
    }
}

static void fill_costs(const work_t *w, int64_t l, int64_t f)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        const int sweep = kind < FIRST_HELD ? LATER : FIRST;
        const int away = kind == AWAY || kind == FIRST_AWAY;
        if (away && f < 1)
            continue;
        const double *through = right_of(w, sweep, THROUGH, f) + w->n - l;
        const double *begun = right_of(w, sweep, BEGUN, f) + w->n - l;
        const double *none = away ? begun : right_of(w, sweep, NONE, f) + w->n - l;
        *cost_of(w, THROUGH, kind, f) = least_sum(left_of(w, THROUGH_THROUGH, kind, f), through, l);
        *cost_of(w, NONE, kind, f) = least_sum(left_of(w, NONE_NONE, kind, f), none, l);
        double least = least_sum(left_of(w, NONE_BEGUN, kind, f), none, l);
        least = fmin(least, *cost_of(w, NONE, kind, f));
        if (f > 0) {
            least = fmin(least, least_sum(left_of(w, NONE_THROUGH, kind, f), begun, l));
            least = fmin(least, *cost_of(w, THROUGH, kind, f - 1));
        }
        *cost_of(w, BEGUN, kind, f) = least;
    }
}

static void fill_rights(const work_t *w, int64_t l, int64_t f)
{
    const prices_t *p = w->p;
    for (int mode = 0; mode < N_MODES; mode++) {
        double later = p->write_2 + *cost_of(w, mode, AWAY, f);
        double first = p->write_1 + *cost_of(w, mode, FIRST_AWAY, f);
        later = fmin(later, *cost_of(w, mode, HELD, f - 1));
        first = fmin(first, p->keep_1 + *cost_of(w, mode, FIRST_HELD, f - 1));
        if (l == 1) {
            const double price = mode == BEGUN ? second_begun(p, f) : second_with(p, mode, f);
            later = p->turn * price;
            first = (p->step + p->turn) * price;
        }
        right_of(w, LATER, mode, f)[w->n - l] = later;
        right_of(w, FIRST, mode, f)[w->n - l] = first;
    }
}

/* The lower part of l steps in `mode`, for which the first state is where `kind` says. */
static double left_part(const work_t *w, int mode, int kind, int64_t f)
{
    const prices_t *p = w->p;
    const double kept = *cost_of(w, mode, BOTH, f), evicted = *cost_of(w, mode, AWAY, f + 1);
    if (f < 0)
        return INFINITY;
    if (kind == HELD || kind == FIRST_HELD)
        return fmin(*cost_of(w, mode, HELD, f), p->write_2 + evicted);
    if (kind == BOTH)
        return fmin(kept, evicted);
    return p->read + fmin(*cost_of(w, mode, AWAY, f), *cost_of(w, mode, BOTH, f - 1));
}

static void fill_lefts(const work_t *w, int64_t l, int64_t f)
{
    const prices_t *p = w->p;
    for (int kind = 0; kind < N_KINDS; kind++) {
        const int first = kind >= FIRST_HELD;
        const double steps = (double)l * p->step;
        const double none = steps * (first ? 1 - (f > 0 ? p->first : 0) : second_with(p, NONE, f));
        const double through = steps * (first ? 1 - p->first : second_with(p, THROUGH, f));
        left_of(w, NONE_NONE, kind, f)[l] = none + left_part(w, NONE, kind, f);
        left_of(w, NONE_BEGUN, kind, f)[l] = none + left_part(w, BEGUN, kind, f);
        left_of(w, NONE_THROUGH, kind, f)[l] =
            none + (f > 0 ? left_part(w, THROUGH, kind, f - 1) : INFINITY);
        left_of(w, THROUGH_THROUGH, kind, f)[l] = through + left_part(w, THROUGH, kind, f);
    }
}

/* Doubles the caller has to provide, or -1 for sizes out of range. */
int64_t ms_priced_work_len(int64_t n, int64_t slots)
{
    if (n < 1 || n > 1 << 20 || slots < 0 || slots > n)
        return -1;
    const int64_t rows = (N_LEFTS * N_KINDS + N_SWEEPS * N_MODES) * (slots + 1);
    return N_MODES * N_KINDS * (slots + 3) + rows * (n + 1);
}

/* Return the least priced cost of n steps with `slots` slots. */
double ms_priced(int64_t n, int64_t slots, const double *prices, double *work)
{
    const double *q = prices;
    const prices_t p = {q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7], q[8]};
    const int64_t costs = N_MODES * N_KINDS * (slots + 3);
    work_t w = {&p, n, slots, work, work + costs, NULL};
    w.rights = w.lefts + N_LEFTS * N_KINDS * (slots + 1) * (n + 1);
    for (int64_t l = 1; l <= n; l++) {
        for (int64_t k = 0; k < costs; k++)
            w.cost[k] = INFINITY;
        for (int64_t f = 0; f <= slots; f++) {
            if (l == 1)
                fill_turns(&w, f);
            else
                fill_costs(&w, l, f);
        }
        for (int64_t f = 0; f <= slots; f++) {
            fill_rights(&w, l, f);
            fill_lefts(&w, l, f);
        }
    }
    return right_of(&w, FIRST, NONE, slots)[0];
}

/* The Lagrangian dual behind the lower bound of chains with a slow tier, at given prices.
 *
 * Stages 0..n-1, the last reversed as soon as it is taped; memories m = 0..slots.
 * Seconds at their prices, least over all nested schedules; "moved" is written
 * to the tier, evicted and read again:
 *
 *   later(s, e, m)  stages s..e reversed after the turn, input held outside m,
 *                   beyond one forward run: chain.c's table, moves at their prices
 *   kept(s, m)      stages s..n-1 of the first sweep, input held outside m
 *   moved(s, m)     the same where the input is moved, its price included
 *   right(s, m)     the less of both, a kept input taking its slots of m
 *
 *   kept(s, m)  = min of taped(s, m)
 *                 and  u(s, k) + later(s, k-1, m) + right(k, m)         over s < k < n
 *   moved(s, m) = min of taped(s, m) + move(s)
 *                 and  u(s, k) + min( right(k, m - state(s)) + late(s) + later(s, k-1, m),
 *                                     right(k, m) + move(s) +
 *                                     min(later(s, k-1, m - state(s)),
 *                                         later(s, k-1, m) + again(s)) )
 *   taped(s, m) = min( kept(s+1, m - tape(s)) + fast(s), kept(s+1, m) + move(s) )
 *
 * O(n^2 slots) beside the table.  All arrays belong to the caller.  The Python twin adds the
 * same doubles in the same order.
 */
#include "chain.h"

static inline double less(double a, double b)
{
    return a < b ? a : b;
}

static void later(const dual_t *x, int64_t s, int64_t e, double *out)
{
    const int64_t cells = x->n * (x->n + 1) / 2, at = row(x->n, s) + e;
    for (int64_t m = 0; m <= x->slots; m += PLANE) {
        const float *plane = x->table + (m / PLANE * cells + at) * PLANE;
        const int64_t count = x->slots + 1 - m < PLANE ? x->slots + 1 - m : PLANE;
        for (int64_t q = 0; q < count; q++)
            out[m + q] = x->total * (double)plane[q];
    }
}

static void taped(const dual_t *x, int64_t s, const double *next, double *out)
{
    const int64_t tape = x->tape[s];
    for (int64_t m = 0; m <= x->slots; m++) {
        out[m] = INFINITY;
        if (m < x->taping[s])
            continue;
        const double fast = m >= tape ? next[m - tape] + x->fast_tape[s] : INFINITY;
        out[m] = less(fast, next[m] + x->move_tape[s]);
    }
}

/* Doubles of the work area. */
int64_t ms_joint_dual_len(int64_t n, int64_t slots)
{
    return (n + 4) * (slots + 1);
}

/* Return the least priced seconds beyond the first sweep, infinite if nothing fits. */
double ms_joint_dual(const dual_t *x, double *area)
{
    const int64_t n = x->n, slots = x->slots, width = slots + 1;
    double *right = area, *kept = area + n * width, *next = kept + width;
    double *moved = next + width, *segment = moved + width;
    for (int64_t m = 0; m <= slots; m++)
        kept[m] = m >= x->taping[n - 1] ? 0.0 : INFINITY;
    for (int64_t s = n - 1; s >= 0; s--) {
        const int64_t state = x->state[s];
        if (s < n - 1) {
            taped(x, s, next, kept);
            for (int64_t m = 0; m <= slots; m++)
                moved[m] = kept[m] + x->move_state[s];
        } else {
            for (int64_t m = 0; m <= slots; m++)
                moved[m] = INFINITY;
        }
        for (int64_t k = s + 1; k < n; k++) {
            const double u = x->work * (x->forward[k] - x->forward[s]);
            const double *behind = right + k * width;
            const double late = x->late_state[s], move = x->move_state[s];
            const double again = x->again_state[s];
            const int64_t passing = x->passing[row(n, s) + k];
            later(x, s, k - 1, segment);
            for (int64_t m = passing; m <= slots; m++)
                kept[m] = less(segment[m] + behind[m] + u, kept[m]);
            if (s == 0)
                continue; /* the caller holds state 0 */
            const int64_t edge = state < slots + 1 ? state : slots + 1;
            for (int64_t m = passing; m < edge; m++)
                moved[m] = less(segment[m] + again + behind[m] + move + u, moved[m]);
            for (int64_t m = passing > edge ? passing : edge; m <= slots; m++) {
                const double held = segment[m] + behind[m - state] + late;
                const double left = less(segment[m - state], segment[m] + again);
                moved[m] = less(less(held, left + behind[m] + move) + u, moved[m]);
            }
        }
        for (int64_t m = 0; m <= slots; m++) {
            const double fast = m >= state ? kept[m - state] + x->fast_state[s] : INFINITY;
            right[s * width + m] = less(fast, moved[m]);
        }
        double *swap = next;
        next = kept;
        kept = swap;
    }
    return next[slots];
}

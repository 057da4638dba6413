/* The Lagrangian dual behind the lower bound of chains with a slow tier, at given prices.
 *
 * Stages 0..n-1, the last reversed as soon as it is taped; memories m = 0..slots.
 * Seconds at their prices, least over all nested schedules; "moved" is written
 * to the tier, evicted and read again:
 *
 *   later(s, e, m)  stages s..e reversed after the turn, input held outside m,
 *                   beyond one forward run: chain.c's table, moves at their prices
 *   kept(s, m)      stages s..n-1 of the first sweep, input held outside m: the less of
 *                   taped(s, m), which tapes stage s, and passed(s, m), which runs it forward
 *   moved(s, m)     the same where the input is moved, its price included
 *   right(s, m)     the less of both, a kept input taking its slots of m
 *
 *   passed(s, m) = min of u(s, k) + later(s, k-1, m) + right(k, m)      over s < k < n
 *   moved(s, m) = min of taped(s, m) + move(s)
 *                 and  u(s, k) + min( right(k, m - state(s)) + late(s) + later(s, k-1, m),
 *                                     right(k, m) + move(s) +
 *                                     min(later(s, k-1, m - state(s)),
 *                                         later(s, k-1, m) + again(s)) )
 *   taped(s, m) = min( kept(s+1, m - tape(s)) + fast(s),
 *                      min(taped(s+1, m) + wait_taped(s), passed(s+1, m) + wait_passed(s)) +
 *                      move(s) )
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

typedef struct {
    double *taped, *passed;
} rows_t;

static void tape(const dual_t *x, int64_t s, const rows_t *next, double *out)
{
    const int64_t tape = x->tape[s];
    for (int64_t m = 0; m <= x->slots; m++) {
        out[m] = INFINITY;
        if (m < x->taping[s])
            continue;
        const double moved = less(next->taped[m] + x->wait_taped[s],
                                  next->passed[m] + x->wait_passed[s]);
        const double fast = m >= tape ? less(next->taped[m - tape], next->passed[m - tape]) +
                                            x->fast_tape[s]
                                      : INFINITY;
        out[m] = less(fast, moved + x->move_tape[s]);
    }
}

/* Doubles of the work area. */
int64_t ms_joint_dual_len(int64_t n, int64_t slots)
{
    return (n + 6) * (slots + 1);
}

/* Return the least priced seconds beyond the first sweep, infinite if nothing fits. */
double ms_joint_dual(const dual_t *x, double *area)
{
    const int64_t n = x->n, slots = x->slots, width = slots + 1;
    double *right = area, *moved = area + n * width, *segment = moved + width;
    rows_t kept = {segment + width, segment + 2 * width};
    rows_t next = {segment + 3 * width, segment + 4 * width};
    for (int64_t s = n - 1; s >= 0; s--) {
        const int64_t state = x->state[s];
        if (s < n - 1)
            tape(x, s, &next, kept.taped);
        for (int64_t m = 0; m <= slots; m++) {
            if (s == n - 1)
                kept.taped[m] = m >= x->taping[s] ? 0.0 : INFINITY;
            kept.passed[m] = INFINITY;
            moved[m] = s < n - 1 ? kept.taped[m] + x->move_state[s] : INFINITY;
        }
        for (int64_t k = s + 1; k < n; k++) {
            const double u = x->work * (x->forward[k] - x->forward[s]);
            const double *behind = right + k * width;
            const double late = x->late_state[s], move = x->move_state[s];
            const double again = x->again_state[s];
            const int64_t passing = x->passing[row(n, s) + k];
            later(x, s, k - 1, segment);
            for (int64_t m = passing; m <= slots; m++)
                kept.passed[m] = less(segment[m] + behind[m] + u, kept.passed[m]);
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
            const double fast =
                m >= state ? less(kept.taped[m - state], kept.passed[m - state]) + x->fast_state[s]
                           : INFINITY;
            right[s * width + m] = less(fast, moved[m]);
        }
        const rows_t swap = next;
        next = kept;
        kept = swap;
    }
    return less(next.taped[slots], next.passed[slots]);
}

/* Schedules of a heterogeneous chain, read off its table (chain.c) and judged in true bytes. */
#include "chain.h"

/* Write the choices of the schedule of stages first..last at memory m in the order of its recursion.
 *
 * `out` takes (s, t, choice) per pair; a schedule has at most 2 n - 1 pairs,
 * and `stack` room for 3 n entries.  Returns the number of pairs, or
 * INFEASIBLE.
 */
int64_t ms_chain_trace(const chain_t *chain, const int32_t *none, const float *table,
                              int64_t first, int64_t last, int64_t m, int64_t *out, int64_t *stack)
{
    const table_t x = {chain, none, table, cells_of(chain)};
    int64_t made = 0, depth = 0;
    stack[0] = first, stack[1] = last, stack[2] = m;
    depth = 1;
    while (depth) {
        const int64_t *top = stack + 3 * --depth;
        const int64_t s = top[0], t = top[1], have = top[2];
        const int64_t k = chain_choice(&x, s, t, have);
        if (k == INFEASIBLE)
            return INFEASIBLE;
        out[3 * made] = s, out[3 * made + 1] = t, out[3 * made + 2] = k;
        made++;
        if (s == t)
            continue;
        int64_t *next = stack + 3 * depth;
        const int64_t tape = tape_of(chain, s, t, k);
        if (tape >= 0) {
            next[0] = s + 1, next[1] = t, next[2] = have - chain->tape[tape];
            depth++;
        } else {
            next[0] = s, next[1] = k - 1, next[2] = have;
            next[3] = k, next[4] = t, next[5] = have - chain->state[k];
            depth += 2;
        }
    }
    return made;
}

/* Seconds and peak bytes of a schedule given by its trace.
 *
 * `bytes` is the chain with true sizes, whose sums may pass 2^63: the peak is
 * cut off at INT64_MAX.  `stack` has room for 2 n entries.  `reverse_s` has a row for each way to
 * keep a tape.
 */
static void judge(const chain_t *bytes, const double *forward_s, const double *reverse_s,
                           const double *spared_s, const int64_t *trace, int64_t made, int64_t *stack_room,
                           double *seconds, int64_t *peak_bytes)
{
    const chain_t *c = bytes;
    /* The trace is in the order of processing: a pair's right part follows it,
     * then its left part, whose held bytes wait on the stack. */
    unsigned __int128 *stack = (unsigned __int128 *)stack_room, held = 0, peak = 0;
    int64_t depth = 0;
    double total = 0;
    for (int64_t p = 0; p < made; p++) {
        const int64_t s = trace[3 * p], t = trace[3 * p + 1], k = trace[3 * p + 2];
        const int64_t at = tape_of(c, s, t, k);
        unsigned __int128 need;
        if (at >= 0) {
            const unsigned __int128 tape = (unsigned __int128)c->tape[at];
            need = held + tape + (unsigned __int128)c->grad[t + 1] + (unsigned __int128)c->taping[at];
            peak = need > peak ? need : peak;
            need = held + tape + (unsigned __int128)c->grad[s + 1] +
                   (unsigned __int128)c->grad[s] + (unsigned __int128)c->reverse[at];
            peak = need > peak ? need : peak;
            total += forward_s[s] + reverse_s[at];
            if (s == t) {
                total -= spared_s[s];
                held = depth ? stack[--depth] : 0;
            } else {
                held += tape;
            }
            continue;
        }
        for (int64_t j = s; j < k; j++) {
            need = held + (unsigned __int128)c->grad[t + 1] +
                   (unsigned __int128)(j == s ? 0 : c->state[j]) +
                   (unsigned __int128)c->state[j + 1] + (unsigned __int128)c->advance[j];
            peak = need > peak ? need : peak;
            total += forward_s[j];
        }
        stack[depth++] = held;
        held += (unsigned __int128)c->state[k];
    }
    *seconds = total;
    *peak_bytes = peak > INT64_MAX ? INT64_MAX : (int64_t)peak;
}

/* Trace and judge the schedule of every memory first..last: the time-memory curve.
 *
 * Infeasible memories get infinite seconds.  `trace` has room for 6 n entries,
 * `stack` for 8 n (and is aligned to 16 bytes).
 */
void ms_chain_curve(const chain_t *chain, const chain_t *bytes, const double *forward_s,
                           const double *reverse_s, const double *spared_s, const int32_t *none,
                           float *table, int64_t first, int64_t last, int64_t *trace,
                           int64_t *stack, double *seconds, int64_t *peak_bytes)
{
    for (int64_t m = first; m <= last; m++) {
        const int64_t made = ms_chain_trace(chain, none, table, 0, chain->n - 1, m, trace, stack);
        if (made == INFEASIBLE) {
            seconds[m - first] = INFINITY;
            peak_bytes[m - first] = INT64_MAX;
        } else {
            judge(bytes, forward_s, reverse_s, spared_s, trace, made, stack,
                           seconds + m - first, peak_bytes + m - first);
        }
    }
}

/* ---------------------------------------------------------- smallest memory */

#define CEILING ((int64_t)1 << 62)

static int64_t plus(int64_t a, int64_t b)
{
    return a > CEILING - b ? CEILING : a + b;
}

/* Fill peak(s, t), the smallest peak of stages s..t, and its choices, in true bytes.
 *
 * Exact: no rounding to slots.  Both arrays have n (n + 1) / 2 entries.
 * Stages first..n-1 descending may be done in several calls, the last first.
 */
void ms_chain_smallest(const chain_t *c, int64_t first, int64_t last, int64_t *peak,
                              int32_t *choices)
{
    const int64_t n = c->n;
    for (int64_t s = last; s >= first; s--) {
        int64_t running = 0;
        for (int64_t t = s; t < n; t++) {
            const int64_t own = plus(c->tape[s], plus(c->grad[s + 1], plus(c->grad[s], c->reverse[s])));
            const int64_t all = max64(own, plus(c->tape[s], plus(c->grad[t + 1], c->taping[s])));
            int64_t best = all, found = s;
            if (t > s) {
                if (c->tapes)
                    best = max64(all, plus(c->tape[s], peak[row(n, s + 1) + t]));
                else
                    best = CEILING, found = INFEASIBLE;
                const int64_t j = t - 1;
                running = max64(running, plus(j == s ? 0 : c->state[j],
                                              plus(c->state[j + 1], c->advance[j])));
                const int64_t none = plus(c->grad[t + 1], running);
                for (int64_t k = s + 1; k <= t; k++) {
                    int64_t here = max64(plus(c->state[k], peak[row(n, k) + t]),
                                         peak[row(n, s) + k - 1]);
                    here = max64(here, none);
                    if (here < best) {
                        best = here;
                        found = k;
                    }
                }
            }
            peak[row(n, s) + t] = best;
            choices[row(n, s) + t] = (int32_t)found;
        }
    }
}

/* A heterogeneous chain in slots, and its table of excess: what chain.c and the joint planner share. */
#ifndef MS_CHAIN_H
#define MS_CHAIN_H
#include <math.h>
#include <stdint.h>

#include "core.h"

enum { PLANE = 16 };
enum { INFEASIBLE = -2 };

/* Solved: E(s, t, m) as planes of 16 slots, each of `cells` rows of the triangle. */
typedef struct {
    const chain_t *chain;
    const int32_t *none; /* none(s, t), as rows of the triangle */
    const float *table;
    int64_t cells;
} table_t;

static inline int64_t row(int64_t n, int64_t s)
{
    return s * n - s * (s - 1) / 2 - s; /* so that row + t is the cell of (s, t) */
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t need_all(const chain_t *c, int64_t s, int64_t t)
{
    return max64(c->grad[t + 1] + c->tape[s] + c->taping[s],
                 c->grad[s + 1] + c->tape[s] + c->grad[s] + c->reverse[s]);
}

static inline float excess(const table_t *x, int64_t s, int64_t t, int64_t m)
{
    return x->table[((m / PLANE) * x->cells + row(x->chain->n, s) + t) * PLANE + m % PLANE];
}

/* Checkpoints whose excess is within this share of the least are taken for equally good. */
#define TIE 1e-6f

/* The choice at (s, t, m): s for a tape, k for a checkpoint at state k, INFEASIBLE.
 *
 * Of equally good checkpoints the farthest: the longer the stretch, the fewer the states
 * kept, and states smaller than half a slot count nothing here.
 */
static inline int64_t chain_choice(const table_t *x, int64_t s, int64_t t, int64_t m)
{
    const chain_t *c = x->chain;
    float taped = INFINITY, best = INFINITY;
    int64_t found = INFEASIBLE;
    if (s == t)
        return m >= need_all(c, s, s) ? s : INFEASIBLE;
    if (c->tapes && m >= need_all(c, s, t) && m >= c->tape[s])
        taped = excess(x, s + 1, t, m - c->tape[s]);
    if (m >= x->none[row(c->n, s) + t])
        for (int64_t k = s + 1; k <= t; k++) {
            const int64_t rest = m - c->state[k];
            if (rest < 0)
                continue;
            const float right = excess(x, k, t, rest) + c->prefix[k];
            const float sum = excess(x, s, k - 1, m) + right - c->prefix[s];
            if (sum < INFINITY && sum <= best + TIE * fabsf(best))
                found = k;
            best = sum < best ? sum : best;
        }
    return taped < INFINITY && taped <= best ? s : found;
}

#endif

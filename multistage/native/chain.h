/* A heterogeneous chain in slots, and its table of excess: what chain.c and the joint planner share. */
#ifndef MS_CHAIN_H
#define MS_CHAIN_H
#include <math.h>
#include <stdint.h>

#include "core.h"

enum { PLANE = 16 };
enum { INFEASIBLE = -2 };

/* Solved: E(s, t, m) as planes of 16 slots, each of `cells` rows. */
typedef struct {
    const chain_t *chain;
    const int32_t *none; /* none(s, t), in cells */
    const float *table;
    int64_t cells;
} table_t;

static inline int64_t row(int64_t n, int64_t s)
{
    return s * n - s * (s - 1) / 2 - s; /* so that row + t is the cell of (s, t) */
}

/* The cell of (s, t): in a triangle or, where only a band of it is solved, in rows of one length.
 *
 * Of equal stages by length: those that begin the chain, those inside of it, those that end it.
 */
static inline int64_t cell_of(const chain_t *c, int64_t s, int64_t t)
{
    if (c->equal)
        return s == 0 ? t : t < c->n - 1 ? c->n + t - s : 2 * c->n - 2 + t - s;
    return c->band < c->n ? s * c->band + t - s : row(c->n, s) + t;
}

static inline int64_t cells_of(const chain_t *c)
{
    if (c->equal)
        return 3 * c->n - 3;
    return c->band < c->n ? c->n * c->band : c->n * (c->n + 1) / 2;
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Of stage s with its tape kept the first way, or by row `at` of the ways. */
static inline int64_t need_by(const chain_t *c, int64_t at, int64_t s, int64_t t)
{
    return c->tape[at] + max64(c->grad[t + 1] + c->taping[at],
                               c->grad[s + 1] + c->grad[s] + c->reverse[at]);
}

static inline int64_t need_all(const chain_t *c, int64_t s, int64_t t)
{
    return need_by(c, s, s, t);
}

/* The place of a choice's tape in the rows of the ways; -1 for a checkpoint. */
static inline int64_t tape_of(const chain_t *c, int64_t s, int64_t t, int64_t k)
{
    return k == s || s == t ? s : k > t ? (k - t) * c->n + s : -1;
}

static inline float excess(const table_t *x, int64_t s, int64_t t, int64_t m)
{
    return x->table[((m / PLANE) * x->cells + cell_of(x->chain, s, t)) * PLANE + m % PLANE];
}

/* The same of any pair: infinite beyond the band. */
static inline float excess_within(const table_t *x, int64_t s, int64_t t, int64_t m)
{
    return t - s < x->chain->band ? excess(x, s, t, m) : INFINITY;
}

/* Checkpoints whose excess is within this share of the least are taken for equally good. */
#define TIE 1e-6f

/* The choice at (s, t, m): s for a tape, t + w for one kept by way w, k for a checkpoint at
 * state k, INFEASIBLE.
 *
 * Of equally good checkpoints the farthest: the longer the stretch, the fewer the states
 * kept, and states smaller than half a slot count nothing here.
 */
static inline int64_t chain_choice(const table_t *x, int64_t s, int64_t t, int64_t m)
{
    const chain_t *c = x->chain;
    float taped = INFINITY, best = INFINITY;
    int64_t found = INFEASIBLE, tape = s;
    if (s == t)
        return m >= need_all(c, s, s) ? s : INFEASIBLE;
    for (int64_t w = 0; c->tapes && w < c->ways; w++) {
        const int64_t at = w * c->n + s;
        if (m < need_by(c, at, s, t) || m < c->tape[at])
            continue;
        const float sum = excess(x, s + 1, t, m - c->tape[at]) + c->again[at];
        if (sum < taped) {
            taped = sum;
            tape = w ? t + w : s;
        }
    }
    if (m >= x->none[cell_of(c, s, t)])
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
    return taped < INFINITY && taped <= best ? tape : found;
}

#endif

/* A heterogeneous chain in slots, and its table of excess: what chain.c and the joint planner share. */
#ifndef MS_CHAIN_H
#define MS_CHAIN_H
#include <math.h>
#include <stdint.h>

#include "core.h"

enum { PLANE = 16, TILE = 16 };
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

/* Whether stages s..t are a run of the table. */
static inline int has(const chain_t *c, int64_t s, int64_t t)
{
    return c->places ? c->places[s / TILE * c->n + t] >= 0 : t - s < c->band;
}

/* The cell of (s, t) in a triangle, or among the runs that there are. */
static inline int64_t run_cell(const chain_t *c, int64_t s, int64_t t)
{
    return c->places ? c->begins[s] + c->places[s / TILE * c->n + t] : row(c->n, s) + t;
}

/* The cell of (s, t): in a triangle or, where only a band of it is solved, in rows of one length.
 *
 * Of equal stages by length: those that begin the chain, those inside of it, those that end it.
 */
static inline int64_t cell_of(const chain_t *c, int64_t s, int64_t t)
{
    if (c->equal)
        return s == 0 ? t : t < c->n - 1 ? c->n + t - s : 2 * c->n - 2 + t - s;
    return c->band < c->n ? s * c->band + t - s : run_cell(c, s, t);
}

static inline int64_t cells_of(const chain_t *c)
{
    if (c->equal)
        return 3 * c->n - 3;
    if (c->places)
        return c->begins[c->n];
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

/* The same of any pair: infinite where it is not in the table. */
static inline float excess_within(const table_t *x, int64_t s, int64_t t, int64_t m)
{
    return has(x->chain, s, t) ? excess(x, s, t, m) : INFINITY;
}

/* The end before t of the runs that begin with stage s. */
static inline int64_t end_before(const chain_t *c, int64_t s, int64_t t)
{
    return c->ends ? c->ends[s / TILE * c->n + c->places[s / TILE * c->n + t] - 1] : t - 1;
}

/* How many stages there may be between two ends, up to the second; and the longest of the runs
 * by which these are reversed where all of them do not fit as one run, each from stage s on.
 */
enum { GAP = 64, NEAR = 128 };

/* The first run of those that (before, t] may end with. */
static inline int64_t first_near(int64_t before, int64_t t)
{
    return max64(before + 1, t - NEAR + 1);
}

/* The excess of s..t by such runs behind the end before t, and the first stage of the last of them. */
static inline float excess_near(const table_t *x, int64_t s, int64_t t, int64_t m, int64_t *first)
{
    const chain_t *c = x->chain;
    int64_t before = t - 1, end = t;
    while (before >= s && !has(c, s, before))
        before--;
    while (!has(c, s, end))
        end++;
    *first = INFEASIBLE;
    if (before < s || (before == t - 1 && end == t))
        return INFINITY;
    const int64_t passing = x->none[cell_of(c, s, end)] - c->grad[end + 1];
    float found[GAP + 1] = {excess(x, s, before, m)};
    for (int64_t j = before + 1; j <= t; j++) {
        found[j - before] = INFINITY;
        for (int64_t k = first_near(s, j); k <= j; k++) {
            const int64_t rest = m - c->state[k];
            if (m < c->grad[j + 1] + passing || rest < 0 || !has(c, k, j))
                continue;
            if (k - 1 < before && !has(c, s, k - 1))
                continue;
            const float run = excess(x, k, j, rest) + c->prefix[k];
            const float left = k - 1 < before ? excess(x, s, k - 1, m) : found[k - 1 - before];
            const float sum = left + run - c->prefix[s];
            if (sum < found[j - before]) {
                found[j - before] = sum;
                if (j == t)
                    *first = k;
            }
        }
    }
    return found[t - before];
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
    int64_t near = INFEASIBLE;
    const float by_near = c->places ? excess_near(x, s, t, m, &near) : INFINITY;
    if (!has(c, s, t))
        return near;
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
            if (rest < 0 || !has(c, s, k - 1))
                continue;
            const float right = excess(x, k, t, rest) + c->prefix[k];
            const float sum = excess(x, s, k - 1, m) + right - c->prefix[s];
            if (sum < INFINITY && sum <= best + TIE * fabsf(best))
                found = k;
            best = sum < best ? sum : best;
        }
    if (taped < INFINITY && taped <= best) {
        found = tape;
        best = taped;
    }
    return by_near < best ? near : found;
}

#endif

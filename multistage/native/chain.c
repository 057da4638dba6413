/* The optimal persistent schedules of a heterogeneous chain, for all memories at once.
 *
 * Beaumont et al. 2019 (RR-9302), Theorem 1, in terms of excess: E(s, t, m) is
 * the forward work done again, as a share of the chain's forward work, when
 * stages s..t are processed within m slots, the input of stage s not counted:
 *
 *   E(s, s, m) = leaf[s]                                if m >= all(s, s)
 *   E(s, t, m) = min of  E(s+1, t, m - tape[s])         if m >= all(s, t)
 *                        (the same, and what is made again, for the other ways to keep a tape)
 *                and     P[k] - P[s] + E(k, t, m - state[k]) + E(s, k-1, m)
 *                        over s < k <= t                if m >= none(s, t)
 *
 * Where not all runs (s, t) are in the table, k - 1 is an end of those that begin with s, and
 * the stages between the end before t and t may be reversed by short runs (`excess_near`).
 *
 * The second line is a (min,+) product.  Memory is cut into planes of 16
 * slots, kept apart: plane, then (s, t) by rows, then slot.  A plane is solved
 * by tiles of 16 x 16 pairs, diagonal by diagonal; the tiles of a diagonal are
 * independent of each other, and threads share them.  The caller allocates;
 * the only allocation here is scratch, per thread and call.
 *
 * No table of choices is kept: `ms_chain_trace` (chain_schedules.c) finds the choices again, O(n)
 * for each of the O(n) pairs that a schedule passes through.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "chain.h"

enum { DEPTH = 192, MAX_THREADS = 64 };
enum { BASELINE = 1, AVX2 = 2, AVX512 = 3 };
enum { NO_MEMORY = -1 };

typedef struct {
    const chain_t *chain;
    const int32_t *none; /* none(s, t), in cells */
    float *table;
    int64_t cells; /* of a plane */
    int64_t plane, diagonals;
    int isa;
    /* Shared by the threads of one call: tickets are given out in order, and a
     * tile waits until all tiles of the diagonals before its own are done. */
    int64_t first_diagonal, last_diagonal;
    atomic_int_fast64_t ticket, done;
    atomic_int failed;
} solve_t;

static inline float *cell(const solve_t *x, int64_t plane, int64_t s, int64_t t)
{
    return x->table + (plane * x->cells + run_cell(x->chain, s, t)) * PLANE;
}

/* ------------------------------------------------------------------ kernels */

#define NAME(x) x##_baseline
#define TARGET
#define LANES 4
#define ROWS 4
#define COLS 2
#if defined(__x86_64__)
#define MIN(a, b) _mm_min_ps(a, b)
#else
typedef float four_t __attribute__((vector_size(16)));
typedef int32_t mask_t __attribute__((vector_size(16)));
static inline four_t min_four(four_t a, four_t b)
{
    const mask_t less = a < b;
    return (four_t)(((mask_t)a & less) | ((mask_t)b & ~less));
}
#define MIN(a, b) min_four(a, b)
#endif
#include "chain_kernel.h"

#if defined(__x86_64__)
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2")))
#define LANES 8
#define ROWS 4
#define COLS 2
#define MIN(a, b) _mm256_min_ps(a, b)
#include "chain_kernel.h"

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq")))
#define LANES 16
#define ROWS 4
#define COLS 4
#define MIN(a, b) _mm512_min_ps(a, b)
#include "chain_kernel.h"
#define DISPATCH(isa, call, ...)                                                                  \
    ((isa) == AVX512 ? call##_avx512(__VA_ARGS__)                                                 \
                     : (isa) == AVX2 ? call##_avx2(__VA_ARGS__) : call##_baseline(__VA_ARGS__))
#else
#define DISPATCH(isa, call, ...) call##_baseline(__VA_ARGS__)
#endif

/* The best instruction set this machine has. */
int64_t ms_chain_isa(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return AVX512;
    if (__builtin_cpu_supports("avx2"))
        return AVX2;
#endif
    return BASELINE;
}

/* -------------------------------------------------------------------- tiles */

static void fill(float *values, int count, float value)
{
    for (int q = 0; q < count; q++)
        values[q] = value;
}

/* The 16 values of (s, t) at memories m..m+15, infinite below 0. */
static void load(const solve_t *x, int64_t s, int64_t t, int64_t m, float *out)
{
    if (m <= -PLANE) {
        fill(out, PLANE, INFINITY);
        return;
    }
    const int64_t plane = m >= 0 ? m / PLANE : -1;
    const int shift = (int)(m - plane * PLANE);
    if (plane >= 0)
        memcpy(out, cell(x, plane, s, t) + shift, (size_t)(PLANE - shift) * sizeof(float));
    else
        fill(out, PLANE - shift, INFINITY);
    if (shift)
        memcpy(out + PLANE - shift, cell(x, plane + 1, s, t), (size_t)shift * sizeof(float));
}

/* Lower the values of (s, t) to those by short runs (see `excess_near`), if one run does not fit. */
static void finish_near(const solve_t *x, int64_t s, int64_t t, int64_t none, float *out)
{
    const chain_t *c = x->chain;
    const int64_t m = x->plane * PLANE, before = end_before(c, s, t), passing = none - c->grad[t + 1];
    float found[GAP + 1][PLANE], run[PLANE];
    if (before == t - 1)
        return;
    load(x, before + 1, t, m - c->state[before + 1], run);
    memcpy(found[0], cell(x, x->plane, s, before), sizeof found[0]);
    if (run[0] < INFINITY || found[0][PLANE - 1] == INFINITY)
        return;
    for (int64_t j = before + 1; j <= t; j++) {
        float *best = found[j - before];
        fill(best, PLANE, INFINITY);
        for (int64_t k = first_near(s, j); k <= j; k++) {
            if (!has(c, k, j) || (k - 1 < before && !has(c, s, k - 1)))
                continue;
            const float *left = k - 1 < before ? cell(x, x->plane, s, k - 1) : found[k - 1 - before];
            load(x, k, j, m - c->state[k], run);
            for (int q = 0; q < PLANE; q++) {
                const float sum = left[q] + (run[q] + c->prefix[k]) - c->prefix[s];
                best[q] = m + q >= c->grad[j + 1] + passing && sum < best[q] ? sum : best[q];
            }
        }
    }
    for (int q = 0; q < PLANE; q++)
        out[q] = found[t - before][q] < out[q] ? found[t - before][q] : out[q];
}

/* Finish (s, t) of the current plane: `best` holds the checkpointing candidates plus P[s]. */
static void finish(const solve_t *x, int64_t s, int64_t t, float *best)
{
    const chain_t *c = x->chain;
    const int64_t m = x->plane * PLANE;
    const int32_t none = x->none[run_cell(c, s, t)];
    float *out = cell(x, x->plane, s, t), taped[PLANE];
    for (int q = 0; q < PLANE; q++)
        out[q] = m + q >= none ? best[q] - c->prefix[s] : INFINITY;
    for (int64_t w = 0; w < c->ways; w++) {
        const int64_t at = w * c->n + s, all = need_by(c, at, s, t);
        if (m + PLANE <= all)
            continue;
        if (c->tapes)
            load(x, s + 1, t, m - c->tape[at], taped);
        else
            fill(taped, PLANE, INFINITY);
        if (c->move_tape) {
            const float *behind = cell(x, x->plane, s + 1, t);
            for (int q = 0; q < PLANE; q++) {
                const float moved = behind[q] + c->move_tape[s];
                taped[q] = moved < taped[q] ? moved : taped[q];
            }
        }
        for (int q = 0; q < PLANE; q++) {
            const float other = m + q >= all ? taped[q] + c->again[at] : INFINITY;
            out[q] = other < out[q] ? other : out[q];
        }
    }
    if (c->ends)
        finish_near(x, s, t, none, out);
}

/* Scratch of a thread: tiles of sums, and right operands, shifted and with their prefix added. */
typedef struct {
    float sums[TILE * TILE * PLANE];
    float own[TILE * TILE * PLANE];      /* of the tile's finished pairs */
    float diagonal[TILE * TILE * PLANE]; /* of the tile on the diagonal in its columns */
    float right[(DEPTH + 1) * TILE * PLANE];
} scratch_t;

/* The end that is number j of the runs that begin with the stages of tile I. */
static inline int64_t end_of(const chain_t *c, int64_t I, int64_t j)
{
    return c->ends ? c->ends[I * c->n + j] : I * TILE + j;
}

static inline int64_t ends_of(const chain_t *c, int64_t I)
{
    return c->places ? c->places[I * c->n + c->n - 1] + 1 : c->n - I * TILE;
}

/* Solve the runs that begin in tile I, of ends TILE * d and the next. */
static void tile(const solve_t *x, int64_t I, int64_t d, scratch_t *y)
{
    const chain_t *c = x->chain;
    const int64_t n = c->n, m = x->plane * PLANE, wide = TILE * PLANE, ends = ends_of(c, I);
    const int64_t s0 = I * TILE, s1 = s0 + TILE < n ? s0 + TILE - 1 : n - 1, j0 = d * TILE;
    const int ns = (int)(s1 - s0 + 1), nt = (int)(j0 + TILE < ends ? TILE : ends - j0);
    int64_t t[TILE];
    for (int j = 0; j < nt; j++)
        t[j] = end_of(c, I, j0 + j);

    fill(y->sums, TILE * TILE * PLANE, INFINITY);
    /* Behind each end before these is a state that may be kept. */
    for (int64_t q0 = TILE - 1; q0 < j0; q0 += DEPTH) {
        const int64_t q1 = q0 + DEPTH < j0 ? q0 + DEPTH : j0;
        const float *left[TILE];
        for (int64_t q = q0; q < q1; q++)
            DISPATCH(x->isa, pack, x, end_of(c, I, q) + 1, t, nt, y->right + (q - q0) * wide);
        for (int i = 0; i < ns; i++)
            left[i] = cell(x, x->plane, s0 + i, end_of(c, I, q0));
        DISPATCH(x->isa, multiply, left, y->right, (int)(q1 - q0), y->sums, ns, nt);
    }
    for (int j = 1; d && j < nt; j++)
        DISPATCH(x->isa, pack, x, t[j - 1] + 1, t + j, nt - j, y->diagonal + j * wide + j * PLANE);
    /* What is left depends on this tile itself: columns up, rows down. */
    for (int j = 0; j < nt; j++)
        for (int64_t s = s1 < t[j] ? s1 : t[j]; s >= s0; s--) {
            const int64_t column = j * PLANE, below = (s1 < t[j] ? s1 : t[j]) - s;
            float *best = y->sums + (s - s0) * wide + column;
            if (s == t[j]) {
                float *out = cell(x, x->plane, s, s);
                const int64_t all = need_all(c, s, s);
                for (int q = 0; q < PLANE; q++)
                    out[q] = m + q >= all ? c->leaf[s] : INFINITY;
            } else {
                DISPATCH(x->isa, add_min, best, cell(x, x->plane, s, s),
                         y->own + (s + 1 - s0) * wide + column, (int)below);
                if (d)
                    DISPATCH(x->isa, add_min, best, cell(x, x->plane, s, t[0]),
                             y->diagonal + wide + column, j);
                finish(x, s, t[j], best);
            }
            if (s > s0)
                DISPATCH(x->isa, pack, x, s, t + j, 1, y->own + (s - s0) * wide + column);
        }
}

/* ------------------------------------------------------------------ threads */

static void *work(void *argument)
{
    solve_t *x = argument;
    const int64_t tiles = (x->chain->n + TILE - 1) / TILE;
    scratch_t *scratch = malloc(sizeof *scratch);
    if (!scratch) {
        atomic_store(&x->failed, 1);
        return 0;
    }
    int64_t diagonal = x->first_diagonal, before = 0;
    /* Runs of other ends, more of which are near: by first stages, by one thread. */
    for (int64_t I = tiles - 1; x->chain->ends && I >= 0; I--)
        for (int64_t d = 0; d * TILE < ends_of(x->chain, I); d++)
            tile(x, I, d, scratch);
    for (; !x->chain->ends;) {
        const int64_t ticket = atomic_fetch_add(&x->ticket, 1);
        while (diagonal <= x->last_diagonal && ticket >= before + tiles - diagonal) {
            before += tiles - diagonal;
            diagonal++;
        }
        if (diagonal > x->last_diagonal)
            break;
        while (atomic_load(&x->done) < before && !atomic_load(&x->failed))
            sched_yield();
        if (atomic_load(&x->failed))
            break;
        tile(x, ticket - before, diagonal, scratch);
        atomic_fetch_add(&x->done, 1);
    }
    free(scratch);
    return 0;
}

/* Solve diagonals first..last (of tiles) of one plane.  0, or NO_MEMORY.
 *
 * Planes ascend, and diagonals within a plane; the caller may stop between
 * two calls.  `none` and `table` have n (n + 1) / 2 entries a plane.
 */
int64_t ms_chain_solve(const chain_t *chain, const int32_t *none, float *table,
                              int64_t plane, int64_t first, int64_t last, int64_t isa,
                              int64_t threads)
{
    solve_t x = {.chain = chain,
                 .none = none,
                 .table = table,
                 .cells = cells_of(chain),
                 .plane = plane,
                 .isa = (int)isa,
                 .first_diagonal = first,
                 .last_diagonal = last};
    pthread_t helpers[MAX_THREADS];
    int started = 0;
    atomic_init(&x.ticket, 0);
    atomic_init(&x.done, 0);
    atomic_init(&x.failed, 0);
    for (; started < threads - 1 && started < MAX_THREADS; started++)
        if (pthread_create(&helpers[started], 0, work, &x))
            break; /* fewer will do */
    work(&x);
    for (int i = 0; i < started; i++)
        pthread_join(helpers[i], 0);
    return atomic_load(&x.failed) ? NO_MEMORY : 0;
}

/* Fill none(s, t) in all cells, clipped to `most`. */
void ms_chain_none(const chain_t *c, int32_t *none, int64_t most)
{
    for (int64_t s = 0; s < c->n; s++) {
        int64_t peak = INT64_MIN; /* overheads may be negative: see `Sizes.beside` */
        none[cell_of(c, s, s)] = 0;
        for (int64_t t = s + 1; t < c->n; t++) {
            const int64_t j = t - 1; /* the last stage run forward before stage t is reached */
            peak = max64(peak, (j == s ? 0 : c->state[j]) + c->state[j + 1] + c->advance[j]);
            const int64_t need = c->grad[t + 1] + peak;
            if (has(c, s, t))
                none[cell_of(c, s, t)] = (int32_t)(need < most ? need : most);
        }
    }
}

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

enum { TILE = 16, DEPTH = 192, MAX_THREADS = 64 };
enum { BASELINE = 1, AVX2 = 2, AVX512 = 3 };
enum { NO_MEMORY = -1 };

typedef struct {
    const chain_t *chain;
    const int32_t *none; /* none(s, t), as rows of the triangle */
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
    return x->table + (plane * x->cells + row(x->chain->n, s) + t) * PLANE;
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

/* Finish (s, t) of the current plane: `best` holds the checkpointing candidates plus P[s]. */
static void finish(const solve_t *x, int64_t s, int64_t t, float *best)
{
    const chain_t *c = x->chain;
    const int64_t m = x->plane * PLANE;
    const int32_t none = x->none[row(c->n, s) + t];
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
}

/* Scratch of a thread: tiles of sums, and right operands, shifted and with their prefix added. */
typedef struct {
    float sums[TILE * TILE * PLANE];
    float own[TILE * TILE * PLANE];      /* of the tile's finished pairs */
    float diagonal[TILE * TILE * PLANE]; /* of the tile on the diagonal in its columns */
    float right[(DEPTH + 1) * TILE * PLANE];
} scratch_t;

static void tile(const solve_t *x, int64_t I, int64_t J, scratch_t *y)
{
    const chain_t *c = x->chain;
    const int64_t n = c->n, m = x->plane * PLANE, wide = TILE * PLANE;
    const int64_t s0 = I * TILE, s1 = s0 + TILE < n ? s0 + TILE - 1 : n - 1;
    const int64_t t0 = J * TILE, t1 = t0 + TILE < n ? t0 + TILE - 1 : n - 1;
    const int ns = (int)(s1 - s0 + 1), nt = (int)(t1 - t0 + 1);

    fill(y->sums, TILE * TILE * PLANE, INFINITY);
    for (int64_t k0 = (I + 1) * TILE; I < J && k0 <= t0; k0 += DEPTH) {
        const int64_t k1 = k0 + DEPTH - 1 < t0 ? k0 + DEPTH - 1 : t0;
        const float *left[TILE];
        for (int64_t k = k0; k <= k1; k++)
            DISPATCH(x->isa, pack, x, k, t0, nt, y->right + (k - k0) * wide);
        for (int i = 0; i < ns; i++)
            left[i] = cell(x, x->plane, s0 + i, k0 - 1);
        DISPATCH(x->isa, multiply, left, y->right, (int)(k1 - k0 + 1), y->sums, ns, nt);
    }
    for (int64_t k = t0 + 1; I < J && k <= t1; k++)
        DISPATCH(x->isa, pack, x, k, k, (int)(t1 - k + 1),
                 y->diagonal + (k - t0) * wide + (k - t0) * PLANE);
    /* What is left depends on this tile itself: columns up, rows down. */
    for (int64_t t = t0; t <= t1; t++)
        for (int64_t s = s1 < t ? s1 : t; s >= s0; s--) {
            const int64_t column = (t - t0) * PLANE, below = (s1 < t ? s1 : t) - s;
            float *best = y->sums + (s - s0) * wide + column;
            if (s == t) {
                float *out = cell(x, x->plane, s, s);
                const int64_t all = need_all(c, s, s);
                for (int q = 0; q < PLANE; q++)
                    out[q] = m + q >= all ? c->leaf[s] : INFINITY;
            } else {
                DISPATCH(x->isa, add_min, best, cell(x, x->plane, s, s),
                         y->own + (s + 1 - s0) * wide + column, (int)below);
                if (I < J)
                    DISPATCH(x->isa, add_min, best, cell(x, x->plane, s, t0),
                             y->diagonal + wide + column, (int)(t - t0));
                finish(x, s, t, best);
            }
            if (s > s0)
                DISPATCH(x->isa, pack, x, s, t, 1, y->own + (s - s0) * wide + column);
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
    for (;;) {
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
        const int64_t I = ticket - before;
        tile(x, I, I + diagonal, scratch);
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
                 .cells = chain->n * (chain->n + 1) / 2,
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
            none[cell_of(c, s, t)] = (int32_t)(need < most ? need : most);
        }
    }
}

/* Plans of a chain with a slow tier by a dynamic program whose dimensions are memory and the
 * backlog of writes.
 *
 * least[f][s][w][m]: the least seconds beyond one forward sweep that stages s.. take, as a share
 * of that sweep, with m slots for them, when w steps of time of writes are queued as stage s
 * starts.  f tells where state s is: 0 in fast memory and paid for (or the caller's), 1 inside
 * tape s-1 of the tier, 2 in the tier.  `apart[s][w][m]` is the better of 0 and 2, paid for.
 *
 *   least[f][s][w][m] = min of
 *     E(s, n-1, m - its input - the backlog)                        the last segment
 *     P[e+1] - P[s] + E(s, e, m - landing(f) - reserve) + apart[e+1][w'][m]      a segment
 *     least[0][s+1][w'][m - tape]                                   a tape that stays
 *     price of travel + least[1][s+1][w' + its write][m]           a tape that travels
 *     price of travel + apart[s+1][w' + its write][m]              and state s+1 besides
 *     step + least[f][s][w-1][m]                                    waiting for a write
 *
 * where w' is what is left of w when the stages have run.  Writes in flight hold memory.
 * E is the table of chain.c, every `stride`-th memory of it.
 *
 * joint_rounding.c rounds bytes and seconds, joint_read_off.c reads the plans off.
 */
#include "joint_program.h"

/* out = min(out, left + right + add) over `count` values; no FMA, so all sets agree. */
#define ROWS_MIN                                                                                  \
    {                                                                                             \
        for (int64_t m = 0; m < count; m++) {                                                     \
            const float sum = left[m] + right[m] + add;                                           \
            out[m] = sum < out[m] ? sum : out[m];                                                 \
        }                                                                                         \
    }
#define ROWS (float *restrict out, const float *restrict left, const float *restrict right,      \
              float add, int64_t count)
static void rows_min_baseline ROWS ROWS_MIN
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void rows_min_avx2 ROWS ROWS_MIN
__attribute__((target("avx512f,avx512vl,avx512dq"))) static void rows_min_avx512 ROWS ROWS_MIN
#endif

static void rows_min(int64_t isa, float *out, const float *left, const float *right, float add,
                     int64_t count)
{
#if defined(__x86_64__)
    if (isa >= 3) {
        rows_min_avx512(out, left, right, add, count);
        return;
    }
    if (isa == 2) {
        rows_min_avx2(out, left, right, add, count);
        return;
    }
#endif
    (void)isa;
    rows_min_baseline(out, left, right, add, count);
}

static void gather(solve_t *z, int64_t s, int64_t e, float *out)
{
    const joint_t *x = z->x;
    const table_t table = {x->slots, x->none, x->table, cells_of(x->slots)};
    for (int64_t m = 0; m < z->width; m++)
        out[m] = m <= z->slots ? excess_within(&table, s, e, m * z->p->stride) : INFINITY;
}

/* The ends of segments from s, and their excess; the last row is that of the last segment. */
static void gather_ends(solve_t *z, int64_t s)
{
    z->n_ends = 0;
    for (int64_t e = s; e < z->n - 1; e = next_end(z, s, e)) {
        gather(z, s, e, z->excess + z->n_ends * z->width);
        z->ends[z->n_ends++] = e;
    }
    gather(z, s, z->n - 1, z->excess + z->n_ends * z->width);
}

static void take_min(const solve_t *z, float *out, int64_t from, const float *other, int64_t shift,
                     float add)
{
    /* Rows are infinite below 0 and end at z->slots. */
    for (int64_t m = max64(from, shift); m <= z->slots; m++) {
        const float value = other[m - shift] + add;
        out[m] = value < out[m] ? value : out[m];
    }
}

/* The candidates of segments, for all places of the input at once: they share the right part. */
static void solve_segments(solve_t *z, int64_t places, int64_t s, int64_t w)
{
    int64_t run = 0, reached = s;
    const int64_t queued = backlog(z, w, s);
    for (int64_t k = 0; k < z->n_ends; k++) {
        const int64_t e = z->ends[k];
        for (; reached <= e; reached++)
            run = to_run(z, s, reached, run);
        const float *left = z->excess + k * z->width;
        const float *right = apart(z, e + 1, after(z, w, s, e + 1));
        const float add = share_run(z, s, e);
        for (int f = 0; f < places; f++) {
            const int64_t lands = landing(z, f, s) + z->p->reserve;
            const int64_t from = max64(lands, run + input(z, f, s) + queued);
            if (from <= z->slots)
                rows_min(z->p->isa, least(z, f, s, w) + from, left + from - lands, right + from,
                         add, z->slots + 1 - from);
        }
    }
}

static void solve_rows(solve_t *z, int64_t s, int64_t w)
{
    const int64_t n = z->n, places = s ? 3 : 1;
    const int64_t then = after(z, w, s, s + 1), queued = then + z->tape_w[s];
    for (int f = 0; f < places; f++) {
        float *out = least(z, f, s, w);
        for (int64_t m = 0; m < z->width; m++)
            out[m] = INFINITY;
        const int64_t rest = input(z, f, s) + backlog(z, after(z, w, s, n - 1), n - 1);
        take_min(z, out, rest, z->excess + z->n_ends * z->width, rest, 0);
    }
    solve_segments(z, places, s, w);
    for (int f = 0; f < places; f++) {
        float *out = least(z, f, s, w);
        if (s < n - 1 && z->x->slots->tapes) {
            const int64_t from = to_tape(z, f, s) + backlog(z, w, s);
            take_min(z, out, from, least(z, 0, s + 1, then), z->tape[s], 0);
            if (queued <= z->p->steps && may(z, s, MAY_TAPE)) {
                const float price = travel_price(z, z->x->bytes->tape[s]);
                take_min(z, out, from + z->p->reserve, least(z, 1, s + 1, queued), 0, price);
                take_min(z, out, from + z->p->reserve, apart(z, s + 1, queued), 0, price);
            }
        }
        if (w)
            take_min(z, out, 0, least(z, f, s, w - 1), 0, (float)z->step);
    }
}

static void solve_apart(solve_t *z, int64_t s, int64_t w)
{
    float *out = apart(z, s, w);
    const int64_t queued = w + z->state_w[s];
    for (int64_t m = 0; m < z->width; m++)
        out[m] = INFINITY;
    take_min(z, out, 0, least(z, 0, s, w), z->state[s], 0);
    if (queued <= z->p->steps && may(z, s, MAY_STATE))
        take_min(z, out, 0, least(z, 2, s, queued), 0, travel_price(z, z->x->bytes->state[s]));
}

/* Write the plans that the program finds best for `count` shares of the limit.
 *
 * `fates` takes n bytes a share, `found` whether there is a plan.
 */
void ms_joint_program(const joint_t *x, const program_t *p, int64_t *work,
                             const double *shares, int64_t count, uint8_t *fates, uint8_t *found)
{
    solve_t z = {.x = x, .p = p, .n = x->slots->n, .slots = x->memories / p->stride};
    joint_round(&z, work);
    for (int64_t s = z.n - 1; s >= 0; s--) {
        gather_ends(&z, s);
        for (int64_t w = 0; w <= p->steps; w++)
            solve_rows(&z, s, w);
        for (int64_t w = 0; s && w <= p->steps; w++)
            solve_apart(&z, s, w);
    }
    for (int64_t k = 0; k < count; k++) {
        const double memory = shares[k] * (double)x->limit / (x->unit * (double)p->stride);
        const int64_t m = memory < (double)z.slots ? (int64_t)memory : z.slots;
        found[k] = least(&z, 0, 0, 0)[m] < INFINITY && joint_read_off(&z, m, fates + k * z.n);
    }
}

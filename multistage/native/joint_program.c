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
 *     price of reading + least[1][s+1][w' + its write][m]           a tape that travels
 *     price of reading + apart[s+1][w' + its write][m]              and state s+1 besides
 *     step + least[f][s][w-1][m]                                    waiting for a write
 *
 * where w' is what is left of w when the stages have run.  Writes in flight hold memory.
 * E is the table of chain.c, every `stride`-th memory of it.
 *
 * Rounding decides: time advances by prefix sums; what takes 1.5 steps or more is
 * rounded up, shorter things by prefix sums.  A program that rounds all of them by prefix sums
 * chooses those which happened to be rounded down.
 */
#include "joint.h"

#include <string.h>

/* Beyond so many stages, far ends of segments are tried every eighth of their length. */
enum { MOST_ENDS = 120 };

typedef struct {
    const joint_t *x;
    const program_t *p;
    int64_t n, slots, width, layer; /* floats of a row, of a stage */
    double forward_s, step;         /* seconds, and a share of them */
    double bytes_per_step;
    float *least[3], *apart;
    float *excess; /* of the ends of segments that start at s, then of the last segment */
    int64_t *state, *tape, *grad, *advance, *taping, *reverse, *clock, *state_w, *tape_w, *staged;
    int64_t *ends, n_ends;
} solve_t;

static double total(const double *values, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += values[i];
    return sum;
}

static int64_t width_of(const joint_t *x, int64_t stride)
{
    return (x->memories / stride + PLANE) / PLANE * PLANE;
}

/* Floats of the scratch; integers follow. */
static int64_t floats_of(const joint_t *x, const program_t *p)
{
    const int64_t n = x->slots->n, width = width_of(x, p->stride);
    return 4 * (n + 1) * (p->steps + 1) * width + (n + 1) * width;
}

int64_t ms_joint_program_len(const joint_t *x, const program_t *p)
{
    return (floats_of(x, p) + 1) / 2 + 12 * (x->slots->n + 2);
}

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

static float *least(const solve_t *z, int f, int64_t s, int64_t w)
{
    return z->least[f] + s * z->layer + w * z->width;
}

static float *apart(const solve_t *z, int64_t s, int64_t w)
{
    return z->apart + s * z->layer + w * z->width;
}

static int64_t after(const solve_t *z, int64_t w, int64_t s, int64_t e)
{
    return max64(0, w + z->clock[s] - z->clock[e]);
}

static int64_t landing(const solve_t *z, int f, int64_t s)
{
    return f == 0 ? 0 : f == 1 ? z->tape[s - 1] : z->state[s];
}

static int64_t input(const solve_t *z, int f, int64_t s)
{
    return f ? z->state[s] : 0;
}

/* Slots that w steps of writes hold when stage s starts. */
static int64_t backlog(const solve_t *z, int64_t w, int64_t s)
{
    return (int64_t)((double)w * z->bytes_per_step) + (w ? z->staged[s] : 0);
}

static int64_t to_tape(const solve_t *z, int f, int64_t s)
{
    return z->tape[s] +
           max64(z->grad[z->n] + z->taping[s], z->grad[s + 1] + z->grad[s] + z->reverse[s]) +
           max64(landing(z, f, s), input(z, f, s));
}

static int may(const solve_t *z, int64_t s, int what)
{
    return (z->x->may[s] & what) != 0;
}

static float read_price(const solve_t *z, int64_t bytes)
{
    const joint_t *x = z->x;
    const double read_s = x->latency_s + (double)bytes / x->read_bytes_per_s;
    return (float)(z->p->read_price * z->p->speed * read_s / z->forward_s);
}

static int64_t in_slots(const solve_t *z, int64_t bytes)
{
    const double slots = rint((double)bytes / (z->x->unit * (double)z->p->stride));
    return slots < 1e6 ? (int64_t)slots : 1000000;
}

static void round_times(solve_t *z)
{
    const joint_t *x = z->x;
    const double forward_s = z->forward_s, scale = z->p->speed / forward_s;
    double clock = 0, states = 0, tapes = 0;
    for (int64_t i = 0; i <= z->n; i++) {
        z->clock[i] = (int64_t)(clock / forward_s / z->step);
        if (i == z->n)
            break;
        clock += x->forward_s[i];
        for (int kind = 0; kind < 2; kind++) {
            const double bytes = (double)(kind ? x->bytes->tape[i] : x->bytes->state[i]);
            const double took = scale * (x->latency_s + bytes / x->write_bytes_per_s) / z->step;
            double *sum = kind ? &tapes : &states;
            const int64_t steps = took > 1.5
                                      ? (int64_t)ceil((took < 1e6 ? took : 1e6) - 0.2)
                                      : (int64_t)(*sum + took) - (int64_t)*sum;
            *sum += took < 1e6 ? took : 1e6;
            (kind ? z->tape_w : z->state_w)[i] = steps;
        }
    }
}

static void prepare(solve_t *z, int64_t *work)
{
    const joint_t *x = z->x;
    const program_t *p = z->p;
    const chain_t *c = x->bytes;
    const int64_t n = z->n;
    const double forward_s = z->forward_s, limit = (double)x->limit;
    float *at = (float *)work;
    for (int f = 0; f < 3; f++, at += (n + 1) * z->layer)
        z->least[f] = at;
    z->apart = at;
    z->excess = at + (n + 1) * z->layer;
    int64_t *part = work + (floats_of(x, p) + 1) / 2;
    int64_t **parts[] = {&z->state,  &z->grad,    &z->tape,   &z->advance, &z->taping, &z->reverse,
                         &z->clock, &z->state_w, &z->tape_w, &z->staged,  &z->ends};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++, part += n + 2)
        *parts[i] = part;
    double tapes = 0;
    for (int64_t i = 0; i <= n; i++) {
        z->state[i] = in_slots(z, c->state[i]);
        z->grad[i] = in_slots(z, c->grad[i]);
        if (i == n)
            break;
        z->tape[i] = in_slots(z, c->tape[i]);
        z->advance[i] = in_slots(z, c->advance[i]);
        z->taping[i] = in_slots(z, c->taping[i]);
        z->reverse[i] = in_slots(z, c->reverse[i]);
        tapes += (double)c->tape[i];
    }
    const double mean = tapes / (double)n;
    const double write_s = p->speed * (x->latency_s + mean / x->write_bytes_per_s);
    const double all_s = p->speed * limit / x->write_bytes_per_s;
    double step_s = (all_s < 1.2 * forward_s ? all_s : 1.2 * forward_s) / (double)p->steps;
    if (p->fineness > 0 && write_s / p->fineness < step_s)
        step_s = write_s / p->fineness;
    if (!(step_s > 1e-9 * forward_s))
        step_s = 1e-9 * forward_s;
    z->step = step_s / forward_s;
    z->bytes_per_step =
        write_s > 0 ? step_s / write_s * mean / (x->unit * (double)p->stride) : 0;
    if (z->bytes_per_step > 1e6)
        z->bytes_per_step = 1e6;
    round_times(z);
    const int64_t recent = max64(4, n / 3);
    for (int64_t s = 0; s < n; s++) {
        z->staged[s] = 0;
        for (int64_t j = max64(0, s - recent); j < s; j++)
            z->staged[s] = max64(z->staged[s], (int64_t)(p->staging * (double)z->tape[j]));
    }
}

static void gather(solve_t *z, int64_t s, int64_t e, float *out)
{
    const joint_t *x = z->x;
    const table_t table = {x->slots, x->none, x->table, z->n * (z->n + 1) / 2};
    const float *values = table.table + (row(z->n, s) + e) * PLANE;
    for (int64_t m = 0, at = 0; m < z->width; m++, at += z->p->stride)
        out[m] = m <= z->slots ? values[at / PLANE * PLANE * table.cells + at % PLANE] : INFINITY;
}

static float excess_at(const solve_t *z, int64_t s, int64_t e, int64_t m)
{
    const joint_t *x = z->x;
    const table_t table = {x->slots, x->none, x->table, z->n * (z->n + 1) / 2};
    return excess(&table, s, e, m * z->p->stride);
}

static int64_t next_end(const solve_t *z, int64_t s, int64_t e)
{
    const int64_t far = z->n > MOST_ENDS ? (e - s) / 8 : 0;
    return e + max64(1, far);
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

static float share_run(const solve_t *z, int64_t s, int64_t e)
{
    return z->x->slots->prefix[e + 1] - z->x->slots->prefix[s];
}

/* The least slots in which s..e run forward, their input not counted; grows with e. */
static int64_t to_run(const solve_t *z, int64_t s, int64_t e, int64_t before)
{
    const int64_t need = (e == s ? 0 : z->state[e]) + z->state[e + 1] + z->advance[e];
    return max64(before, need + z->grad[z->n]);
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
        if (s < n - 1) {
            const int64_t from = to_tape(z, f, s) + backlog(z, w, s);
            take_min(z, out, from, least(z, 0, s + 1, then), z->tape[s], 0);
            if (queued <= z->p->steps && may(z, s, MAY_TAPE)) {
                const float price = read_price(z, z->x->bytes->tape[s]);
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
        take_min(z, out, 0, least(z, 2, s, queued), 0, read_price(z, z->x->bytes->state[s]));
}

/* Where a plan is while it is read off: stage, memory, backlog, and where its input is. */
typedef struct {
    int64_t s, m, w;
    int f;
} place_t;

static void go_apart(const solve_t *z, place_t *at, uint8_t *fates)
{
    const int64_t s = at->s, queued = at->w + z->state_w[s];
    fates[s] |= STARTS;
    const float away = queued <= z->p->steps && may(z, s, MAY_STATE)
                           ? least(z, 2, s, queued)[at->m] + read_price(z, z->x->bytes->state[s])
                           : INFINITY;
    if (at->m >= z->state[s] && least(z, 0, s, at->w)[at->m - z->state[s]] <= away) {
        at->f = 0, at->m -= z->state[s];
    } else {
        fates[s] |= STATE_AWAY;
        at->f = 2, at->w = queued;
    }
}

/* Whether the tape of the stage is kept; then continue behind it. */
static int go_tape(const solve_t *z, place_t *at, uint8_t *fates, float best)
{
    const int64_t s = at->s, m = at->m, then = after(z, at->w, s, s + 1);
    const int64_t from = to_tape(z, at->f, s) + backlog(z, at->w, s), queued = then + z->tape_w[s];
    const float price = read_price(z, z->x->bytes->tape[s]);
    if (m >= from && m >= z->tape[s] && least(z, 0, s + 1, then)[m - z->tape[s]] <= best) {
        fates[s] |= KEEPS_TAPE;
        *at = (place_t){s + 1, m - z->tape[s], then, 0};
        return 1;
    }
    if (m < from + z->p->reserve || queued > z->p->steps || !may(z, s, MAY_TAPE))
        return 0;
    const int inside = least(z, 1, s + 1, queued)[m] + price <= best;
    if (!inside && !(apart(z, s + 1, queued)[m] + price <= best))
        return 0;
    fates[s] |= KEEPS_TAPE | TAPE_AWAY;
    *at = (place_t){s + 1, m, queued, 1};
    if (!inside) {
        fates[s + 1] |= APART;
        go_apart(z, at, fates);
    }
    return 1;
}

static int read_off(solve_t *z, int64_t memory, uint8_t *fates)
{
    const int64_t n = z->n;
    place_t at = {0, memory, 0, 0};
    memset(fates, 0, (size_t)n);
    while (at.s < n) {
        const int64_t s = at.s;
        float best = least(z, at.f, s, at.w)[at.m];
        fates[s] |= STARTS;
        while (at.w && least(z, at.f, s, at.w - 1)[at.m] + (float)z->step <= best)
            best = least(z, at.f, s, --at.w)[at.m];
        const int64_t in = input(z, at.f, s), queued = backlog(z, at.w, s);
        const int64_t rest = in + backlog(z, after(z, at.w, s, n - 1), n - 1);
        if (at.m >= rest && excess_at(z, s, n - 1, at.m - rest) <= best)
            return 1;
        if (s < n - 1 && go_tape(z, &at, fates, best))
            continue;
        const int64_t lands = landing(z, at.f, s) + z->p->reserve;
        int64_t run = 0, reached = s, e = s;
        for (; e < n - 1; e = next_end(z, s, e)) {
            for (; reached <= e; reached++)
                run = to_run(z, s, reached, run);
            if (at.m < max64(lands, run + in + queued))
                continue;
            const float here = excess_at(z, s, e, at.m - lands) +
                               apart(z, e + 1, after(z, at.w, s, e + 1))[at.m] +
                               share_run(z, s, e);
            if (here <= best)
                break;
        }
        if (e >= n - 1)
            return 0;
        at = (place_t){e + 1, at.m, after(z, at.w, s, e + 1), 0};
        go_apart(z, &at, fates);
    }
    return 1;
}

/* Write the plans that the program finds best for `count` shares of the limit.
 *
 * `fates` takes n bytes a share, `found` whether there is a plan.
 */
void ms_joint_program(const joint_t *x, const program_t *p, int64_t *work,
                             const double *shares, int64_t count, uint8_t *fates, uint8_t *found)
{
    solve_t z = {.x = x, .p = p, .n = x->slots->n, .slots = x->memories / p->stride};
    z.width = width_of(x, p->stride);
    z.layer = (p->steps + 1) * z.width;
    z.forward_s = total(x->forward_s, z.n);
    prepare(&z, work);
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
        found[k] = least(&z, 0, 0, 0)[m] < INFINITY && read_off(&z, m, fates + k * z.n);
    }
}

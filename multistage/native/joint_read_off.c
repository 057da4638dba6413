/* The plan that the dynamic program of joint_program.c finds best, read off its tables. */
#include "joint_program.h"

#include <string.h>

/* Where a plan is while it is read off: stage, memory, backlog, and where its input is. */
typedef struct {
    int64_t s, m, w;
    int f;
} place_t;

static float excess_at(const solve_t *z, int64_t s, int64_t e, int64_t m)
{
    const joint_t *x = z->x;
    const table_t table = {x->slots, x->none, x->table, cells_of(x->slots)};
    return excess_within(&table, s, e, m * z->p->stride);
}

static void go_apart(const solve_t *z, place_t *at, uint8_t *fates)
{
    const int64_t s = at->s, queued = at->w + z->state_w[s];
    fates[s] |= STARTS;
    const float away = queued <= z->p->steps && may(z, s, MAY_STATE)
                           ? least(z, 2, s, queued)[at->m] + travel_price(z, z->x->bytes->state[s])
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
    const float price = travel_price(z, z->x->bytes->tape[s]);
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

int joint_read_off(const solve_t *z, int64_t memory, uint8_t *fates)
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
        if (s < n - 1 && z->x->slots->tapes && go_tape(z, &at, fates, best))
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

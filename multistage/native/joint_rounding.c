/* Bytes in slots and seconds in steps, as the dynamic program of joint_program.c counts them.
 *
 * Rounding decides: time advances by prefix sums; what takes 1.5 steps or more is
 * rounded up, shorter things by prefix sums.  A program that rounds all of them by prefix sums
 * chooses those which happened to be rounded down.
 */
#include "joint_program.h"

#include <stddef.h>

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
            const double took = scale * (x->write_s + bytes / x->write_bytes_per_s) / z->step;
            double *sum = kind ? &tapes : &states;
            const int64_t steps = took > 1.5
                                      ? (int64_t)ceil((took < 1e6 ? took : 1e6) - 0.2)
                                      : (int64_t)(*sum + took) - (int64_t)*sum;
            *sum += took < 1e6 ? took : 1e6;
            (kind ? z->tape_w : z->state_w)[i] = steps;
        }
    }
}

void joint_round(solve_t *z, int64_t *work)
{
    const joint_t *x = z->x;
    const program_t *p = z->p;
    const chain_t *c = x->bytes;
    const int64_t n = z->n;
    z->width = width_of(x, p->stride);
    z->layer = (p->steps + 1) * z->width;
    z->forward_s = total(x->forward_s, n);
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
    const double write_s = p->speed * (x->write_s + mean / x->write_bytes_per_s);
    const double fixed_s = mean > 0 ? p->speed * x->write_s * (limit / mean) : 0;
    const double all_s = p->speed * limit / x->write_bytes_per_s + fixed_s;
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

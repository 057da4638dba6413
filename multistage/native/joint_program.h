/* The dynamic program of joint_program.c: its tables, and what it asks of a chain in slots. */
#ifndef MS_JOINT_PROGRAM_H
#define MS_JOINT_PROGRAM_H
#include "joint.h"

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

static inline float *least(const solve_t *z, int f, int64_t s, int64_t w)
{
    return z->least[f] + s * z->layer + w * z->width;
}

static inline float *apart(const solve_t *z, int64_t s, int64_t w)
{
    return z->apart + s * z->layer + w * z->width;
}

static inline int64_t after(const solve_t *z, int64_t w, int64_t s, int64_t e)
{
    return max64(0, w + z->clock[s] - z->clock[e]);
}

static inline int64_t landing(const solve_t *z, int f, int64_t s)
{
    return f == 0 ? 0 : f == 1 ? z->tape[s - 1] : z->state[s];
}

static inline int64_t input(const solve_t *z, int f, int64_t s)
{
    return f ? z->state[s] : 0;
}

/* Slots that w steps of writes hold when stage s starts. */
static inline int64_t backlog(const solve_t *z, int64_t w, int64_t s)
{
    return (int64_t)((double)w * z->bytes_per_step) + (w ? z->staged[s] : 0);
}

static inline int64_t to_tape(const solve_t *z, int f, int64_t s)
{
    return z->tape[s] +
           max64(z->grad[z->n] + z->taping[s], z->grad[s + 1] + z->grad[s] + z->reverse[s]) +
           max64(landing(z, f, s), input(z, f, s));
}

static inline int may(const solve_t *z, int64_t s, int what)
{
    return (z->x->may[s] & what) != 0;
}

/* What sending so many bytes to the tier and back costs. */
static inline float travel_price(const solve_t *z, int64_t bytes)
{
    const joint_t *x = z->x;
    const double read_s = x->read_s + (double)bytes / x->read_bytes_per_s;
    const double overhead_s = x->write_overhead_s + x->read_overhead_s;
    return (float)((z->p->read_price * z->p->speed * read_s + overhead_s) / z->forward_s);
}

static inline int64_t next_end(const solve_t *z, int64_t s, int64_t e)
{
    const int64_t far = z->n > MOST_ENDS ? (e - s) / 8 : 0;
    e += max64(1, far);
    while (e < z->n - 1 && !has(z->x->slots, s, e))
        e++;
    return e;
}

static inline float share_run(const solve_t *z, int64_t s, int64_t e)
{
    return z->x->slots->prefix[e + 1] - z->x->slots->prefix[s];
}

/* The least slots in which s..e run forward, their input not counted; grows with e. */
static inline int64_t to_run(const solve_t *z, int64_t s, int64_t e, int64_t before)
{
    const int64_t need = (e == s ? 0 : z->state[e]) + z->state[e + 1] + z->advance[e];
    return max64(before, need + z->grad[z->n]);
}

/* -------------------------------------------------------- joint_rounding.c */

/* Give the program its rows in the work array, and the chain in slots and steps. */
void joint_round(solve_t *z, int64_t *work);

/* --------------------------------------------------------- joint_read_off.c */

/* Write the plan of `memory` slots as fates; 0 if there is none. */
int joint_read_off(const solve_t *z, int64_t memory, uint8_t *fates);

#endif

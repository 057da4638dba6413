/* Intervals of a streaming schedule reversed by Revolve, with reads queued meanwhile.
 *
 * A reversal by Revolve that can wait for nothing is a sum and is added as one; only the
 * number of actions of a long one is an estimate, and counts only where the driver's time
 * per action does.
 */
#include "revolve.h"
#include "sweep_run.h"

#define COUNTED 512   /* longer reversals have as many actions per step as this one */
#define PATIENCE 4096 /* actions run one by one, at most, while a write may be waited for */
#define SHORT 128     /* reversals up to this length are run action by action */

static double nu(run_t *r, int64_t length, int64_t slots)
{
    if (length != r->nu_length || slots != r->nu_slots) {
        r->nu_length = length;
        r->nu_slots = slots;
        r->nu_value = revolve_nu(length, slots);
    }
    return r->nu_value;
}

/* Actions of a reversal of `length` steps; an estimate beyond COUNTED. */
static double count_actions(run_t *r, int64_t length, int64_t slots, int64_t keep_first)
{
    const int64_t counted = length < COUNTED ? length : COUNTED;
    slots = slots < counted ? slots : counted;
    if (counted != r->actions_length || 2 * slots + keep_first != r->actions_slots) {
        int64_t state[16], out[3 * 64], made;
        ms_revolve_init(state, r->stack, 0, counted, slots, keep_first);
        r->actions = 0;
        while ((made = ms_revolve_fill(state, r->stack, out, 64)))
            r->actions += made;
        r->actions_length = counted;
        r->actions_slots = 2 * slots + keep_first;
    }
    return (double)r->actions * ((double)length / (double)counted);
}

void sweep_revolve(run_t *r, int64_t length, int64_t slots, int64_t keep_first)
{
    const sweep_t *p = r->p;
    int64_t left = length, held = 0;
    double steps = 0, actions = 0;
    slots = slots < length ? slots : length;
    if (length <= SHORT || r->staged || queued(r) || count(&r->leftover)) {
        int64_t state[16], out[3 * 64], made;
        const int64_t most = length <= SHORT ? INT64_MAX : PATIENCE;
        ms_revolve_init(state, r->stack, 0, length, slots, keep_first);
        while ((made = ms_revolve_fill(state, r->stack, out, 64)) && !r->status) {
            for (int64_t k = 0; k < 3 * made; k += 3) {
                if (out[k] == REVOLVE_SAVE) {
                    make_room(r);
                    act(r);
                    take(r);
                    held++;
                } else if (out[k] == REVOLVE_FREE) {
                    act(r);
                    r->used--;
                    held--;
                } else if (out[k] == REVOLVE_ADVANCE) {
                    advance(r, out[k + 2] - out[k + 1]);
                    steps += (double)(out[k + 2] - out[k + 1]);
                } else if (out[k] == REVOLVE_LOAD) {
                    act(r);
                } else if (r->ended) {
                    turn(r);
                    left--;
                } else {
                    first_reverse(r);
                    left--;
                }
            }
            actions += (double)made;
            if (actions > (double)most)
                break;
        }
        if (!left)
            return;
    }
    /* Nothing to wait for any more, or too much to continue one by one. */
    const int64_t most = slots < length - 1 - keep_first ? slots : length - 1 - keep_first;
    const double forward_steps = nu(r, length, slots + keep_first) - steps;
    if (r->used - held + most > r->peak)
        r->peak = r->used - held + most < p->slots ? r->used - held + most : p->slots;
    r->used -= held;
    if (p->action > 0) {
        const double rest = count_actions(r, length, slots, keep_first) - actions;
        r->now += rest * p->action;
    }
    if (!r->ended) {
        first_reverse(r);
        r->now -= p->action;
        left--;
    }
    r->now += forward_steps * p->forward + (double)left * p->turn;
    r->forward_steps += forward_steps;
}

/* Reverse the upper parts of `length` steps with every slot; return how many are left.
 *
 * A long spine has many parts.  Where nothing is waited for, segments of the
 * same length and slots cost the same, and there are few of them. */
static int64_t down_the_spine(run_t *r, int64_t length)
{
    const int64_t free = reclaimable(r), whole = length, at = length % N_SPINES;
    const int known = r->spines[at].length == length && r->spines[at].free == free;
    const int alike = r->ended && !r->staged && !count(&r->leftover) && length > EXACT_LENGTH;
    if (alike && known) {
        r->now += r->spines[at].seconds;
        r->forward_steps += r->spines[at].steps;
        if (r->used + r->spines[at].above > r->peak)
            r->peak = r->used + r->spines[at].above;
        return r->spines[at].left;
    }
    const double now = r->now, steps = r->forward_steps;
    const int64_t peak = r->peak;
    int64_t part;
    r->peak = r->used;
    while (!r->status && (part = sweep_spine_advance(r, length, reclaimable(r)))) {
        advance(r, part);
        sweep_revolve(r, length - part, reclaimable(r), 0);
        act(r);
        length = part;
    }
    if (alike) {
        r->spines[at].length = whole;
        r->spines[at].free = free;
        r->spines[at].left = length;
        r->spines[at].above = r->peak - r->used;
        r->spines[at].seconds = r->now - now;
        r->spines[at].steps = r->forward_steps - steps;
    }
    r->peak = r->peak > peak ? r->peak : peak;
    return length;
}

void sweep_segment(run_t *r, int64_t start, int64_t end)
{
    const sweep_t *p = r->p;
    const int64_t need = end - start - 1;
    const int held = count(&r->fresh) > queued(r) || count(&r->pins) || count(&r->written);
    if (r->ended)
        while (count(&r->readable) && p->slots - r->used > need &&
               count(&r->pending) < r->depth && !r->status)
            prefetch(r);
    if (!count(&r->pending) && !held && count(&r->readable)) {
        if (p->reserve)
            end = start + down_the_spine(r, end - start);
        if (r->ended && reclaimable(r) > 0) {
            make_room(r);
            if (!hold_parked(r, last(&r->readable)))
                prefetch(r);
        }
    }
    sweep_revolve(r, end - start, reclaimable(r), 1);
}

/* The exact optimum of a tiny chain with an asynchronous slow tier, by A*.
 *
 * States of the search: what is held where, the operation and the transfers
 * in flight with what is left of them.  Anything may be kept, dropped, written
 * or read at any moment: schedules need be neither nested nor persistent.  The
 * one rule beside memory is that of a tape's input: as long as the tape is of
 * use, its input exists in one of the tiers, and its stage is not run again.  A
 * state that lay in no tape when the next stage was taped is pinned by that
 * tape: it stays, unless it is written itself, even beside a tape that came
 * back and includes the same state.  What executors do not do is left out: a
 * tape made after the last stage's adjoint, and the state it starts from, are
 * not written to make room; they stay until the adjoint.
 *
 * Stages 1..n, the loss last; state 0 belongs to the caller and lies outside
 * the memory.  All times are whole and at most 63.
 */
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 7, NONE = 0, RUN = 1, TAPE = 2, BACK = 3, STATES = 8 };

typedef struct {
    int64_t n, memory;
    const int64_t *state, *gradient;               /* 0..n */
    const int64_t *tape, *advance, *taping, *back; /* 1..n, as what follows */
    const int64_t *forward_s, *spared_s, *backward_s;
    const int64_t *write_s, *read_s; /* by thing: tape i at i, state i at 8 + i */
    int64_t shared, tapes;
} problem_t;

/* Things in flight are numbered as in write_s, 0 for none; sets are bits i - 1. */
typedef struct {
    int adjoint, kind, stage, rest, states, tapes, far_states, far_tapes;
    int write, write_rest, read, read_rest;
    int pins, late; /* states that the next stage's tape pins; tapes made in the reverse sweep */
} held_t;

__extension__ typedef unsigned __int128 packed_t;

typedef struct {
    packed_t key;
    int32_t seconds;
} entry_t;

typedef struct {
    const problem_t *p;
    entry_t *best; /* open addressing; seconds < 0: empty */
    uint64_t slots, used;
    entry_t **bucket; /* waiting, by the sum of seconds and what is still needed */
    int64_t *count, *room;
    int64_t upper;
    int failed;
} search_t;

enum { FIELDS = 14 };
static const int WIDTH[FIELDS] = {3, 2, 3, 6, 6, 7, 6, 7, 4, 6, 4, 6, 6, 7};

static packed_t packed(const held_t *h)
{
    const int *field = &h->adjoint;
    packed_t key = 0;
    for (int i = 0; i < FIELDS; i++)
        key = key << WIDTH[i] | (packed_t)field[i];
    return key;
}

static held_t unpacked(packed_t key)
{
    held_t h;
    int *field = &h.adjoint;
    for (int i = FIELDS - 1; i >= 0; i--) {
        field[i] = (int)(key & ((1u << WIDTH[i]) - 1));
        key >>= WIDTH[i];
    }
    return h;
}

static int has(int set, int i)
{
    return i > 0 && (set >> (i - 1) & 1);
}

static int64_t used(const problem_t *p, const held_t *h)
{
    int64_t sum = p->gradient[h->adjoint];
    for (int i = 1; i <= p->n; i++)
        sum += (has(h->tapes, i) ? p->tape[i] : 0) + (has(h->states, i) ? p->state[i] : 0);
    if (h->kind == RUN)
        sum += p->state[h->stage] + p->advance[h->stage];
    if (h->kind == TAPE)
        sum += p->tape[h->stage] + p->taping[h->stage];
    if (h->kind == BACK)
        sum += p->gradient[h->stage - 1] + p->back[h->stage];
    if (h->read)
        sum += h->read < STATES ? p->tape[h->read] : p->state[h->read - STATES];
    return sum;
}

/* Seconds that are needed at least: adjoints, and the forward of stages without a tape. */
static int64_t needed(const problem_t *p, const held_t *h)
{
    int tapes = h->tapes | h->far_tapes, last = h->kind == BACK ? h->adjoint - 1 : h->adjoint;
    int64_t sum = h->rest;
    if (h->read && h->read < STATES)
        tapes |= 1 << (h->read - 1);
    if (h->write && h->write < STATES)
        tapes |= 1 << (h->write - 1);
    if (h->kind == TAPE)
        tapes |= 1 << (h->stage - 1);
    for (int i = 1; i <= last; i++)
        sum += p->backward_s[i] + (has(tapes, i) ? 0 : p->forward_s[i] - p->spared_s[i]);
    return sum;
}

/* Forget what nothing will need: states from adjoint - 1 on, tapes beyond the adjoint. */
static void tidy(held_t *h)
{
    const int of_tapes = (1 << h->adjoint) - 1, of_states = h->adjoint >= 2 ? (1 << (h->adjoint - 1)) - 1 : 0;
    int written = 0, written_state = 0;
    if (h->write >= STATES)
        written_state = 1 << (h->write - STATES - 1), written = written_state & h->tapes;
    else if (h->write)
        written = 1 << (h->write - 1);
    h->tapes &= of_tapes | written;
    h->pins &= h->tapes >> 1 | (h->kind == TAPE && h->stage > 1 ? 1 << (h->stage - 2) : 0);
    h->states &= (of_states | written_state) & (~h->tapes | h->pins);
    h->pins &= h->states;
    h->late &= h->tapes | (h->kind == TAPE ? 1 << (h->stage - 1) : 0);
    h->far_tapes &= of_tapes;
    h->far_states &= of_states;
}

static uint64_t slot_of(const search_t *x, packed_t key)
{
    const uint64_t folded = (uint64_t)key ^ (uint64_t)(key >> 64) * 0xD6E8FEB86659FD93u;
    uint64_t at = (folded * 0x9E3779B97F4A7C15u) >> 20;
    for (at &= x->slots - 1; x->best[at].seconds >= 0 && x->best[at].key != key;)
        at = (at + 1) & (x->slots - 1);
    return at;
}

static void grow(search_t *x)
{
    entry_t *old = x->best;
    const uint64_t before = x->slots;
    x->slots = before ? 2 * before : 1 << 16;
    x->best = malloc(x->slots * sizeof *x->best);
    if (!x->best) {
        x->best = old, x->slots = before, x->failed = 1;
        return;
    }
    memset(x->best, 0xff, x->slots * sizeof *x->best);
    for (uint64_t i = 0; i < before; i++)
        if (old[i].seconds >= 0)
            x->best[slot_of(x, old[i].key)] = old[i];
    free(old);
}

static void reach(search_t *x, held_t h, int64_t seconds)
{
    tidy(&h);
    const int64_t sum = seconds + needed(x->p, &h);
    if (sum >= x->upper || x->failed)
        return;
    if (2 * x->used >= x->slots)
        grow(x);
    const packed_t key = packed(&h);
    const uint64_t at = slot_of(x, key);
    if (x->best[at].seconds >= 0 && x->best[at].seconds <= seconds)
        return;
    x->used += x->best[at].seconds < 0;
    x->best[at] = (entry_t){key, (int32_t)seconds};
    if (x->count[sum] == x->room[sum]) {
        const int64_t room = x->room[sum] ? 2 * x->room[sum] : 64;
        entry_t *more = realloc(x->bucket[sum], (size_t)room * sizeof *more);
        if (!more) {
            x->failed = 1;
            return;
        }
        x->bucket[sum] = more, x->room[sum] = room;
    }
    x->bucket[sum][x->count[sum]++] = x->best[at];
}

/* Whether state j may be dropped from where `h` already lacks it; without a copy
 * left, tape j + 1 in the tier is worth nothing. */
static int may_drop(const problem_t *p, held_t *h, int j)
{
    if (j >= p->n || has(h->states | h->tapes | h->far_states | h->far_tapes, j) ||
        h->write == j || h->write == STATES + j)
        return 1;
    if (has(h->tapes, j + 1))
        return 0;
    h->far_tapes &= ~(1 << j);
    return h->write != j + 1 && h->read != j + 1;
}

static void operations(search_t *x, const held_t *h, int64_t bytes, int64_t seconds)
{
    const problem_t *p = x->p;
    const int held = h->states | h->tapes, d = h->adjoint;
    for (int i = 1; i <= d; i++) {
        if (i > 1 && !has(held, i - 1))
            continue;
        if (i < p->n && has(h->tapes | h->far_tapes, i + 1))
            continue; /* its output is the input of a tape: not made again */
        held_t next = *h;
        next.stage = i, next.rest = (int)p->forward_s[i];
        if (i < d && !has(held, i) && bytes + p->state[i] + p->advance[i] <= p->memory) {
            next.kind = RUN;
            reach(x, next, seconds);
        }
        const int64_t inside = i < p->n && has(h->states, i) ? p->state[i] : 0;
        if (!has(h->tapes, i) && h->read != i &&
            bytes + p->tape[i] + p->taping[i] - inside <= p->memory) {
            next.kind = TAPE;
            next.rest -= i == d ? (int)p->spared_s[i] : 0;
            if (i > 1 && !has(h->tapes, i - 1))
                next.pins |= 1 << (i - 2);
            if (d < p->n)
                next.late |= 1 << (i - 1);
            reach(x, next, seconds);
        }
    }
    if (has(h->tapes, d) && (d == 1 || has(held, d - 1)) &&
        bytes + p->gradient[d - 1] + p->back[d] <= p->memory) {
        held_t next = *h;
        next.kind = BACK, next.stage = d, next.rest = (int)p->backward_s[d];
        reach(x, next, seconds);
    }
}

static void transfers(search_t *x, const held_t *h, int64_t bytes, int64_t seconds)
{
    const problem_t *p = x->p;
    const int free_to_write = !h->write && !(p->shared && h->read);
    const int free_to_read = !h->read && !(p->shared && h->write);
    for (int j = 1; j <= h->adjoint; j++) {
        held_t next = *h;
        const int held = h->states | h->tapes, running = h->kind == TAPE && h->stage == j;
        if (free_to_write && p->tapes && has(h->tapes, j) && !has(h->far_tapes, j) &&
            !has(h->late, j)) {
            next.write = j, next.write_rest = (int)p->write_s[j];
            reach(x, next, seconds);
        }
        if (free_to_write && j < p->n && has(held, j) && !has(h->far_states, j)) {
            next.write = STATES + j, next.write_rest = (int)p->write_s[STATES + j];
            reach(x, next, seconds);
        }
        next = *h;
        if (free_to_read && has(h->far_tapes, j) && !has(h->tapes, j) && !running &&
            bytes + p->tape[j] <= p->memory) {
            next.read = j, next.read_rest = (int)p->read_s[j];
            reach(x, next, seconds);
        }
        if (free_to_read && j < p->n && has(h->far_states, j) && !has(held, j) &&
            bytes + p->state[j] <= p->memory) {
            next.read = STATES + j, next.read_rest = (int)p->read_s[STATES + j];
            reach(x, next, seconds);
        }
    }
}

static void drops(search_t *x, const held_t *h, int64_t seconds)
{
    const problem_t *p = x->p;
    const int input = h->kind ? h->stage - 1 : 0; /* what the operation reads */
    for (int j = 1; j <= p->n; j++) {
        const int bit = 1 << (j - 1);
        if (has(h->tapes, j) && h->write != j && !(h->kind == BACK && h->stage == j)) {
            held_t next = *h;
            next.tapes &= ~bit;
            if (j < p->n) { /* its output stays */
                held_t kept = next;
                kept.states |= bit;
                const int begun = has(h->tapes, j + 1) || (h->kind == TAPE && h->stage == j + 1);
                if (begun && (!has(h->far_tapes, j) || has(h->late, j + 1)))
                    kept.pins |= bit;
                reach(x, kept, seconds);
            }
            const int starts = has(h->late, j + 1); /* whose tape cannot leave */
            if (h->write != STATES + j && input != j && !starts && may_drop(p, &next, j))
                reach(x, next, seconds);
        }
        if (has(h->states, j) && h->write != STATES + j && input != j &&
            (!has(h->pins, j) || (has(h->far_states, j) && !has(h->late, j + 1)))) {
            held_t next = *h;
            next.states &= ~bit;
            if (may_drop(p, &next, j))
                reach(x, next, seconds);
        }
    }
}

/* Let time pass until the first of what is in flight ends. */
static void wait(search_t *x, held_t h, int64_t seconds)
{
    int span = INT_MAX;
    if (h.kind && h.rest < span)
        span = h.rest;
    if (h.write && h.write_rest < span)
        span = h.write_rest;
    if (h.read && h.read_rest < span)
        span = h.read_rest;
    if (span == INT_MAX)
        return;
    if (h.write && !(h.write_rest -= span)) {
        if (h.write < STATES)
            h.far_tapes |= 1 << (h.write - 1);
        else
            h.far_states |= 1 << (h.write - STATES - 1);
        h.write = 0;
    }
    if (h.read && !(h.read_rest -= span)) {
        if (h.read < STATES)
            h.tapes |= 1 << (h.read - 1);
        else
            h.states |= 1 << (h.read - STATES - 1);
        h.read = 0;
    }
    if (h.kind && !(h.rest -= span)) {
        if (h.kind == RUN && h.stage < x->p->n)
            h.states |= 1 << (h.stage - 1);
        if (h.kind == TAPE)
            h.tapes |= 1 << (h.stage - 1);
        if (h.kind == BACK)
            h.adjoint--;
        h.kind = NONE, h.stage = 0;
    }
    reach(x, h, seconds + span);
}

/* Return the least makespan, `upper` if none is below it, -1 if `limit` states do not
 * suffice, -2 without memory. */
int64_t exact_joint(const problem_t *p, int64_t upper, int64_t limit)
{
    search_t x = {.p = p, .upper = upper};
    int64_t answer = upper, explored = 0;
    if (p->n > MOST)
        return -2;
    x.bucket = calloc((size_t)upper + 1, sizeof *x.bucket);
    x.count = calloc((size_t)upper + 1, sizeof *x.count);
    x.room = calloc((size_t)upper + 1, sizeof *x.room);
    if (!x.bucket || !x.count || !x.room)
        x.failed = 1;
    else
        grow(&x);
    if (!x.failed)
        reach(&x, (held_t){.adjoint = (int)p->n}, 0);
    for (int64_t sum = 0; sum < upper && answer == upper && !x.failed; sum++)
        while (x.count[sum] && !x.failed) { /* what is reached may belong into this bucket */
            const entry_t e = x.bucket[sum][--x.count[sum]];
            if (x.best[slot_of(&x, e.key)].seconds < e.seconds)
                continue;
            const held_t h = unpacked(e.key);
            if (h.adjoint == 0 && h.kind == NONE) {
                answer = e.seconds;
                break;
            }
            if (++explored > limit) {
                answer = -1;
                break;
            }
            const int64_t bytes = used(p, &h);
            if (h.kind == NONE)
                operations(&x, &h, bytes, e.seconds);
            transfers(&x, &h, bytes, e.seconds);
            drops(&x, &h, e.seconds);
            wait(&x, h, e.seconds);
        }
    for (int64_t sum = 0; x.bucket && sum <= upper; sum++)
        free(x.bucket[sum]);
    free(x.bucket), free(x.count), free(x.room), free(x.best);
    return x.failed ? -2 : answer;
}

/* Revolve (Griewank & Walther 2000) as a stream of actions.
 *
 * The reversal of l steps with s slots is written down action by action: no
 * recursion, no tables, one small record per slot, constant work per action.
 * The caller owns all memory, so a schedule of 10^9 steps costs what its
 * slots cost.
 *
 * beta(s, r) = C(s + r, s) is the number of steps that s slots reverse when
 * no step is run forward more than r times.  The first advance m of an
 * optimal reversal of l steps lies in
 *   max(1, beta(s, r-2), l - beta(s-1, r)) <= m
 *   m <= min(l - 1, beta(s, r-1), l - beta(s-1, r-1)),
 * r minimal with l <= beta(s, r).  The middle of that range needs the fewest
 * saves in practice.  Products are formed in 128 bits and saturate.
 */
#include <stdint.h>

#include "revolve.h"

typedef unsigned __int128 wide;

#define SATURATED ((uint64_t)1 << 62)

enum {
    ADVANCE = REVOLVE_ADVANCE,
    REVERSE = REVOLVE_REVERSE,
    SAVE = REVOLVE_SAVE,
    LOAD = REVOLVE_LOAD,
    FREE = REVOLVE_FREE
};
enum { AT_STATE, AFTER_REVERSE, LAST_USE, DONE };

/* Fields of the state array, all int64. */
enum { START, END, LIVE, PHASE, DEPTH, SLOTS, KEEP_FIRST, N_FIELDS };

/* A stack record: the position of a checkpoint and the r of the work above it. */
enum { POS, REPS, RECORD };

static uint64_t beta(int64_t s, int64_t r)
{
    if (s < 0 || r < 0)
        return 0;
    uint64_t low = (uint64_t)(s < r ? s : r), high = (uint64_t)(s < r ? r : s), b = 1;
    for (uint64_t i = 1; i <= low; i++) {
        wide next = (wide)b * (high + i) / i;
        if (next >= SATURATED)
            return SATURATED;
        b = (uint64_t)next;
    }
    return b;
}

/* With more slots than these the repetitions are few. */
enum { FEW = 8 };

static int64_t repetitions(int64_t l, int64_t s)
{
    if (l <= 1)
        return 0;
    if (s == 1)
        return l - 1;
    int64_t r = 0;
    uint64_t b = 1;
    if (s <= FEW) { /* r may be large: bisect */
        int64_t high = 1;
        while (beta(s, high) < (uint64_t)l)
            high *= 2;
        while (r < high) {
            const int64_t middle = r + (high - r) / 2;
            if (beta(s, middle) < (uint64_t)l)
                r = middle + 1;
            else
                high = middle;
        }
        return r;
    }
    while (b < (uint64_t)l) {
        r++;
        wide next = (wide)b * (uint64_t)(s + r) / (uint64_t)r;
        b = next >= SATURATED ? SATURATED : (uint64_t)next;
    }
    return r;
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Which of the optimal advances; PUBLISHED is that of the paper's p. 34. */
enum { LOW, MIDDLE, HIGH, PUBLISHED };

static int64_t first_advance(int64_t l, int64_t s, int64_t r, int64_t trajectory)
{
    if (s <= 1)
        return l - 1;
    int64_t low = max64(1, max64((int64_t)beta(s, r - 2), l - (int64_t)beta(s - 1, r)));
    int64_t high = min64(l - 1, min64((int64_t)beta(s, r - 1), l - (int64_t)beta(s - 1, r - 1)));
    if (high <= low || trajectory == LOW)
        return low;
    if (trajectory == HIGH)
        return high;
    if (trajectory == PUBLISHED) {
        int64_t upper = (int64_t)(beta(s - 1, r - 1) + beta(s - 2, r - 1));
        return max64(low, min64(max64((int64_t)beta(s, r - 2), l - upper), high));
    }
    return low + (high - low) / 2;
}

double revolve_nu(int64_t l, int64_t s)
{
    if (l <= 1)
        return 0;
    if (s <= 1)
        return (double)((wide)l * (uint64_t)(l - 1) / 2);
    const int64_t r = repetitions(l, s);
    return (double)((wide)r * (uint64_t)l - beta(s + 1, r - 1));
}

int64_t revolve_first_advance(int64_t l, int64_t s)
{
    return first_advance(l, s, repetitions(l, s), MIDDLE);
}

/* Bytes are for the caller to allocate: int64 fields of `state` and of `stack`. */
int64_t ms_revolve_state_len(void) { return N_FIELDS; }
int64_t ms_revolve_stack_len(int64_t slots) { return RECORD * (slots + 1); }

/* Prepare to reverse steps start..end-1 with `slots` slots, state `start` live.
 * With keep_first, checkpoint `start` is already held beside those slots and
 * stays held. */
void ms_revolve_init(int64_t *state, int64_t *stack, int64_t start, int64_t end,
                            int64_t slots, int64_t keep_first)
{
    state[START] = start;
    state[END] = end;
    state[LIVE] = start;
    state[PHASE] = AT_STATE;
    state[DEPTH] = 0;
    state[SLOTS] = slots + (keep_first ? 1 : 0);
    state[KEEP_FIRST] = keep_first;
    if (keep_first) {
        stack[POS] = start;
        stack[REPS] = repetitions(end - start, state[SLOTS]);
        state[DEPTH] = 1;
    }
}

/* Write up to `room` actions to `out`, three int64 each (code, a, b); return how many.
 * 0 means the reversal is complete. */
int64_t ms_revolve_fill(int64_t *state, int64_t *stack, int64_t *out, int64_t room)
{
    int64_t made = 0;
    int64_t start = state[START], end = state[END], live = state[LIVE], depth = state[DEPTH];
    int64_t slots = state[SLOTS], keep_first = state[KEEP_FIRST], phase = state[PHASE];

#define EMIT(code, x, y)                                                                          \
    do {                                                                                          \
        out[3 * made] = (code);                                                                   \
        out[3 * made + 1] = (x);                                                                  \
        out[3 * made + 2] = (y);                                                                  \
        made++;                                                                                   \
    } while (0)

    while (made < room && phase != DONE) {
        int64_t *top = stack + RECORD * (depth - 1);
        switch (phase) {
        case AT_STATE:
            if (end - live == 1) {
                EMIT(REVERSE, live, 0);
                phase = AFTER_REVERSE;
            } else if ((depth == 0 || top[POS] != live) && depth < slots) {
                top += RECORD;
                depth++;
                top[POS] = live;
                top[REPS] = repetitions(end - live, slots - depth + 1);
                EMIT(SAVE, live, 0);
            } else {
                int64_t l = end - live, s = slots - depth + 1, m = l - 1;
                if (top[POS] == live && s > 1) {
                    while (top[REPS] > 0 && beta(s, top[REPS] - 1) >= (uint64_t)l)
                        top[REPS]--;
                    m = first_advance(l, s, top[REPS], MIDDLE);
                }
                EMIT(ADVANCE, live, live + m);
                live += m;
            }
            break;
        case AFTER_REVERSE:
            end = live;
            if (end == start) {
                phase = DONE;
            } else {
                live = top[POS];
                EMIT(LOAD, live, 0);
                phase = live == end - 1 && !(keep_first && depth == 1) ? LAST_USE : AT_STATE;
            }
            break;
        case LAST_USE:
            depth--;
            EMIT(FREE, live, 0);
            phase = AT_STATE;
            break;
        default:
            phase = DONE;
        }
    }
    state[END] = end;
    state[LIVE] = live;
    state[DEPTH] = depth;
    state[PHASE] = phase;
    return made;
}

/* Count how often each of the `slots` slots, from the bottom of the stack, is
 * written and read when n steps are reversed; `stack` as for ms_revolve_init. */
void ms_revolve_accesses(int64_t n, int64_t slots, int64_t trajectory, int64_t *writes,
                                int64_t *reads, int64_t *stack)
{
    int64_t live = 0, end = n, depth = 0;
    for (;;) {
        while (end - live > 1) {
            int64_t *top = stack + RECORD * (depth - 1);
            if ((depth == 0 || top[POS] != live) && depth < slots) {
                top += RECORD;
                top[POS] = live;
                top[REPS] = repetitions(end - live, slots - depth);
                writes[depth++]++;
            }
            int64_t l = end - live, s = slots - depth + 1, m = l - 1;
            if (top[POS] == live && s > 1) {
                while (top[REPS] > 0 && beta(s, top[REPS] - 1) >= (uint64_t)l)
                    top[REPS]--;
                m = first_advance(l, s, top[REPS], trajectory);
            }
            live += m;
        }
        end = live;
        if (end == 0)
            return;
        live = stack[RECORD * (depth - 1) + POS];
        reads[depth - 1]++;
        if (live == end - 1)
            depth--;
    }
}

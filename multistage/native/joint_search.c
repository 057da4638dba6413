/* Plans of a chain with a slow tier, improved by a local search. */
#include "joint_work.h"

#include <string.h>

static int64_t drawn(uint64_t *state, int64_t below)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (int64_t)((*state >> 20) % (uint64_t)below);
}

static void set_flags(uint8_t *fate, int mask, int flags)
{
    *fate = (uint8_t)((*fate & ~mask) | flags);
}

/* Change a plan a little; 0 if the move has no place here. */
static int move(uint8_t *fates, int64_t n, uint64_t *state)
{
    const int64_t i = drawn(state, n), kind = drawn(state, 11);
    const int64_t length = 1 + drawn(state, n - 1 < 8 ? n : 9);
    const int64_t j = i + length - 1 < n ? i + length - 1 : n - 1;
    const int each = 3 << RESERVE_AT;
    switch (kind) {
    case 0:
        fates[i] ^= TAPE_AWAY;
        return 1;
    case 1:
        fates[i] ^= STATE_AWAY;
        return 1;
    case 2:
        fates[i] ^= STARTS;
        return 1;
    case 3:
        fates[i] = (fates[i] ^ KEEPS_TAPE) | STARTS;
        if (i + 1 < n)
            fates[i + 1] |= STARTS;
        return 1;
    case 4: /* one segment */
        for (int64_t z = i; z <= j; z++)
            set_flags(fates + z, KEEPS_TAPE | STARTS, z == i ? STARTS : 0);
        if (j + 1 < n)
            fates[j + 1] |= STARTS;
        return 1;
    case 5: { /* all tapes */
        const int away = drawn(state, 2) ? TAPE_AWAY : 0;
        for (int64_t z = i; z <= j; z++)
            set_flags(fates + z, TAPE_AWAY, KEEPS_TAPE | STARTS | away);
        if (j + 1 < n)
            fates[j + 1] |= STARTS;
        return 1;
    }
    case 6:
        set_flags(fates + i, each, (int)drawn(state, 4) << RESERVE_AT);
        return 1;
    case 7: {
        const int reserve = (int)drawn(state, 4) << RESERVE_AT;
        for (int64_t z = 0; z < n; z++)
            set_flags(fates + z, each, reserve);
        return 1;
    }
    case 8: {
        const int away = drawn(state, 2) ? TAPE_AWAY | STATE_AWAY : 0;
        for (int64_t z = i; z <= j; z++)
            set_flags(fates + z, TAPE_AWAY | STATE_AWAY, away);
        return 1;
    }
    case 9: { /* a border */
        const int64_t far = 1 + drawn(state, 2), o = drawn(state, 2) ? i + far : i - far;
        const int both = STARTS | STATE_AWAY;
        if (i < 1 || o < 1 || o >= n || !((fates[i] | fates[o]) & STARTS))
            return 0;
        const int mine = fates[i] & both, other = fates[o] & both;
        set_flags(fates + i, both, other);
        set_flags(fates + o, both, mine);
        return 1;
    }
    default:
        fates[i] = (fates[i] ^ APART) | STARTS;
        return 1;
    }
}

/* Try so many moves on a plan of `seconds`; `fates` becomes the best.  Its makespan.
 *
 * A move that makes it slower is kept now and then, less and less.
 */
double ms_joint_improve(const joint_t *x, uint8_t *fates, double seconds, int64_t moves,
                               int64_t seed)
{
    work_t w = joint_work_of(x);
    const int64_t n = x->slots->n;
    const size_t bytes = (size_t)n;
    uint64_t state = (uint64_t)seed * 0x9e3779b97f4a7c15u + 1;
    double now = seconds, best = seconds;
    memcpy(w.fates, fates, bytes);
    for (int64_t k = 0; k < moves; k++) {
        const double left = 1 - (double)k / (double)moves;
        const double allowed = 0.006 * seconds * left * left;
        int64_t moved;
        double waited;
        memcpy(w.other, w.fates, bytes);
        if (!move(w.other, n, &state))
            continue;
        const double found = joint_judged(x, &w, w.other, &moved, &waited);
        const double luck = (double)drawn(&state, 1 << 20) / (1 << 20);
        if (!(found <= now || found - now < allowed * luck * luck))
            continue;
        now = found;
        memcpy(w.fates, w.other, bytes);
        if (now < best - 1e-12 * seconds) {
            best = now;
            memcpy(fates, w.fates, bytes);
        }
    }
    return best;
}

/* Judge the plans that begin as `first` and continue as `rest`, one for each stage, but the
 * first, where the two differ.
 *
 * Those of less than `below` seconds are written to `made`, n bytes each, and their makespans
 * to `seconds`.  Their number, less than n.
 */
int64_t ms_joint_cross(const joint_t *x, const uint8_t *first, const uint8_t *rest, double below,
                       uint8_t *made, double *seconds)
{
    work_t w = joint_work_of(x);
    const int64_t n = x->slots->n;
    int64_t count = 0, differed = first[0] != rest[0];
    memcpy(w.other, rest, (size_t)n);
    for (int64_t cut = 1; cut < n; cut++) {
        int64_t moved;
        double waited;
        w.other[cut - 1] = first[cut - 1];
        if (first[cut] == rest[cut])
            continue;
        const double found = differed ? joint_judged(x, &w, w.other, &moved, &waited) : INFINITY;
        differed = 1;
        if (!(found < below))
            continue;
        memcpy(made + count * n, w.other, (size_t)n);
        seconds[count++] = found;
    }
    return count;
}

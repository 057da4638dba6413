/* The schedules inside the segments of a chain with a slow tier, those of the table.
 *
 * They are kept in the work array, which forgets them all when it is full: that changes
 * no answer.
 */
#include "joint_work.h"

#include <string.h>

/* Rounding makes a schedule of so many slots more fit, now and then. */
enum { MORE_SLOTS = 4, MOST_TRIES = 48 };

static int64_t entries(size_t bytes)
{
    return (int64_t)((bytes + 7) / 8);
}

/* Cut the work array; with `work` null, measure it. */
static int64_t cut_up(int64_t n, int64_t *work, work_t *w)
{
    int64_t at = 0;
    work_t none;
    if (!w)
        w = &none;
#define PART(name, count)                                                                         \
    (w->name = work ? (void *)(work + at) : 0, at += entries(sizeof(*w->name) * (size_t)(count)))
    PART(head, 1);
    PART(trace, TRACES);
    PART(room, ROOMS);
    PART(held, OPS);
    PART(op, OPS);
    PART(request, OPS);
    PART(cut, OPS);
    PART(stack, 8 * (n + 2));
    PART(node, n);
    PART(item, 2 * n);
    PART(before, 2 * n + 1);
    PART(soonest, 2 * n);
    PART(written, 2 * n);
    PART(landed, 2 * n);
    PART(fates, n);
    PART(other, n);
#undef PART
    return at;
}

/* Entries of the work array of a chain of n stages. */
int64_t ms_joint_work_len(int64_t n)
{
    return cut_up(n, 0, 0);
}

work_t joint_work_of(const joint_t *x)
{
    work_t w;
    cut_up(x->slots->n, x->work, &w);
    return w;
}

void joint_forget(work_t *w)
{
    memset(w->trace, 0, TRACES * sizeof(*w->trace));
    memset(w->room, 0, ROOMS * sizeof(*w->room));
    w->head->ready = 1;
    w->head->traces = w->head->rooms = w->head->held = 0;
}

static uint64_t mixed(uint64_t key)
{
    key ^= key >> 31;
    key *= 0x9e3779b97f4a7c15u;
    return key ^ key >> 29;
}

/* ------------------------------------------------------------------- traces */

/* Write the operations that reverse s..t within m slots, the input not counted; their number. */
static int64_t operations(const joint_t *x, int64_t s, int64_t t, int64_t m, op_t *out,
                          int64_t most, int64_t *stack)
{
    const table_t table = {x->slots, x->none, x->table, cells_of(x->slots)};
    const chain_t *c = x->bytes;
    int64_t made = 0, depth = 1;
    stack[0] = s, stack[1] = t, stack[2] = m, stack[3] = 0;
    while (depth) {
        int64_t *top = stack + 4 * --depth;
        const int64_t i = top[0], stop = top[1], have = top[2], held = top[3];
        if (made + 2 >= most)
            return INFEASIBLE;
        if (stop < 0) {
            out[made++] = (op_t){held + c->tape[i] + c->grad[i + 1] + c->grad[i] + c->reverse[i],
                                 REVERSE, (int32_t)i};
            continue;
        }
        const int64_t k = chain_choice(&table, i, stop, have);
        if (k == INFEASIBLE)
            return INFEASIBLE;
        if (k == i) {
            out[made++] = (op_t){held + c->tape[i] + c->grad[stop + 1] + c->taping[i],
                                 i == stop ? TAPE_LAST : TAPE, (int32_t)i};
            top[1] = -1; /* its adjoint, when what follows is done */
            depth++;
            if (i < stop) {
                top += 4, depth++;
                top[0] = i + 1, top[1] = stop;
                top[2] = have - x->slots->tape[i], top[3] = held + c->tape[i];
            }
            continue;
        }
        if (made + (k - i) >= most)
            return INFEASIBLE;
        for (int64_t j = i; j < k; j++)
            out[made++] = (op_t){held + c->grad[stop + 1] + (j == i ? 0 : c->state[j]) +
                                     c->state[j + 1] + c->advance[j],
                                 ADVANCE, (int32_t)j};
        top[1] = k - 1;
        top += 4, depth += 2;
        top[0] = k, top[1] = stop;
        top[2] = have - x->slots->state[k], top[3] = held + c->state[k];
    }
    return made;
}

const trace_t *joint_trace_of(const joint_t *x, work_t *w, int64_t s, int64_t t, int64_t m)
{
    const int64_t n = x->slots->n, key = (s * n + t) * (x->memories + 1) + m + 1;
    if (w->head->traces > TRACES / 2 || w->head->held + TRACE_OPS > OPS)
        joint_forget(w);
    uint64_t at = mixed((uint64_t)key) % TRACES;
    while (w->trace[at].key && w->trace[at].key != key)
        at = (at + 1) % TRACES;
    trace_t *found = w->trace + at;
    if (found->key)
        return found;
    op_t *out = w->held + w->head->held;
    const int64_t count = operations(x, s, t, m, out, TRACE_OPS, w->stack);
    found->key = key;
    found->first = (int32_t)w->head->held;
    found->count = (int32_t)count;
    found->peak = 0;
    for (int64_t q = 0; q < count; q++)
        found->peak = max64(found->peak, out[q].need);
    w->head->held += count < 0 ? 0 : count;
    w->head->traces++;
    return found;
}

/* Whether a trace of s..t is worth a try: a run that is not in the table may have one. */
static int may_fit(const table_t *x, int64_t s, int64_t t, int64_t m)
{
    return has(x->chain, s, t) ? excess(x, s, t, m) < INFINITY : x->chain->places != 0;
}

int64_t joint_slots_within(const joint_t *x, work_t *w, int64_t s, int64_t t, int64_t room)
{
    const int64_t n = x->slots->n, key = s * n + t + 1;
    const table_t table = {x->slots, x->none, x->table, cells_of(x->slots)};
    if (room <= 0)
        return INFEASIBLE;
    if (w->head->rooms > ROOMS / 2)
        joint_forget(w);
    uint64_t at = mixed((uint64_t)key * 1000003u ^ (uint64_t)room) % ROOMS;
    while (w->room[at].key && (w->room[at].key != key || w->room[at].room != room))
        at = (at + 1) % ROOMS;
    if (w->room[at].key)
        return w->room[at].slots;
    const double most = (double)room / x->unit + MORE_SLOTS;
    int64_t m = most < (double)x->memories ? (int64_t)most : x->memories, tries = MOST_TRIES;
    int64_t found = INFEASIBLE;
    for (; m >= 0 && tries && may_fit(&table, s, t, m); m--, tries--) {
        const trace_t *trace = joint_trace_of(x, w, s, t, m);
        if (trace->count > 0 && trace->peak <= room) {
            found = m;
            break;
        }
    }
    /* The traces may have been forgotten, this table with them. */
    at = mixed((uint64_t)key * 1000003u ^ (uint64_t)room) % ROOMS;
    while (w->room[at].key)
        at = (at + 1) % ROOMS;
    w->room[at] = (room_t){key, room, (int32_t)found, 0};
    w->head->rooms++;
    return found;
}

/* Plans of a heterogeneous chain with a slow tier: judged in virtual time, and improved.
 *
 * `planners/chain/joint.py` tells the algorithm.  A plan is one byte for each stage (joint.h).
 * To judge it, the plan is laid out as operations and things of the tier; each
 * thing gets the operations before which it is evicted and read back, from
 * bytes alone; then the clock runs.  As times play no part in what is resident
 * when, a tier slower than planned costs time and never memory.
 *
 * The schedules inside segments are those of the table.  They are kept in the
 * work array, which forgets them all when it is full: that changes no answer.
 */
#include "joint.h"

#include <string.h>

enum { TRACES = 1 << 15, ROOMS = 1 << 16, OPS = 1 << 20, TRACE_OPS = 1 << 18 };
/* Rounding makes a schedule of so many slots more fit, now and then. */
enum { MORE_SLOTS = 4, MOST_TRIES = 48 };

typedef struct {
    int64_t key; /* (s, t, m), one added */
    int64_t peak;
    int32_t first, count;
} trace_t;

typedef struct {
    int64_t key, room;
    int32_t slots, padding; /* INFEASIBLE if none fits */
} room_t;

typedef struct {
    int64_t ready, traces, rooms, held;
    int64_t nodes, items, ops, turn;
    int64_t peak;
} head_t;

typedef struct {
    head_t *head;
    trace_t *trace;
    room_t *room;
    op_t *held; /* of the traces */
    op_t *op;
    int64_t *request; /* of an operation: bytes below which no resident thing may start */
    int32_t *cut;     /* of an operation: things not yet given back */
    int64_t *stack;
    node_t *node;
    item_t *item;
    int64_t *before; /* bytes of the things before one */
    int32_t *soonest;
    double *written, *landed;
    uint8_t *fates, *other; /* for the search */
} work_t;

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

static work_t work_of(const joint_t *x)
{
    work_t w;
    cut_up(x->slots->n, x->work, &w);
    return w;
}

static void forget(work_t *w)
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
    const table_t table = {x->slots, x->none, x->table, x->slots->n * (x->slots->n + 1) / 2};
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

static const trace_t *trace_of(const joint_t *x, work_t *w, int64_t s, int64_t t, int64_t m)
{
    const int64_t n = x->slots->n, key = (s * n + t) * (x->memories + 1) + m + 1;
    if (w->head->traces > TRACES / 2 || w->head->held + TRACE_OPS > OPS)
        forget(w);
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

/* The most slots with which s..t is reversed within `room` bytes, or INFEASIBLE. */
static int64_t slots_within(const joint_t *x, work_t *w, int64_t s, int64_t t, int64_t room)
{
    const int64_t n = x->slots->n, key = s * n + t + 1;
    const table_t table = {x->slots, x->none, x->table, n * (n + 1) / 2};
    if (room <= 0)
        return INFEASIBLE;
    if (w->head->rooms > ROOMS / 2)
        forget(w);
    uint64_t at = mixed((uint64_t)key * 1000003u ^ (uint64_t)room) % ROOMS;
    while (w->room[at].key && (w->room[at].key != key || w->room[at].room != room))
        at = (at + 1) % ROOMS;
    if (w->room[at].key)
        return w->room[at].slots;
    const double most = (double)room / x->unit + MORE_SLOTS;
    int64_t m = most < (double)x->memories ? (int64_t)most : x->memories, tries = MOST_TRIES;
    int64_t found = INFEASIBLE;
    for (; m >= 0 && tries && excess(&table, s, t, m) < INFINITY; m--, tries--) {
        const trace_t *trace = trace_of(x, w, s, t, m);
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

/* ------------------------------------------------------------------- layout */

static void push(work_t *w, int64_t need, int kind, int64_t stage)
{
    w->op[w->head->ops++] = (op_t){need, kind, (int32_t)stage};
}

static int32_t thing(const joint_t *x, work_t *w, int tape, int64_t step)
{
    const int64_t bytes = tape ? x->bytes->tape[step] : x->bytes->state[step];
    w->item[w->head->items] = (item_t){
        .bytes = bytes,
        .write_s = x->latency_s + (double)bytes / x->write_bytes_per_s,
        .read_s = x->latency_s + (double)bytes / x->read_bytes_per_s,
        .tape = tape,
        .step = (int32_t)step,
        .made = (int32_t)w->head->ops - 1,
        .used = (int32_t)w->head->ops,
        .evicted = NEVER,
        .got = NEVER,
    };
    return (int32_t)w->head->items++;
}

static void cut_into_nodes(const joint_t *x, work_t *w, const uint8_t *fates)
{
    const int64_t n = x->slots->n;
    int64_t count = 0;
    for (int64_t i = 0; i < n;) {
        const node_t *last = count ? w->node + count - 1 : 0;
        const int tape = (fates[i] & KEEPS_TAPE) != 0;
        const int away = i && (fates[i - 1] & TAPE_AWAY) && (x->may[i - 1] & MAY_TAPE);
        const int apart = last && (!last->tape || ((fates[i] & APART) && away));
        int64_t stop = i;
        while (!tape && stop + 1 < n && !(fates[stop + 1] & (STARTS | KEEPS_TAPE)))
            stop++;
        w->node[count++] = (node_t){(int32_t)i, (int32_t)stop, tape, apart, -1, -1, 0, 0, 0};
        i = stop + 1;
    }
    w->head->nodes = count;
}

/* The operations of the forward sweep, up to the last node. */
static void lay_forward(const joint_t *x, work_t *w, const uint8_t *fates)
{
    const chain_t *c = x->bytes;
    const int64_t count = w->head->nodes, last_grad = c->grad[c->n];
    int64_t held = 0;
    for (int64_t k = 0; k < count; k++) {
        node_t *v = w->node + k;
        const int64_t s = v->start;
        if (v->apart) {
            const int away = (fates[s] & STATE_AWAY) && (x->may[s] & MAY_STATE);
            if (away && k < count - 1) {
                v->input = thing(x, w, 0, s);
            } else {
                held += c->state[s];
                if (v[-1].own >= 0)
                    w->item[v[-1].own].again = c->state[s];
            }
        } else if (k) {
            v->input = v[-1].own;
        }
        v->left = held;
        if (k == count - 1)
            return;
        if (v->tape) {
            push(w, held + c->tape[s] + c->taping[s] + last_grad, TAPE, s);
            if ((fates[s] & TAPE_AWAY) && (x->may[s] & MAY_TAPE))
                v->own = thing(x, w, 1, s);
            else
                held += c->tape[s];
            v->left = held;
            continue;
        }
        for (int64_t j = s; j <= v->stop; j++)
            push(w, held + last_grad + (j == s ? 0 : c->state[j]) + c->state[j + 1] + c->advance[j],
                 ADVANCE, j);
    }
}

/* The operations that reverse segment k; 0 if none fits into the room left. */
static int lay_segment(const joint_t *x, work_t *w, int64_t k, int reserve)
{
    node_t *v = w->node + k;
    const int64_t input = v->input >= 0 ? w->item[v->input].bytes : 0;
    const int64_t room = x->limit - v->left - input;
    int64_t next = v->input >= 0 ? v->input : 0; /* things before it are read next */
    if (v->input < 0)
        for (int64_t j = k - 1; j >= 0 && !next; j--)
            next = w->node[j].own >= 0 ? w->node[j].own + 1 : w->node[j].input + 1;
    int64_t slots = INFEASIBLE;
    for (int64_t r = reserve; r >= 0 && slots == INFEASIBLE; r--) {
        const int64_t from = next > r ? next - r : 0;
        slots = slots_within(x, w, v->start, v->stop, room - (w->before[next] - w->before[from]));
    }
    if (slots == INFEASIBLE)
        return 0;
    const trace_t *trace = trace_of(x, w, v->start, v->stop, slots);
    if (w->head->ops + trace->count > OPS - 4 * x->slots->n)
        return 0;
    v->slots = (int32_t)slots;
    for (int64_t q = 0; q < trace->count; q++) {
        const op_t *op = w->held + trace->first + q;
        push(w, op->need + v->left, op->kind, op->stage);
    }
    return 1;
}

static int lay_out(const joint_t *x, work_t *w, const uint8_t *fates)
{
    const chain_t *c = x->bytes;
    w->head->ops = w->head->items = 0;
    cut_into_nodes(x, w, fates);
    lay_forward(x, w, fates);
    w->before[0] = 0;
    for (int64_t i = 0; i < w->head->items; i++)
        w->before[i + 1] = w->before[i] + w->item[i].bytes;
    for (int64_t k = w->head->nodes - 1; k >= 0; k--) {
        node_t *v = w->node + k;
        const int last_node = k == w->head->nodes - 1;
        int64_t first = w->head->ops;
        if (v->tape && !last_node)
            push(w, v->left + c->grad[v->start + 1] + c->grad[v->start] + c->reverse[v->start],
                 REVERSE, v->start);
        else if (!lay_segment(x, w, k, fates[v->start] >> RESERVE_AT & 3))
            return 0;
        const int32_t stop = (int32_t)w->head->ops - 1;
        if (last_node) {
            while (w->op[first].kind != REVERSE)
                first++;
            w->head->turn = first;
            if (v->input >= 0)
                w->item[v->input].used = NEVER;
        }
        if (v->apart && v->input >= 0)
            w->item[v->input].first = (int32_t)first, w->item[v->input].last = stop;
        else if (v->input >= 0)
            w->item[v->input].first = (int32_t)first;
        if (v->own >= 0) {
            w->item[v->own].last = stop;
            if (v[1].apart)
                w->item[v->own].first = (int32_t)first;
        }
    }
    return 1;
}

/* -------------------------------------------------------------------- bytes */

/* Give each thing the operations before which it leaves and comes back; 0 if memory is short. */
static int read_back(const joint_t *x, work_t *w)
{
    const int64_t ops = w->head->ops, turn = w->head->turn, items = w->head->items;
    const int64_t *before = w->before;
    for (int64_t q = turn, k = items; q < ops; q++) {
        while (k && w->item[k - 1].last < q)
            k--;
        w->cut[q] = (int32_t)k;
        w->request[q] = w->op[q].need + before[k] - x->limit;
    }
    for (int64_t i = items - 1, low = turn; i >= 0; i--) {
        int64_t q = max64(w->item[i].first, turn);
        for (int64_t z = q; z <= w->item[i].last; z++)
            if (w->request[z] > before[i] && w->cut[z] > i)
                return 0;
        while (q > low && w->request[q - 1] <= before[i])
            q--;
        w->soonest[i] = (int32_t)q;
        low = q;
    }
    return 1;
}

/* The number of things that are evicted, always the first ones; -1 if memory is short. */
static int64_t arrange(const joint_t *x, work_t *w)
{
    const int64_t ops = w->head->ops, turn = w->head->turn, items = w->head->items;
    int64_t resident = 0, gone = 0, made = 0, most = 0, peak = 0;
    if (!read_back(x, w))
        return -1;
    for (int64_t q = 0; q < ops; q++) {
        const int64_t need = w->op[q].need;
        const int64_t top = q < turn ? made : w->cut[q];
        if (q >= turn)
            resident = w->before[max64(top, gone)] - w->before[gone];
        while (need + resident > x->limit) {
            if (gone >= top || w->item[gone].used >= q)
                return -1;
            w->item[gone].evicted = (int32_t)q;
            resident -= w->item[gone].bytes - (q < turn ? w->item[gone].again : 0);
            gone++;
        }
        most = max64(most, gone);
        while (q >= turn && gone && w->soonest[gone - 1] <= q) {
            w->item[--gone].got = (int32_t)q;
            resident += w->item[gone].bytes;
        }
        if (need + resident > x->limit)
            return -1;
        peak = max64(peak, need + resident);
        for (; made < items && w->item[made].made == q; made++)
            resident += w->item[made].bytes - w->item[made].again;
    }
    w->head->peak = peak;
    return w->before[most] <= x->capacity ? most : -1;
}

/* -------------------------------------------------------------------- clock */

static double run(const joint_t *x, work_t *w, int64_t moved, double *waited)
{
    const int64_t ops = w->head->ops, turn = w->head->turn;
    int64_t evict = 0, get = moved - 1, await = w->head->items - 1, put = 0;
    double now = 0, stalled = 0, free_s[2] = {0, 0};
    double *writing = free_s, *reading = x->shared ? free_s : free_s + 1;
    for (int64_t q = 0; q < ops; q++) {
        for (; evict < moved && w->item[evict].evicted == q; evict++)
            if (w->written[evict] > now) {
                stalled += w->written[evict] - now;
                now = w->written[evict];
            }
        for (; get >= 0 && w->item[get].got == q; get--) {
            *reading = (now > *reading ? now : *reading) + w->item[get].read_s;
            w->landed[get] = *reading;
        }
        for (; q >= turn && await >= 0 && w->item[await].first <= q; await--)
            if (await < moved && w->landed[await] > now) {
                stalled += w->landed[await] - now;
                now = w->landed[await];
            }
        const op_t *op = w->op + q;
        if (op->kind == REVERSE) {
            now += x->reverse_s[op->stage];
        } else {
            now += x->forward_s[op->stage];
            if (op->kind == TAPE_LAST)
                now -= x->spared_s[op->stage];
        }
        for (; put < moved && w->item[put].made == q; put++) {
            *writing = (now > *writing ? now : *writing) + w->item[put].write_s;
            w->written[put] = *writing;
        }
    }
    *waited = stalled;
    return now;
}

static double judge(const joint_t *x, work_t *w, const uint8_t *fates, int64_t *moved,
                    double *waited)
{
    if (!w->head->ready)
        forget(w);
    if (!lay_out(x, w, fates))
        return INFINITY;
    *moved = arrange(x, w);
    return *moved < 0 ? INFINITY : run(x, w, *moved, waited);
}

/* The makespan of a plan, infinite if it does not fit.
 *
 * `summary` takes the numbers of things moved, operations, things, nodes, the
 * first operation of the reverse sweep, and the peak in bytes.
 */
double ms_joint_judge(const joint_t *x, const uint8_t *fates, int64_t *summary,
                             double *waited)
{
    work_t w = work_of(x);
    int64_t moved = 0;
    *waited = 0;
    const double seconds = judge(x, &w, fates, &moved, waited);
    const head_t *head = w.head;
    const int64_t told[] = {moved, head->ops, head->items, head->nodes, head->turn, head->peak};
    memcpy(summary, told, sizeof told);
    return seconds;
}

/* Copy what the last call of ms_joint_judge laid out: 3 numbers an operation (kind, stage,
 * need), 7 a thing (tape, step, made, evicted, got, first, last), 5 a node (start, stop, slots,
 * apart, tape). */
void ms_joint_layout(const joint_t *x, int64_t *ops, int64_t *items, int64_t *nodes)
{
    const work_t w = work_of(x);
    for (int64_t q = 0; q < w.head->ops; q++) {
        const int64_t told[] = {w.op[q].kind, w.op[q].stage, w.op[q].need};
        memcpy(ops + 3 * q, told, sizeof told);
    }
    for (int64_t i = 0; i < w.head->items; i++) {
        const item_t *v = w.item + i;
        const int64_t told[] = {v->tape, v->step, v->made, v->evicted, v->got, v->first, v->last};
        memcpy(items + 7 * i, told, sizeof told);
    }
    for (int64_t k = 0; k < w.head->nodes; k++) {
        const node_t *v = w.node + k;
        const int64_t told[] = {v->start, v->stop, v->slots, v->apart, v->tape};
        memcpy(nodes + 5 * k, told, sizeof told);
    }
}

/* ------------------------------------------------------------- local search */

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
    work_t w = work_of(x);
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
        const double found = judge(x, &w, w.other, &moved, &waited);
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

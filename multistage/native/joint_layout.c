/* A plan of a chain with a slow tier, laid out: operations, things of the tier, nodes. */
#include "joint_work.h"

static void push(work_t *w, int64_t need, int kind, int64_t stage)
{
    w->op[w->head->ops++] = (op_t){need, kind, (int32_t)stage};
}

static int32_t thing(const joint_t *x, work_t *w, int tape, int64_t step)
{
    const int64_t bytes = tape ? x->bytes->tape[step] : x->bytes->state[step];
    w->item[w->head->items] = (item_t){
        .bytes = bytes,
        .write_s = x->write_s + (double)bytes / x->write_bytes_per_s,
        .read_s = x->read_s + (double)bytes / x->read_bytes_per_s,
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
    const int keeps = x->slots->tapes ? KEEPS_TAPE : 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n;) {
        const node_t *last = count ? w->node + count - 1 : 0;
        const int tape = (fates[i] & keeps) != 0;
        const int away = i && (fates[i - 1] & TAPE_AWAY) && (x->may[i - 1] & MAY_TAPE);
        const int apart = last && (!last->tape || ((fates[i] & APART) && away));
        int64_t stop = i;
        while (!tape && stop + 1 < n && !(fates[stop + 1] & (STARTS | keeps)))
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
        v->things = (int32_t)w->head->items;
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
    const int64_t next = v->input >= 0 ? v->input : v->things; /* things before it are read next */
    int64_t slots = INFEASIBLE;
    for (int64_t r = reserve; r >= 0 && slots == INFEASIBLE; r--) {
        const int64_t from = next > r ? next - r : 0;
        slots = joint_slots_within(x, w, v->start, v->stop, room - (w->before[next] - w->before[from]));
    }
    if (slots == INFEASIBLE)
        return 0;
    const trace_t *trace = joint_trace_of(x, w, v->start, v->stop, slots);
    if (w->head->ops + trace->count > OPS - 4 * x->slots->n)
        return 0;
    v->slots = (int32_t)slots;
    for (int64_t q = 0; q < trace->count; q++) {
        const op_t *op = w->held + trace->first + q;
        push(w, op->need + v->left, op->kind, op->stage);
    }
    return 1;
}

int joint_lay_out(const joint_t *x, work_t *w, const uint8_t *fates)
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

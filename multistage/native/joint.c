/* Plans of a heterogeneous chain with a slow tier, judged in virtual time.
 *
 * `planners/chain/joint.py` tells the algorithm.  A plan is one byte for each stage (joint.h).
 * To judge it, the plan is laid out as operations and things of the tier (joint_layout.c); each
 * thing gets the operations before which it is evicted and read back, from
 * bytes alone; then the clock runs.  As times play no part in what is resident
 * when, a tier slower than planned costs time and never memory.
 */
#include "joint_work.h"

#include <string.h>

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
            if (await < moved) {
                if (w->landed[await] > now) {
                    stalled += w->landed[await] - now;
                    now = w->landed[await];
                }
                now += x->read_overhead_s;
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
            now += x->write_overhead_s;
            *writing = (now > *writing ? now : *writing) + w->item[put].write_s;
            w->written[put] = *writing;
        }
    }
    *waited = stalled;
    return now;
}

double joint_judged(const joint_t *x, work_t *w, const uint8_t *fates, int64_t *moved,
                    double *waited)
{
    if (!w->head->ready)
        joint_forget(w);
    if (!joint_lay_out(x, w, fates))
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
    work_t w = joint_work_of(x);
    int64_t moved = 0;
    *waited = 0;
    const double seconds = joint_judged(x, &w, fates, &moved, waited);
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
    const work_t w = joint_work_of(x);
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

/* When a streaming schedule gives up a slot for the next read: `planners/streaming/reserve.py`.
 *
 * Tables of choices are made for N_TABLES numbers of free slots, in memory of the caller.
 */
#include "revolve.h"
#include "sweep_run.h"

#define AGAIN_ACTIONS 6 /* of planners/streaming/reserve.py */
#define N_TABLES 8

/* `Reservation._read_again`. */
static void fill_again(const run_t *r, const double *value, double *least, int64_t *again)
{
    const sweep_t *p = r->p;
    const double extra = AGAIN_ACTIONS * p->action + p->read_overhead;
    for (int64_t k = 0; k <= EXACT_LENGTH; k++) {
        double best = 0;
        int64_t where = 0;
        for (int64_t m = 1; m < k - 1; m++) {
            const double parts = (double)m * p->forward + value[k - m] + least[m];
            if (!where || parts < best) {
                best = parts;
                where = m;
            }
        }
        least[k] = value[k];
        again[k] = 0;
        if (where && best + extra < value[k] - 1e-12) {
            least[k] = best + extra;
            again[k] = where;
        }
    }
}

/* `Reservation._table`: choices of the spine for every length, then those of a second read. */
static const int64_t *choices(run_t *r, int64_t free)
{
    const sweep_t *p = r->p;
    int64_t at = 0;
    while (at < N_TABLES && r->tables[1 + at] != free)
        at++;
    if (at == N_TABLES) {
        at = r->tables[0]++ % N_TABLES;
        r->tables[1 + at] = free;
        double *less = r->scratch, *value = less + EXACT_LENGTH + 1;
        int64_t *choice = r->tables + 1 + N_TABLES + at * 2 * (EXACT_LENGTH + 1);
        for (int64_t k = 0; k <= EXACT_LENGTH; k++)
            less[k] = (double)k * p->turn + revolve_nu(k, free) * p->forward;
        value[0] = 0;
        choice[0] = 0;
        for (int64_t k = 1; k <= EXACT_LENGTH; k++) {
            double best = 0;
            int64_t where = 0;
            for (int64_t m = 1; m < k; m++) {
                const double deeper = (double)m * p->forward + less[k - m] + value[m];
                if (!where || deeper < best) {
                    best = deeper;
                    where = m;
                }
            }
            value[k] = less[k] > p->read ? less[k] : p->read;
            choice[k] = 0;
            if (where && best < value[k] - 1e-12) {
                value[k] = best;
                choice[k] = where;
            }
        }
        fill_again(r, value, less, choice + EXACT_LENGTH + 1);
    }
    return r->tables + 1 + N_TABLES + at * 2 * (EXACT_LENGTH + 1);
}

int64_t sweep_spine_advance(run_t *r, int64_t length, int64_t free)
{
    if (length <= 1 || free < 1)
        return 0;
    if (length > EXACT_LENGTH)
        return revolve_first_advance(length, free + 1);
    return choices(r, free)[length];
}

int64_t sweep_read_again(run_t *r, int64_t length, int64_t free)
{
    if (length <= 2 || length > EXACT_LENGTH || free < 1)
        return 0;
    return choices(r, free)[EXACT_LENGTH + 1 + length];
}

int64_t ms_sweep_tables_len(void)
{
    return 1 + N_TABLES + N_TABLES * 2 * (EXACT_LENGTH + 1);
}

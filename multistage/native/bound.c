/* The priced two-level dynamic programme behind the priced lower bound.
 *
 * A segment of l steps with f free slots, its first state in a slot (FAST) or
 * only in the slow tier (SLOW), in the first sweep or later.  Four costs each:
 *
 *   later[FAST](l)  = min over m of  m c_F2 + right_later(l-m) + later[FAST](m)
 *   later[SLOW](l)  = min over m of  m c_F2 + right_later(l-m) + back(m)
 *   first[.](l)     the same with m c_F1 and right_first,
 *
 * where the right part's first state goes into a slot or is written, or is
 * reversed at once (length 1), and back(m) reads the first state again, to
 * keep it in a slot or not.  Every sum is a (min,+) convolution over m; the
 * operands are kept ready, so that the inner loop is one add and one min.
 *
 * The caller owns the work area of ms_priced_work_len(n, slots) doubles.
 */
#include <math.h>
#include <stdint.h>

#include "core.h"

enum { LATER_FAST, LATER_SLOW, FIRST_FAST, FIRST_SLOW, N_COSTS };
enum { RIGHT_LATER, RIGHT_FIRST, LEFT = 2, N_ROWS = LEFT + N_COSTS };

/* Least sum left[m] + right[m], m = 1 .. l-1; four running minima hide the latency. */
static double least_sum(const double *left, const double *right, int64_t l)
{
    double a = INFINITY, b = INFINITY, c = INFINITY, d = INFINITY;
    int64_t m = 1;
    for (; m + 3 < l; m += 4) {
        double w = left[m] + right[m], x = left[m + 1] + right[m + 1];
        double y = left[m + 2] + right[m + 2], z = left[m + 3] + right[m + 3];
        a = w < a ? w : a;
        b = x < b ? x : b;
        c = y < c ? y : c;
        d = z < d ? z : d;
    }
    for (; m < l; m++)
        a = left[m] + right[m] < a ? left[m] + right[m] : a;
    return fmin(fmin(a, b), fmin(c, d));
}

/* Doubles the caller has to provide, or -1 for sizes out of range. */
int64_t ms_priced_work_len(int64_t n, int64_t slots)
{
    if (n < 1 || n > 1 << 20 || slots < 0 || slots > n)
        return -1;
    return (2 * N_COSTS + N_ROWS) * (n + 1);
}

/* Return the least priced cost of n steps with `slots` slots, turns not counted.
 *
 * forward_1, write_1 and keep_1 are the prices of a step, of a write and of a
 * slot kept in the first sweep, forward_2 and write_2 later, read that of a read. */
double ms_priced(int64_t n, int64_t slots, double forward_1, double write_1, double keep_1,
                        double forward_2, double write_2, double read, double *work)
{
    if (n <= 1)
        return 0.0;
    int64_t row = n + 1;
    double *now = work, *fewer = work + N_COSTS * row, *rows = work + 2 * N_COSTS * row;
    double root = INFINITY;

    for (int64_t f = 0; f <= slots; f++) {
        for (int64_t l = 0; l <= n; l++) {
            if (l > 1) {
                /* right[n - q] holds the right part of q steps: with q = l - m it
                 * advances with m. */
                const double *later = rows + RIGHT_LATER * row + n - l;
                const double *first = rows + RIGHT_FIRST * row + n - l;
                for (int k = 0; k < N_COSTS; k++)
                    now[k * row + l] =
                        least_sum(rows + (LEFT + k) * row, k < FIRST_FAST ? later : first, l);
            } else {
                for (int k = 0; k < N_COSTS; k++)
                    now[k * row + l] = 0.0;
            }
            double later = write_2 + now[LATER_SLOW * row + l];
            double first = write_1 + now[FIRST_SLOW * row + l];
            double back = now[LATER_SLOW * row + l];
            if (f > 0) {
                later = fmin(later, fewer[LATER_FAST * row + l]);
                first = fmin(first, keep_1 + fewer[FIRST_FAST * row + l]);
                back = fmin(back, fewer[LATER_FAST * row + l]);
            }
            if (l == n)
                root = first;
            rows[RIGHT_LATER * row + n - l] = l > 1 ? later : 0.0;
            rows[RIGHT_FIRST * row + n - l] = l > 1 ? first : 0.0;
            double fast = now[LATER_FAST * row + l], slow = read + (l > 1 ? back : 0.0);
            rows[(LEFT + LATER_FAST) * row + l] = (double)l * forward_2 + fast;
            rows[(LEFT + LATER_SLOW) * row + l] = (double)l * forward_2 + slow;
            rows[(LEFT + FIRST_FAST) * row + l] = (double)l * forward_1 + fast;
            rows[(LEFT + FIRST_SLOW) * row + l] = (double)l * forward_1 + slow;
        }
        double *swap = fewer;
        fewer = now;
        now = swap;
    }
    return root;
}

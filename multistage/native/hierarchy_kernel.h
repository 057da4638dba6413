/* The (min,+) kernel of hierarchy.c for one instruction set.
 *
 * Included once per set, with these defined:
 *   NAME(x)     the name of x for this set
 *   TARGET      the function attribute that allows its instructions
 *   LANES       doubles in one of its vectors, 2, 4 or 8
 *   MIN(a, b)   the smaller of two vectors, lane by lane; there are no NaNs
 *
 * Every set adds the same two doubles for a candidate and takes the same
 * minimum, so the rows are equal to the last bit.
 */

typedef double NAME(vector) __attribute__((vector_size(8 * LANES)));
typedef double NAME(loose) __attribute__((vector_size(8 * LANES), aligned(8)));
#define VECTOR NAME(vector)
#define LOOSE NAME(loose)

/* Least left[i] + right[i] over i < count; blocks[b] is the least of block b. */
TARGET static double NAME(least)(const double *left, const double *right, int64_t count,
                                 double *blocks)
{
    double least = INFINITY;
    for (int64_t start = 0; start < count; start += BLOCK, blocks++) {
        const double *a = left + start, *b = right + start;
        const int64_t size = count - start < BLOCK ? count - start : BLOCK;
        double best = INFINITY;
        int64_t i = 0;
        if (size >= 4 * LANES) {
            VECTOR w = *(const LOOSE *)a + *(const LOOSE *)b;
            VECTOR x = *(const LOOSE *)(a + LANES) + *(const LOOSE *)(b + LANES);
            VECTOR y = *(const LOOSE *)(a + 2 * LANES) + *(const LOOSE *)(b + 2 * LANES);
            VECTOR z = *(const LOOSE *)(a + 3 * LANES) + *(const LOOSE *)(b + 3 * LANES);
            for (i = 4 * LANES; i + 4 * LANES <= size; i += 4 * LANES) {
                w = MIN(w, *(const LOOSE *)(a + i) + *(const LOOSE *)(b + i));
                x = MIN(x, *(const LOOSE *)(a + i + LANES) + *(const LOOSE *)(b + i + LANES));
                y = MIN(y, *(const LOOSE *)(a + i + 2 * LANES) +
                               *(const LOOSE *)(b + i + 2 * LANES));
                z = MIN(z, *(const LOOSE *)(a + i + 3 * LANES) +
                               *(const LOOSE *)(b + i + 3 * LANES));
            }
            w = MIN(MIN(w, x), MIN(y, z));
            for (int v = 0; v < LANES; v++)
                best = w[v] < best ? w[v] : best;
        }
        for (; i < size; i++)
            best = a[i] + b[i] < best ? a[i] + b[i] : best;
        *blocks = best;
        least = best < least ? best : least;
    }
    return least;
}

#undef NAME
#undef TARGET
#undef LANES
#undef MIN
#undef VECTOR
#undef LOOSE

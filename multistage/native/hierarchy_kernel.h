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

/* Least a[i] + b[i] over i < size. */
TARGET static double NAME(block)(const double *a, const double *b, int64_t size)
{
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
            y = MIN(y, *(const LOOSE *)(a + i + 2 * LANES) + *(const LOOSE *)(b + i + 2 * LANES));
            z = MIN(z, *(const LOOSE *)(a + i + 3 * LANES) + *(const LOOSE *)(b + i + 3 * LANES));
        }
        w = MIN(MIN(w, x), MIN(y, z));
        for (int v = 0; v < LANES; v++)
            best = w[v] < best ? w[v] : best;
    }
    for (; i < size; i++)
        best = a[i] + b[i] < best ? a[i] + b[i] : best;
    return best;
}

/* Least a[i] + b[i] over i < count; blocks[k] is the least of block k. */
TARGET static double NAME(least)(const double *a, const double *b, int64_t count, double *blocks)
{
    double least = INFINITY;
    for (int64_t start = 0; start < count; start += BLOCK, blocks++) {
        *blocks = NAME(block)(a + start, b + start, min64(BLOCK, count - start));
        least = *blocks < least ? *blocks : least;
    }
    return least;
}

/* Least a[i] + b[i] over i < count, where a ascends and b descends.
 *
 * A block whose first a and last b are together too much is passed over; so
 * most are, once the block of the last length's choice is known. */
TARGET static double NAME(search)(const double *a, const double *b, int64_t count, int64_t *hint)
{
    int64_t start = *hint < count ? *hint : 0;
    double least = NAME(block)(a + start, b + start, min64(BLOCK, count - start));
    for (int64_t far = 0; far < count; far += FAR) {
        const int64_t stop = min64(far + FAR, count);
        if (a[far] + b[stop - 1] >= least)
            continue;
        for (start = far; start < stop; start += BLOCK) {
            const int64_t size = min64(BLOCK, stop - start);
            if (a[start] + b[start + size - 1] >= least)
                continue;
            const double best = NAME(block)(a + start, b + start, size);
            if (best < least) {
                least = best;
                *hint = start;
            }
        }
    }
    return least;
}

#undef NAME
#undef TARGET
#undef LANES
#undef MIN
#undef VECTOR
#undef LOOSE

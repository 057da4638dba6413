/* The dynamic program behind H-Revolve, Disk-Revolve and mixed storage.
 *
 * Costs of reversing l steps beyond their turns.  With the first state held in
 * a level, m slots of the level counting that one (row), and without (over):
 *
 *   row(l, m)  = min(below(l), min over 0 < j < l of
 *                              ahead(j) + over(l-j, m-1) + row(j, m))
 *   over(l, m) = min(below(l), write + row(l, m))
 *
 * ahead(j) = j steps forward and one read.  Rows are made one slot count at a
 * time, each from `over` of the row before; a level without bound needs the
 * one row that is made from its own `over`.  The operands are kept ready, the
 * right one reversed (entry n - l), so that the inner loop is one add and one
 * min over contiguous doubles.
 *
 * No table of choices is kept: the code that walks the schedule finds them again,
 * O(l) each.  All memory is the caller's.
 */
#include <math.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core.h"

/* Candidates that are looked at, or passed over, together. */
enum { BLOCK = 64, FAR = 8 * BLOCK };
enum { BASELINE = 1, AVX2 = 2, AVX512 = 3 };

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#define NAME(x) x##_baseline
#define TARGET
#define LANES 2
#if defined(__x86_64__)
#define MIN(a, b) _mm_min_pd(a, b)
#else
typedef double two_t __attribute__((vector_size(16)));
typedef int64_t mask_t __attribute__((vector_size(16)));
static inline two_t min_two(two_t a, two_t b)
{
    const mask_t less = a < b;
    return (two_t)(((mask_t)a & less) | ((mask_t)b & ~less));
}
#define MIN(a, b) min_two(a, b)
#endif
#include "hierarchy_kernel.h"

#if defined(__x86_64__)
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2")))
#define LANES 4
#define MIN(a, b) _mm256_min_pd(a, b)
#include "hierarchy_kernel.h"

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq")))
#define LANES 8
#define MIN(a, b) _mm512_min_pd(a, b)
#include "hierarchy_kernel.h"
#endif

#if defined(__x86_64__)
#define DISPATCH(isa, call, ...)                                                                  \
    ((isa) == AVX512 ? call##_avx512(__VA_ARGS__)                                                 \
                     : (isa) == AVX2 ? call##_avx2(__VA_ARGS__) : call##_baseline(__VA_ARGS__))
#else
#define DISPATCH(isa, call, ...) call##_baseline(__VA_ARGS__)
#endif

/* Doubles of scratch that ms_hierarchy_row needs for n steps. */
int64_t ms_hierarchy_blocks(int64_t n) { return n / BLOCK + 1; }

/* Fill one row for lengths first..last, 2 <= first, given all shorter ones.
 *
 * ahead, below, left and row have n + 1 entries, by length; left(l) = ahead(l)
 * + row(l).  right and over have n + 1 entries, of length l at n - l; they may
 * be the same (a level without bound).
 *
 * depth and over_depth, unless null, get the fewest slots of the level that a
 * cheapest reversal takes; then right and over must be the same.
 */
void ms_hierarchy_row(int64_t n, int64_t first, int64_t last, const double *ahead,
                             double write, const double *below, const double *right, double *left,
                             double *row, double *over, int32_t *depth, int32_t *over_depth,
                             double *blocks, int64_t isa)
{
    int64_t hint = 0;
    (void)isa;
    for (int64_t l = first; l <= last; l++) {
        const double *a = left + 1, *b = right + n - l + 1;
        const double split = depth ? DISPATCH(isa, least, a, b, l - 1, blocks)
                                   : DISPATCH(isa, search, a, b, l - 1, &hint);
        const double value = below[l] < split ? below[l] : split;
        const double written = write + value;
        row[l] = value;
        left[l] = ahead[l] + value;
        over[n - l] = below[l] < written ? below[l] : written;
        if (!depth)
            continue;
        int32_t fewest = INT32_MAX;
        if (below[l] <= split) {
            fewest = 1; /* its own state, which may be released at once */
        } else {
            for (int64_t start = 0; start < l - 1; start += BLOCK) {
                if (blocks[start / BLOCK] != split)
                    continue;
                const int64_t stop = start + BLOCK < l - 1 ? start + BLOCK : l - 1;
                for (int64_t i = start; i < stop; i++) {
                    if (a[i] + b[i] != split)
                        continue;
                    const int32_t above = over_depth[l - 1 - i] + 1, again = depth[i + 1];
                    const int32_t most = above > again ? above : again;
                    fewest = most < fewest ? most : fewest;
                }
            }
        }
        depth[l] = fewest;
        over_depth[l] = below[l] <= written ? 0 : fewest;
    }
}

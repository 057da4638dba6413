/* The (min,+) kernels of chain.c for one instruction set.
 *
 * Included once per set, with these defined:
 *   NAME(x)     the name of x for this set
 *   TARGET      the function attribute that allows its instructions
 *   LANES       floats in one of its vectors, 4, 8 or 16
 *   ROWS, COLS  the register block: ROWS * COLS accumulators
 *   MIN(a, b)   the smaller of two vectors, lane by lane; there are no NaNs
 *
 * Every set adds the same two floats for a candidate and takes the same
 * minimum, so the tables are equal to the last bit.
 */

typedef float NAME(vector) __attribute__((vector_size(4 * LANES)));
typedef float NAME(loose) __attribute__((vector_size(4 * LANES), aligned(4)));
#define VECTOR NAME(vector)
#define LOOSE NAME(loose)

/* Copy row k of the right operand, columns t, shifted down by its slots, plus `add`. */
TARGET static void NAME(shift)(const solve_t *x, int64_t k, const int64_t *t, int nt, int64_t m,
                               float add, float *out)
{
    if (m <= -PLANE) {
        for (int q = 0; q < nt * PLANE; q++)
            out[q] = INFINITY;
        return;
    }
    /* Two neighbouring planes; what lies below memory 0 is infeasible. */
    const int64_t plane = m >= 0 ? m / PLANE : -1;
    const int shift = (int)(m - plane * PLANE);
    float pair[2 * PLANE];
    for (int q = 0; q < PLANE; q++)
        pair[q] = INFINITY;
    for (int j = 0; j < nt; j++) {
        if (plane >= 0)
            memcpy(pair, cell(x, plane, k, t[j]), PLANE * sizeof(float));
        if (shift)
            memcpy(pair + PLANE, cell(x, plane + 1, k, t[j]), PLANE * sizeof(float));
        for (int v = 0; v < PLANE; v += LANES)
            *(LOOSE *)(out + j * PLANE + v) = *(const LOOSE *)(pair + shift + v) + add;
    }
}

/* The right operand of row k: its state kept, or moved at its price. */
TARGET static void NAME(pack)(const solve_t *x, int64_t k, const int64_t *t, int nt, float *out)
{
    const chain_t *c = x->chain;
    NAME(shift)(x, k, t, nt, x->plane * PLANE - c->state[k], c->prefix[k], out);
    if (!c->move_state)
        return;
    const float add = c->prefix[k] + c->move_state[k];
    for (int j = 0; j < nt; j++, out += PLANE) {
        const float *behind = cell(x, x->plane, k, t[j]);
        for (int v = 0; v < PLANE; v += LANES) {
            const VECTOR moved = *(const LOOSE *)(behind + v) + add;
            *(LOOSE *)(out + v) = MIN(moved, *(const LOOSE *)(out + v));
        }
    }
}

/* sums[i][j][:] = min(sums, left[i][k][:] + right[k][j][:]) over `depth` values of k. */
TARGET static void NAME(multiply)(const float *const *left, const float *right, int depth,
                                  float *sums, int ns, int nt)
{
    for (int i = 0; i < ns; i += ROWS)
        for (int j = 0; j < nt; j += COLS)
            for (int v = 0; v < PLANE; v += LANES) {
                VECTOR best[ROWS][COLS];
                const float *a[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    a[r] = left[i + r < ns ? i + r : ns - 1] + v;
                    for (int c = 0; c < COLS; c++)
                        best[r][c] = *(const LOOSE *)(sums + ((i + r) * TILE + j + c) * PLANE + v);
                }
                const float *b = right + j * PLANE + v;
                for (int k = 0; k < depth; k++, b += TILE * PLANE) {
                    VECTOR y[COLS];
                    for (int c = 0; c < COLS; c++)
                        y[c] = *(const LOOSE *)(b + c * PLANE);
                    for (int r = 0; r < ROWS; r++) {
                        const VECTOR z = *(const LOOSE *)(a[r] + k * PLANE);
                        for (int c = 0; c < COLS; c++) {
                            const VECTOR sum = z + y[c];
                            best[r][c] = MIN(sum, best[r][c]);
                        }
                    }
                }
                for (int r = 0; r < ROWS; r++)
                    for (int c = 0; c < COLS; c++)
                        *(LOOSE *)(sums + ((i + r) * TILE + j + c) * PLANE + v) = best[r][c];
            }
}

/* One row times one column: best = min(best, left[k] + right[k]) over `depth` values of k. */
TARGET static void NAME(add_min)(float *best, const float *left, const float *right, int depth)
{
    for (int v = 0; v < PLANE; v += LANES) {
        VECTOR least = *(const LOOSE *)(best + v);
        for (int k = 0; k < depth; k++) {
            const VECTOR sum =
                *(const LOOSE *)(left + k * PLANE + v) + *(const LOOSE *)(right + k * TILE * PLANE + v);
            least = MIN(sum, least);
        }
        *(LOOSE *)(best + v) = least;
    }
}

#undef VECTOR
#undef LOOSE
#undef MIN
#undef NAME
#undef TARGET
#undef LANES
#undef ROWS
#undef COLS

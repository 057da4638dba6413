/* The exact optimum of a short reversal, by A* over the states of the machine.
 *
 * One computing thread, one write and one read channel, s fast slots; all
 * times are whole numbers.  A state of the search says what is held where and
 * how long each of the three activities still takes.  Moves at one instant
 * (save, start a step, a write or a read) cost nothing; the one move that
 * costs time lets it pass until the next activity ends.
 *
 * Heuristic: what the computing thread still has to do, that is the turns left
 * and one forward step for each state that is nowhere at hand.  No schedule
 * needs less, so the first goal taken from the heap is optimal; states reached
 * again more cheaply are opened again.
 *
 * The caller owns the hash table (keys, seconds) and the heap; where either is
 * full the search stops with FULL and may be repeated with more room.
 */
#include <stdint.h>

enum { FULL = -1, BAD = -2, UNREACHABLE = -3 };
enum { IDLE, FORWARD, TURN };

#define MAX_STEPS 12
#define NONE 15
#define MAX_COMPUTE 63
#define MAX_TRANSFER 255

/* A heap record: f = g + h, g, and the packed state. */
enum { F, G, KEY, RECORD };

typedef struct {
    int left;           /* adjoint steps still to do */
    int live;           /* the live state; while a step runs, its result; or NONE */
    int op, op_rest;    /* what the computing thread does, and how long still */
    int fast, slow;     /* sets of states, one bit each */
    int put, put_rest;  /* the state under write, or NONE */
    int get, get_rest;  /* the state under read, or NONE */
} state_t;

typedef struct {
    int n, slots, forward, turn, write, read;
    uint64_t *keys;
    int64_t *seconds, *heap;
    uint64_t mask;
    int64_t n_states, max_states, n_heap, max_heap;
    int full;
} search_t;

/* 4 + 4 + 2 + 6 + 12 + 12 + 4 + 8 + 4 + 8 = 64 bits.  Never 0: an idle write
 * channel has put = NONE, a busy one put_rest > 0. */
static uint64_t pack(const state_t *x)
{
    return (uint64_t)x->left | (uint64_t)x->live << 4 | (uint64_t)x->op << 8 |
           (uint64_t)x->op_rest << 10 | (uint64_t)x->fast << 16 | (uint64_t)x->slow << 28 |
           (uint64_t)x->put << 40 | (uint64_t)x->put_rest << 44 | (uint64_t)x->get << 52 |
           (uint64_t)x->get_rest << 56;
}

static state_t unpack(uint64_t key)
{
    state_t x = {
        .left = key & 15,
        .live = key >> 4 & 15,
        .op = key >> 8 & 3,
        .op_rest = key >> 10 & 63,
        .fast = key >> 16 & 0xfff,
        .slow = key >> 28 & 0xfff,
        .put = key >> 40 & 15,
        .put_rest = key >> 44 & 255,
        .get = key >> 52 & 15,
        .get_rest = key >> 56 & 255,
    };
    return x;
}

static int count_bits(unsigned bits)
{
    int count = 0;
    for (; bits; bits &= bits - 1)
        count++;
    return count;
}

static int64_t still_to_compute(const search_t *q, const state_t *x)
{
    int at_hand = x->fast | x->slow, left = x->left;
    int64_t total = x->op_rest;
    if (x->put_rest)
        at_hand |= 1 << x->put;
    if (x->get_rest)
        at_hand |= 1 << x->get;
    if (x->live != NONE)
        at_hand |= 1 << x->live;
    if (x->op == TURN)
        left--;
    else if (left == q->n)
        total += q->forward; /* the first turn makes state n as well */
    int missing = left - count_bits((unsigned)at_hand & ((1u << left) - 1));
    return total + (int64_t)missing * q->forward + (int64_t)left * q->turn;
}

static int before(const int64_t *a, const int64_t *b)
{
    /* Of equal f the deeper state first: it is nearer to the goal. */
    return a[F] < b[F] || (a[F] == b[F] && a[G] > b[G]);
}

static void copy_record(int64_t *to, const int64_t *from)
{
    for (int k = 0; k < RECORD; k++)
        to[k] = from[k];
}

static void heap_push(search_t *q, const int64_t *record)
{
    if (q->n_heap == q->max_heap) {
        q->full = 1;
        return;
    }
    int64_t hole = q->n_heap++;
    while (hole > 0 && before(record, q->heap + RECORD * ((hole - 1) / 2))) {
        copy_record(q->heap + RECORD * hole, q->heap + RECORD * ((hole - 1) / 2));
        hole = (hole - 1) / 2;
    }
    copy_record(q->heap + RECORD * hole, record);
}

static void heap_pop(search_t *q, int64_t *top)
{
    copy_record(top, q->heap);
    const int64_t *last = q->heap + RECORD * --q->n_heap;
    int64_t hole = 0;
    for (;;) {
        int64_t child = 2 * hole + 1;
        if (child >= q->n_heap)
            break;
        if (child + 1 < q->n_heap &&
            before(q->heap + RECORD * (child + 1), q->heap + RECORD * child))
            child++;
        if (!before(q->heap + RECORD * child, last))
            break;
        copy_record(q->heap + RECORD * hole, q->heap + RECORD * child);
        hole = child;
    }
    copy_record(q->heap + RECORD * hole, last);
}

static uint64_t find(const search_t *q, uint64_t key)
{
    uint64_t h = key;
    h ^= h >> 32;
    h *= 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
    uint64_t i = h & q->mask;
    while (q->keys[i] && q->keys[i] != key)
        i = (i + 1) & q->mask;
    return i;
}

static void reach(search_t *q, const state_t *x, int64_t seconds)
{
    uint64_t key = pack(x), i = find(q, key);
    if (q->keys[i] == key && q->seconds[i] <= seconds)
        return;
    if (q->keys[i] != key) {
        if (q->n_states == q->max_states) {
            q->full = 1;
            return;
        }
        q->n_states++;
        q->keys[i] = key;
    }
    q->seconds[i] = seconds;
    int64_t record[RECORD] = {seconds + still_to_compute(q, x), seconds, (int64_t)key};
    heap_push(q, record);
}

/* Put state `step` under read, or save it, in a free slot or in place of any
 * state that is not under write. */
static void take_slot(search_t *q, const state_t *x, int64_t seconds, int step, int is_read)
{
    int pinned = x->put_rest ? 1 << x->put : 0;
    int full = count_bits((unsigned)x->fast) + (x->get_rest > 0) >= q->slots;
    for (int victim = 0; victim < (full ? q->n : 1); victim++) {
        state_t y = *x;
        if (full) {
            if (!(x->fast & ~pinned & 1 << victim))
                continue;
            y.fast &= ~(1 << victim);
        }
        if (is_read) {
            y.get = step;
            y.get_rest = q->read;
        } else {
            y.fast |= 1 << step;
        }
        reach(q, &y, seconds);
    }
}

static void compute(search_t *q, const state_t *x, int64_t seconds)
{
    if (x->live != NONE && !(x->fast >> x->live & 1))
        take_slot(q, x, seconds, x->live, 0);
    for (int i = 0; i < x->left; i++) {
        if (x->live != i && !(x->fast >> i & 1))
            continue;
        state_t y = *x;
        if (i == x->left - 1) {
            y.op = TURN;
            y.live = NONE;
            y.op_rest = q->turn + (x->left == q->n ? q->forward : 0);
        } else {
            y.op = FORWARD;
            y.live = i + 1;
            y.op_rest = q->forward;
        }
        reach(q, &y, seconds);
    }
}

static void transfer(search_t *q, const state_t *x, int64_t seconds)
{
    for (int i = 0; i < q->n && q->write; i++) {
        int in_fast = x->fast >> i & 1, in_slow = x->slow >> i & 1;
        if (!x->put_rest && in_fast && !in_slow) {
            state_t y = *x;
            y.put = i;
            y.put_rest = q->write;
            reach(q, &y, seconds);
        }
        if (!x->get_rest && in_slow && !in_fast)
            take_slot(q, x, seconds, i, 1);
    }
}

static int shortest(int a, int b) { return b && (!a || b < a) ? b : a; }

static void let_time_pass(search_t *q, const state_t *x, int64_t seconds)
{
    int step = shortest(shortest(x->op_rest, x->put_rest), x->get_rest);
    state_t y = *x;
    if (x->op != IDLE && !x->op_rest)
        step = 0; /* a turn that takes no time */
    else if (!step)
        return;
    if (y.put_rest && !(y.put_rest -= step)) {
        if (y.put < y.left)
            y.slow |= 1 << y.put;
        else
            y.fast &= ~(1 << y.put);
        y.put = NONE;
    }
    if (y.get_rest && !(y.get_rest -= step)) {
        if (y.get < y.left)
            y.fast |= 1 << y.get;
        y.get = NONE;
    }
    if (y.op != IDLE && !(y.op_rest -= step)) {
        if (y.op == TURN) {
            /* Nobody wants the states above any more; a write in flight keeps its slot. */
            int wanted = (1 << --y.left) - 1;
            y.slow &= wanted;
            y.fast &= wanted | (y.put_rest ? 1 << y.put : 0);
        }
        y.op = IDLE;
    }
    reach(q, &y, seconds + step);
}

/* Return the least makespan of n steps, or FULL, or BAD for arguments out of range.
 *
 * keys and seconds hold n_table entries each, a power of two, keys all 0; heap
 * holds 3 * n_heap int64.  write = 0 means that there is no slow tier. */
int64_t exact_steps(int64_t n, int64_t slots, int64_t forward, int64_t turn, int64_t write,
                    int64_t read, uint64_t *keys, int64_t *seconds, int64_t n_table,
                    int64_t *heap, int64_t n_heap)
{
    if (n < 1 || n > MAX_STEPS || slots < 1 || forward < 1 || turn < 0 ||
        forward > MAX_COMPUTE || turn > MAX_COMPUTE - forward || write < 0 ||
        write > MAX_TRANSFER || read > MAX_TRANSFER || (write && read < 1) || n_table < 2 ||
        n_table > INT64_MAX / 8 || (n_table & (n_table - 1)) || n_heap < 1 ||
        n_heap > INT64_MAX / (8 * RECORD))
        return BAD;
    search_t q = {
        .n = (int)n,
        .slots = (int)(slots < n ? slots : n),
        .forward = (int)forward,
        .turn = (int)turn,
        .write = (int)write,
        .read = (int)read,
        .keys = keys,
        .seconds = seconds,
        .heap = heap,
        .mask = (uint64_t)n_table - 1,
        .max_states = n_table - n_table / 4,
        .max_heap = n_heap,
    };
    state_t start = {.left = (int)n, .put = NONE, .get = NONE};
    reach(&q, &start, 0);
    while (q.n_heap && !q.full) {
        int64_t top[RECORD];
        heap_pop(&q, top);
        uint64_t key = (uint64_t)top[KEY];
        if (q.seconds[find(&q, key)] < top[G])
            continue;
        state_t x = unpack(key);
        if (!x.left && x.op == IDLE)
            return top[G];
        if (x.op == IDLE)
            compute(&q, &x, top[G]);
        transfer(&q, &x, top[G]);
        let_time_pass(&q, &x, top[G]);
    }
    return q.full ? FULL : UNREACHABLE;
}

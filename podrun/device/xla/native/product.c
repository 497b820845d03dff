/* Divides a product into parts and computes them. See product.h. */

#define _GNU_SOURCE
#include "product.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"
#include "plans.h"
#include "workers.h"

enum { VECTOR = 16 };

typedef struct {
    Product p;
    const float *left, *right, *bias, *mask;
    float *result;
    int64_t left_row, right_row, row; /* elements between neighbouring rows in memory */
    int status;
} Part;

/* The same bits as separate passes: nothing is contracted. */
__attribute__((target_clones("avx512f", "avx2", "default"))) static void
follow(int64_t follows, float *restrict to, const float *bias, const float *mask, int64_t count)
{
    for (int64_t i = 0; follows & WITH_BIAS && i < count; i++)
        to[i] = to[i] + bias[i];
    for (int64_t i = 0; follows & WITH_CUT && i < count; i++)
        to[i] = to[i] > 0.0f || to[i] != to[i] ? to[i] : 0.0f;
    for (int64_t i = 0; follows & WITH_MASK && i < count; i++)
        to[i] = mask[i] > 0.0f ? to[i] : 0.0f;
}

static void
run_part(void *what, int i)
{
    Part *part = (Part *)what + i;
    const Product *p = &part->p;
    const Before before = plan_enter();
    part->status = onednn.dnnl_sgemm(p->left_turned ? 'T' : 'N', p->right_turned ? 'T' : 'N', p->m, p->n, p->k, 1.0f,
                                     part->left, part->left_row, part->right, part->right_row, p->adds ? 1.0f : 0.0f,
                                     part->result, part->row);
    for (int64_t k = 0; p->follows && k < p->m; k++)
        follow(p->follows, part->result + k * part->row, part->bias, part->mask ? part->mask + k * part->row : NULL, p->n);
    plan_leave(before);
}

static void
run_all(void *what, int unused)
{
    for (int i = 0; i < MOST_PARTS; i++)
        run_part(what, i);
}

/* How a product is computed: in halves of the result's rows, in halves of its columns, or whole. */
typedef enum { ROWS, COLUMNS, WHOLE } Way;

/* What the bits of a product are those of: its halves of columns where the rows of the right operand are, of rows
   elsewhere. The library reads each part of the right operand once. */
static Way
way_of_bits(const Product *p)
{
    return p->right_turned ? COLUMNS : ROWS;
}

static int
divide(Part *parts, Way way)
{
    const int64_t all = way == COLUMNS ? parts[0].p.n : parts[0].p.m, at = (all / 2 + VECTOR - 1) / VECTOR * VECTOR;
    if (way == WHOLE || at < 1 || at >= all)
        return 1;
    parts[1] = parts[0];
    if (way == COLUMNS) {
        parts[0].p.n = at, parts[1].p.n = all - at;
        parts[1].right += parts[0].p.right_turned ? at * parts[0].right_row : at;
        parts[1].result += at;
        parts[1].bias += parts[1].bias ? at : 0;
        parts[1].mask += parts[1].mask ? at : 0;
    } else {
        parts[0].p.m = at, parts[1].p.m = all - at;
        parts[1].left += parts[0].p.left_turned ? at : at * parts[0].left_row;
        parts[1].result += at * parts[0].row;
        parts[1].mask += parts[1].mask ? at * parts[0].row : 0;
    }
    return 2;
}

/* Whether this thread keeps to one core, because every other core has work of its own. */
static int
keeps_to_one_core(void)
{
    cpu_set_t own;
    return !sched_getaffinity(0, sizeof own, &own) && CPU_COUNT(&own) == 1;
}

/* Random numbers, the same ones always. */
static void
fill(float *to, int64_t count, uint32_t *state)
{
    for (int64_t i = 0; i < count; i++) {
        *state = *state * 1664525u + 1013904223u;
        to[i] = (float)(int32_t)(*state & 0xffffff00) * 0x1p-31f;
    }
}

/* Whether a product of random matrices has the same bits in another way; -1: no memory to find out. Which of its kernels
   the library takes, and with that the order of every sum, depends on the product's form alone. */
static int
is_same_in(Way way, const Product *p)
{
    const int64_t left = p->m * p->k, right = p->k * p->n, result = p->m * p->n;
    float *memory = malloc((size_t)(left + right + 2 * result) * sizeof *memory);
    if (!memory)
        return -1;
    uint32_t state = 1;
    fill(memory, left + right, &state);
    Part first = {.p = *p, .left = memory, .right = memory + left, .result = memory + left + right,
                  .left_row = p->left_turned ? p->m : p->k, .right_row = p->right_turned ? p->k : p->n, .row = p->n};
    first.p.follows = 0;
    int same = 1;
    for (int other = 0; other < 2; other++, first.result += result) {
        Part parts[MOST_PARTS] = {first};
        const int count = divide(parts, other ? way : way_of_bits(p));
        for (int i = 0; i < count; i++) {
            run_part(parts, i);
            same &= !parts[i].status;
        }
    }
    same = same && !memcmp(memory + left + right, memory + left + right + result, (size_t)result * sizeof *memory);
    free(memory);
    return same;
}

/* The same for each form and way, found out once: for forms of up to so many multiplications and elements, and so many
   answers. */
enum { MOST_FORMS = 256 };
static const int64_t MOST_COMPARED = (int64_t)1 << 28, MOST_ELEMENTS = (int64_t)1 << 23;
static pthread_mutex_t forms_lock = PTHREAD_MUTEX_INITIALIZER;
static struct Form {
    int64_t turned, m, n, k;
    Way way;
    int same;
} forms[MOST_FORMS];
static int known;

/* What is known of a form; -1: nothing. */
static int
known_form(const Product *p, int64_t turned, Way way)
{
    for (int i = 0, count = __atomic_load_n(&known, __ATOMIC_ACQUIRE); i < count; i++)
        if (forms[i].turned == turned && forms[i].m == p->m && forms[i].n == p->n && forms[i].k == p->k && forms[i].way == way)
            return forms[i].same;
    return -1;
}

void
product_forget(void)
{
    pthread_mutex_lock(&forms_lock);
    __atomic_store_n(&known, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&forms_lock);
}

static int
is_comparable(const Product *p)
{
    const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
    return !p->adds && m * n * k <= (double)MOST_COMPARED && m * k + k * n + 2 * m * n <= (double)MOST_ELEMENTS;
}

static int
keeps_bits_in(Way way, const Product *p)
{
    const int64_t turned = 2 * p->left_turned + p->right_turned;
    if (!is_comparable(p))
        return 0;
    int same = known_form(p, turned, way);
    if (same >= 0)
        return same;
    if (__atomic_load_n(&known, __ATOMIC_ACQUIRE) == MOST_FORMS)
        return 0;
    same = is_same_in(way, p); /* perhaps by two threads at a time, which find the same */
    pthread_mutex_lock(&forms_lock);
    if (same >= 0 && known < MOST_FORMS && known_form(p, turned, way) < 0) {
        forms[known] = (struct Form){turned, p->m, p->n, p->k, way, same};
        __atomic_store_n(&known, known + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&forms_lock);
    return same > 0;
}

/* Halves with fewer rows than this take the library longer, unless the right operand is small: it reads that for each. */
enum { FEW_ROWS = 64, SMALL_OPERAND = 1 << 18 };

static Way
way_for(const Product *p, int alone)
{
    const int few = !p->right_turned && p->m < 2 * FEW_ROWS && p->n >= 2 * p->m && p->k * p->n >= SMALL_OPERAND;
    if (alone && keeps_bits_in(WHOLE, p))
        return WHOLE;
    return few && keeps_bits_in(COLUMNS, p) ? COLUMNS : way_of_bits(p);
}

const char *
product_compute(const Product *p, const float *left, const float *right, const Beside *beside, float *result, int wanted)
{
    Part parts[MOST_PARTS] = {{.p = *p, .left = left, .right = right, .bias = beside->bias, .mask = beside->mask, .result = result}};
    parts[0].left_row = p->left_turned ? p->m : p->k;
    parts[0].right_row = p->right_turned ? p->k : p->n;
    parts[0].row = p->n;
    if (p->adds && beside->addend != result)
        memcpy(result, beside->addend, (size_t)(p->m * p->n) * sizeof(float));
    const int alone = wanted > 1 && keeps_to_one_core();
    const int count = wanted > 1 ? divide(parts, way_for(p, alone)) : 1;
    if (count > 1 && alone)
        workers_run(run_all, parts, 1);
    else
        workers_run(run_part, parts, count);
    for (int i = 0; i < count; i++)
        if (parts[i].status)
            return "the library computes no such product";
    return NULL;
}

static __thread const Places *given;
static __thread uint64_t filled;

uint64_t
places_give(const Places *places)
{
    const uint64_t before = filled;
    given = places;
    filled = 0;
    return before;
}

float *
place_of(const Product *p, float *result)
{
    const int at = (int)p->place;
    if (!at || !given || !given->memory[at] || given->elements[at] != p->m * p->n)
        return result;
    filled |= (uint64_t)1 << at;
    return given->memory[at];
}

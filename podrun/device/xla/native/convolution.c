/* Divides a convolution into parts and computes them. See convolution.h.

   A large call is two parts: halves of the batch, of one image's rows, or, where the weights are what takes time, of the
   channels. Which, follows from the shape. A weight gradient in halves of the batch is two sums, which are added in that
   order. */

#include "convolution.h"

#include <stdio.h>
#include <string.h>

#include "plans.h"
#include "workers.h"

enum { CHANNELS = 16, LEAST_ROWS = 4 };

typedef struct {
    Convolution c;
    Arrays arrays;
    int64_t total; /* elements of the result if it is to be added to another part's, else 0 */
    int64_t shuffle; /* the convolution's own, which the plan knows nothing of */
    const char *error;
} Part;

int
convolution_decode(const int64_t *numbers, size_t count, Convolution *c, Manner *manner)
{
    if (count != CONVOLUTION_NUMBERS)
        return -1;
    for (int i = 0; i < CONVOLUTION_NUMBERS; i++)
        if (numbers[i] < 0 || numbers[i] > INT32_MAX)
            return -1;
    memset(c, 0, sizeof *c);
    memcpy(c, numbers, (CONVOLUTION_NUMBERS - 1) * sizeof *numbers);
    c->src_row = c->c;
    c->dst_row = c->m;
    manner->parts = (int)numbers[CONVOLUTION_NUMBERS - 1];
    manner->packed = (c->follows & PACKED) != 0;
    c->follows &= ~(int64_t)PACKED;
    if (manner->packed && c->kind != FORWARD)
        return -1;
    const int sizes = c->n && c->ih && c->iw && c->c && c->oh && c->ow && c->m && c->kh && c->kw && c->groups;
    const int steps = c->stride[0] && c->stride[1] && c->dilation[0] && c->dilation[1];
    const int shuffles = c->shuffle == 1 || (c->shuffle && c->kind == FORWARD && !(c->m % c->shuffle));
    return sizes && steps && shuffles && c->kind <= OF_WEIGHTS && !(c->c % c->groups) && !(c->m % c->groups) ? 0 : -1;
}

static int64_t
weights_of(const Convolution *c)
{
    return c->m * (c->c / c->groups) * c->kh * c->kw;
}

static int64_t
pixels_of(const Convolution *c)
{
    return c->n * (c->ih * c->iw * c->c + c->oh * c->ow * c->m);
}

/* About half, in whole vectors. */
static int64_t
half(int64_t channels)
{
    return (channels / 2 + CHANNELS - 1) / CHANNELS * CHANNELS;
}

/* Halves of the result's channels, or of those that the weights' gradient has one row for each of. */
static int
divide_channels(Part *parts)
{
    const int inputs = parts[0].c.kind == OF_SRC;
    const int64_t all = inputs ? parts[0].c.c : parts[0].c.m, at = half(all);
    if (at < 1 || at >= all)
        return 1;
    parts[1] = parts[0];
    Arrays *second = &parts[1].arrays;
    if (inputs) {
        parts[0].c.c = at, parts[1].c.c = all - at;
        second->src += at;
        second->weights += at * parts[0].c.order[2];
    } else {
        parts[0].c.m = at, parts[1].c.m = all - at;
        second->dst += at;
        second->weights += at * parts[0].c.order[1];
        second->bias += second->bias ? at : 0;
        second->other += second->other ? at : 0;
    }
    return 2;
}

static int
divide_batch(Part *parts)
{
    const int64_t at = (parts[0].c.n + 1) / 2;
    parts[1] = parts[0];
    parts[1].c.n -= at;
    parts[0].c.n = at;
    const Convolution *c = &parts[0].c;
    Arrays *second = &parts[1].arrays;
    second->src += at * c->ih * c->iw * c->src_row;
    second->dst += at * c->oh * c->ow * c->dst_row;
    second->other += second->other ? at * c->oh * c->ow * c->dst_row : 0;
    if (c->kind == OF_WEIGHTS)
        parts[1].total = weights_of(c);
    return 2;
}

/* Halves of the rows of a forward convolution's result. */
static int
divide_rows(Part *parts)
{
    const Convolution whole = parts[0].c;
    const int64_t at = (whole.oh + 1) / 2, begin = at * whole.stride[0] - whole.pad[0];
    const int64_t end = (at - 1) * whole.stride[0] + (whole.kh - 1) * whole.dilation[0] + 1 - whole.pad[0];
    if (begin < 0 || begin >= whole.ih || end < 1)
        return 1;
    parts[1] = parts[0];
    parts[0].c.oh = at;
    parts[0].c.ih = end < whole.ih ? end : whole.ih;
    parts[1].c.oh = whole.oh - at;
    parts[1].c.ih = whole.ih - begin;
    parts[1].c.pad[0] = 0;
    Arrays *second = &parts[1].arrays;
    second->src += begin * whole.iw * whole.src_row;
    second->dst += at * whole.ow * whole.dst_row;
    second->other += second->other ? at * whole.ow * whole.dst_row : 0;
    return 2;
}

static int
divide(const Convolution *c, const Arrays *arrays, int wanted, Part *parts)
{
    parts[0] = (Part){.c = *c, .arrays = *arrays};
    parts[0].shuffle = c->shuffle;
    parts[0].c.shuffle = 1;
    if (wanted < 2)
        return 1;
    if (c->groups == 1 && c->shuffle == 1 && weights_of(c) > pixels_of(c) / 2 && divide_channels(parts) > 1)
        return 2;
    if (c->n > 1)
        return divide_batch(parts);
    if (c->kind == FORWARD && c->oh >= LEAST_ROWS && divide_rows(parts) > 1)
        return 2;
    return c->groups == 1 && c->shuffle == 1 ? divide_channels(parts) : 1;
}

/* Store each pixel's channels, a matrix of `rows` rows, transposed. Always inlined: a constant count lets the compiler
   use vectors. */
static inline __attribute__((always_inline)) void
transpose(float *restrict to, const float *restrict from, int64_t pixels, int64_t rows, int64_t columns)
{
    for (int64_t p = 0; p < pixels; p++, to += rows * columns, from += rows * columns)
        for (int64_t j = 0; j < columns; j++)
            for (int64_t i = 0; i < rows; i++)
                to[j * rows + i] = from[i * columns + j];
}

static void
shuffle(float *to, const float *from, int64_t pixels, int64_t rows, int64_t columns)
{
    switch (rows) {
    case 2: transpose(to, from, pixels, 2, columns); break;
    case 3: transpose(to, from, pixels, 3, columns); break;
    case 4: transpose(to, from, pixels, 4, columns); break;
    case 8: transpose(to, from, pixels, 8, columns); break;
    default: transpose(to, from, pixels, rows, columns);
    }
}

static const char *
run_plan(Plan *plan, const Part *part)
{
    const Convolution *c = &part->c;
    if (part->shuffle == 1)
        return plan_run(plan, &part->arrays);
    const int64_t pixels = c->n * c->oh * c->ow;
    Arrays arrays = part->arrays;
    if (!(arrays.dst = scratch(1, (size_t)(pixels * c->m) * sizeof(float))))
        return "out of memory";
    const char *error = plan_run(plan, &arrays);
    if (!error)
        shuffle(part->arrays.dst, arrays.dst, pixels, part->shuffle, c->m / part->shuffle);
    return error;
}

static void
run_part(void *what, int i)
{
    Part *part = (Part *)what + i;
    const Before before = plan_enter();
    Plan *plan = plan_take(&part->c, &part->error);
    if (plan) {
        part->error = run_plan(plan, part);
        plan_give_back(plan);
    }
    plan_leave(before);
}

/* Whether each part of a forward convolution has weights of its own. */
static int
divides_weights(const Convolution *c, const Part *parts, int count)
{
    return count > 1 && parts[0].c.m != c->m;
}

/* Both plans of the parts; NULL in the place of what there is not. */
static const char *
take_plans(const Part *parts, int count, Plan **plans)
{
    const char *error = NULL;
    for (int i = 0; i < count && !error; i++)
        plans[i] = plan_take(&parts[i].c, &error);
    return error;
}

static void
give_back_plans(Plan **plans)
{
    for (int i = 0; i < MOST_PARTS; i++)
        if (plans[i])
            plan_give_back(plans[i]);
}

const char *
convolution_pack(const Convolution *c, int wanted, const float *weights, float *packed, size_t bytes)
{
    const Arrays arrays = {.weights = (float *)weights};
    Part parts[MOST_PARTS];
    Plan *plans[MOST_PARTS] = {0};
    const int count = divide(c, &arrays, wanted, parts), apart = divides_weights(c, parts, count);
    const Before before = plan_enter();
    const char *error = take_plans(parts, count, plans);
    const size_t first = error ? 0 : plan_packed(plans[0]), second = error || !apart ? 0 : plan_packed(plans[1]);
    if (!error && (!first || (apart && !second)))
        error = "the library takes these weights as they are";
    if (!error && count > 1 && !apart && !plan_agrees(plans[0], plans[1]))
        error = "the parts want different orders of the weights";
    if (!error && first + second > bytes)
        error = "the weights do not fit there in the library's order";
    if (!error)
        error = plan_pack(plans[0], parts[0].arrays.weights, packed);
    if (!error && apart)
        error = plan_pack(plans[1], parts[1].arrays.weights, packed + first / sizeof(float));
    give_back_plans(plans);
    plan_leave(before);
    return error;
}

int
convolution_take(const Convolution *c, int wanted, Plan **plans, const char **error)
{
    static const Arrays none;
    Part parts[MOST_PARTS];
    const int count = divide(c, &none, wanted, parts);
    const Before before = plan_enter();
    *error = take_plans(parts, count, plans);
    plan_leave(before);
    return *error ? 0 : count;
}

/* Where the second part's packed weights lie. */
static size_t
second_weights(const Convolution *c, const Part *parts, int count, Plan *const *plans)
{
    return divides_weights(c, parts, count) ? plan_packed(plans[0]) / sizeof(float) : 0;
}

int64_t
convolution_weights(const Convolution *c, int wanted, int packed, Plan *const *plans)
{
    static const Arrays none;
    Part parts[MOST_PARTS];
    const int count = divide(c, &none, wanted, parts);
    if (!packed)
        return weights_of(c);
    const int last = divides_weights(c, parts, count) ? 1 : 0;
    return (int64_t)(second_weights(c, parts, count, plans) + plan_packed(plans[last]) / sizeof(float));
}

const char *
convolution_compute_part(const Convolution *c, const Arrays *arrays, int wanted, int part, Plan *const *plans)
{
    Part parts[MOST_PARTS];
    const int count = divide(c, arrays, wanted, parts);
    if (arrays->packed && part)
        parts[part].arrays.weights = arrays->weights + second_weights(c, parts, count, plans);
    return run_plan(plans[part], &parts[part]);
}

/* The second part's packed weights lie behind the first's. */
static const char *
find_packed(const Convolution *c, const Arrays *arrays, Part *parts, int count)
{
    if (!divides_weights(c, parts, count))
        return NULL;
    Plan *plans[MOST_PARTS] = {0};
    const Before before = plan_enter();
    const char *error = take_plans(parts, 1, plans);
    if (!error)
        parts[1].arrays.weights = arrays->weights + plan_packed(plans[0]) / sizeof(float);
    give_back_plans(plans);
    plan_leave(before);
    return error;
}

const char *
convolution_compute(const Convolution *c, const Arrays *arrays, int wanted)
{
    Part parts[MOST_PARTS];
    const int count = divide(c, arrays, wanted, parts);
    const int64_t total = count > 1 ? parts[1].total : 0;
    if (total && !(parts[1].arrays.weights = scratch(1, (size_t)total * sizeof(float))))
        return "out of memory";
    const char *error = arrays->packed ? find_packed(c, arrays, parts, count) : NULL;
    if (error)
        return error;
    workers_run(run_part, parts, count);
    for (int i = 0; i < count; i++)
        if (parts[i].error)
            return parts[i].error;
    float *sum = arrays->weights;
    const float *more = parts[count - 1].arrays.weights;
    for (int64_t i = 0; i < total; i++)
        sum[i] += more[i];
    return NULL;
}

const char *
convolution_prepare(const Convolution *c, int wanted, char *names, int size)
{
    static const Arrays none;
    Part parts[MOST_PARTS];
    const int count = divide(c, &none, wanted, parts);
    const char *error = NULL;
    const Before before = plan_enter();
    for (int i = 0, used = 0; i < count && !error; i++) {
        Plan *plan = plan_take(&parts[i].c, &error);
        if (plan) {
            used += snprintf(names + used, (size_t)(size - used), i ? " %s" : "%s", plan_name(plan));
            used = used < size ? used : size - 1;
            plan_give_back(plan);
        }
    }
    plan_leave(before);
    return error;
}

/* Takes networks apart into steps and runs these. See network.h.

   Each step has one part or two, which follow from its shape, and so do the bits. Threads take the parts in their order;
   before one begins, the steps that it has to come after are done. A thread waits for parts that another has taken, never
   for a thread that has not come. */

#define _GNU_SOURCE
#include "network.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "convolution.h"
#include "layers.h"
#include "planes.h"
#include "plans.h"
#include "workers.h"

enum { MOST_NETWORKS = 64, HEAD = 3, STEP_HEAD = 3, WAITS = 2000 };

typedef struct {
    int64_t buffer, element;
} Place;

typedef struct {
    int kind, parts, wanted, packed;
    int64_t after, at; /* number of its first part among all */
    Place src, dst, weights, bias, other;
    Convolution convolution;
    Plan *plans[MOST_PARTS];
    Pool pool;
    Chain chain;
    Place operands[MOST_OPS];
} Step;

struct Network {
    Network *next;
    int users, kept;
    size_t count, operands, results, steps;
    int64_t *numbers, *reach, arena, parts;
    Step *step;
};

/* --- Reading ------------------------------------------------------------------------------------------------------- */

typedef struct {
    Network *network;
    const int64_t *at, *end;
    int wrong;
} Reader;

static int64_t
next(Reader *r)
{
    if (r->at >= r->end || *r->at < 0 || *r->at > UINT32_MAX) {
        r->wrong = 1;
        return 0;
    }
    return *r->at++;
}

/* A size, at least 1. */
static int64_t
size(Reader *r)
{
    const int64_t value = next(r);
    r->wrong |= value < 1 || value > INT32_MAX;
    return value;
}

/* A place from which so many rows of `count` elements lie, `step` apart. */
static Place
place(Reader *r, int64_t rows, int64_t step, int64_t count)
{
    const int64_t buffer = next(r), element = next(r);
    const size_t all = r->network->operands + r->network->results + 1;
    if (buffer >= (int64_t)all || rows < 1 || step < count) {
        r->wrong = 1;
        return (Place){0};
    }
    const __int128 reach = (__int128)(rows - 1) * step + count + element;
    r->wrong |= reach > INT64_MAX / 8;
    if (!r->wrong && (int64_t)reach > r->network->reach[buffer])
        r->network->reach[buffer] = (int64_t)reach;
    return (Place){buffer, element};
}

static void
read_convolution(Reader *r, Step *s)
{
    Convolution *c = &s->convolution;
    Manner manner;
    if (r->end - r->at < CONVOLUTION_NUMBERS || convolution_decode(r->at, CONVOLUTION_NUMBERS, c, &manner) || c->kind != FORWARD) {
        r->wrong = 1;
        return;
    }
    r->at += CONVOLUTION_NUMBERS;
    s->wanted = manner.parts;
    s->packed = manner.packed;
    c->src_row = size(r);
    c->dst_row = size(r);
    const char *error = NULL;
    const int64_t src = c->n * c->ih * c->iw, dst = c->n * c->oh * c->ow;
    s->parts = r->wrong ? 0 : convolution_take(c, s->wanted, s->plans, &error);
    const int64_t weights = s->parts ? convolution_weights(c, s->wanted, s->packed, s->plans) : 0;
    r->wrong |= !weights;
    s->src = place(r, src, c->src_row, c->c);
    s->weights = place(r, 1, weights, weights);
    s->bias = place(r, 1, c->m, c->follows & BIAS ? c->m : 0);
    s->other = place(r, c->follows & OTHER ? dst : 1, c->dst_row, c->follows & OTHER ? c->m : 0);
    s->dst = place(r, dst, c->dst_row, c->m);
}

static void
read_ops(Reader *r, Step *s, int64_t pixels, int64_t channels)
{
    Chain *chain = &s->chain;
    chain->pixels = pixels;
    chain->channels = channels;
    const int64_t count = next(r);
    if (count > MOST_OPS) {
        r->wrong = 1;
        return;
    }
    chain->count = (int)count;
    for (int i = 0; i < chain->count; i++) {
        Op *op = &chain->ops[i];
        op->op = (int)next(r);
        op->by = (int)next(r);
        op->row = next(r);
        r->wrong |= op->op > OP_CUT || op->by > BY_ELEMENT;
        if (op->by == BY_NUMBER) {
            const uint32_t bits = (uint32_t)next(r);
            memcpy(&op->number, &bits, sizeof bits);
            next(r);
        } else if (op->by == BY_CHANNEL)
            s->operands[i] = place(r, 1, channels, channels);
        else if (op->by == BY_PIXEL)
            s->operands[i] = place(r, pixels, 1, 1);
        else
            s->operands[i] = place(r, pixels, op->row, channels);
    }
}

static void
read_pool(Reader *r, Step *s)
{
    Pool *p = &s->pool;
    int64_t *const sizes[] = {&p->n, &p->ih, &p->iw, &p->c, &p->oh, &p->ow, &p->kernel[0], &p->kernel[1], &p->stride[0],
                              &p->stride[1]};
    p->sums = (int)next(r);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        *sizes[i] = size(r);
    p->pad[0] = next(r);
    p->pad[1] = next(r);
    p->src_row = size(r);
    p->dst_row = size(r);
    s->src = place(r, p->n * p->ih * p->iw, p->src_row, p->c);
    s->dst = place(r, p->n * p->oh * p->ow, p->dst_row, p->c);
    read_ops(r, s, p->n * p->oh * p->ow, p->c);
    s->parts = (int)size(r);
}

static void
read_chain(Reader *r, Step *s)
{
    const int64_t pixels = size(r), channels = size(r);
    s->chain.src_row = size(r);
    s->chain.dst_row = size(r);
    s->src = place(r, pixels, s->chain.src_row, channels);
    s->dst = place(r, pixels, s->chain.dst_row, channels);
    read_ops(r, s, pixels, channels);
    s->parts = (int)size(r);
}

static void
read_turn(Reader *r, Step *s)
{
    Chain *chain = &s->chain;
    chain->pixels = size(r);
    chain->channels = size(r);
    chain->dst_row = size(r);
    s->src = place(r, chain->channels, chain->pixels, chain->pixels);
    s->dst = place(r, chain->pixels, chain->dst_row, chain->channels);
    s->parts = (int)size(r);
}

static void
read_sum(Reader *r, Step *s)
{
    Chain *chain = &s->chain;
    const int64_t pixels = size(r), channels = size(r);
    chain->src_row = size(r);
    s->src = place(r, pixels, chain->src_row, channels);
    s->dst = place(r, 1, channels, channels);
    read_ops(r, s, 1, channels);
    chain->pixels = pixels;
    s->parts = (int)size(r);
}

/* A window over an image of these sizes, whose pixels lie side by side. */
static void
read_window(Reader *r, Pool *p, int64_t height, int64_t width, int64_t channels)
{
    int64_t *const sizes[] = {&p->oh, &p->ow, &p->kernel[0], &p->kernel[1], &p->stride[0], &p->stride[1]};
    p->sums = (int)next(r);
    p->n = 1, p->ih = height, p->iw = width, p->c = p->src_row = channels;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        *sizes[i] = size(r);
    p->pad[0] = next(r);
    p->pad[1] = next(r);
}

static void
read_planes(Reader *r, Step *s)
{
    Convolution *c = &s->convolution;
    Manner manner;
    if (r->end - r->at < CONVOLUTION_NUMBERS || convolution_decode(r->at, CONVOLUTION_NUMBERS, c, &manner) || !planes_fit(c) ||
        manner.packed) {
        r->wrong = 1;
        return;
    }
    r->at += CONVOLUTION_NUMBERS;
    s->parts = manner.parts > 1 && c->oh > 1 ? MOST_PARTS : 1;
    c->dst_row = size(r);
    s->src = place(r, 1, c->ih * c->iw * c->c, c->ih * c->iw * c->c);
    const int64_t weights = c->m * c->c * c->kh * c->kw;
    s->weights = place(r, 1, weights, weights);
    s->bias = place(r, 1, c->m, c->follows & BIAS ? c->m : 0);
    if (next(r)) {
        read_window(r, &s->pool, c->oh, c->ow, c->m);
        s->parts = manner.parts > 1 && s->pool.oh > 1 ? MOST_PARTS : 1;
        s->pool.dst_row = c->dst_row;
        s->dst = place(r, s->pool.oh * s->pool.ow, c->dst_row, c->m);
        read_ops(r, s, s->pool.oh * s->pool.ow, c->m);
    } else
        s->dst = place(r, c->oh * c->ow, c->dst_row, c->m);
}

static void
read_softmax(Reader *r, Step *s)
{
    s->chain.channels = size(r);
    s->src = place(r, 1, s->chain.channels, s->chain.channels);
    s->dst = place(r, 1, s->chain.channels, s->chain.channels);
    s->parts = 1;
}

static void
read_steps(Reader *r)
{
    static void (*const read[STEPS])(Reader *, Step *) = {read_convolution, read_pool, read_chain,
                                                          read_turn,        read_sum,  read_softmax,
                                                          read_planes};
    Network *network = r->network;
    const int64_t *const end = r->end;
    for (size_t i = 0; r->at < end && !r->wrong; i++) {
        Step *s = &network->step[i];
        network->steps = i + 1;
        s->kind = (int)next(r);
        s->after = next(r);
        const int64_t length = next(r);
        if (r->wrong || s->kind >= STEPS || s->after > (int64_t)i || length > end - r->at) {
            r->wrong = 1;
            return;
        }
        r->end = r->at + length;
        read[s->kind](r, s);
        r->wrong |= r->at != r->end || s->parts < 1 || s->parts > MOST_PARTS;
        r->end = end;
        s->at = network->parts;
        network->parts += s->parts;
    }
}

static void
network_free(Network *network)
{
    for (size_t i = 0; i < network->steps; i++)
        for (int k = 0; k < MOST_PARTS; k++)
            if (network->step[i].plans[k])
                plan_give_back(network->step[i].plans[k]);
    free(network->numbers);
    free(network->reach);
    free(network->step);
    free(network);
}

static Network *
network_new(const int64_t *numbers, size_t count, const char **error)
{
    *error = "these numbers describe no network";
    for (int i = 0; i < HEAD; i++)
        if (count < HEAD || numbers[i] < 0 || numbers[i] > INT32_MAX)
            return NULL;
    Network *network = calloc(1, sizeof *network);
    if (!network)
        return NULL;
    network->count = count;
    network->operands = (size_t)numbers[0];
    network->results = (size_t)numbers[1];
    network->arena = numbers[2];
    const size_t buffers = network->operands + network->results + 1;
    network->numbers = malloc(count * sizeof *numbers);
    network->reach = calloc(buffers, sizeof *network->reach);
    network->step = calloc(count / STEP_HEAD + 1, sizeof *network->step);
    Reader r = {network, numbers + HEAD, numbers + count, 0};
    if (network->numbers && network->reach && network->step) {
        memcpy(network->numbers, numbers, count * sizeof *numbers);
        read_steps(&r);
        if (!r.wrong && network->steps && network->reach[buffers - 1] <= network->arena)
            return network;
    }
    network_free(network);
    return NULL;
}

/* --- Keeping ------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Network *networks;
static int kept;

Network *
network_take(const int64_t *numbers, size_t count, const char **error)
{
    pthread_mutex_lock(&lock);
    Network **at = &networks;
    while (*at && ((*at)->count != count || memcmp((*at)->numbers, numbers, count * sizeof *numbers)))
        at = &(*at)->next;
    Network *network = *at;
    if (network)
        *at = network->next; /* to the front */
    else {
        network = network_new(numbers, count, error);
        kept += network != NULL;
    }
    if (network) {
        network->users++;
        network->next = networks;
        networks = network;
    }
    for (at = &networks; kept > MOST_NETWORKS && *at;) {
        Network *last = *at;
        if (last->next || last->users) {
            at = &last->next;
            continue;
        }
        *at = NULL;
        network_free(last);
        kept--;
    }
    pthread_mutex_unlock(&lock);
    return network;
}

void
network_give_back(Network *network)
{
    pthread_mutex_lock(&lock);
    network->users--;
    pthread_mutex_unlock(&lock);
}

size_t
network_operands(const Network *network)
{
    return network->operands;
}

size_t
network_results(const Network *network)
{
    return network->results;
}

int64_t
network_reach(const Network *network, size_t buffer)
{
    return network->reach[buffer];
}

void
networks_hold(void)
{
    pthread_mutex_lock(&lock);
}

void
networks_release(void)
{
    pthread_mutex_unlock(&lock);
}

/* --- Running ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Network *network;
    float *const *buffers;
    float *arena;
    int64_t taken;       /* parts */
    const char *error;   /* the first */
    unsigned char *done; /* by part */
} Run;

static float *
find(const Run *run, Place place)
{
    const size_t all = run->network->operands + run->network->results;
    return ((size_t)place.buffer < all ? run->buffers[place.buffer] : run->arena) + place.element;
}

/* Wait until a part that some thread has taken is done. */
static void
await(const unsigned char *done)
{
    for (int i = 0; !__atomic_load_n(done, __ATOMIC_ACQUIRE); i++)
        if (i < WAITS && workers_cores() > 1)
            __builtin_ia32_pause();
        else
            sched_yield();
}

static const char *
run_convolution(const Run *run, const Step *s, int part)
{
    const Convolution *c = &s->convolution;
    const Arrays arrays = {.src = find(run, s->src),
                           .weights = find(run, s->weights),
                           .dst = find(run, s->dst),
                           .bias = c->follows & BIAS ? find(run, s->bias) : NULL,
                           .other = c->follows & OTHER ? find(run, s->other) : NULL,
                           .packed = s->packed};
    return convolution_compute_part(c, &arrays, s->wanted, part, s->plans);
}

/* The operations after a step, with what they read in this run. */
static Chain
ready_chain(const Run *run, const Step *s)
{
    Chain chain = s->chain;
    for (int i = 0; i < chain.count; i++)
        chain.ops[i].values = chain.ops[i].by == BY_NUMBER ? NULL : find(run, s->operands[i]);
    return chain;
}

static const char *
run_planes(const Run *run, const Step *s, int part)
{
    const Convolution *c = &s->convolution;
    Arrays arrays = {.src = find(run, s->src),
                     .weights = find(run, s->weights),
                     .bias = c->follows & BIAS ? find(run, s->bias) : NULL};
    const int64_t rows = s->pool.n ? s->pool.oh : c->oh, begin = rows * part / s->parts, end = rows * (part + 1) / s->parts;
    if (s->pool.n) {
        const Chain chain = ready_chain(run, s);
        return planes_pooled(c, &arrays, &s->pool, &chain, find(run, s->dst), begin, end);
    }
    arrays.dst = find(run, s->dst) + begin * c->ow * c->dst_row;
    return planes_rows(c, &arrays, begin, end);
}

static const char *
run_step(const Run *run, const Step *s, int part)
{
    if (s->kind == STEP_CONVOLVE)
        return run_convolution(run, s, part);
    if (s->kind == STEP_PLANES)
        return run_planes(run, s, part);
    Chain chain = ready_chain(run, s);
    const float *src = find(run, s->src);
    float *dst = find(run, s->dst);
    if (s->kind == STEP_POOL) {
        const int64_t rows = s->pool.n * s->pool.oh;
        float *room = scratch(1, (size_t)(s->pool.iw * s->pool.c) * sizeof(float));
        if (!room)
            return "out of memory";
        pool_rows(&s->pool, &chain, src, dst, room, rows * part / s->parts, rows * (part + 1) / s->parts);
        return NULL;
    }
    if (s->kind == STEP_SOFTMAX) {
        softmax(src, dst, chain.channels);
        return NULL;
    }
    const int64_t all = s->kind == STEP_SUM ? chain.channels : chain.pixels;
    const int64_t begin = all * part / s->parts, end = all * (part + 1) / s->parts;
    if (s->kind == STEP_SUM)
        sum_pixels(&chain, src, dst, begin, end);
    else if (s->kind == STEP_CHAIN)
        chain_pixels(&chain, src, dst, begin, end);
    else
        turn_pixels(&chain, src, dst, begin, end);
    return NULL;
}

/* Take parts until there are no more. */
static void
work(void *what, int unused)
{
    Run *run = what;
    const Network *network = run->network;
    size_t at = 0, settled = 0;
    const Before before = plan_enter();
    for (;;) {
        const int64_t taken = __atomic_fetch_add(&run->taken, 1, __ATOMIC_RELAXED);
        if (taken >= network->parts)
            break;
        while (network->step[at].at + network->step[at].parts <= taken)
            at++;
        const Step *s = &network->step[at];
        for (; settled < (size_t)s->after; settled++)
            for (int i = 0; i < network->step[settled].parts; i++)
                await(&run->done[network->step[settled].at + i]);
        const char *error = __atomic_load_n(&run->error, __ATOMIC_RELAXED);
        if (!error && (error = run_step(run, s, (int)(taken - s->at))))
            __atomic_store_n(&run->error, error, __ATOMIC_RELAXED);
        __atomic_store_n(&run->done[taken], 1, __ATOMIC_RELEASE);
    }
    plan_leave(before);
}

const char *
network_run(const Network *network, float *const *buffers)
{
    Run run = {.network = network, .buffers = buffers};
    run.done = calloc((size_t)network->parts, 1);
    run.arena = scratch(2, (size_t)network->arena * sizeof(float));
    if (run.done && run.arena)
        workers_run(work, &run, network->parts > (int64_t)network->steps ? MOST_PARTS : 1);
    else
        run.error = "out of memory";
    free(run.done);
    return run.error;
}

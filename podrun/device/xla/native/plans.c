/* Plans: primitives of the library, with what brings arrays into the order that they want. See plans.h.

   The library divides work by OpenMP's number of threads, and by it chooses blocks and the order of sums. It is 1 here
   whenever a primitive is made or run, so OpenMP starts no thread, and nothing depends on the host's cores. Scratch memory
   is the calling thread's, so threads may run one primitive at the same time. */

#define _GNU_SOURCE
#include "plans.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include "library.h"
#include "workers.h"

enum { SRC, WEIGHTS, DST, ADDEND, TENSORS };
enum { MOST_PLANS = 1024, BUCKETS = 512, OWN_BUFFERS = 3 };
#define KEPT_SCRATCH ((size_t)64 << 20) /* bytes that a thread keeps between calls */

/* The library's objects for a run, whose data may be exchanged. */
typedef struct {
    Memory there[TENSORS], wanted[TENSORS], bias, scratch;
} Memories;

struct Plan {
    Convolution key;
    Memories *spare; /* of a run that is over; NULL while a thread has them */
    Plan *next;
    uint64_t used;
    int users;
    Primitive primitive;
    Layout there[TENSORS], wanted[TENSORS], bias, scratch; /* wanted: NULL as it is there */
    Primitive turns[TENSORS];                              /* from there to wanted, or back for the result */
    size_t at[TENSORS], scratch_at, bytes;                 /* within the scratch buffer */
    char name[96];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Plan *buckets[BUCKETS];
static int plans;
static uint64_t clock_;

/* --- One thread ---------------------------------------------------------------------------------------------------- */

Before
plan_enter(void)
{
    Before before = {.numbers = _mm_getcsr(), .threads = onednn.omp_get_max_threads()};
    signals_hold(&before.signals);
    _mm_setcsr(0x9fc0); /* no traps, round to nearest, denormal operands and results are 0: as XLA's own code */
    onednn.omp_set_num_threads(1);
    return before;
}

void
plan_leave(Before before)
{
    onednn.omp_set_num_threads(before.threads);
    _mm_setcsr(before.numbers);
    pthread_sigmask(SIG_SETMASK, &before.signals, NULL);
}

/* --- Memory of a thread -------------------------------------------------------------------------------------------- */

typedef struct {
    Stream stream;
    float *buffer[OWN_BUFFERS];
    size_t bytes[OWN_BUFFERS];
} Own;

static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static int guarding;

void
scratch_guard(void)
{
    guarding = 1;
}

/* Memory that ends where a page begins that nobody may touch: so many bytes, a multiple of 64. */
static void *
guarded_new(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    char *made = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED)
        return NULL;
    mprotect(made + room, page, PROT_NONE);
    return made + room - bytes;
}

static void
guarded_free(char *buffer, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    if (buffer)
        munmap(buffer + bytes - room, room + page);
}

static void
buffer_free(float *buffer, size_t bytes)
{
    if (guarding)
        guarded_free((char *)buffer, bytes);
    else
        free(buffer);
}

static float *
buffer_new(size_t bytes)
{
    void *made = NULL;
    if (guarding)
        return guarded_new(bytes);
    return posix_memalign(&made, 64, bytes) ? NULL : made;
}

static void
own_free(void *value)
{
    Own *own = value;
    if (own->stream)
        onednn.dnnl_stream_destroy(own->stream);
    for (int i = 0; i < OWN_BUFFERS; i++)
        buffer_free(own->buffer[i], own->bytes[i]);
    free(own);
}

static void
own_start(void)
{
    pthread_key_create(&own_key, own_free);
}

static Own *
own_get(void)
{
    pthread_once(&own_once, own_start);
    Own *own = pthread_getspecific(own_key);
    if (own)
        return own;
    own = calloc(1, sizeof *own);
    if (own && onednn.dnnl_stream_create(&own->stream, engine, IN_ORDER)) {
        free(own);
        return NULL;
    }
    if (own)
        pthread_setspecific(own_key, own);
    return own;
}

float *
scratch(int which, size_t bytes)
{
    Own *own = own_get();
    if (!own)
        return NULL;
    bytes = bytes ? (bytes + 63) & ~(size_t)63 : 64;
    int keeps = own->bytes[which] >= bytes && (own->bytes[which] <= KEPT_SCRATCH || bytes > KEPT_SCRATCH);
    if (guarding)
        keeps = own->bytes[which] == bytes;
    if (!keeps) {
        buffer_free(own->buffer[which], own->bytes[which]);
        own->buffer[which] = buffer_new(bytes);
        own->bytes[which] = own->buffer[which] ? bytes : 0;
    }
    return own->buffer[which];
}

/* --- Making -------------------------------------------------------------------------------------------------------- */

static Layout
image(int64_t n, int64_t h, int64_t w, int64_t c, int64_t row)
{
    Layout made = NULL;
    const Dims dims = {n, c, h, w}, steps = {h * w * row, 1, w * row, row};
    onednn.dnnl_memory_desc_create_with_strides(&made, 4, dims, F32, steps);
    return made;
}

static Layout
weights(const Convolution *c, int any)
{
    Layout made = NULL;
    const int grouped = c->groups > 1;
    const Dims dims = {c->groups, c->m / c->groups, c->c / c->groups, c->kh, c->kw};
    if (any)
        onednn.dnnl_memory_desc_create_with_tag(&made, 4 + grouped, dims + !grouped, F32, ANY);
    else
        onednn.dnnl_memory_desc_create_with_strides(&made, 4 + grouped, dims + !grouped, F32, c->order + !grouped);
    return made;
}

static Attributes
attributes(const Convolution *c, Layout other)
{
    Attributes made = NULL;
    PostOps follow = NULL;
    if (onednn.dnnl_primitive_attr_create(&made))
        return NULL;
    onednn.dnnl_primitive_attr_set_scratchpad_mode(made, USER_SCRATCH);
    if (c->follows & (OTHER | CUT) && !onednn.dnnl_post_ops_create(&follow)) {
        if (c->follows & OTHER)
            onednn.dnnl_post_ops_append_binary(follow, ADD, other);
        if (c->follows & CUT)
            onednn.dnnl_post_ops_append_eltwise(follow, RELU, 0.0f, 0.0f);
        onednn.dnnl_primitive_attr_set_post_ops(made, follow);
        onednn.dnnl_post_ops_destroy(follow);
    }
    return made;
}

/* Padding behind the last pixel that is read; less than none where not all are. */
static int64_t
after(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t dilation, int64_t before)
{
    return (out - 1) * stride + (kernel - 1) * dilation + 1 - in - before;
}

static int
describe(Plan *p, Description *made)
{
    const Convolution *c = &p->key;
    Layout src = image(c->n, c->ih, c->iw, c->c, c->c), dst = image(c->n, c->oh, c->ow, c->m, c->m);
    Layout any = weights(c, 1);
    const Dims dilation = {c->dilation[0] - 1, c->dilation[1] - 1};
    const Dims end = {after(c->ih, c->oh, c->kh, c->stride[0], c->dilation[0], c->pad[0]),
                      after(c->iw, c->ow, c->kw, c->stride[1], c->dilation[1], c->pad[1])};
    Attributes with = attributes(c, dst);
    int status = 1;
    if (src && dst && any && with && c->kind == FORWARD)
        status = onednn.dnnl_convolution_forward_primitive_desc_create(made, engine, INFERENCE, DIRECT, src, any, p->bias, dst,
                                                                       c->stride, dilation, c->pad, end, with);
    else if (src && dst && any && with && c->kind == OF_SRC)
        status = onednn.dnnl_convolution_backward_data_primitive_desc_create(made, engine, DIRECT, src, any, dst, c->stride,
                                                                             dilation, c->pad, end, NULL, with);
    else if (src && dst && any && with)
        status = onednn.dnnl_convolution_backward_weights_primitive_desc_create(made, engine, DIRECT, src, any, NULL, dst,
                                                                                c->stride, dilation, c->pad, end, NULL, with);
    const Layout made_here[] = {src, dst, any};
    for (int i = 0; i < 3; i++)
        if (made_here[i])
            onednn.dnnl_memory_desc_destroy(made_here[i]);
    if (with)
        onednn.dnnl_primitive_attr_destroy(with);
    return status;
}

static int
turn(Plan *p, int which, int result)
{
    Description made = NULL;
    Layout from = p->there[which], to = p->wanted[which];
    int status = result ? onednn.dnnl_reorder_primitive_desc_create(&made, to, engine, from, engine, NULL)
                        : onednn.dnnl_reorder_primitive_desc_create(&made, from, engine, to, engine, NULL);
    if (!status) {
        status = onednn.dnnl_primitive_create(&p->turns[which], made);
        onednn.dnnl_primitive_desc_destroy(made);
    }
    return status;
}

static size_t
reserve(Plan *p, Layout layout)
{
    const size_t at = p->bytes;
    p->bytes += (onednn.dnnl_memory_desc_get_size(layout) + (guarding ? 63 : 127)) & ~(size_t)63;
    return at;
}

static void
memories_free(Memories *m)
{
    for (int i = 0; m && i < TENSORS; i++) {
        if (m->there[i])
            onednn.dnnl_memory_destroy(m->there[i]);
        if (m->wanted[i])
            onednn.dnnl_memory_destroy(m->wanted[i]);
    }
    if (m && m->bias)
        onednn.dnnl_memory_destroy(m->bias);
    if (m && m->scratch)
        onednn.dnnl_memory_destroy(m->scratch);
    free(m);
}

static void
plan_free(Plan *p)
{
    memories_free(p->spare);
    for (int i = 0; i < TENSORS; i++) {
        if (p->there[i])
            onednn.dnnl_memory_desc_destroy(p->there[i]);
        if (p->wanted[i])
            onednn.dnnl_memory_desc_destroy(p->wanted[i]);
        if (p->turns[i])
            onednn.dnnl_primitive_destroy(p->turns[i]);
    }
    if (p->bias)
        onednn.dnnl_memory_desc_destroy(p->bias);
    if (p->scratch)
        onednn.dnnl_memory_desc_destroy(p->scratch);
    if (p->primitive)
        onednn.dnnl_primitive_destroy(p->primitive);
    free(p);
}

static int
result_of(const Convolution *c)
{
    return c->kind == FORWARD ? DST : c->kind == OF_SRC ? SRC : WEIGHTS;
}

static int
fill(Plan *p)
{
    const Convolution *c = &p->key;
    static const int asked[3][TENSORS - 1] = {
        {ASK_SRC, ASK_WEIGHTS, ASK_DST}, {ASK_DIFF_SRC, ASK_WEIGHTS, ASK_DIFF_DST}, {ASK_SRC, ASK_DIFF_WEIGHTS, ASK_DIFF_DST}};
    Description made = NULL;
    const Dims channels = {c->m}, one = {1};
    p->there[SRC] = image(c->n, c->ih, c->iw, c->c, c->src_row);
    p->there[WEIGHTS] = weights(c, 0);
    p->there[DST] = image(c->n, c->oh, c->ow, c->m, c->dst_row);
    p->there[ADDEND] = image(c->n, c->oh, c->ow, c->m, c->dst_row);
    if (c->follows & BIAS)
        onednn.dnnl_memory_desc_create_with_strides(&p->bias, 1, channels, F32, one);
    if (!p->there[SRC] || !p->there[WEIGHTS] || !p->there[DST] || !p->there[ADDEND] || describe(p, &made))
        return 1;
    const char *name = NULL;
    int status = onednn.dnnl_primitive_desc_query(made, ASK_NAME, 0, &name);
    if (!status && name)
        strncpy(p->name, name, sizeof p->name - 1);
    for (int i = 0; i < TENSORS && !status; i++) {
        Layout wants = i == ADDEND ? image(c->n, c->oh, c->ow, c->m, c->m)
                                   : onednn.dnnl_primitive_desc_query_md(made, asked[c->kind][i], 0);
        if (wants && !onednn.dnnl_memory_desc_equal(wants, p->there[i])) {
            status = onednn.dnnl_memory_desc_clone(&p->wanted[i], wants) || turn(p, i, i == result_of(c));
            p->at[i] = status ? 0 : reserve(p, p->wanted[i]);
        }
        if (wants && i == ADDEND)
            onednn.dnnl_memory_desc_destroy(wants);
    }
    if (!status)
        status = onednn.dnnl_memory_desc_clone(&p->scratch, onednn.dnnl_primitive_desc_query_md(made, ASK_SCRATCH, 0));
    if (!status) {
        p->scratch_at = reserve(p, p->scratch);
        status = onednn.dnnl_primitive_create(&p->primitive, made);
    }
    onednn.dnnl_primitive_desc_destroy(made);
    return status;
}

/* --- Keeping ------------------------------------------------------------------------------------------------------- */

static unsigned
bucket_of(const Convolution *c)
{
    uint64_t hash = 14695981039346656037u;
    const unsigned char *bytes = (const unsigned char *)c;
    for (size_t i = 0; i < sizeof *c; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    return (unsigned)(hash >> 20) % BUCKETS;
}

/* Forget the plan that was not used for longest, if no thread uses it now. */
static void
forget_one(void)
{
    Plan **oldest = NULL;
    for (int i = 0; i < BUCKETS; i++)
        for (Plan **at = &buckets[i]; *at; at = &(*at)->next)
            if (!(*at)->users && (!oldest || (*at)->used < (*oldest)->used))
                oldest = at;
    if (oldest) {
        Plan *gone = *oldest;
        *oldest = gone->next;
        plan_free(gone);
        plans--;
    }
}

Plan *
plan_take(const Convolution *c, const char **error)
{
    const unsigned bucket = bucket_of(c);
    pthread_mutex_lock(&lock);
    Plan *p = buckets[bucket];
    while (p && memcmp(&p->key, c, sizeof *c))
        p = p->next;
    if (!p) {
        p = calloc(1, sizeof *p);
        if (p)
            p->key = *c;
        if (!p || fill(p)) {
            *error = p ? "oneDNN has no algorithm for it" : "out of memory";
            if (p)
                plan_free(p);
            pthread_mutex_unlock(&lock);
            return NULL;
        }
        if (plans >= MOST_PLANS)
            forget_one();
        plans++;
        p->next = buckets[bucket];
        buckets[bucket] = p;
    }
    p->users++;
    p->used = ++clock_;
    pthread_mutex_unlock(&lock);
    return p;
}

void
plan_give_back(Plan *p)
{
    pthread_mutex_lock(&lock);
    p->users--;
    pthread_mutex_unlock(&lock);
}

const char *
plan_name(const Plan *p)
{
    return p->name;
}

void
plans_hold(void)
{
    pthread_mutex_lock(&lock);
}

void
plans_release(void)
{
    pthread_mutex_unlock(&lock);
}

/* --- Running ------------------------------------------------------------------------------------------------------- */

static int
run_turn(const Plan *p, int which, Stream stream, Memory from, Memory to)
{
    const Argument arguments[] = {{ARG_SRC, from}, {ARG_DST, to}};
    return onednn.dnnl_primitive_execute(p->turns[which], stream, 2, arguments);
}

size_t
plan_packed(const Plan *p)
{
    return p->wanted[WEIGHTS] ? onednn.dnnl_memory_desc_get_size(p->wanted[WEIGHTS]) : 0;
}

int
plan_agrees(const Plan *p, const Plan *other)
{
    return p->wanted[WEIGHTS] && other->wanted[WEIGHTS] &&
           onednn.dnnl_memory_desc_equal(p->wanted[WEIGHTS], other->wanted[WEIGHTS]);
}

const char *
plan_pack(const Plan *p, float *weights, float *packed)
{
    Own *own = own_get();
    Memory from = NULL, to = NULL;
    int status = !own || onednn.dnnl_memory_create(&from, p->there[WEIGHTS], engine, weights);
    if (!status)
        status = onednn.dnnl_memory_create(&to, p->wanted[WEIGHTS], engine, packed);
    if (!status)
        status = run_turn(p, WEIGHTS, own->stream, from, to);
    if (to)
        onednn.dnnl_memory_destroy(to);
    if (from)
        onednn.dnnl_memory_destroy(from);
    return status ? "oneDNN could not bring the weights into its order" : NULL;
}

/* Memory of the library's at some place: the one of an earlier run, or a new one. */
static int
memory_at(Memory *memory, Layout layout, void *data)
{
    return *memory ? onednn.dnnl_memory_set_data_handle(*memory, data)
                   : onednn.dnnl_memory_create(memory, layout, engine, data);
}

static int
run_with(const Plan *p, const Arrays *a, Memories *m, char *block, Stream stream)
{
    static const int roles[3][TENSORS] = {{ARG_SRC, ARG_WEIGHTS, ARG_DST, ARG_POST_OP | ARG_SRC_1},
                                          {ARG_DIFF_SRC, ARG_WEIGHTS, ARG_DIFF_DST, 0},
                                          {ARG_SRC, ARG_DIFF_WEIGHTS, ARG_DIFF_DST, 0}};
    const int kind = (int)p->key.kind, result = result_of(&p->key);
    void *const data[TENSORS] = {a->src, a->weights, a->dst, (void *)a->other};
    Argument arguments[TENSORS + 2];
    int count = 0, status = 0;
    for (int i = 0; i < TENSORS && !status; i++) {
        if (i == ADDEND && !(p->key.follows & OTHER))
            continue;
        const int ready = i == WEIGHTS && a->packed;
        status = memory_at(&m->there[i], p->there[i], data[i]);
        if (!status && p->wanted[i])
            status = memory_at(&m->wanted[i], p->wanted[i], ready ? data[i] : block + p->at[i]);
        if (!status && p->wanted[i] && !ready && i != result)
            status = run_turn(p, i, stream, m->there[i], m->wanted[i]);
        arguments[count++] = (Argument){roles[kind][i], p->wanted[i] ? m->wanted[i] : m->there[i]};
    }
    if (!status && p->bias && !(status = memory_at(&m->bias, p->bias, (void *)a->bias)))
        arguments[count++] = (Argument){ARG_BIAS, m->bias};
    if (!status && !(status = memory_at(&m->scratch, p->scratch, block + p->scratch_at)))
        arguments[count++] = (Argument){ARG_SCRATCH, m->scratch};
    if (!status)
        status = onednn.dnnl_primitive_execute(p->primitive, stream, count, arguments);
    if (!status && p->wanted[result])
        status = run_turn(p, result, stream, m->wanted[result], m->there[result]);
    return status;
}

const char *
plan_run(Plan *p, const Arrays *a)
{
    char *block = (char *)scratch(0, p->bytes);
    Own *own = own_get();
    Memories *m = __atomic_exchange_n(&p->spare, NULL, __ATOMIC_ACQUIRE);
    if (!m)
        m = calloc(1, sizeof *m);
    if (!block || !own || !m) {
        memories_free(m);
        return "out of memory";
    }
    const int status = run_with(p, a, m, block, own->stream);
    memories_free(__atomic_exchange_n(&p->spare, m, __ATOMIC_ACQ_REL));
    return status ? "oneDNN could not compute it" : NULL;
}
